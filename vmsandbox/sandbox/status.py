"""Owns what is true about sandboxes now: the record is intent, libvirt is the truth,
contradictions are problems.

Reads only. A libvirt that does not answer proves nothing about a guest.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from pydantic import Field

from vmsandbox import approvals, review, spending
from vmsandbox.asking import Approval
from vmsandbox.errors import HostProblem
from vmsandbox.model import (
    BatchMark,
    ExecResult,
    Failure,
    Limits,
    Origin,
    ResultState,
    SandboxRecord,
    SandboxState,
    Value,
)
from vmsandbox.provider import Usage
from vmsandbox.sandbox.publishing import first_url, lost
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.sandbox.setbacks import LIVE
from vmsandbox.store import SandboxFolder


class Status(Value):
    """One sandbox as `status` shows it."""

    id: str
    name: str
    state: SandboxState
    worktree: Path | None = None
    command: tuple[str, ...] = ()
    created_at: datetime | None = None
    image: str = ""
    image_digest: str = ""
    limits: Limits | None = None
    address: str = ""
    url: str = Field(default="", description="of its first published port")
    guest_alive: bool | None = None
    managed: bool = False
    exec_result: ExecResult | None = None
    result: ResultState = ResultState.NONE
    result_digest: str | None = None
    changes: int | None = None
    failure: Failure | None = None
    problems: tuple[str, ...] = ()
    disk_bytes: int = 0
    timings: dict[str, float] = Field(default_factory=dict)
    batch: BatchMark | None = None
    forked_from: Origin | None = None
    scratch_of: str | None = Field(
        default=None, description="the sandbox whose result it holds for a while"
    )
    agent_status: str = Field(default="", description="the agent's own words, made safe to show")
    agent: str = Field(default="", description="the agent that the task is, by name")
    usage: Usage = Field(default=Usage(), description="of its gateways")
    asks: tuple[Approval, ...] = Field(default=(), description="questions that wait for a person")

    @property
    def outcome(self) -> str:
        """How the task ended, all told, or an empty text while it has not."""
        if self.failure and self.failure.outcome:
            return self.failure.outcome.value
        return self.exec_result.outcome.value if self.exec_result else ""


def observe(folder: SandboxFolder, alive: Callable[[str], bool | None]) -> Status:
    """What is true of one sandbox. `alive` says of a domain uuid whether it runs; None: unknown."""
    managed = folder.manager_alive()
    try:
        record = folder.read_record()
        change_set, result = review.latest(folder)
    except HostProblem as error:
        return Status(
            id=folder.id,
            name=folder.id,
            state=SandboxState.FAILED,
            managed=managed,
            problems=(f"{error.message}: {error.hint}",),
            disk_bytes=folder.allocated_bytes(),
        )
    guest = alive(record.domain_uuid)
    state, problems = _derive(record, guest, managed, lambda: lost(folder, record))
    return Status(
        id=record.id,
        name=record.name,
        state=state,
        worktree=record.task.worktree,
        command=record.task.command,
        created_at=record.created_at,
        image=record.image_name,
        image_digest=record.image_digest,
        limits=record.limits,
        address=record.endpoint.address,
        url=first_url(folder),
        guest_alive=guest,
        managed=managed,
        exec_result=record.exec_result,
        result=result.state,
        result_digest=result.digest,
        changes=len(change_set.changes) if change_set else None,
        failure=record.failure,
        problems=problems,
        disk_bytes=folder.allocated_bytes(),
        timings=record.timings,
        batch=record.batch,
        forked_from=record.forked_from,
        scratch_of=record.scratch_of,
        agent_status=review.told(folder).status if record.heard else "",
        agent=record.equipment.agent,
        usage=spending.used(folder),
        asks=approvals.pending(folder) if record.equipment.asks else (),
    )


def _derive(
    record: SandboxRecord, guest: bool | None, managed: bool, ports_lost: Callable[[], bool]
) -> tuple[SandboxState, tuple[str, ...]]:
    """The true state, and what contradicts the record, each with the command that helps."""
    state, again = record.state, f"vmsandbox resume {record.id}"
    if guest is None:
        unknown = "libvirt does not answer, whether its guest runs is unknown"
        return state, (f"{unknown}: vmsandbox doctor --fix",)
    if managed:
        return state, ()
    if state is SandboxState.QUEUED:
        return state, (f"it was never started: {again}",)
    if state not in LIVE:
        return state, (f"its guest still runs: vmsandbox stop {record.id}",) if guest else ()
    if guest:
        if not (state is SandboxState.READY and record.collected):
            return state, (f"nothing manages it (killed?): {again}",)
        return state, (f"nobody publishes its ports (killed?): {again}",) if ports_lost() else ()
    if record.collected and not record.keep:
        return SandboxState.STOPPED, ()  # the manager was killed at its very last step
    gone = f"its guest is gone: {again} boots it again from its disk"
    return SandboxState.FAILED, (gone,)


def observe_all(rooms: Rooms, folders: Sequence[SandboxFolder]) -> list[Status]:
    """What is true of these sandboxes, oldest first."""
    found = [observe(folder, rooms.guest_alive) for folder in folders]
    return sorted(found, key=lambda one: (str(one.created_at or ""), one.id))
