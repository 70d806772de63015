"""Owns the open target folder: walking into it without following links, and seeing what is there.

Every name is looked up relative to an open descriptor of its parent, and every parent is opened
with ``O_NOFOLLOW`` from the root down, so a folder that was swapped for a link is met as a link.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

from vmsandbox.errors import HostProblem, UsageProblem, VmsandboxError
from vmsandbox.text import printable, quote_path

_CHUNK_BYTES = 1024 * 1024
_WALK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

Kind = Literal["missing", "file", "link", "folder", "special"]


class BlockedError(Exception):
    """A folder on the way to a path is none: `at` is where, `missing` that nothing is there."""

    def __init__(self, at: bytes, *, missing: bool) -> None:
        super().__init__(at)
        self.at = at
        self.missing = missing


class Seen(NamedTuple):
    """What tells that an object was left alone since it was looked at.

    Not ctime and not the link count: removing one of two hard links changes both for the other.
    """

    inode: int
    mode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Found:
    """What is at a path now. `oid` is the git name of its bytes, for files and links."""

    kind: Kind
    oid: str | None = None
    status: os.stat_result | None = None

    @property
    def mode(self) -> int:
        """The git mode, 0 where git has none."""
        if self.kind == "link":
            return 0o120000
        if self.kind == "file" and self.status is not None:
            return 0o100755 if self.status.st_mode & 0o100 else 0o100644
        return 0

    @property
    def seen(self) -> Seen | None:
        return seen(self.status) if self.status is not None else None


def seen(status: os.stat_result) -> Seen:
    return Seen(status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)


class TargetFolder:
    """The folder, open and locked against other applies for as long as it is entered."""

    def __init__(self, path: Path, object_format: Literal["sha1", "sha256"] = "sha1") -> None:
        self.path = path
        self._hash = object_format
        self.root = -1

    def __enter__(self) -> Self:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        _refuse_undecodable(self.path)
        try:
            self.root = os.open(self.path, flags)
        except OSError as error:
            raise UsageProblem(
                "target_missing",
                f"no folder to write to: {self.path} ({error.strerror})",
                hint="name another one with --target DIR",
            ) from error
        with contextlib.suppress(OSError):  # some network file systems cannot lock folders
            fcntl.flock(self.root, fcntl.LOCK_EX)
        return self

    def __exit__(self, *failure: object) -> None:
        os.close(self.root)  # and with it the lock
        self.root = -1

    @contextlib.contextmanager
    def folder(self, path: bytes) -> Iterator[int]:
        """A descriptor (``O_PATH``) of the folder at `path`; raises BlockedError if it is none."""
        with self.translated(path):
            descriptor = _walk(self.root, path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def translated(self, path: bytes) -> Iterator[None]:
        """Turn an OSError on `path` into one of ours."""
        try:
            yield
        except OSError as error:
            raise problem(error, self.path, path) from error

    @contextlib.contextmanager
    def parent(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """The folder that `path` lies in, and its last part."""
        above, _, name = path.rpartition(b"/")
        with self.folder(above) as descriptor:
            yield descriptor, name

    def look(self, path: bytes) -> Found:
        """What is at `path`; raises BlockedError if the way to it does not lead over folders."""
        with self.parent(path) as (above, name), self.translated(path):
            status = lstat(above, name)
            if status is None:
                return Found("missing")
            if stat.S_ISLNK(status.st_mode):
                target = os.readlink(name, dir_fd=above)
                return Found("link", self._oid_of(target), status)
            if stat.S_ISREG(status.st_mode):
                return self._look_at_file(above, name)
            kind: Kind = "folder" if stat.S_ISDIR(status.st_mode) else "special"
            return Found(kind, None, status)

    def names(self, path: bytes) -> list[bytes]:
        """The names in the folder at `path`."""
        with self.folder(path) as descriptor, self.translated(path):
            readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=descriptor)
            try:
                with os.scandir(readable) as entries:
                    return [os.fsencode(entry.name) for entry in entries]
            finally:
                os.close(readable)

    def _look_at_file(self, above: int, name: bytes) -> Found:
        descriptor = os.open(name, _READ, dir_fd=above)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):  # swapped in between
                return Found("special", None, status)
            digest = self.new_hash(status.st_size)
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            return Found("file", digest.hexdigest(), status)

    def new_hash(self, size: int) -> "hashlib._Hash":
        """A hash that yields the git name of a blob once its `size` bytes were fed in."""
        digest = hashlib.new(self._hash, usedforsecurity=False)
        digest.update(b"blob %d\0" % size)
        return digest

    def _oid_of(self, content: bytes) -> str:
        digest = self.new_hash(len(content))
        digest.update(content)
        return digest.hexdigest()


def _refuse_undecodable(path: Path) -> None:
    """What is written down of an apply is UTF-8."""
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        raise UsageProblem(
            "target_name",
            f"the folder's name is not UTF-8: {printable(os.fsencode(path), newlines=False)}",
            hint="rename it, or bind-mount it under another name",
        ) from None


def lstat(folder: int, name: bytes) -> os.stat_result | None:
    """The status of a name in an open folder, links not followed; None if there is nothing."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _walk(root: int, path: bytes) -> int:
    descriptor = os.dup(root)
    cut = 0
    try:
        while path and cut >= 0:
            start = cut + 1 if cut else 0
            cut = path.find(b"/", start)
            at = path if cut < 0 else path[:cut]
            inner = _step_into(descriptor, at[start:], at)
            os.close(descriptor)
            descriptor = inner
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _step_into(folder: int, part: bytes, walked: bytes) -> int:
    try:
        return os.open(part, _WALK, dir_fd=folder)
    except FileNotFoundError as error:
        raise BlockedError(walked, missing=True) from error
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise BlockedError(walked, missing=False) from error
        raise


_CODES = {
    errno.ENOSPC: ("target_full", "free some space, then run the same apply again"),
    errno.EDQUOT: ("target_full", "raise the quota, then run the same apply again"),
    errno.EROFS: ("target_read_only", "name a writable folder with --target DIR"),
    errno.EACCES: ("target_not_writable", "run as the owner of the folder"),
    errno.EPERM: ("target_not_writable", "run as the owner of the folder"),
}


def problem(error: OSError, root: Path, path: bytes) -> VmsandboxError:
    """Translate a failure on a path below the target."""
    code, hint = _CODES.get(
        error.errno or 0, ("target_failed", "put that right, then run the same apply again")
    )
    reason = printable(error.strerror or str(error), newlines=False)
    return HostProblem(
        code, f"{quote_path(path)} in {root}: {reason}", hint=hint, evidence=str(root)
    )
