"""Owns the root file system between mmdebstrap and ext4: entries with owners and modes, content in
flat files.

Reads a tar stream once. Owners and modes are kept as numbers beside the content, so nothing here
needs to be root or in a user namespace. Also decides what is left out, so that equal packages give
equal images.
"""

import fnmatch
import re
import tarfile
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import IO

from vmsandbox.errors import HostProblem

LEFT_OUT = (
    # What only this build knew.
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/apt/sources.list",
    "etc/apt/sources.list.d/0000*",
    "etc/apt/preferences.d/0000*",
    "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
    "etc/ssh/ssh_host_*",
    "etc/.pwd.lock",
    "etc/passwd-",
    "etc/group-",
    "etc/shadow-",
    "etc/gshadow-",
    "etc/subuid-",
    "etc/subgid-",
    "var/lib/dpkg/*-old",
    "var/lib/systemd/random-seed",
    "var/lib/systemd/catalog/database",
    "var/lib/dbus/machine-id",
    # Written again when needed, different every time or big.
    "var/log/*",
    "var/cache/*",
    "var/lib/apt/lists/*",
    # The kernel is loaded by the host; device nodes are the kernel's own.
    "boot/vmlinuz-*",
    "boot/initrd.img-*",
    "boot/System.map-*",
    "vmlinuz*",
    "initrd.img*",
    "dev/*",
    "run/*",
    "tmp/*",
    "var/tmp/*",
)
"""Files (folders stay) that an image does not hold; ``*`` also matches ``/``."""

_LEFT_OUT = re.compile("|".join(fnmatch.translate(pattern) for pattern in LEFT_OUT))
_LAST_CHANGE = re.compile(rb"^([^:]*:[^:]*):[0-9]*:", re.MULTILINE)


class Kind(Enum):
    FOLDER = "folder"
    FILE = "file"
    SYMLINK = "symlink"
    OTHER = "other"


@dataclass(frozen=True)
class Entry:
    """One name in the file system. `content` is where the bytes lie for files, `target` where a
    symlink points.
    """

    path: str
    kind: Kind
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int = 0
    content: Path | None = None
    target: str = ""
    xattrs: dict[str, bytes] = field(default_factory=dict)
    links: tuple[str, ...] = ()  # further names of the same file


class Tree:
    """All entries by path, without leading slash; the root folder itself is ``""``."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self.entries = entries

    def read(self, path: str) -> bytes:
        """Content of a file, following symlinks of folders as far as merged /usr needs it."""
        entry = self.entries.get(path) or self.entries.get(f"usr/{path}")
        if entry is None or entry.content is None:
            raise HostProblem("image_incomplete", f"the root file system has no file {path}")
        return entry.content.read_bytes()

    def only(self, pattern: str) -> str:
        """The one path that matches; HostProblem ``image_incomplete`` if it is not exactly one."""
        found = fnmatch.filter(self.entries, pattern)
        if len(found) != 1:
            shown = ", ".join(sorted(found)) or "none"
            raise HostProblem("image_incomplete", f"want one file {pattern}, found {shown}")
        return found[0]

    def kept(self) -> list[Entry]:
        """What goes into the image, sorted by path."""
        return [
            entry
            for path, entry in sorted(self.entries.items())
            if entry.kind is not Kind.OTHER
            and (entry.kind is Kind.FOLDER or not _LEFT_OUT.match(path))
        ]

    def packages(self) -> dict[str, str]:
        """Installed packages and their versions, from dpkg's own record."""
        records = self.read("var/lib/dpkg/status").decode().split("\n\n")
        fields = [dict(re.findall(r"^(Package|Version|Status): (.*)$", r, re.M)) for r in records]
        return {
            record["Package"]: record["Version"]
            for record in fields
            if record.get("Status", "").endswith(" installed")
        }

    def neutral(self) -> "Tree":
        """Take out of kept files what a build's day or machine put in."""
        changed = dict(self.entries)
        for path, entry in self.entries.items():
            if entry.content is None:
                continue
            if path == "etc/machine-id":
                entry.content.write_bytes(b"")
            elif path == "etc/shadow":  # day of the last password change
                entry.content.chmod(0o600)
                entry.content.write_bytes(_LAST_CHANGE.sub(rb"\1::", entry.content.read_bytes()))
            else:
                continue
            changed[path] = replace(entry, size=entry.content.stat().st_size)
        return Tree(changed)


def read_tar(stream: IO[bytes], folder: Path, newest: int) -> Tree:
    """Read a root file system from a tar stream, file contents into `folder`; times after `newest`
    become `newest`.
    """
    entries: dict[str, Entry] = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for number, member in enumerate(archive):
            path = _path(member.name)
            if member.islnk():
                first = _path(member.linkname)
                entries[first] = replace(entries[first], links=(*entries[first].links, path))
                continue
            content = folder / str(number) if member.isreg() else None
            source = archive.extractfile(member) if content else None
            if content and source:
                _copy(source, content)
            entries[path] = _entry(member, path, content, newest)
    return Tree(entries)


def _path(name: str) -> str:
    return name.removeprefix(".").strip("/")


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        while chunk := source.read(1 << 20):
            file.write(chunk)


def _kind(member: tarfile.TarInfo) -> Kind:
    if member.isdir():
        return Kind.FOLDER
    if member.isreg():
        return Kind.FILE
    return Kind.SYMLINK if member.issym() else Kind.OTHER


def _entry(member: tarfile.TarInfo, path: str, content: Path | None, newest: int) -> Entry:
    prefix = "SCHILY.xattr."
    return Entry(
        path=path,
        kind=_kind(member),
        mode=member.mode,
        uid=member.uid,
        gid=member.gid,
        mtime=min(int(member.mtime), newest),
        size=member.size if content else 0,
        content=content,
        target=member.linkname if member.issym() else "",
        xattrs={
            name.removeprefix(prefix): value.encode("utf-8", "surrogateescape")
            for name, value in sorted(member.pax_headers.items())
            if name.startswith(prefix)
        },
    )
