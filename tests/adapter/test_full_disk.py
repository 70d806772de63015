"""A disk of the host that is full: named as such, nothing half-made, nothing lost."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapter.left import Leave
from tests.disks import SmallDisk, small_disk
from tests.guestless import Guestless
from tests.repositories import Repository
from tests.waiting import wait_until
from vmsandbox import worktree
from vmsandbox.errors import GuestProblem, HostProblem
from vmsandbox.model import Event, SandboxState
from vmsandbox.sandbox import Manager, Rooms, clean_up, delete_sandbox, observe
from vmsandbox.sandbox.listening import Quiet
from vmsandbox.store import SandboxFolder, write_atomic


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", "8m") as disk:
        yield disk


def noise(size: int) -> bytes:
    """What cannot be compressed."""
    return Path("/dev/urandom").open("rb").read(size)


@pytest.mark.parametrize("leave_bytes", [0, 8192, 65536, 1 << 20])
def test_a_snapshot(disk: SmallDisk, tmp_path: Path, leave_bytes: int) -> None:
    project = Repository.create(tmp_path / "project", {"a": "b"})
    for number in range(3):
        project.write(f"new{number}", noise(1 << 20))
    stores = disk.path / "stores"
    disk.fill(leave_bytes)
    with pytest.raises(HostProblem) as full:
        worktree.snapshot(project.path, stores)
    assert full.value.code == "host_disk_full"
    assert full.value.hint == "vmsandbox cleanup"
    disk.free()
    assert worktree.snapshot(project.path, stores).files == 4


@pytest.mark.parametrize("leave_bytes", [0, 8192, 65536, 1 << 20])
def test_a_collection(disk: SmallDisk, tmp_path: Path, leave_bytes: int) -> None:
    """The host's own disk is no fault of the guest's, and the former result stays."""
    project = Repository.create(tmp_path / "project", {"a": "b"})
    guest = Guestless(project.path, tmp_path / "guest")
    guest.send()
    guest.quarantine = worktree.Quarantine(disk.path / "result.git")
    (guest.inside / "a").write_text("former\n")
    former = guest.collect()
    (guest.inside / "new").write_bytes(noise(2 << 20))
    disk.fill(leave_bytes)
    with pytest.raises(HostProblem) as full, guest.quarantine.replacing():
        guest.collect()
    assert full.value.code == "host_disk_full"
    with guest.quarantine.reading() as results:
        (change,) = results.changes(guest.snapshot.tree, former.tree)
        assert change.path == b"a"
    disk.free()
    with guest.quarantine.replacing():
        fresh = guest.collect()
    with guest.quarantine.reading() as results:
        assert len(results.changes(guest.snapshot.tree, fresh.tree)) == 2
    assert not list(guest.quarantine.folder.glob("incoming-*"))


def test_records_and_events(disk: SmallDisk) -> None:
    folder = SandboxFolder(disk.path)
    write_atomic(folder.record, b"former")
    disk.fill()
    with pytest.raises(HostProblem) as full:
        write_atomic(folder.record, bytes(100_000))
    assert full.value.code == "host_disk_full"
    assert folder.record.read_bytes() == b"former"
    assert not list(disk.path.glob(".record*"))
    for _ in range(200):
        folder.append_event(Event(phase="told", text="x" * 4000))
    disk.free()
    folder.append_event(Event(phase="told"))
    assert folder.read_events()


# --- a sandbox whose state folder is full ---------------------------------------------------------


@pytest.fixture
def crowded(rooms: Rooms) -> Iterator[SmallDisk]:
    """The file system that the sandboxes lie on."""
    with small_disk(rooms.store.sandboxes, "8m") as disk:
        yield disk


def test_a_failure_is_told_and_frees_the_guest(
    rooms: Rooms, crowded: SmallDisk, leave: Leave
) -> None:
    """Even if it cannot be written down, which must not hide the cause."""
    left = leave(SandboxState.RUNNING, runs=True)
    before = left.folder.record.read_bytes()
    crowded.fill()
    with (
        pytest.raises(GuestProblem) as first,
        Manager.of(rooms, left.folder, Quiet()) as manager,
        manager._answering_for_failure(),
    ):
        raise GuestProblem("cause", "the first of all")
    assert first.value.code == "cause"
    assert left.folder.record.read_bytes() == before
    assert rooms.guest_alive(left.guest.uuid) is False
    assert observe(left.folder, rooms.guest_alive).problems


def test_a_manager_can_be_asked_to_end_and_all_be_deleted(
    rooms: Rooms, crowded: SmallDisk, leave: Leave
) -> None:
    """Who wants to free space must be able to."""
    left = leave(SandboxState.RUNNING, runs=True)
    managing, asked = threading.Event(), threading.Event()

    def manage() -> None:
        with Manager.of(rooms, left.folder, Quiet()) as manager:
            managing.set()
            wait_until(manager._at_once.is_set)
            asked.set()

    thread = threading.Thread(target=manage)
    thread.start()
    assert managing.wait(30)
    crowded.fill()
    delete_sandbox(rooms, left.folder, force=True)
    thread.join(30)
    assert asked.is_set()
    assert not left.folder.path.exists()
    assert rooms.guest_alive(left.guest.uuid) is False
    assert clean_up(rooms, dry_run=False) == []


def test_nothing_is_made_where_there_is_no_space(
    rooms: Rooms, crowded: SmallDisk, leave: Leave
) -> None:
    left = leave(SandboxState.STOPPED)
    record = left.folder.read_record()
    crowded.fill()
    with pytest.raises(HostProblem) as full:
        rooms.store.create(None, lambda id_, name, _: record.model_copy(update={"id": id_}))
    assert full.value.code == "host_disk_full"
    assert [folder.id for folder in rooms.store.folders()] == [left.folder.id]
