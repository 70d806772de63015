"""Cuts work short before its n-th change to the file system, for every n there is.

The work runs in a forked child. Before a change, the interpreter's own audit event tells of it, and
whoever watches may send the child a real signal.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable

_CHANGES = frozenset(
    {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.chmod", "os.chown"}
)


def changes_files(event: str, arguments: tuple[object, ...]) -> bool:
    """Whether this audit event announces a change to the file system."""
    if event == "open" and isinstance(arguments[2], int):
        return bool(arguments[2] & (os.O_CREAT | os.O_TRUNC))
    return event in _CHANGES


def run_child(work: Callable[[], object], before: Callable[[int], None]) -> int:
    """Work in a child; `before` is called with n before the n-th change. Returns the status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    gc.disable()  # a collection would copy every page that it looks at
    count = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if changes_files(event, arguments):
            count += 1
            before(count)

    sys.addaudithook(watch)
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def cut_at(step: int, number: signal.Signals, work: Callable[[], object]) -> bool:
    """Work, with the signal before the given step; False if there is no such step."""

    def before(count: int) -> None:
        if count == step:
            os.kill(os.getpid(), number)

    status = run_child(work, before)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == number
        return True
    return os.WEXITSTATUS(status) != 0
