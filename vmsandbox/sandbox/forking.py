"""Owns how a sandbox is made of another one that stands still: the disk is copied and the base
kept, everything that identifies the guest is new.

Both are then alike to everybody else, and neither needs the other.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vmsandbox import review
from vmsandbox.errors import UsageProblem
from vmsandbox.images import copy_disk
from vmsandbox.model import Endpoint, Origin, SandboxRecord
from vmsandbox.sandbox.attention import sole_manager
from vmsandbox.sandbox.create import LEAST_FREE_BYTES
from vmsandbox.sandbox.plan import plan_of
from vmsandbox.sandbox.rooms import Rooms, owner_uid
from vmsandbox.store import SandboxFolder


def fork_sandbox(
    rooms: Rooms,
    source: SandboxFolder,
    *,
    command: Sequence[str] = (),
    name: str | None = None,
    keep: bool = False,
) -> SandboxFolder:
    """Make a sandbox, state queued, that goes on from where `source` stopped.

    Its task is that of `source`, or `command` instead of that one's; its result will be everything
    that differs from the base of `source`. Raises before anything is made: UsageProblem
    ``sandbox_live``, ``nothing_to_fork``, ``name_taken``; HostProblem ``host_disk_full``,
    ``libvirt_unreachable``.
    """
    with standing_still(rooms, source) as standing:
        image = rooms.images.resolve(standing.image_digest)
        host = rooms.host_facts(image)

        def make(id_: str, name: str, endpoint: Endpoint) -> SandboxRecord:
            new = {"id": id_, "name": name, "endpoint": endpoint, "keep": keep}
            record = _record(rooms, source, standing, tuple(command), new)
            plan_of(record, rooms.store.folder(id_), rooms.store.path, image, host, owner_uid())
            return record

        return with_copied_disk(rooms, source, name, make)


def with_copied_disk(
    rooms: Rooms,
    source: SandboxFolder,
    name: str | None,
    make: Callable[[str, str, Endpoint], SandboxRecord],
) -> SandboxFolder:
    """A sandbox as `make` describes it whose disk is a copy of that of `source`, which stands
    still; its record says that the worktree is in the guest once all of the disk is there."""
    folder = rooms.store.create(name, make)
    try:
        copy_disk(source.overlay, folder.overlay, spare_bytes=LEAST_FREE_BYTES)
        rooms.store.update(folder, lambda r: r.model_copy(update={"base_in_guest": True}))
    except BaseException:
        rooms.store.hand_over(folder)
        rooms.store.remove(folder)
        raise
    return folder


@contextlib.contextmanager
def standing_still(rooms: Rooms, source: SandboxFolder) -> Iterator[SandboxRecord]:
    """The record of a sandbox whose disk holds its worktree, and that nobody writes inside.

    Raises UsageProblem ``sandbox_live``, ``nothing_to_fork``.
    """
    with sole_manager(source, code="sandbox_live", hint=_stop_first(source)):
        yield _standing(rooms, source)


def _stop_first(source: SandboxFolder) -> str:
    return f"vmsandbox stop {source.id} && vmsandbox fork {source.id}"


def _standing(rooms: Rooms, source: SandboxFolder) -> SandboxRecord:
    record = source.read_record()
    if rooms.guest_runs(record):
        raise UsageProblem(
            "sandbox_live",
            f"the guest of {record.id} runs, and a disk that is written cannot be copied",
            hint=_stop_first(source),
        )
    if not record.base_in_guest or not source.overlay.exists():
        raise UsageProblem(
            "nothing_to_fork",
            f"{record.id} never had its worktree on its disk",
            hint=f"vmsandbox resume {record.id}    (or: vmsandbox run …)",
        )
    return record


def _record(
    rooms: Rooms,
    folder: SandboxFolder,
    source: SandboxRecord,
    command: tuple[str, ...],
    new: Mapping[str, Any],
) -> SandboxRecord:
    """The first record; that the worktree is in the guest is said once the disk is there."""
    change_set, _ = review.latest(folder)
    digest = change_set.digest if change_set else None
    task = source.task.model_copy(update={"command": command}) if command else source.task
    return SandboxRecord(
        task=task,
        forked_from=Origin(id=source.id, name=source.name, digest=digest),
        limits=source.limits,
        image_name=source.image_name,
        image_digest=source.image_digest,
        libvirt_uri=rooms.uri,
        domain_uuid=str(uuid.uuid4()),
        cold=source.cold,
        template=source.template,
        publishes=source.publishes,
        net=source.net,
        equipment=source.equipment,
        snapshot=source.snapshot,
        **new,
    )
