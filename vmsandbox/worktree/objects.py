"""Owns the reading of objects through one `git cat-file` process. Knows no tree."""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO

from vmsandbox.errors import HostProblem
from vmsandbox.worktree.git import Git, Process

_CHUNK = 1 << 16


class ObjectReader:
    """Reads one object after the other; :meth:`open` must be closed before the next one."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def of(cls, git: Git) -> "Iterator[ObjectReader]":
        with git.process("cat-file", "--batch") as process:
            process.at_our_pace()  # writing what is read, and flushing it, may take long
            yield cls(process)

    @contextmanager
    def open(self, oid: str) -> Iterator[BinaryIO]:
        """The bytes of an object, as a stream. Raises HostProblem ``object_missing``."""
        size = self._ask(oid)
        content = _Content(self._process.stdout, size)
        try:
            yield io.BufferedReader(content, _CHUNK)
        finally:
            content.skip_rest()

    def read(self, oid: str) -> bytes:
        """The bytes of an object that is known to be small."""
        with self.open(oid) as stream:
            return stream.read()

    def _ask(self, oid: str) -> int:
        try:
            self._process.stdin.write(oid.encode("ascii") + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._process.finish()
        answer = self._process.stdout.readline().split()
        if len(answer) == 3:
            return int(answer[2])
        if not answer:
            self._process.finish()
        raise object_missing(oid)


class _Content(io.RawIOBase):
    """`size` bytes of a pipe, and then the newline that ends them."""

    def __init__(self, pipe: IO[bytes], size: int) -> None:
        self._pipe = pipe
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        chunk = self._take(len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def _take(self, most: int) -> bytes:
        chunk = self._pipe.read(min(most, self._left))
        if not chunk and self._left:
            raise HostProblem("object_unreadable", "git stopped in the middle of an object")
        self._left -= len(chunk)
        return chunk

    def skip_rest(self) -> None:
        while self._left:
            self._take(_CHUNK)
        self._pipe.read(1)


def object_missing(oid: str) -> HostProblem:
    return HostProblem(
        "object_missing",
        f"object {oid} is not in the store any more",
        hint="collect the result again, or drop it",
    )


def sizes(git: Git, oids: Iterable[str]) -> dict[str, int]:
    """The inflated size of each object that exists; the others are left out."""
    wanted = "".join(f"{oid}\n" for oid in dict.fromkeys(oids))
    if not wanted:
        return {}
    answer = git.run(
        "cat-file", "--buffer", "--batch-check=%(objectname) %(objectsize)", stdin=wanted.encode()
    )
    pairs = (line.split() for line in answer.decode("ascii").splitlines())
    return {oid: int(size) for oid, size in pairs if size != "missing"}
