"""Owns what a task wrote, on the host: one bounded file per stream, and where to go on after a
lost connection.

Knows no connection. The bytes are the guest's own; nothing here may show them to a terminal.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from vmsandbox.errors import HostProblem
from vmsandbox.guest.channel import Stream

CAPTURE_BYTES = 64 * 1024 * 1024


class BoundedFile:
    """A file that takes `limit_bytes`, then one line saying so, and drops the rest."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._limit = limit_bytes
        self._marker = f"\n[vmsandbox: dropped all beyond {limit_bytes} bytes]\n".encode()
        with self._translated():
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._file).st_size

    def close(self) -> None:
        os.close(self._file)

    @property
    def offset(self) -> int:
        """How many bytes of the stream are here: where following goes on."""
        return min(self._size, self._limit)

    @property
    def full(self) -> bool:
        """Something had to be dropped."""
        return self._size > self._limit

    def write(self, data: bytes) -> bytes:
        """Keep what fits and return it. HostProblem ``host_disk_full``, ``state_unwritable``."""
        kept = data[: max(0, self._limit - self._size)]
        self._append(kept)
        if len(kept) < len(data) and self._size == self._limit:
            self._append(self._marker)
            kept += self._marker
        return kept

    def _append(self, data: bytes) -> None:
        with self._translated():
            while data:
                written = os.write(self._file, data)
                self._size += written
                data = data[written:]

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise HostProblem(
                "host_disk_full" if full else "state_unwritable",
                f"cannot write what the task said to {self._path}: {error.strerror}",
                hint="vmsandbox cleanup" if full else None,
                evidence=str(self._path),
            ) from error


class Capture:
    """Both streams of one task in files that go on where they ended, and live to `on_output`.

    `on_output` gets raw guest bytes, what the files get and no more; it must escape them itself.
    """

    def __init__(
        self,
        stdout: Path,
        stderr: Path,
        *,
        limit_bytes: int = CAPTURE_BYTES,
        on_output: Callable[[Stream, bytes], None] = lambda stream, data: None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._on_output = on_output
        self._files: dict[Stream, BoundedFile] = {"stdout": BoundedFile(stdout, limit_bytes)}
        self._files["stderr"] = BoundedFile(stderr, limit_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()

    def offset(self, stream: Stream) -> int:
        """Where in the guest's stream following goes on, in bytes."""
        return self._files[stream].offset

    def full(self) -> bool:
        """Whether one of the streams was too long."""
        return any(file.full for file in self._files.values())

    def write(self, stream: Stream, data: bytes) -> None:
        if kept := self._files[stream].write(data):
            self._on_output(stream, kept)
