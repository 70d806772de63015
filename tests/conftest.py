"""What all layers share: their order, state folders, git repositories, a host that is ready for
guests, an ordinary user, and the proof at the end that nothing was left behind.
"""

import contextlib
import gc
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests.people import ROOT, Person, ordinary_person
from tests.processes import MARK, describe, left_behind, own_listeners
from tests.repositories import Repository
from tests.sandboxes import State, keep_evidence, short_folder, state_folder

IMAGE = "debian-12"
LAYERS = ("unit", "adapter", "vm")
_FAILED = pytest.StashKey[bool]()
_STATES: list[Path] = []

# A machine that emulates guests is busy: a slow example is no finding.
settings.register_profile("vmsandbox", deadline=None, print_blob=True)
settings.load_profile("vmsandbox")


def layer_of(item: pytest.Item) -> str:
    parts = item.path.relative_to(ROOT / "tests").parts
    return parts[0] if parts[0] in LAYERS else LAYERS[-1]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick layers first, so that a plain mistake shows before a guest boots.

    Tests that may have to start libvirt's daemons stay in one process, and so do those with guests
    that are in one file, as they share some. With several processes the unit tests come last: many
    short ones keep all of them busy to the end.
    """
    order = ("adapter", "unit", "vm") if "PYTEST_XDIST_WORKER" in os.environ else LAYERS
    items.sort(key=lambda item: order.index(layer_of(item)))
    for item in items:
        if layer_of(item) == "vm":
            item.add_marker(pytest.mark.vm)
            person = "person" in getattr(item, "fixturenames", ())  # there is only one
            item.add_marker(pytest.mark.xdist_group("person" if person else item.path.stem))
        elif "host" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("libvirt"))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no search for garbage need look at them again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for node in item.listchain():
            node.stash[_FAILED] = True
    return report


@pytest.fixture(autouse=True, scope="session")
def nothing_left_behind() -> Iterator[None]:
    """No process, loopback port or state folder of this session outlives it."""
    session = secrets.token_hex(8)
    os.environ[MARK] = session
    yield
    processes = left_behind(session, _STATES)
    psutil.wait_procs(processes, timeout=10)
    processes = left_behind(session, _STATES)
    names = [describe(process) for process in processes]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not names, f"left running: {names}"
    assert not own_listeners()
    assert not [path for path in _STATES if path.exists()]


# --- the layers below guests ----------------------------------------------------------------------


@pytest.fixture
def make_repository(tmp_path: Path) -> Callable[..., Repository]:
    """Makes git repositories: ``make_repository("name", {"file": "content"})``."""

    def make(name: str = "project", files: dict[str, str | bytes] | None = None) -> Repository:
        return Repository.create(tmp_path / name, {"README": "hello\n"} if files is None else files)

    return make


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder of one's own whose path leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="vms-") as folder:
        yield Path(folder)


# --- guests ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def host() -> Iterator[None]:
    """libvirt answers; daemons that had to be started for that are ended again."""
    from vmsandbox.host import daemons

    uri = daemons.default_uri()
    before = daemons.started_by_us(uri)
    state = State(_images().parent)
    answer = state("doctor")
    if answer.code != 0:  # mending takes longer: it asks the host everything anew
        answer = state("doctor", "--fix")
    assert answer.code == 0, f"this host cannot run guests:\n{answer.out}{answer.err}"
    yield
    if not before:
        daemons.stop(uri)


@pytest.fixture(scope="session")
def images(host: None) -> Path:
    """The folder of built images, in the state folder that this machine uses every day."""
    state = State(_images().parent)
    state.ok("image", "build", "--if-needed", IMAGE)
    return _images()


def _images() -> Path:
    from vmsandbox.store import state_root

    return state_root() / "images"


@pytest.fixture(scope="session")
def shared() -> Iterator[Path]:
    """Templates and facts about the host, for every state folder of root's."""
    folder = short_folder()
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def _state(
    images: Path,
    request: pytest.FixtureRequest,
    person: Person | None = None,
    shared: Path | None = None,
) -> Iterator[State]:
    with state_folder(images, person, shared) as state:
        _STATES.append(state.path)
        try:
            yield state
        finally:
            if request.node.stash.get(_FAILED, False) and (
                kept := keep_evidence(state, request.node.nodeid)
            ):
                print(f"evidence: {kept}")


@pytest.fixture
def state(images: Path, shared: Path, request: pytest.FixtureRequest) -> Iterator[State]:
    """A fresh state folder with the built image, and the command line on it."""
    with _state(images, request, shared=shared) as state:
        yield state


@pytest.fixture(scope="module")
def shared_state(images: Path, shared: Path, request: pytest.FixtureRequest) -> Iterator[State]:
    """As `state`, for all tests of a module."""
    with _state(images, request, shared=shared) as state:
        yield state


@pytest.fixture(scope="session")
def person() -> Iterator[Person]:
    """Somebody who is not root."""
    with ordinary_person() as person:
        yield person


@pytest.fixture
def persons_state(images: Path, person: Person, request: pytest.FixtureRequest) -> Iterator[State]:
    """A fresh state folder of somebody who is not root: qemu:///session."""
    with _state(images, request, person) as state:
        yield state
