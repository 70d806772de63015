"""A guest for a look and batches share this host: it waits for what a batch holds, and for nothing
that nobody would give back.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapter.crafted import IMAGE
from vmsandbox.batch import Planned, Unwatched, conducting, share_of
from vmsandbox.batch.admission import Need
from vmsandbox.batch.budget import Budget
from vmsandbox.batch.record import create
from vmsandbox.errors import HostProblem
from vmsandbox.host import load
from vmsandbox.model import Endpoint, Limits, SandboxRecord, Task
from vmsandbox.sandbox import Rooms
from vmsandbox.store import SandboxFolder, locked, write_value

PATIENCE_S = 20.0


class Notes(list[str]):
    """What was noted, and that something was."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def take(self, text: str) -> None:
        self.append(text)
        self.heard.set()


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def rooms(tmp_path: Path, notes: Notes) -> Iterator[Rooms]:
    with Rooms.open(tmp_path / "state", notes.take) as rooms:
        yield rooms


def look(rooms: Rooms, id_: str, *, memory_mib: int = 64) -> SandboxFolder:
    """A sandbox of this size."""
    folder = rooms.store.folder(id_)
    folder.path.mkdir()
    record = SandboxRecord(
        id=id_,
        name=id_,
        task=Task(command=("make",), worktree=Path("/w")),
        limits=Limits(memory_mib=memory_mib, disk_mib=256),
        image_name="debian-12",
        image_digest=IMAGE,
        libvirt_uri="test:///default",
        domain_uuid=id_,
        endpoint=Endpoint(address="127.0.0.2", port=2222),
    )
    write_value(folder.record, record)
    return folder


def goes_on() -> None:
    """Somebody waits."""


def test_a_look_waits_for_what_a_batch_holds(rooms: Rooms, notes: Notes) -> None:
    folder = look(rooms, "0badcafe")
    entered = threading.Event()

    def enter() -> None:
        with locked(folder.manager_lock), share_of(rooms)(folder, goes_on):
            entered.set()

    with create(rooms.store, [], None) as batch:
        budget = Budget(rooms.store, batch.id)
        everything = load(rooms.store.path).total_bytes
        budget.adopt("a", Need(memory_bytes=everything, disk_bytes=0, basis="density"))
        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        assert notes.heard.wait(PATIENCE_S)
        assert notes[0].startswith("waiting for room beside the batches: it needs 224 MiB")
        assert not entered.is_set()
        budget.release("a")
        thread.join(PATIENCE_S)
    assert entered.is_set()
    assert len(notes) == 1, "told once"


class Enough(Exception):
    """Whoever waited does so no more."""


def test_whoever_gives_up_waiting_holds_nobody_up(rooms: Rooms) -> None:
    folder, other = look(rooms, "0badcafe"), look(rooms, "0badcaff")

    def enough() -> None:
        raise Enough

    with create(rooms.store, [], None) as batch:
        budget = Budget(rooms.store, batch.id)
        everything = load(rooms.store.path).total_bytes
        budget.adopt("a", Need(memory_bytes=everything, disk_bytes=0, basis="density"))
        with locked(folder.manager_lock):
            with pytest.raises(Enough), share_of(rooms)(folder, enough):
                pass
            budget.release("a")
            with locked(other.manager_lock), share_of(rooms)(other, goes_on):
                assert not budget.alone()
        assert budget.alone()


def test_a_batch_waits_for_another_however_long(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks are not given up for a host that is full of guests which will end."""
    monkeypatch.setattr(conducting, "_PATIENCE_S", 0.0)
    task = Planned(name="a", origin="a", command=("true",), worktree=Path("/w"))
    with create(rooms.store, [], None) as other, create(rooms.store, [task], None) as mine:
        everything = load(rooms.store.path).total_bytes
        need = Need(memory_bytes=everything, disk_bytes=0, basis="density")
        Budget(rooms.store, other.id).adopt("a", need)
        conductor = conducting.Conductor(rooms, mine, Unwatched())
        end = threading.Timer(3.5, conductor.ask_to_end)  # it looks once a second
        end.start()
        report = conductor.run()
        end.join()
    (ended,) = report.tasks
    assert (ended.outcome, report.unfinished) == ("queued", 1), ended.reason
    assert "free beside the reserve and what others were promised" in ended.reason


def test_what_never_fits_is_told_at_once(rooms: Rooms) -> None:
    folder = look(rooms, "0badcafe", memory_mib=4 << 20)
    with (
        locked(folder.manager_lock),
        pytest.raises(HostProblem) as caught,
        share_of(rooms)(folder, goes_on),
    ):
        pass
    assert caught.value.code == "host_memory_full"
    assert "there is no room for another guest: it needs" in caught.value.message
