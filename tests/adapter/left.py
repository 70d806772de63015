"""Sandboxes as a killed process may have left them: a record, and a guest that runs or not.

The guests are real domains of a few hundred bytes; the records say what a life would have written.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.adapter.crafted import IMAGE
from tests.tiny_guests import TinyGuest, tiny_guest
from vmsandbox.hypervisor import evidence
from vmsandbox.model import (
    Change,
    ChangeKind,
    ChangeSet,
    LibvirtFacts,
    Limits,
    ResultRecord,
    ResultState,
    SandboxRecord,
)
from vmsandbox.sandbox import Cleaned, Rooms
from vmsandbox.store import SandboxFolder, write_value


class Left(NamedTuple):
    """A sandbox as it was left."""

    folder: SandboxFolder
    guest: TinyGuest

    @property
    def log(self) -> Path:
        return evidence.log_folder(self.guest_uri) / f"{self.guest.spec.name}.log"

    @property
    def guest_uri(self) -> str:
        return "qemu:///system" if os.geteuid() == 0 else "qemu:///session"


Leave = Callable[..., Left]
"""Leaves a sandbox in some state, with ``runs=True`` its guest running."""


def described(rooms: Rooms, facts: LibvirtFacts) -> TinyGuest:
    """A guest with a folder in the store, not started."""
    id_ = "a" + secrets.token_hex(4)[1:]
    for name in ("kernel", "initramfs", "rootfs"):
        (rooms.store.path / name).unlink(missing_ok=True)
    guest = tiny_guest(rooms.store.path, facts, id_=id_)
    spec = guest.spec.model_copy(update={"name": f"vmsandbox-{id_}", "ssh": None})
    return TinyGuest(spec)


def record_of(guest: TinyGuest, uri: str, project: Path) -> SandboxRecord:
    return SandboxRecord.model_validate(
        {
            "id": guest.spec.id,
            "name": guest.spec.id,
            "task": {"command": ("make",), "worktree": project},
            "limits": Limits(),
            "image_name": "debian-12",
            "image_digest": IMAGE,
            "libvirt_uri": uri,
            "domain_uuid": guest.uuid,
            "endpoint": {"address": "127.9.9.9", "port": 2222},
        }
    )


def put_up(folder: SandboxFolder, state: ResultState, changes: int = 1) -> None:
    """A collected result, as far as cleaning up looks at it."""
    change = Change(kind=ChangeKind.ADDED, path=b"new", new_mode=0o100644, new_oid="1" * 40)
    digest = ChangeSet.digest_for("1" * 40, "2" * 40, IMAGE, IMAGE)
    change_set = ChangeSet(
        digest=digest,
        task_digest=IMAGE,
        image_digest=IMAGE,
        base_commit="3" * 40,
        base_tree="1" * 40,
        result_commit="4" * 40,
        result_tree="2" * 40,
        changes=(change,) * changes,
    )
    write_value(folder.change_set, change_set)
    write_value(folder.result_record, ResultRecord(state=state, digest=digest))


def seen(items: list[Cleaned]) -> set[tuple[str, str, str]]:
    return {(item.kind, item.what, item.outcome) for item in items}
