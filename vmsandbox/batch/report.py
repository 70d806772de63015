"""Owns what a batch is reported as while it goes on and at its end. Pure."""

from pathlib import Path
from typing import Protocol

from pydantic import Field

from vmsandbox.batch.record import SKIPPED
from vmsandbox.model import Outcome, Value
from vmsandbox.sandbox.report import ResultSummary


class TaskReport(Value):
    """What came of one task."""

    name: str
    id: str | None = Field(description="its sandbox; None if none was made")
    outcome: str = Field(description="an outcome, or `skipped` or `queued`")
    exit_code: int | None = None
    result: ResultSummary | None = None
    reason: str = ""
    evidence: Path | None = Field(default=None, description="the file that says most about it")

    @property
    def well(self) -> bool:
        """Whether nothing is amiss: it completed and was proven, or there was nothing to do."""
        proven = self.result is None or not self.result.unproven
        return self.outcome == SKIPPED or (self.outcome == Outcome.COMPLETED and proven)


class BatchReport(Value):
    """What came of a batch."""

    batch: str
    tasks: tuple[TaskReport, ...]
    unfinished: int = Field(default=0, description="tasks that `resume` would go on with")

    @property
    def well(self) -> bool:
        """Whether every task came to a good end."""
        return not self.unfinished and all(task.well for task in self.tasks)


class Watcher(Protocol):
    """Who wants to know how a batch goes on; called from the conducting thread."""

    def created(self, name: str, id_: str) -> None:
        """A task got a sandbox."""

    def queued(self, name: str, reason: str) -> None:
        """A task waits, and why; called again when the reason is another."""

    def ended(self, task: TaskReport) -> None:
        """Something came of a task."""


class Unwatched:
    """A watcher that does not watch."""

    def created(self, name: str, id_: str) -> None:
        return

    def queued(self, name: str, reason: str) -> None:
        return

    def ended(self, task: TaskReport) -> None:
        return
