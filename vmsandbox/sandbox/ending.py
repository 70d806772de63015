"""Owns how sandboxes end: stop, delete, and cleaning up what nobody owns any more.

Every removal says what it really freed; what is gone already is an answer of its own, no error.
"""

import contextlib
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from vmsandbox import review, worktree
from vmsandbox.errors import HostProblem, UsageProblem, VmsandboxError
from vmsandbox.model import ResultState, SandboxState, Value
from vmsandbox.sandbox import templates
from vmsandbox.sandbox.attention import ASK, NOW, request_end, sole_manager
from vmsandbox.sandbox.life import Manager
from vmsandbox.sandbox.listening import Quiet
from vmsandbox.sandbox.plan import GRACE_S
from vmsandbox.sandbox.publishing import await_unpublished
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.sandbox.setbacks import LIVE
from vmsandbox.sandbox.status import Status, observe
from vmsandbox.sandbox.templates import Template
from vmsandbox.store import SandboxFolder, allocated_bytes, is_locked, locked

_ASK_PATIENCE_S = GRACE_S + 600.0
_NOW_PATIENCE_S = 60.0
_ASIDE = ".unused-"


class Cleaned(Value):
    """One thing that a removal looked at."""

    kind: str
    what: str
    outcome: str
    detail: str = ""
    freed_bytes: int = 0


def stop_sandbox(rooms: Rooms, folder: SandboxFolder, *, at_once: bool) -> str:
    """End the task, collect, stop the guest; with `at_once` neither wait nor collect.

    Returns what was found: ``stopped``, ``already stopped``. Raises HostProblem ``stop_timeout``,
    or ``libvirt_unreachable`` if it cannot be known whether the guest runs.
    """
    rooms.store.hand_over(folder)  # whoever made it waits no longer for its manager
    if folder.manager_alive():
        _ask_manager(folder, at_once)
        return "stopped"
    record = folder.read_record()
    if rooms.guest_runs(record):
        _stop_unmanaged(rooms, folder, at_once)
        await_unpublished(folder)
        return "stopped"
    if record.state in LIVE:  # the guest went away while nobody looked
        state = SandboxState.STOPPED if record.collected else SandboxState.FAILED
        rooms.store.update(folder, lambda r: r.model_copy(update={"state": state}))
    return "already stopped"


def _stop_unmanaged(rooms: Rooms, folder: SandboxFolder, at_once: bool) -> None:
    with Manager.of(rooms, folder, Quiet()) as manager:
        if at_once:
            manager.end_now()
            manager.stop()
        else:
            manager.finish()


def _ask_manager(folder: SandboxFolder, at_once: bool) -> None:
    if at_once:
        request_end(folder, NOW, _NOW_PATIENCE_S)
    else:
        request_end(folder, ASK, _ASK_PATIENCE_S)


def has_undecided_result(folder: SandboxFolder) -> bool:
    """Whether deleting this sandbox would throw a change set away that nobody decided on."""
    return review.is_undecided(*review.latest(folder))


def delete_sandbox(rooms: Rooms, folder: SandboxFolder, *, force: bool) -> Cleaned:
    """Remove a sandbox and all that belongs to it. Raises UsageProblem ``sandbox_live``."""
    rooms.store.hand_over(folder)
    live = folder.manager_alive()
    if force and live:
        _ask_manager(folder, at_once=True)
    elif not force and (live or any(map(rooms.guest_alive, _domains_of(rooms, folder)))):
        raise UsageProblem(
            "sandbox_live",
            f"sandbox {folder.id} is {observe(folder, rooms.guest_alive).state.value}",
            hint=f"vmsandbox stop {folder.id}    (or: vmsandbox delete --force {folder.id})",
        )
    return _remove(rooms, folder)


def _remove(rooms: Rooms, folder: SandboxFolder) -> Cleaned:
    with _unmanaged(folder):
        return _free(rooms, folder)


def _unmanaged(folder: SandboxFolder) -> AbstractContextManager[None]:
    """Nobody manages it, nor begins to, inside."""
    return sole_manager(folder, code="sandbox_live", hint=f"vmsandbox delete --force {folder.id}")


