"""Owns where the private store of a worktree lies, and the lock on it. Knows no git."""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmsandbox.deadline import Deadline
from vmsandbox.errors import HostProblem

_LOCK_TIMEOUT_S = 600.0
_LOCK_POLL_S = 0.02


def store_of(stores: Path, top: Path) -> Path:
    """The folder below `stores` that belongs to the worktree at `top`."""
    return stores / hashlib.sha256(os.fsencode(top)).hexdigest()[:16]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time in a store. Raises HostProblem ``worktree_busy``."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    deadline = Deadline(_LOCK_TIMEOUT_S)
    with (folder / "lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.passed():
                    raise HostProblem(
                        "worktree_busy",
                        "another snapshot of the same worktree does not end",
                        hint="vmsandbox status",
                        evidence=str(folder),
                    ) from None
            time.sleep(_LOCK_POLL_S)
        yield
