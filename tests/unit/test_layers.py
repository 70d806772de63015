"""Imports only go down, and each outside thing has one owner.

A *room* is a module or package directly below `vmsandbox`. Rooms stand on floors; a new room gets
its floor here first, which is the moment to ask whether it is one.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import PACKAGE, none, python, statements

pytestmark = pytest.mark.xdist_group("sources")  # read and parsed once

FLOORS: Mapping[str, int] = {
    "": 0,  # vmsandbox/__init__.py: the version
    "errors": 0,
    "text": 0,
    "model": 0,
    "states": 0,
    "values": 0,
    "asking": 0,
    "provider": 0,
    "proof": 0,
    "reach": 0,
    "document": 0,
    "deadline": 0,
    "forwards": 0,
    "addresses": 1,
    "brief": 1,
    "config": 1,
    "domain": 1,
    "hostile": 1,
    "seed": 1,
    "selection": 1,
    "gateway": 2,
    "guest": 2,
    "host": 2,
    "hypervisor": 2,
    "images": 2,
    "ports": 2,
    "outlet": 2,
    "store": 2,
    "target": 2,
    "worktree": 2,
    "approvals": 3,
    "doctor": 3,
    "egress": 3,
    "review": 3,
    "sandbox": 3,
    "spending": 3,
    "api": 4,
    "batch": 4,
    "density": 4,
    "cli": 5,
    "__main__": 5,
}

STRANGERS = frozenset({1, 2})
"""Floors whose rooms must not know each other: what two of them need together is built above."""

LIBRARY_OWNERS: Mapping[str, frozenset[str]] = {
    "libvirt": frozenset({"hypervisor"}),
    "libvirt_qemu": frozenset({"hypervisor"}),
    "paramiko": frozenset({"guest"}),
    "tenacity": frozenset({"guest"}),
    "pycdlib": frozenset({"seed"}),
    "cryptography": frozenset({"seed"}),
    "platformdirs": frozenset({"store"}),
    "yaml": frozenset({"document"}),
    "httpx": frozenset({"gateway"}),
    "h11": frozenset({"egress", "outlet"}),
    "matplotlib": frozenset({"density"}),
    "typer": frozenset({"cli"}),
    "rich": frozenset({"cli"}),
}

PROGRAM_OWNERS: Mapping[str, str | None] = {
    "git": "worktree",
    "qemu-img": "images",
    "mmdebstrap": "images",
    "mke2fs": "images",
    "libvirtd": "host",
    "virtlogd": "host",
    "virsh": None,  # libvirt is asked through its library
    "ssh-keygen": None,  # keys are made in process
}

PURE_FLOORS = frozenset({0, 1})
IMPURE_MODULES = frozenset({"subprocess", "socket", "shutil", "tempfile", "psutil"})


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@cache
def sources() -> Mapping[Path, ast.Module]:
    return {
        path: tree
        for path, tree in python().items()
        if path.is_relative_to(PACKAGE) and room_of(path) not in ("guest_scripts", "recipes")
    }


def shown(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, wherever in the file."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative import"
            assert node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def rooms_imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, name in imported(tree):
        top, _, rest = name.partition(".")
        if top == "vmsandbox":
            room = rest.partition(".")[0]
            yield line, "" if room.startswith("__version") else room


def modules_imported(path: Path) -> set[Path]:
    """The files of our own that `path` imports."""
    found = set()
    for _, name in imported(sources()[path]):
        parts = name.split(".")
        if parts[0] != "vmsandbox":
            continue
        for length in (len(parts), len(parts) - 1):
            base = PACKAGE.joinpath(*parts[1:length])
            if candidate := next(
                (c for c in (base.with_suffix(".py"), base / "__init__.py") if c in sources()), None
            ):
                found.add(candidate)
                break
    return found - {path}


def test_every_room_has_a_floor() -> None:
    homeless = {room_of(path) for path in sources()} - FLOORS.keys()
    assert not homeless, f"give these rooms a floor in {Path(__file__).name}: {sorted(homeless)}"


def climbs(room: str, other: str) -> str | None:
    """Why `room` must not import `other`."""
    floor = FLOORS.get(room, 0)
    if other == room:
        return None
    if other not in FLOORS:
        return "which has no floor"
    if FLOORS[other] > floor:
        return f"(floor {FLOORS[other]}), which lies above"
    return "a neighbour" if floor in STRANGERS and FLOORS[other] == floor else None


def test_imports_go_down() -> None:
    none(
        f"{shown(path)}:{line}: {room_of(path)!r} imports {other!r}, {why}"
        for path, tree in sources().items()
        for line, other in rooms_imported(tree)
        if (why := climbs(room_of(path), other))
    )


def test_no_two_modules_import_each_other() -> None:
    TopologicalSorter({path: modules_imported(path) for path in sources()}).prepare()


def test_each_library_has_one_owner() -> None:
    none(
        f"{shown(path)}:{line}: {name} belongs to {sorted(owners)}"
        for path, tree in sources().items()
        for line, name in imported(tree)
        if (owners := LIBRARY_OWNERS.get(name.partition(".")[0])) and room_of(path) not in owners
    )


def programs_run(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, program) of every command line that is spelled out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple) and node.elts:
            first = node.elts[0]
            if isinstance(first, ast.Constant) and first.value in PROGRAM_OWNERS:
                yield node.lineno, str(first.value)


def test_each_program_has_one_owner() -> None:
    none(
        f"{shown(path)}:{line}: {program!r} is run by {PROGRAM_OWNERS[program] or 'nobody'}"
        for path, tree in sources().items()
        for line, program in programs_run(tree)
        if room_of(path) != PROGRAM_OWNERS[program]
    )


def test_floors_0_and_1_are_pure() -> None:
    none(
        f"{shown(path)}:{line}: {name}"
        for path, tree in sources().items()
        if FLOORS.get(room_of(path), 0) in PURE_FLOORS
        for line, name in imported(tree)
        if name.partition(".")[0] in IMPURE_MODULES
    )
