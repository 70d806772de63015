"""Imports only go down, and each outside thing has one owner.

A *room* is a module or package directly below `vmsandbox`. Rooms stand on floors; a new room gets
its floor here first, which is the moment to ask whether it is one.
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vmsandbox"

FLOORS: Mapping[str, int] = {
    "": 0,  # vmsandbox/__init__.py: the version
    "errors": 0,
    "text": 0,
    "model": 0,
    "states": 0,
    "document": 0,
    "deadline": 0,
    "brief": 1,
    "config": 1,
    "domain": 1,
    "hostile": 1,
    "seed": 1,
    "selection": 1,
    "guest": 2,
    "host": 2,
    "hypervisor": 2,
    "images": 2,
    "store": 2,
    "target": 2,
    "worktree": 2,
    "doctor": 3,
    "review": 3,
    "sandbox": 3,
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


SOURCES = {
    path: ast.parse(path.read_bytes(), filename=str(path))
    for path in sorted(PACKAGE.rglob("*.py"))
    if room_of(path) not in ("guest_scripts", "recipes")
}
BY_FILE = pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, wherever in the file."""
    for node in ast.walk(tree):
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
    for _, name in imported(SOURCES[path]):
        parts = name.split(".")
        if parts[0] != "vmsandbox":
            continue
        for length in (len(parts), len(parts) - 1):
            base = PACKAGE.joinpath(*parts[1:length])
            if candidate := next(
                (c for c in (base.with_suffix(".py"), base / "__init__.py") if c in SOURCES), None
            ):
                found.add(candidate)
                break
    return found - {path}


def test_every_room_has_a_floor() -> None:
    homeless = {room_of(path) for path in SOURCES} - FLOORS.keys()
    assert not homeless, f"give these rooms a floor in {Path(__file__).name}: {sorted(homeless)}"


@BY_FILE
def test_imports_go_down(path: Path) -> None:
    room = room_of(path)
    floor = FLOORS.get(room, 0)
    for line, other in rooms_imported(SOURCES[path]):
        if other == room:
            continue
        where = f"{path.name}:{line}: {room!r} (floor {floor}) imports {other!r}"
        assert other in FLOORS, f"{where}, which has no floor"
        assert FLOORS[other] <= floor, f"{where} (floor {FLOORS[other]}), which lies above"
        if floor in STRANGERS:
            assert FLOORS[other] < floor, f"{where}, a neighbour"


def test_no_two_modules_import_each_other() -> None:
    TopologicalSorter({path: modules_imported(path) for path in SOURCES}).prepare()


@BY_FILE
def test_each_library_has_one_owner(path: Path) -> None:
    for line, name in imported(SOURCES[path]):
        owners = LIBRARY_OWNERS.get(name.partition(".")[0])
        assert owners is None or room_of(path) in owners, (
            f"{path.name}:{line}: {name} belongs to {sorted(owners)}"
        )


@BY_FILE
def test_each_program_has_one_owner(path: Path) -> None:
    for node in ast.walk(SOURCES[path]):
        if not (isinstance(node, ast.List | ast.Tuple) and node.elts):
            continue
        first = node.elts[0]
        if isinstance(first, ast.Constant) and first.value in PROGRAM_OWNERS:
            owner = PROGRAM_OWNERS[str(first.value)]
            assert room_of(path) == owner, (
                f"{path.name}:{node.lineno}: {first.value!r} is run by {owner or 'nobody'}"
            )


@BY_FILE
def test_floors_0_and_1_are_pure(path: Path) -> None:
    if FLOORS.get(room_of(path), 0) in PURE_FLOORS:
        for line, name in imported(SOURCES[path]):
            assert name.partition(".")[0] not in IMPURE_MODULES, f"{path.name}:{line}: {name}"
