"""Owns how sandboxes end: stop, delete, and cleaning up what nobody owns any more.

Every removal says what it really freed; what is gone already is an answer of its own, no error.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time

from vmsandbox import review, worktree
from vmsandbox.errors import HostProblem, ReviewRefused, UsageProblem
from vmsandbox.guest import Deadline
from vmsandbox.model import ChangeSet, ResultRecord, ResultState, SandboxState, Value
from vmsandbox.sandbox.life import GRACE_S, Manager
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.sandbox.status import LIVE, Status, observe
from vmsandbox.store import (
    SandboxFolder,
    allocated_bytes,
    locked,
    read_value,
    write_atomic,
)

_POLL_S = 0.05
_COLLECT_PATIENCE_S = 600.0
_NOW_PATIENCE_S = 60.0
_UNDECIDED = (ResultState.PENDING, ResultState.APPROVED, ResultState.CONFLICTED)


class Cleaned(Value):
    """One thing that a removal looked at."""

    kind: str
    what: str
    outcome: str
    detail: str = ""
    freed_bytes: int = 0


class Quiet:
    """A listener that does not listen."""

    def phase(self, name: str) -> None:
        return

    def output(self, stream: str, data: bytes) -> None:
        return

    def note(self, text: str) -> None:
        return


def spawn_manager(folder: SandboxFolder) -> None:
    """Let a process with a session of its own carry the sandbox out; what it says goes to its log.

    Returns once it holds the manager's lock, or has ended already.
    """
    with folder.manager_log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vmsandbox", "_manage", folder.id],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "VMSANDBOX_HOME": str(folder.path.parent.parent)},
            start_new_session=True,
        )
    deadline = Deadline(_NOW_PATIENCE_S)
    while not folder.manager_alive() and process.poll() is None and not deadline.passed():
        time.sleep(_POLL_S)


def stop_sandbox(rooms: Rooms, folder: SandboxFolder, *, at_once: bool) -> str:
    """End the task, collect, stop the guest; with `at_once` neither wait nor collect.

    Returns what was found: ``stopped``, ``already stopped``. Raises HostProblem ``stop_timeout``.
    """
    if folder.manager_alive():
        _ask_manager(folder, at_once)
        return "stopped"
    record = folder.read_record()
    if not rooms.guest_alive(record.domain_uuid):
        if record.state in LIVE:  # the guest went away while nobody looked
            rooms.store.update(
                folder, lambda r: r.model_copy(update={"state": SandboxState.FAILED})
            )
        return "already stopped"
    with Manager.of(rooms, folder, Quiet()) as manager:
        if at_once:
            manager.end_now()
            manager.stop()
        else:
            manager.finish()
    return "stopped"


def _ask_manager(folder: SandboxFolder, at_once: bool) -> None:
    write_atomic(folder.stop_request, b"now" if at_once else b"ask")
    deadline = Deadline(_NOW_PATIENCE_S if at_once else GRACE_S + _COLLECT_PATIENCE_S)
    while folder.manager_alive():
        if deadline.passed():
            raise HostProblem(
                "stop_timeout",
                f"the manager of sandbox {folder.id} did not stop within {deadline.seconds:g} s",
                hint=f"vmsandbox stop --now {folder.id}",
                evidence=str(folder.events),
            )
        time.sleep(_POLL_S)


def has_undecided_result(folder: SandboxFolder) -> bool:
    """Whether deleting this sandbox would throw a change set away that nobody decided on."""
    result = read_value(folder.result_record, ResultRecord)
    changes = read_value(folder.change_set, ChangeSet)
    return bool(result and result.state in _UNDECIDED and changes and changes.changes)


def delete_sandbox(rooms: Rooms, folder: SandboxFolder, *, force: bool) -> Cleaned:
    """Remove a sandbox and all that belongs to it. Raises UsageProblem ``sandbox_live``."""
    if not force:
        status = observe(folder, rooms.guest_alive)
        if status.managed or status.guest_alive:
            raise UsageProblem(
                "sandbox_live",
                f"sandbox {folder.id} is {status.state.value}",
                hint=f"vmsandbox stop {folder.id}    (or: vmsandbox delete --force {folder.id})",
            )
    elif folder.manager_alive():
        _ask_manager(folder, at_once=True)
    return _remove(rooms, folder)


def _remove(rooms: Rooms, folder: SandboxFolder) -> Cleaned:
    try:
        with locked(folder.manager_lock, wait=False):
            with contextlib.suppress(HostProblem):
                _free_guest(rooms, folder)
            review.abandon(folder)
            freed = rooms.store.remove(folder)
    except BlockingIOError:
        raise UsageProblem(
            "sandbox_live", f"another process manages sandbox {folder.id} now"
        ) from None
    return Cleaned(kind="sandbox", what=folder.id, outcome="removed", freed_bytes=freed)


def _free_guest(rooms: Rooms, folder: SandboxFolder) -> None:
    record = folder.read_record()
    rooms.hypervisor.destroy(record.domain_uuid)
    rooms.hypervisor.forget(f"vmsandbox-{folder.id}")


# --- what nobody owns any more --------------------------------------------------------------------


def clean_up(rooms: Rooms, *, dry_run: bool) -> list[Cleaned]:
    """Remove decided and empty sandboxes, half-made folders, orphaned guests, unused snapshots.

    Never touches what runs, what is managed, nor a result that waits for a decision.
    """
    cleaned = [_clean_sandbox(rooms, folder, dry_run=dry_run) for folder in rooms.store.folders()]
    cleaned += _clean_domains(rooms, dry_run=dry_run)
    cleaned += _clean_worktrees(rooms, dry_run=dry_run)
    return [item for item in cleaned if item is not None]


def _clean_sandbox(rooms: Rooms, folder: SandboxFolder, *, dry_run: bool) -> Cleaned | None:
    status = observe(folder, rooms.guest_alive)
    why = _why_removable(folder, status)
    if not why:
        return None
    if dry_run:
        size = folder.allocated_bytes()
        return Cleaned(
            kind="sandbox", what=folder.id, outcome="would go", detail=why, freed_bytes=size
        )
    try:
        return _remove(rooms, folder).model_copy(update={"detail": why})
    except (UsageProblem, ReviewRefused) as error:
        return Cleaned(kind="sandbox", what=folder.id, outcome="kept", detail=error.message)


def _why_removable(folder: SandboxFolder, status: Status) -> str:
    """The reason why nobody can miss it, or an empty text."""
    if status.managed or (status.guest_alive is not False and status.created_at is not None):
        return ""
    if status.created_at is None:
        return "half made or half deleted"
    if status.state is SandboxState.QUEUED and status.exec_result is None:
        return "never started"
    if has_undecided_result(folder) or status.state in LIVE or status.state is SandboxState.FAILED:
        return ""
    if status.result in (ResultState.APPLIED, ResultState.DROPPED):
        return f"result {status.result.value}"
    return "nothing changed" if status.changes == 0 else ""


def _clean_domains(rooms: Rooms, *, dry_run: bool) -> list[Cleaned]:
    """Guests that bear our mark for this state folder and have no record any more."""
    known = {record.domain_uuid for record in rooms.store.records()}
    root = rooms.store.path
    owned = {d.uuid: d.name for d in rooms.hypervisor.list_owned(root)}
    strays = {p.uuid: p.name for p in rooms.hypervisor.strays(root)}
    found = []
    for uuid, name in {**owned, **strays}.items():
        if uuid in known:
            continue
        outcome = "would go"
        if not dry_run:
            was_there = rooms.hypervisor.destroy(uuid)
            rooms.hypervisor.forget(name)
            outcome = "removed" if was_there else "already gone"
        found.append(Cleaned(kind="guest", what=name, outcome=outcome, detail="has no sandbox"))
    return found


def _clean_worktrees(rooms: Rooms, *, dry_run: bool) -> list[Cleaned]:
    """Snapshot stores that no sandbox refers to; the next snapshot makes a new one."""
    stores = rooms.store.worktrees
    used = {worktree.store_of(stores, record.task.worktree) for record in rooms.store.records()}
    found = []
    for path in sorted(stores.iterdir()):
        if not path.is_dir() or path in used:
            continue
        size = allocated_bytes(path)
        if not dry_run:
            shutil.rmtree(path, ignore_errors=True)
        outcome = "would go" if dry_run else "removed"
        found.append(Cleaned(kind="snapshots", what=path.name, outcome=outcome, freed_bytes=size))
    return found
