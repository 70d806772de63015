"""Owns which results wait for a decision, and what is told of each in a line."""

from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import Field

from vmsandbox.errors import HostProblem
from vmsandbox.hostile import MEANING
from vmsandbox.model import (
    BatchMark,
    ChangeSet,
    Digest,
    Origin,
    Outcome,
    ResultRecord,
    ResultState,
    SandboxRecord,
    Value,
)
from vmsandbox.review.checks import unproven
from vmsandbox.review.decisions import stale
from vmsandbox.review.opinions import disagreements, opinions
from vmsandbox.review.record import latest
from vmsandbox.store import SandboxFolder

UNDECIDED = frozenset({ResultState.PENDING, ResultState.APPROVED, ResultState.CONFLICTED})


class Waiting(Value):
    """A result that nobody has decided on, or whose decision is not carried out yet."""

    id: str
    name: str
    worktree: Path
    batch: BatchMark | None = None
    forked_from: Origin | None = None
    live: bool = Field(default=False, description="its task runs: the result may change")
    outcome: Outcome | None
    exit_code: int | None
    state: ResultState
    stale: bool = Field(description="an approval names another digest than what lies here now")
    digest: Digest
    named: str = Field(description="what an approval of this, checks included, has to name")
    changes: int
    added: int = Field(description="lines")
    removed: int
    flags: tuple[str, ...] = Field(default=(), description="reasons to look twice at some change")
    checks: int = Field(default=0, description="how many there are, run or not")
    unproven: tuple[str, ...] = Field(default=(), description="the checks that did not pass")
    disagreements: tuple[str, ...] = Field(default=(), description="sentences for people")


class Queue(Value):
    """What waits, and what could not be read. `problems` are sentences for people."""

    results: tuple[Waiting, ...]
    problems: tuple[str, ...] = ()


def is_undecided(change_set: ChangeSet | None, result: ResultRecord) -> bool:
    """Whether deleting this result would throw away what nobody decided on."""
    return bool(change_set and change_set.changes and result.state in UNDECIDED)


def waiting(
    folders: Iterable[SandboxFolder],
    is_live: Callable[[SandboxFolder], bool] = lambda _: False,
    *,
    batch: str = "",
) -> Queue:
    """The results that wait, in the order of `folders`; with `batch` (the beginning of an id) only
    those of that batch."""
    results, problems = [], []
    for folder in folders:
        try:
            if one := _waiting(folder, is_live, batch):
                results.append(one)
        except HostProblem as problem:
            problems.append(f"{folder.id}: {problem.message}: {problem.hint}")
    return Queue(results=tuple(results), problems=tuple(problems))


def _waiting(
    folder: SandboxFolder, is_live: Callable[[SandboxFolder], bool], batch: str
) -> Waiting | None:
    record = folder.read_record()
    if batch and not (record.batch and record.batch.batch.startswith(batch)):
        return None
    change_set, result = latest(folder)
    if change_set is None or not is_undecided(change_set, result):
        return None
    one = _of(record, change_set, result)
    against = disagreements(record.outcome, result, opinions(folder))
    return one.model_copy(update={"live": is_live(folder), "disagreements": against})


def _of(record: SandboxRecord, change_set: ChangeSet, result: ResultRecord) -> Waiting:
    changes = change_set.changes
    found = {flag for change in changes for flag in change.flags}
    return Waiting(
        id=record.id,
        name=record.name,
        worktree=record.task.worktree,
        batch=record.batch,
        forked_from=record.forked_from,
        outcome=record.outcome,
        exit_code=record.exec_result.exit_code if record.exec_result else None,
        state=result.state,
        stale=stale(change_set, result) is not None,
        digest=change_set.digest,
        named="+".join(filter(None, (change_set.digest, result.checks_digest))),
        changes=len(changes),
        added=sum(change.added or 0 for change in changes),
        removed=sum(change.removed or 0 for change in changes),
        flags=tuple(flag for flag in MEANING if flag in found),
        checks=sum(len(run.results) for run in result.checks) or len(record.task.verify),
        unproven=unproven(record.task.verify, result),
    )
