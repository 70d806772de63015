"""Owns what a manager attends to while it works: other processes that ask it to end, and a guest
that stands still. Knows no step of a life.

A request is an empty file in the sandbox's folder: it needs no server and no space, and whoever
asks sees by the manager's lock whether anybody is there to see it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.guest import Deadline
from vmsandbox.store import SandboxFolder, host_problem, locked

ASK, NOW = "ask", "now"
"""End the task politely; stop the guest at once."""

_POLL_S = 0.05
_LOOK_EVERY = 20


@contextlib.contextmanager
def sole_manager(folder: SandboxFolder, *, code: str, hint: str) -> Iterator[None]:
    """Hold the manager's lock. Raises UsageProblem `code` if another process does."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder.manager_lock, wait=False))
        except BlockingIOError:
            raise UsageProblem(
                code, f"another process manages sandbox {folder.id} now", hint=hint
            ) from None
        yield


def request_end(folder: SandboxFolder, wish: str, patience_s: float) -> None:
    """Ask the manager to end, and wait until it has. Raises HostProblem ``stop_timeout``."""
    deadline = Deadline(patience_s)
    while folder.manager_alive():
        # Again and again: a manager that has only just begun clears away what it finds.
        _put(folder, wish)
        if deadline.passed():
            raise HostProblem(
                "stop_timeout",
                f"the manager of sandbox {folder.id} did not stop within {deadline.seconds:g} s",
                hint=f"vmsandbox stop --now {folder.id}",
                evidence=str(folder.events),
            )
        time.sleep(_POLL_S)


def _put(folder: SandboxFolder, wish: str) -> None:
    try:
        _file_of(folder, wish).touch(mode=0o600)
    except FileNotFoundError:  # the sandbox was deleted meanwhile
        return
    except OSError as error:
        raise host_problem(error, folder.path) from error


def _file_of(folder: SandboxFolder, wish: str) -> Path:
    return folder.stop_now_request if wish == NOW else folder.stop_request


def read_request(folder: SandboxFolder) -> str:
    """What was asked for, the more urgent first; empty if nothing was."""
    return next((wish for wish in (NOW, ASK) if _file_of(folder, wish).exists()), "")


def _forget(folder: SandboxFolder) -> None:
    for wish in (ASK, NOW):
        _file_of(folder, wish).unlink(missing_ok=True)


@contextlib.contextmanager
def attending(
    folder: SandboxFolder, heed: Callable[[str], None], look: Callable[[], None]
) -> Iterator[None]:
    """Call `heed` in a thread with each new request, and `look` about once a second."""
    _forget(folder)  # it was meant for a former manager
    over = threading.Event()

    def attend() -> None:
        heard, rounds = "", 0
        while not over.wait(_POLL_S):
            if (wish := read_request(folder)) and wish != heard:
                heard = wish
                heed(wish)
            rounds += 1
            if rounds % _LOOK_EVERY == 0:
                look()

    thread = threading.Thread(target=attend, name="attention", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _forget(folder)
