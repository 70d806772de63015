"""Owns the promise of the unit layer: a test here that starts a process or opens a socket fails.

The interpreter's own audit events are used, so the promise holds whatever library asks. An audit
hook cannot be taken back; it is added once and only bites while a unit test runs.
"""

import sys
from collections.abc import Iterator

import pytest

FORBIDDEN_EVENTS = frozenset(
    {
        "socket.__new__",
        "socket.getaddrinfo",
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "pty.spawn",
    }
)


class OutsideWorld(RuntimeError):
    """A unit test reached for something outside the interpreter."""


class _Guard:
    def __init__(self) -> None:
        self.armed = False
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.armed and event in FORBIDDEN_EVENTS:
            raise OutsideWorld(f"{event}{arguments!r} in a unit test: move it to tests/adapter")


_guard = _Guard()


@pytest.fixture(autouse=True)
def nothing_outside() -> Iterator[None]:
    """Arm the guard for the length of one test."""
    _guard.armed = True
    try:
        yield
    finally:
        _guard.armed = False
