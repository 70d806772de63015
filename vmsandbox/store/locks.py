"""Owns locks: ``flock`` on files in the folder that they guard.

The kernel frees them however their holder dies, so there is nothing to clean up and a held lock
proves a living manager.
"""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

from vmsandbox.deadline import Deadline
from vmsandbox.errors import UsageProblem
from vmsandbox.store.writing import host_problem

_PROBE_S = 0.25


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive ``flock`` on `path` (made if missing, but never its folder).

    With ``wait=False`` raises BlockingIOError if another holds it. Raises UsageProblem
    ``sandbox_unknown`` if the folder is gone.
    """
    descriptor = hold(path, None if wait else _PROBE_S)
    try:
        yield
    finally:
        os.close(descriptor)


def hold(path: Path, patience_s: float | None = None) -> int:
    """The descriptor that holds the lock, as :func:`locked` does it, until it is closed."""
    deadline = Deadline(patience_s)
    while True:
        descriptor = _open_lock(path)
        try:
            _flock(descriptor, deadline)
            # The folder may have been deleted while we waited: lock what is there now.
            if _same_file(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise UsageProblem(
            "sandbox_unknown", f"sandbox {path.parent.name} is gone", hint="vmsandbox status"
        ) from None
    except OSError as error:
        raise host_problem(error, path) from error


def _flock(descriptor: int, deadline: Deadline) -> None:
    """A short patience lets those pass who only ask whether it is held, see :func:`is_locked`."""
    if math.isinf(deadline.seconds):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if deadline.passed():
                raise
        time.sleep(_PROBE_S / 50)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether some process holds :func:`locked` on `path` now."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:  # shared, so that those who ask do not take each other for a holder
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