def _free(rooms: Rooms, folder: SandboxFolder) -> Cleaned:
    """The guest first: while there is a folder it can be found."""
    for uuid in _domains_of(rooms, folder):
        rooms.end_guest(uuid)
    await_unpublished(folder)
    rooms.forget_logs(f"vmsandbox-{folder.id}")
    review.abandon(folder)
    freed = rooms.store.remove(folder)
    return Cleaned(kind="sandbox", what=folder.id, outcome="removed", freed_bytes=freed)


def _domains_of(rooms: Rooms, folder: SandboxFolder) -> list[str]:
    """As the record says; without one, as far as libvirt can be asked."""
    try:
        return [folder.read_record().domain_uuid]
    except HostProblem:
        with contextlib.suppress(HostProblem):
            name = f"vmsandbox-{folder.id}"
            return [guest.uuid for guest in rooms.guests() if guest.name == name]
        return []


# --- what nobody owns any more --------------------------------------------------------------------


def clean_up(rooms: Rooms, *, dry_run: bool, whole_templates: bool = False) -> list[Cleaned]:
    """Remove decided and empty sandboxes, half-made folders and templates, orphaned guests, unused
    snapshots, logs of guests that are gone for good; of whole templates those that no start would
    use any more, or with `whole_templates` all that no sandbox stands on.

    Never touches what runs, what is managed, nor a result that waits for a decision.
    """
    cleaned = _clean_domains(rooms, dry_run=dry_run)
    cleaned += [
        item
        for folder in rooms.store.folders()
        if (item := _clean_sandbox(rooms, folder, dry_run=dry_run))
    ]
    cleaned += _clean_leaving(rooms, dry_run=dry_run)
    cleaned += _clean_templates(rooms, dry_run=dry_run, whole=whole_templates)
    cleaned += _clean_worktrees(rooms, dry_run=dry_run)
    cleaned += _clean_logs(rooms, dry_run=dry_run)
    cleaned += _clean_builds(rooms, dry_run=dry_run)
    return cleaned


def _clean_builds(rooms: Rooms, *, dry_run: bool) -> list[Cleaned]:
    """What image builds left that were killed."""
    freed = rooms.images.sweep(dry_run=dry_run)
    if not freed:
        return []
    outcome = "would go" if dry_run else "removed"
    return [Cleaned(kind="build", what="unfinished images", outcome=outcome, freed_bytes=freed)]


def _clean_sandbox(rooms: Rooms, folder: SandboxFolder, *, dry_run: bool) -> Cleaned | None:
    status = observe(folder, rooms.guest_alive)
    why = "" if status.managed else _why_removable(folder, status)
    if not why:
        return None
    if dry_run:
        size = folder.allocated_bytes()
        return Cleaned(
            kind="sandbox", what=folder.id, outcome="would go", detail=why, freed_bytes=size
        )
    try:
        # One that is being made has no record for a moment, and is made under the store's lock.
        with locked(rooms.store.lock), _unmanaged(folder):
            why = _why_removable(folder, observe(folder, rooms.guest_alive))
            return _free(rooms, folder).model_copy(update={"detail": why}) if why else None
    except VmsandboxError as error:
        return Cleaned(kind="sandbox", what=folder.id, outcome="kept", detail=error.message)


def _why_removable(folder: SandboxFolder, status: Status) -> str:
    """The reason why nobody can miss it, or an empty text."""
    if status.created_at is None:
        return "" if folder.record.exists() else "half made or half deleted"
    if status.scratch_of and status.guest_alive is not None:
        return f"a guest for a look at {status.scratch_of}, and nobody looks any more"
    if status.guest_alive is not False or is_locked(folder.maker_lock):
        return ""
    if status.state is SandboxState.QUEUED and status.exec_result is None:
        return "never started"
    if has_undecided_result(folder) or status.state in LIVE or status.state is SandboxState.FAILED:
        return ""
    if status.result in (ResultState.APPLIED, ResultState.DROPPED):
        return f"result {status.result.value}"
    return "nothing changed" if status.changes == 0 else ""


def _clean_domains(rooms: Rooms, *, dry_run: bool) -> list[Cleaned]:
    """Guests that bear our mark for this state folder and have no record any more."""
    found = []
    # The guests first, then the records: a record is written before its guest is started.
    for guest in rooms.guests():
        if _is_of_template(guest.name) or _folder_of(rooms, guest.name).record.exists():
            continue
        outcome = "would go"
        if not dry_run:
            was_there = rooms.hypervisor.destroy(guest.uuid)
            rooms.forget_logs(guest.name)
            outcome = "removed" if was_there else "already gone"
        found.append(
            Cleaned(kind="guest", what=guest.name, outcome=outcome, detail="has no sandbox")
        )
    return found


