"""A disk of the host that is full: named as such, nothing half-made, nothing lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disks import SmallDisk, small_disk
from tests.guestless import Guestless
from tests.repositories import Repository
from vmsandbox import worktree
from vmsandbox.errors import HostProblem
from vmsandbox.model import Event
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
