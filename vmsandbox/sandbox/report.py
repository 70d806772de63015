"""Owns what a life is reported as, to people and in ``run --json``; read from the records alone."""

from pathlib import Path

from pydantic import Field

from vmsandbox import review, spending
from vmsandbox.model import (
    Outcome,
    ResultState,
    SandboxRecord,
    SandboxState,
    Value,
)
from vmsandbox.store import SandboxFolder


class ResultSummary(Value):
    """The change set as `run` reports it."""

    state: ResultState
    digest: str
    changes: int
    checks: int = Field(default=0, description="how many there are to prove it")
    unproven: tuple[str, ...] = Field(default=(), description="checks that did not pass, by name")

    def proof(self) -> str:
        """How the checks stand, in a few words; empty if there are none."""
        if not self.checks:
            return ""
        if not self.unproven:
            return f"{self.checks} check(s) passed"
        return f"check(s) that did not pass: {', '.join(self.unproven)}"


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
    evidence: Path = Field(description="the file that says most about the outcome")
    agent_status: str = Field(default="", description="the agent's own words, made safe to show")
    usage: str = Field(default="", description="what it took of its gateways, in words")
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
        outcome=(record.outcome or Outcome.CANCELLED).value,
        exit_code=ended.exit_code if ended else None,
        detail=_detail(record),
        evidence=_evidence(folder, record),
        agent_status=review.told(folder).status if record.heard else "",
        result=_summary(folder, record),
        worktree=record.task.worktree,
        image=record.image_name,
        image_digest=record.image_digest,
        state=record.state,
        timings=record.timings,
        usage=spending.used(folder).shown(),
        stdout=folder.stdout,
        stderr=folder.stderr,
    )


def _detail(record: SandboxRecord) -> str:
    if record.failure and record.failure.outcome:
        return record.failure.message
    return record.exec_result.detail if record.exec_result else ""


def _evidence(folder: SandboxFolder, record: SandboxRecord) -> Path:
    if record.failure and record.failure.evidence:
        return Path(record.failure.evidence)
    if record.outcome in (Outcome.GUEST_OOM, Outcome.BOOT_TIMEOUT, Outcome.CONNECTION_LOST):
        return folder.console
    return folder.stderr if record.exec_result else folder.events


def _summary(folder: SandboxFolder, record: SandboxRecord) -> ResultSummary | None:
    change_set, result = review.latest(folder)
    if change_set is None:
        return None
    return ResultSummary(
        state=result.state,
        digest=change_set.digest,
        changes=len(change_set.changes),
        checks=len(record.task.verify),
        unproven=review.unproven(record.task.verify, result),
    )
