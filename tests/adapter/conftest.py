"""What tests of this layer share: cases that are ready to be reviewed, sandboxes that were left."""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.adapter.crafted import BASE, RESULT, Case, Files, Make
from tests.adapter.left import Leave, Left, described, record_of
from tests.adapter.loopback_guest import LoopbackGuest, loopback_guest
from vmsandbox.deadline import Deadline
from vmsandbox.guest import Guest
from vmsandbox.model import LibvirtFacts, SandboxState
from vmsandbox.sandbox import Rooms
from vmsandbox.store import write_value


@pytest.fixture(autouse=True, scope="session")
def warm_program() -> Iterator[None]:
    """What :mod:`tests.warm` started ends with the session."""
    yield
    warm.close()


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes host folders with a collected result, each with a state of its own."""
    roots = (tmp_path / str(number) for number in itertools.count())

    def make_case(base: Files = BASE, result: Files = RESULT, **options: Any) -> Case:
        return Case(next(roots), base, result, **options)

    return make_case


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder that costs no disk time: the same work is done hundreds of times."""
    quick = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=quick, prefix="vmsandbox-killed-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackGuest]:
    """A guest's sshd on this host, for a module."""
    with loopback_guest(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture
def guest(loopback: LoopbackGuest) -> Iterator[Guest]:
    """A connection to it."""
    with loopback.guest() as guest:
        guest.connect(Deadline(10))
        yield guest


@pytest.fixture
def rooms(host: None, short_path: Path) -> Iterator[Rooms]:
    """A state folder of its own, and this user's libvirt."""
    short_path.chmod(0o711)
    with Rooms.open(short_path / "state") as rooms:
        yield rooms


@pytest.fixture
def facts(rooms: Rooms) -> LibvirtFacts:
    return rooms.hypervisor.facts()


@pytest.fixture
def leave(rooms: Rooms, facts: LibvirtFacts, tmp_path: Path) -> Iterator[Leave]:
    """Leaves a sandbox in some state, its guest running or not."""
    left: list[Left] = []

    def leave(state: SandboxState, *, runs: bool = False, **fields: Any) -> Left:
        guest = described(rooms, facts)
        folder = rooms.store.folder(guest.spec.id)
        record = record_of(guest, rooms.uri, tmp_path / "project")
        write_value(folder.record, record.model_copy(update={"state": state, **fields}))
        left.append(Left(folder, guest))
        if runs:
            rooms.hypervisor.start(guest.xml)
        return left[-1]

    yield leave
    for one in left:
        rooms.hypervisor.destroy(one.guest.uuid)
        rooms.hypervisor.forget(one.guest.spec.name)