def _folder_of(rooms: Rooms, domain: str) -> SandboxFolder:
    return rooms.store.folder(domain.removeprefix("vmsandbox-"))


def _is_of_template(domain: str) -> bool:
    return domain.startswith(templates.DOMAIN_PREFIX)


def _clean_templates(rooms: Rooms, *, dry_run: bool, whole: bool) -> list[Cleaned]:
    """Half-made ones, with the guest that was to be frozen, and those that no start would use. The
    others are worth their space, unless `whole` says that it is needed."""
    found = []
    for template, why in templates.disposable(rooms, whole=whole):
        freed = allocated_bytes(template.path) if dry_run else templates.remove(rooms, template)
        outcome = "would go" if dry_run else "kept" if freed is None else "removed"
        found.append(
            Cleaned(
                kind="template",
                what=template.path.name,
                outcome=outcome,
                detail="in use again" if freed is None else why,
                freed_bytes=freed or 0,
            )
        )
    return found


def remove_image(rooms: Rooms, reference: str) -> int:
    """Remove an image's name and, with the last one, the image and the templates made of it. The
    bytes that this freed.

    Raises NegativeAnswer ``image_in_use`` if a sandbox stands on it.
    """
    in_use = {record.image_digest for record in rooms.store.records()}
    made = [one for one in templates.all_templates(rooms) if _is_of_an_image(rooms, one)]
    freed = rooms.images.remove(reference, in_use=in_use)
    for template in made:
        if not _is_of_an_image(rooms, template):
            freed += templates.remove(rooms, Template(template.path)) or 0
    return freed


def _is_of_an_image(rooms: Rooms, template: templates.TemplateStatus) -> bool:
    return rooms.images.holds(template.record.image_digest)


def _clean_leaving(rooms: Rooms, *, dry_run: bool) -> list[Cleaned]:
    """What a delete that was killed left of a sandbox."""
    found = []
    for path in rooms.store.leaving():
        freed = allocated_bytes(path)
        if not dry_run:
            rooms.store.empty(path)
        found.append(
            Cleaned(
                kind="sandbox",
                what=path.name,
                outcome="would go" if dry_run else "removed",
                detail="half deleted",
                freed_bytes=freed,
            )
        )
    return found


def _clean_worktrees(rooms: Rooms, *, dry_run: bool) -> list[Cleaned]:
    """Snapshot stores that no sandbox refers to; the next snapshot makes a new one."""
    with locked(rooms.store.lock):  # a record refers to its store before that is used
        unused = _unused_stores(rooms)
        if not dry_run:
            unused = [_set_aside(path) for path in unused]
    found = []
    for path in unused:
        size = allocated_bytes(path)
        if not dry_run:
            shutil.rmtree(path, ignore_errors=True)
        found.append(
            Cleaned(
                kind="snapshots",
                what=path.name.removeprefix(_ASIDE),
                outcome="would go" if dry_run else "removed",
                freed_bytes=size,
            )
        )
    return found


def _unused_stores(rooms: Rooms) -> list[Path]:
    stores = rooms.store.worktrees
    used = {worktree.store_of(stores, record.task.worktree) for record in rooms.store.records()}
    return sorted(path for path in stores.iterdir() if path.is_dir() and path not in used)


def _set_aside(path: Path) -> Path:
    """Out of the way at once, so that a run that begins now makes a store of its own."""
    if path.name.startswith(_ASIDE):
        return path
    return path.rename(path.with_name(f"{_ASIDE}{path.name}"))


def _clean_logs(rooms: Rooms, *, dry_run: bool) -> list[Cleaned]:
    """What libvirt wrote about guests whose folder is gone."""
    found = []
    for name in rooms.hypervisor.logged(rooms.store.sandboxes):
        if _is_of_template(name) or _folder_of(rooms, name).path.exists():
            continue
        if not dry_run:
            rooms.forget_logs(name)
        outcome = "would go" if dry_run else "removed"
        found.append(Cleaned(kind="log", what=name, outcome=outcome, detail="has no sandbox"))
    return found
