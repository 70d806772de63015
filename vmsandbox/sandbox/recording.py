"""Owns what is written down of a sandbox while somebody carries it out: its state and whatever else
its record says, its events, and how long each phase took. Knows no step of a life.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from vmsandbox.errors import HostProblem
from vmsandbox.model import Event, SandboxRecord, SandboxState, sandbox_may_become
from vmsandbox.sandbox.listening import Listener
from vmsandbox.store import SandboxFolder, Store


class Recorder:
    """Writes the record of one sandbox. For its manager alone, and for any of its threads."""

    def __init__(self, store: Store, folder: SandboxFolder, listener: Listener) -> None:
        self._store = store
        self._folder = folder
        self._listener = listener

    def change(self, **fields: Any) -> SandboxRecord:
        """Write these fields; returns the whole record."""
        return self._store.update(self._folder, lambda record: record.model_copy(update=fields))

    def become(self, state: SandboxState, **fields: Any) -> SandboxRecord:
        """Write another state, and these fields. Raises HostProblem ``state_impossible``."""
        before = self._folder.read_record().state
        if not sandbox_may_become(before, state):
            raise HostProblem(
                "state_impossible", f"sandbox {self._folder.id} cannot go from {before} to {state}"
            )
        self.event(state.value)
        return self.change(state=state, **fields)

    def event(self, phase: str, text: str = "", seconds: float | None = None) -> None:
        """Add a line to what is told of the sandbox."""
        self._folder.append_event(Event(phase=phase, text=text, seconds=seconds))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Tell the listener, and write down how long it took, however it ends."""
        self._listener.phase(name)
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = round(time.monotonic() - started, 4)
            self.event(name, "took", seconds)
            with contextlib.suppress(HostProblem):  # must not hide what the phase came to
                self.timed(name, seconds)

    def timed(self, name: str, seconds: float) -> None:
        """Write down how long something took."""
        timings = self._folder.read_record().timings
        self.change(timings={**timings, name: seconds})
