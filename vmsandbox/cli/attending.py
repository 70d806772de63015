"""Owns how a verb that works for long hears signals: the work goes on in a thread, so that a signal
never cuts a step in half; each signal asks for a little more haste.
"""

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple, TypeVar

from vmsandbox.cli.output import Output

_T = TypeVar("_T")

_FROM_TERMINAL = (signal.SIGINT,)
"""A terminal sends this to every process on it, also to the git that we have just started."""


class Wish(NamedTuple):
    """What one more signal asks for, and what is said about it."""

    note: str
    heed: Callable[[], object]


def attended(out: Output, work: Callable[[], _T], wishes: Sequence[Wish]) -> _T:
    """The result of `work`; each signal meanwhile is the next of `wishes`, later ones are none."""
    outcome: list[_T | BaseException] = []
    left = list(wishes)

    def ask(number: int, frame: FrameType | None) -> None:
        if left:
            wish = left.pop(0)
            out.note(wish.note)
            threading.Thread(target=wish.heed, name="wish", daemon=True).start()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=_guarded(work, outcome), name="work", daemon=True)
    try:
        _start_deaf(thread)
        while thread.is_alive():
            thread.join(0.5)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    found = outcome[0]
    if isinstance(found, BaseException):
        raise found
    return found


def _start_deaf(thread: threading.Thread) -> None:
    """Threads and programs inherit which signals are blocked: the terminal's reach us alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_TERMINAL)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _guarded(work: Callable[[], _T], outcome: list[_T | BaseException]) -> Callable[[], None]:
    def guarded() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    return guarded
