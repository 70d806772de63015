"""Owns the files of a review: change set, result record, and the ledger of an apply on its way."""

import contextlib
from pathlib import Path
from typing import Literal

from pydantic import Field

from vmsandbox.errors import HostProblem, NegativeAnswer, ReviewRefused, UsageProblem
from vmsandbox.model import (
    ChangeSet,
    Decision,
    Digest,
    Event,
    ResultRecord,
    ResultState,
    TreePath,
    Value,
    result_may_become,
)
from vmsandbox.store import SandboxFolder, locked, read_value, write_value
from vmsandbox.target import TargetFolder, discard


class Ledger(Value):
    """An apply on its way: enough to clean up after it and to do it again."""

    version: Literal[1] = 1
    digest: Digest
    target: Path
    paths: tuple[TreePath, ...] = Field(description="the paths of the batch")
    staged: tuple[TreePath, ...] = Field(description="what is written beside them for a while")
    decision: Decision | None = Field(default=None, description="made by this very apply")


def present(folder: SandboxFolder, change_set: ChangeSet) -> ResultRecord:
    """Put a freshly collected change set up for review; a former approval no longer holds."""
    with locked(folder.result_lock):
        former = read_value(folder.result_record, ResultRecord) or ResultRecord()
        forget_ledger(folder)
        write_value(folder.change_set, change_set)
        return write_record(folder, _current(former, change_set))


def abandon(folder: SandboxFolder) -> None:
    """Remove what an apply that was cut short left beside the user's files.

    To be called before a sandbox is deleted. A ledger that cannot be read is no reason to keep it.
    """
    with locked(folder.result_lock):
        try:
            forget_ledger(folder)
        except HostProblem as problem:
            if problem.code != "record_broken":
                raise


def read(folder: SandboxFolder) -> tuple[ChangeSet, ResultRecord]:
    """The change set under review and where it is on its way.

    Raises NegativeAnswer ``no_result``, HostProblem ``record_broken``.
    """
    change_set = read_value(folder.change_set, ChangeSet)
    if change_set is None:
        raise NegativeAnswer(
            "no_result",
            f"sandbox {folder.id} has no collected result",
            hint=f"vmsandbox status {folder.id}",
            evidence=str(folder.path),
        )
    expected = ChangeSet.digest_for(
        change_set.base_tree,
        change_set.result_tree,
        change_set.image_digest,
        change_set.task_digest,
    )
    if change_set.digest != expected:
        raise HostProblem(
            "record_broken",
            f"{folder.change_set.name} does not fit its own digest",
            hint="collect the result again, or delete the sandbox",
            evidence=str(folder.change_set),
        )
    record = read_value(folder.result_record, ResultRecord) or ResultRecord()
    return change_set, _current(record, change_set)


def latest(folder: SandboxFolder) -> tuple[ChangeSet | None, ResultRecord]:
    """As :func:`read`, where having no result is an answer."""
    if not folder.change_set.exists():
        return None, ResultRecord()
    return read(folder)


def _current(record: ResultRecord, change_set: ChangeSet) -> ResultRecord:
    """The record for this change set: itself, or a new one if it speaks of a former result.

    Former decisions are kept, so that an approval of another digest is known as stale; those of a
    result that was applied have served and go (events.jsonl keeps them all).
    """
    if record.digest == change_set.digest:
        return record
    return ResultRecord(
        state=ResultState.PENDING if change_set.changes else ResultState.NONE,
        digest=change_set.digest,
        decisions=() if record.state is ResultState.APPLIED else record.decisions,
    )


def write_record(folder: SandboxFolder, record: ResultRecord) -> ResultRecord:
    write_value(folder.result_record, record)
    return record


def stepped(record: ResultRecord, state: ResultState) -> ResultRecord:
    """The record in its next state; ReviewRefused ``state_refused`` if it may not go there."""
    if not result_may_become(record.state, state):
        raise ReviewRefused(
            "state_refused", f"a result that is {record.state} cannot become {state}"
        )
    return record.model_copy(update={"state": state})


def note(folder: SandboxFolder, text: str) -> None:
    """Add to the sandbox's events what was decided or done, if there is room for it."""
    with contextlib.suppress(OSError):  # the records are what counts, events only tell the story
        folder.append_event(Event(phase="review", text=text))


# --- the ledger -----------------------------------------------------------------------------------


def read_ledger(folder: SandboxFolder) -> Ledger | None:
    return read_value(folder.ledger, Ledger)


def clear_staged(ledger: Ledger) -> None:
    """Remove what the apply had written beside; the target may be gone altogether."""
    with contextlib.suppress(UsageProblem), TargetFolder(ledger.target) as target:
        discard(target, ledger.staged)


def forget_ledger(folder: SandboxFolder) -> None:
    """Clean up after an apply that was cut short, without finishing it."""
    if (ledger := read_ledger(folder)) is not None:
        clear_staged(ledger)
        folder.ledger.unlink(missing_ok=True)
        note(folder, f"gave up an unfinished apply to {ledger.target}")
