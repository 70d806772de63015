"""File systems of a few MiB, to be filled to the last byte."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_CHUNK = 1 << 20


@dataclass(frozen=True)
class SmallDisk:
    """A file system of its own at `path`."""

    path: Path

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self, leave_bytes: int = 0) -> None:
        """Take all space but `leave_bytes`."""
        with self._ballast.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(
                file.fileno(), 0, max(1, shutil.disk_usage(self.path).free - leave_bytes)
            )

    def free(self) -> None:
        """Give the space back."""
        self._ballast.unlink()


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[SmallDisk]:
    """Mounts a tmpfs at the empty folder `path`; skips the test where nobody may mount."""
    options = f"size={size},mode=0711,uid={os.geteuid()}"
    mount = ["mount", "-t", "tmpfs", "-o", options, "vmsandbox-test", str(path)]
    mounted = subprocess.run(mount, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
