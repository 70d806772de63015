"""Owns what a life is reported as, to people and in ``run --json``; read from the records alone."""

from pathlib import Path

from vmsandbox import review
from vmsandbox.model import (
    Outcome,
    ResultState,
    SandboxState,
    Value,
)
from vmsandbox.store import SandboxFolder


class ResultSummary(Value):
    """The change set as `run` reports it."""

    state: ResultState
    digest: str
    changes: int


class Report(Value):
    """What a life came to, for people and for ``run --json``."""

    id: str
    name: str
    outcome: str
    exit_code: int | None
    detail: str = ""
    result: ResultSummary | None = None
    worktree: Path
    image: str
    image_digest: str
    state: SandboxState
    timings: dict[str, float]
    stdout: Path
    stderr: Path

    @property
    def changes(self) -> int:
        """How many paths differ."""
        return self.result.changes if self.result else 0


def report_of(folder: SandboxFolder) -> Report:
    """What came of a sandbox so far."""
    record = folder.read_record()
    ended = record.exec_result
    return Report(
        id=record.id,
        name=record.name,
        outcome=ended.outcome.value if ended else Outcome.CANCELLED.value,
        exit_code=ended.exit_code if ended else None,
        detail=ended.detail if ended else "",
        result=_summary(folder),
        worktree=record.task.worktree,
        image=record.image_name,
        image_digest=record.image_digest,
        state=record.state,
        timings=record.timings,
        stdout=folder.stdout,
        stderr=folder.stderr,
    )


def _summary(folder: SandboxFolder) -> ResultSummary | None:
    change_set, result = review.latest(folder)
    if change_set is None:
        return None
    return ResultSummary(
        state=result.state, digest=change_set.digest, changes=len(change_set.changes)
    )
