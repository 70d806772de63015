"""Owns who hears how a life goes on, and how somebody who waits asks for its end."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol


class Listener(Protocol):
    """Who wants to know how a life goes on; called from the manager's thread."""

    def phase(self, name: str) -> None:
        """A phase begins."""

    def output(self, stream: str, data: bytes) -> None:
        """The task wrote this to ``stdout`` or ``stderr``; bytes as the guest sent them."""

    def note(self, text: str) -> None:
        """Something worth a line."""


class Quiet:
    """A listener that does not listen."""

    def phase(self, name: str) -> None:
        return

    def output(self, stream: str, data: bytes) -> None:
        return

    def note(self, text: str) -> None:
        return


class Halt:
    """Asks work to end that another thread does, from before it has begun until it is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = False
        self._heed: Callable[[], object] | None = None

    def ask(self) -> None:
        """From any thread."""
        with self._lock:
            self._asked = True
            heed = self._heed
        if heed:
            heed()

    @contextlib.contextmanager
    def heeded_by(self, heed: Callable[[], object]) -> Iterator[None]:
        """Inside, `heed` is called when the end is asked for, at once if it was already."""
        with self._lock:
            self._heed = heed
            asked = self._asked
        try:
            if asked:
                heed()
            yield
        finally:
            with self._lock:
                self._heed = None
