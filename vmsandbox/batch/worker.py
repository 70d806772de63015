"""Owns one task of a batch on its way: its sandbox carried out in a thread, what it holds of the
host meanwhile, and what came of it.

Knows no queue. A signal never reaches it: it is asked to end through its manager.
"""

import contextlib
import threading
import time
from collections.abc import Callable

from vmsandbox.batch.record import Ended
from vmsandbox.batch.taskfile import Planned
from vmsandbox.errors import VmsandboxError
from vmsandbox.model import Outcome
from vmsandbox.sandbox import Manager, Rooms
from vmsandbox.sandbox.report import report_of
from vmsandbox.store import SandboxFolder

_SETTLED_S = 3.0
"""Once a task has run this long, what its guest holds says something."""

Held = tuple[int, int]
"""(memory, disk) in bytes."""


class Worker:
    """Carries one sandbox out; `over` hears what came of it, or None if that is still open."""

    def __init__(
        self,
        rooms: Rooms,
        task: Planned,
        folder: SandboxFolder,
        over: Callable[[tuple[str, Ended | None]], None],
    ) -> None:
        self.task = task
        self.folder = folder
        self.record = folder.read_record()
        self.most: Held | None = None
        self._rooms = rooms
        self._over = over
        self._manager: Manager | None = None
        self._asked = 0
        self._runs_since: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"task {task.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    @property
    def measured(self) -> bool:
        """Whether it ran long enough for what it holds to mean something."""
        since = self._runs_since
        return since is not None and time.monotonic() - since >= _SETTLED_S

    def look(self) -> Held | None:
        """What its guest holds now; None if there is none."""
        with contextlib.suppress(VmsandboxError):
            memory = self._rooms.hypervisor.memory(self.record.domain_uuid)
            if memory is None:
                return None
            held = memory.private_bytes, self.folder.allocated_bytes()
            before = self.most or held
            self.most = max(held[0], before[0]), max(held[1], before[1])
            return held
        return None

    def ask_to_end(self, *, at_once: bool) -> None:
        """End the task politely, or its guest at once. Returns immediately; from any thread."""
        self._asked = 2 if at_once else max(self._asked, 1)
        if manager := self._manager:
            end = manager.end_now if at_once else manager.ask_to_end
            threading.Thread(target=_quietly, args=(end,), name="end", daemon=True).start()

    # --- in its thread --------------------------------------------------------------------------

    def _work(self) -> None:
        ended: Ended | None = None
        try:
            ended = self._carried_out()
        except VmsandboxError as error:
            ended = self._failed(error.code, error.message)
        except Exception as error:  # ours to mend; the other tasks of the batch go on
            ended = self._failed("internal_error", f"{type(error).__name__}: {error}")
        finally:
            self._over((self.task.name, ended))

    def _carried_out(self) -> Ended | None:
        with Manager.of(self._rooms, self.folder, self) as manager:
            self._manager = manager
            if self._asked:
                self.ask_to_end(at_once=self._asked > 1)
            try:
                report = manager.carry_out()
            finally:
                self._manager = None
        if self._asked and not self.folder.read_record().collected:
            return None  # stopped before its end, or before it began: it can be taken up again
        return Ended(
            outcome=report.outcome,
            exit_code=report.exit_code,
            result=report.result,
            reason=report.detail,
            evidence=report.evidence,
        )

    def _failed(self, code: str, message: str) -> Ended | None:
        if code == "managed_elsewhere":
            return None
        reason = f"{message} [{code}]"
        try:
            report = report_of(self.folder)
            outcome = self.folder.read_record().outcome
        except VmsandboxError:
            return Ended(outcome=Outcome.FAILED, reason=reason)
        return Ended(
            outcome=outcome if outcome not in (None, Outcome.COMPLETED) else Outcome.FAILED,
            exit_code=report.exit_code,
            result=report.result,
            reason=reason,
            evidence=report.evidence,
        )

    # --- as the manager's listener --------------------------------------------------------------

    def phase(self, name: str) -> None:
        if name == "run":
            self._runs_since = time.monotonic()

    def output(self, stream: str, data: bytes) -> None:
        return

    def note(self, text: str) -> None:
        self._rooms.note(f"{self.task.name}: {text}")


def _quietly(end: Callable[[], None]) -> None:
    """Who is gone already need not be ended."""
    with contextlib.suppress(VmsandboxError):
        end()
