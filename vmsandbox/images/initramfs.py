"""Owns the small initramfs: which kernel modules in which order, and a cpio archive that is the
same every time. Pure.

The format is "newc" of the kernel's Documentation/driver-api/early-userspace/buffer-format.rst: a
header of hex numbers, the name, the content, each padded to four bytes.
"""

import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from vmsandbox.errors import UsageProblem

_FOLDERS = ("bin", "dev", "lib", "modules", "root")
_TRAILER = "TRAILER!!!"


def module_dependencies(modules_dep: str) -> dict[str, tuple[str, ...]]:
    """Parse modules.dep: path of a module → paths of those it needs."""
    lines = (line.split(":", 1) for line in modules_dep.splitlines() if ":" in line)
    return {path: tuple(needs.split()) for path, needs in lines}


def load_order(wanted: Iterable[str], needs: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Paths of the modules named `wanted`, each after those it needs.

    Raises UsageProblem ``recipe_invalid`` for a name that this kernel does not have as a module.
    """
    by_name = {_module_name(path): path for path in needs}
    order: dict[str, None] = {}

    def add(path: str) -> None:
        for other in needs[path]:
            if other not in order:
                add(other)
        order[path] = None

    for name in wanted:
        path = by_name.get(_module_name(name))
        if path is None:
            raise UsageProblem("recipe_invalid", f"the kernel has no module {name}")
        add(path)
    return tuple(order)


def _module_name(path: str) -> str:
    return PurePosixPath(path).name.split(".ko")[0].replace("-", "_")


def archive(files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """A cpio archive of `files` (path → permissions, content) and the folders that the init script
    expects.
    """
    folders = [(folder, stat.S_IFDIR | 0o755, b"") for folder in _FOLDERS]
    regular = [(path, stat.S_IFREG | mode, data) for path, (mode, data) in files.items()]
    entries = [*sorted(folders + regular), (_TRAILER, 0, b"")]
    return b"".join(
        piece
        for number, (path, mode, data) in enumerate(entries, start=1)
        for piece in _entry(number, path, mode, data)
    )


def _entry(number: int, path: str, mode: int, data: bytes) -> Iterator[bytes]:
    name = path.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name
    yield head + bytes(-len(head) % 4)
    yield data + bytes(-len(data) % 4)
