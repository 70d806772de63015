"""Owns what is written down of a life that was cut off or failed, and what a new attempt forgets
of it. Pure.
"""

import re
from pathlib import Path
from typing import Any

from vmsandbox.errors import (
    GuestProblem,
    HostProblem,
    ReviewRefused,
    UsageProblem,
    VmsandboxError,
)
from vmsandbox.model import ExecResult, Failure, Outcome, SandboxRecord, SandboxState
from vmsandbox.text import printable

LIVE = frozenset(
    {
        SandboxState.STARTING,
        SandboxState.READY,
        SandboxState.RUNNING,
        SandboxState.COLLECTING,
    }
)
"""States in which a guest is meant to run."""

_OUTCOMES = {
    "boot_timeout": Outcome.BOOT_TIMEOUT,
    "host_disk_full": Outcome.HOST_FULL,
    "host_memory_full": Outcome.HOST_FULL,
    "connection_lost": Outcome.CONNECTION_LOST,
    "guest_gone": Outcome.CONNECTION_LOST,
}
_NO_SPACE = "No space left on device"
_OOM = re.compile(rb"[Oo]ut of memory: Killed process [0-9]+ \(([^)\n]{1,64})\)")


def failed(record: SandboxRecord, error: VmsandboxError, console: Path) -> dict[str, Any]:
    """What changes in a record whose life failed by `error`; the first cause is kept."""
    outcome = _outcome(record, error)
    failure = Failure(
        code=error.code,
        message=error.message,
        hint=error.hint,
        evidence=error.evidence or str(console),
        phase=record.state.value,
        outcome=outcome,
    )
    ended = record.exec_result
    if ended is None and outcome is not None:
        ended = ExecResult(exit_code=None, outcome=outcome, detail=error.message)
    return {"failure": record.failure or failure, "exec_result": ended}


def _outcome(record: SandboxRecord, error: VmsandboxError) -> Outcome | None:
    """What a task counts as because of this error, if that has a name."""
    if isinstance(error, ReviewRefused):
        return Outcome.COLLECT_REFUSED
    if record.state is SandboxState.COLLECTING and _NO_SPACE in error.message:
        return Outcome.GUEST_DISK_FULL
    return _OUTCOMES.get(error.code)


def told_by_console(ended: ExecResult, console: bytes) -> ExecResult:
    """A failed task whose guest's kernel killed something for lack of memory meanwhile, wherever
    in the guest: only the console tells."""
    killed = _OOM.findall(console)
    if ended.outcome is not Outcome.FAILED or not killed:
        return ended
    name = printable(killed[-1], newlines=False)
    detail = f"the guest's kernel killed {name} for lack of memory; {ended.detail}"
    return ended.model_copy(update={"outcome": Outcome.GUEST_OOM, "detail": detail})


def taken_up(record: SandboxRecord) -> dict[str, Any]:
    """What changes in a record whose life is taken up again.

    A task that never began has its whole life before it, also if it was cancelled then. Raises
    UsageProblem ``fork_incomplete``.
    """
    if record.forked_from and not record.base_in_guest:
        raise _half_forked(record.id, record.forked_from.id)
    if record.task_started:
        return {"failure": None}
    return {"failure": None, "exec_result": None, "cancelled": False}


def _half_forked(id_: str, source: str) -> UsageProblem:
    """What it was to go on from is not on its disk, and another start would not be the same."""
    return UsageProblem(
        "fork_incomplete",
        f"{id_} was to be a fork of {source}, but its disk was never copied to the end",
        hint=f"vmsandbox delete {id_} && vmsandbox fork {source}",
    )


def died_booting(record: SandboxRecord, last_words: str, console: Path) -> GuestProblem:
    """The guest went away before it was ready."""
    return GuestProblem(
        "guest_died",
        f"the guest of {record.id} went away while it booted: {last_words}",
        hint=f"vmsandbox logs --console {record.id}",
        evidence=str(console),
    )


def guest_gone(record: SandboxRecord, detail: str, console: Path) -> GuestProblem:
    """The guest went away under its task."""
    return GuestProblem(
        "guest_gone",
        f"the guest of {record.id} went away while its task ran: {detail}",
        hint=f"vmsandbox resume {record.id}    boots it again from its disk and collects",
        evidence=str(console),
    )


def result_refused(record: SandboxRecord, refused: ReviewRefused) -> ReviewRefused:
    """A result that must not come in, with the way to put it right: the guest still has it."""
    id_ = record.id
    again = "" if record.keep else f"vmsandbox resume --keep {id_}; "
    return ReviewRefused(
        refused.code,
        refused.message,
        hint=f"{again}put it right with vmsandbox ssh {id_}, then vmsandbox stop {id_}"
        f"    (or: vmsandbox delete --force {id_})",
        evidence=refused.evidence,
    )


def stands_still(record: SandboxRecord, folder: Path) -> HostProblem:
    """QEMU stops a guest whose disk it cannot write; the host's file system is full."""
    return HostProblem(
        "host_disk_full",
        f"the guest of {record.id} stands still: the host has no space left for its disk",
        hint=f"vmsandbox cleanup && vmsandbox resume {record.id}",
        evidence=str(folder),
    )


LOST = ExecResult(
    exit_code=None,
    outcome=Outcome.CONNECTION_LOST,
    detail="the guest went away while its task ran; this is what was on its disk",
)
"""What became of a task whose guest had to be booted again: it never begins a second time."""
