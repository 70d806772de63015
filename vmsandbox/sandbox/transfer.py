"""Owns what crosses between host and guest: the snapshot in, later changes in, the change set out.

Joins the rooms that make and check (worktree, review) with the one that carries (guest).
"""

import contextlib
from contextlib import AbstractContextManager
from typing import BinaryIO

from vmsandbox import review, worktree
from vmsandbox.errors import UsageProblem
from vmsandbox.guest import Guest
from vmsandbox.model import ChangeSet, SandboxRecord, Snapshot, Task, TreePath, Value
from vmsandbox.sandbox.access import open_guest, running_record
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.store import SandboxFolder, locked

SEND_TIMEOUT_S = 1800.0
COLLECT_TIMEOUT_S = 1800.0


def send(guest: Guest, task: Task, snapshot: Snapshot) -> None:
    """Unpack a snapshot in the guest, at the same path as on the host."""
    guest.stream_in(
        worktree.receive_command(task.worktree, snapshot),
        worktree.base_stream(snapshot),
        timeout_s=SEND_TIMEOUT_S,
    )


class SyncReport(Value):
    """What `sync` did in the guest."""

    updated: int = 0
    conflicts: tuple[TreePath, ...] = ()


def sync_worktree(rooms: Rooms, folder: SandboxFolder, *, guest: Guest | None = None) -> SyncReport:
    """Bring the host's changes since the last snapshot into a running guest.

    Uses the connection `guest` if there is one, else makes its own.

    What the guest changed as well stays and is reported. The new snapshot becomes the base that
    the next change set is taken against. Raises UsageProblem ``guest_not_running``,
    ``nothing_sent``.
    """
    with locked(folder.sync_lock):
        record = running_record(rooms, folder)
        former = record.snapshot
        if former is None or not record.base_in_guest:
            raise UsageProblem(
                "nothing_sent",
                f"the worktree of sandbox {record.id} is not in its guest yet",
                hint=f"vmsandbox status --watch {record.id}",
            )
        taken = worktree.snapshot(
            record.task.worktree,
            rooms.store.worktrees,
            include=record.task.include,
            history=record.task.history,
        )
        if taken.commit == former.commit:
            return SyncReport()
        with contextlib.ExitStack() as stack:
            way_in = guest or stack.enter_context(open_guest(rooms, folder, record))
            answer = way_in.stream_in(
                worktree.receive_command(record.task.worktree, taken, former),
                worktree.base_stream(taken, former),
                timeout_s=SEND_TIMEOUT_S,
            )
        report = worktree.parse_update(answer)
        base = worktree.hold_back(taken, former, report.conflicts)
        rooms.store.update(folder, lambda r: r.model_copy(update={"snapshot": base}))
        return SyncReport(updated=report.updated, conflicts=report.conflicts)


def collect(guest: Guest, folder: SandboxFolder, record: SandboxRecord) -> ChangeSet:
    """Bring the change set out of a running guest and put it up for review.

    The guest's pack goes through the quarantine, its tree through the checks of hostile names and
    links. Raises ReviewRefused if it must not come in; nothing of a former result is lost then.
    """
    snapshot = record.snapshot
    if snapshot is None:
        raise UsageProblem("nothing_sent", f"sandbox {record.id} never got a worktree")
    quarantine = worktree.Quarantine(folder.result_git)
    with quarantine.replacing():
        result = worktree.collect_result(
            quarantine,
            snapshot,
            lambda agent_commits: _collecting(guest, record, snapshot, agent_commits),
            worktree.ResultLimits.of(record.limits),
        )
        change_set = _inspected(quarantine, record, snapshot, result)
        review.present(folder, change_set)
    return change_set


def _collecting(
    guest: Guest, record: SandboxRecord, snapshot: Snapshot, agent_commits: bool
) -> AbstractContextManager[BinaryIO]:
    argv = worktree.collect_command(
        record.task.worktree, snapshot, include=record.task.include, agent_commits=agent_commits
    )
    return guest.stream_out(argv, timeout_s=COLLECT_TIMEOUT_S)


def _inspected(
    quarantine: worktree.Quarantine,
    record: SandboxRecord,
    snapshot: Snapshot,
    result: worktree.Result,
) -> ChangeSet:
    with quarantine.reading() as store:
        return review.inspect_result(
            store,
            base=(snapshot.commit, snapshot.tree),
            result=(result.commit, result.tree),
            task_digest=record.task.digest(),
            image_digest=record.image_digest,
            limits=record.limits,
            object_format=snapshot.object_format,
            agent_commits=result.agent_commits,
            pack_bytes=result.pack_bytes,
        )
