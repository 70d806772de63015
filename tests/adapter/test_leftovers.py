"""What a killed process can leave of a sandbox: what `status` says of it, that `delete` frees all
of it, and that `cleanup` finds what nobody owns and touches nothing else.

The guests are real domains of a few hundred bytes; the records say what a life would have written.
"""

import contextlib
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4, uuid5

import pytest

from tests.adapter.left import Leave, described, put_up, seen
from tests.repositories import Repository
from tests.tiny_guests import TinyGuest
from tests.waiting import wait_until
from vmsandbox import worktree
from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.hypervisor import processes
from vmsandbox.model import (
    LibvirtFacts,
    ResultState,
    SandboxState,
)
from vmsandbox.sandbox import (
    Manager,
    Rooms,
    clean_up,
    delete_sandbox,
    observe,
    stop_sandbox,
    templates,
)
from vmsandbox.sandbox.listening import Quiet
from vmsandbox.store import locked

LIVE = (
    SandboxState.STARTING,
    SandboxState.READY,
    SandboxState.RUNNING,
    SandboxState.COLLECTING,
)
NOWHERE = "qemu+unix:///session?socket=/nonexistent/socket"


# --- status ---------------------------------------------------------------------------------------

GONE = "its guest is gone: vmsandbox resume"
KILLED = "nothing manages it (killed?): vmsandbox resume"


@pytest.mark.parametrize(
    ("state", "fields", "guest", "shown", "problem"),
    [
        (SandboxState.QUEUED, {}, False, "queued", "it was never started: vmsandbox resume"),
        *((state, {}, False, "failed", GONE) for state in LIVE),
        *((state, {}, True, state.value, KILLED) for state in LIVE),
        (SandboxState.COLLECTING, {"collected": True}, False, "stopped", ""),
        (SandboxState.COLLECTING, {"collected": True}, True, "collecting", KILLED),
        (SandboxState.READY, {"collected": True, "keep": True}, True, "ready", ""),
        (SandboxState.READY, {"collected": True, "keep": True}, False, "failed", GONE),
        (SandboxState.STOPPED, {"collected": True}, False, "stopped", ""),
        (SandboxState.STOPPED, {}, True, "stopped", "its guest still runs: vmsandbox stop"),
        (SandboxState.FAILED, {}, True, "failed", "its guest still runs: vmsandbox stop"),
        (SandboxState.FAILED, {}, False, "failed", ""),
        *((state, {}, None, state.value, "vmsandbox doctor --fix") for state in SandboxState),
    ],
)
def test_status_says_what_is_true_and_what_helps(
    leave: Leave,
    state: SandboxState,
    fields: dict[str, bool],
    guest: bool | None,
    shown: str,
    problem: str,
) -> None:
    folder = leave(state, **fields).folder
    status = observe(folder, lambda uuid: guest)
    assert status.state == shown
    assert [problem in text for text in status.problems] == ([True] if problem else [])
    with locked(folder.manager_lock):  # who manages it will see for himself
        managed = observe(folder, lambda uuid: guest)
        assert managed.managed
        assert managed.state is state
        assert bool(managed.problems) == (guest is None)


def test_a_record_that_cannot_be_read_does_not_hide_the_others(leave: Leave) -> None:
    broken, whole = leave(SandboxState.RUNNING), leave(SandboxState.QUEUED)
    broken.folder.record.write_text("{")
    status = observe(broken.folder, lambda uuid: False)
    assert status.state is SandboxState.FAILED
    assert status.problems
    assert observe(whole.folder, lambda uuid: False).state is SandboxState.QUEUED
    put_up(whole.folder, ResultState.PENDING)
    whole.folder.result_record.write_text("{")
    assert observe(whole.folder, lambda uuid: False).problems


# --- delete ---------------------------------------------------------------------------------------


def test_delete_frees_everything(rooms: Rooms, leave: Leave) -> None:
    left = leave(SandboxState.RUNNING, runs=True)
    assert left.log.exists()
    with pytest.raises(UsageProblem) as refused:
        delete_sandbox(rooms, left.folder, force=False)
    assert refused.value.code == "sandbox_live"
    assert refused.value.hint
    assert rooms.guest_alive(left.guest.uuid)
    delete_sandbox(rooms, left.folder, force=True)
    assert not left.folder.path.exists()
    assert not left.log.exists()
    assert rooms.guest_alive(left.guest.uuid) is False
    assert clean_up(rooms, dry_run=False) == []


@pytest.mark.parametrize("damage", ["gone", "broken"])
def test_delete_finds_the_guest_without_a_record(rooms: Rooms, leave: Leave, damage: str) -> None:
    left = leave(SandboxState.RUNNING, runs=True)
    left.folder.record.write_text("{")
    if damage == "gone":
        left.folder.record.unlink()
    with pytest.raises(UsageProblem) as refused:
        delete_sandbox(rooms, left.folder, force=False)
    assert refused.value.code == "sandbox_live"
    delete_sandbox(rooms, left.folder, force=True)
    assert rooms.guest_alive(left.guest.uuid) is False
    assert not left.folder.path.exists()
    assert clean_up(rooms, dry_run=False) == []


def test_delete_of_what_is_managed_waits_for_its_manager(rooms: Rooms, leave: Leave) -> None:
    """With --force the manager is asked to end at once; without, it is left alone."""
    left = leave(SandboxState.RUNNING)
    with pytest.raises(UsageProblem), locked(left.folder.manager_lock):
        delete_sandbox(rooms, left.folder, force=False)
    ends = threading.Event()

    def manage() -> None:
        with Manager.of(rooms, left.folder, Quiet()) as manager:
            began.set()
            ends.wait(20)
            wait_until(manager._at_once.is_set)

    began = threading.Event()
    thread = threading.Thread(target=manage)
    thread.start()
    began.wait(20)
    deleting = threading.Thread(target=lambda: delete_sandbox(rooms, left.folder, force=True))
    deleting.start()
    wait_until(left.folder.stop_now_request.exists)
    assert left.folder.record.exists()
    ends.set()
    deleting.join(20)
    thread.join(20)
    assert not left.folder.path.exists()


def test_delete_works_while_libvirt_is_down(rooms: Rooms, leave: Leave) -> None:
    gone, runs = leave(SandboxState.RUNNING), leave(SandboxState.RUNNING, runs=True)
    with Rooms.open(rooms.store.path) as blind:
        blind.uri = NOWHERE
        assert blind.guest_alive(gone.guest.uuid) is None
        assert blind.guest_alive(runs.guest.uuid) is True, "its process is seen"
        delete_sandbox(blind, gone.folder, force=False)
        with pytest.raises(UsageProblem):
            delete_sandbox(blind, runs.folder, force=False)
        delete_sandbox(blind, runs.folder, force=True)
    assert not rooms.store.folders()
    assert processes.find(runs.guest.uuid) is None
    wait_until(lambda: rooms.guest_alive(runs.guest.uuid) is False)


def test_in_the_dark_nothing_is_started_or_called_dead(rooms: Rooms, leave: Leave) -> None:
    left = leave(SandboxState.RUNNING)
    before = left.folder.record.read_bytes()
    with Rooms.open(rooms.store.path) as blind:
        blind.uri = NOWHERE
        with pytest.raises(HostProblem) as unknown:
            stop_sandbox(blind, left.folder, at_once=False)
        assert unknown.value.code == "libvirt_unreachable"
        with (
            pytest.raises(HostProblem) as unseen,
            Manager.of(blind, left.folder, Quiet()) as manager,
        ):
            manager.carry_out()
        assert unseen.value.code == "libvirt_unreachable"
    assert left.folder.record.read_bytes() == before


def test_stop_writes_down_that_a_guest_is_gone(rooms: Rooms, leave: Leave) -> None:
    lost, done = leave(SandboxState.RUNNING), leave(SandboxState.COLLECTING, collected=True)
    for left, state in ((lost, SandboxState.FAILED), (done, SandboxState.STOPPED)):
        assert stop_sandbox(rooms, left.folder, at_once=False) == "already stopped"
        assert left.folder.read_record().state is state


# --- cleanup --------------------------------------------------------------------------------------


def test_cleanup_finds_what_nobody_owns(rooms: Rooms, leave: Leave, tmp_path: Path) -> None:
    orphan = leave(SandboxState.RUNNING, runs=True)
    shutil.rmtree(orphan.folder.path)
    half_made = rooms.store.folder("b0000001")
    half_made.path.mkdir()
    half_deleted = leave(SandboxState.RUNNING, runs=True)
    half_deleted.folder.record.unlink()
    half_gone = rooms.store.sandboxes / ".gone-b0000002"
    half_gone.mkdir()
    (half_gone / "overlay.qcow2").write_bytes(bytes(4096))
    forgotten = leave(SandboxState.STOPPED, runs=True)
    rooms.hypervisor.destroy(forgotten.guest.uuid)
    shutil.rmtree(forgotten.folder.path)
    assert forgotten.log.exists()
    never = leave(SandboxState.QUEUED)
    applied = leave(SandboxState.STOPPED, collected=True)
    put_up(applied.folder, ResultState.APPLIED)
    empty = leave(SandboxState.STOPPED, collected=True)
    put_up(empty.folder, ResultState.NONE, changes=0)
    project = Repository.create(tmp_path / "other", {"a": "b"})
    worktree.snapshot(project.path, rooms.store.worktrees)
    (store,) = rooms.store.worktrees.iterdir()
    aside = rooms.store.worktrees / ".unused-0123"
    aside.mkdir()

    expected = {
        ("guest", orphan.guest.spec.name),
        ("guest", half_deleted.guest.spec.name),
        ("log", forgotten.guest.spec.name),
        *(("sandbox", left.folder.id) for left in (half_deleted, never, applied, empty)),
        ("sandbox", half_made.id),
        ("sandbox", half_gone.name),
        ("snapshots", store.name),
        ("snapshots", "0123"),
    }
    planned = clean_up(rooms, dry_run=True)
    assert {(kind, what.removeprefix(".unused-")) for kind, what, _ in seen(planned)} >= expected
    assert {outcome for _, _, outcome in seen(planned)} == {"would go"}
    assert rooms.guest_alive(orphan.guest.uuid)
    cleaned = clean_up(rooms, dry_run=False)
    assert seen(cleaned) == {(kind, what, "removed") for kind, what in expected}
    assert not list(rooms.store.sandboxes.iterdir())
    assert not list(rooms.store.worktrees.iterdir())
    assert rooms.guests() == []
    assert clean_up(rooms, dry_run=False) == []


def test_cleanup_touches_nothing_that_anybody_may_miss(
    rooms: Rooms, leave: Leave, tmp_path: Path
) -> None:
    Repository.create(tmp_path / "project", {"a": "b"})
    worktree.snapshot(tmp_path / "project", rooms.store.worktrees)  # all of them refer to it
    living = [leave(state, runs=True) for state in (SandboxState.QUEUED, SandboxState.STOPPED)]
    kept = [*living, *(leave(state) for state in (*LIVE, SandboxState.FAILED))]
    for state in (ResultState.PENDING, ResultState.APPROVED, ResultState.CONFLICTED):
        kept.append(leave(SandboxState.STOPPED, collected=True))
        put_up(kept[-1].folder, state)
    kept.append(leave(SandboxState.RUNNING))
    kept[-1].folder.record.write_text("{")  # broken, but it is there
    managed = leave(SandboxState.STOPPED)
    put_up(managed.folder, ResultState.DROPPED)
    with locked(managed.folder.manager_lock):
        assert clean_up(rooms, dry_run=False) == []
    assert all(left.folder.record.exists() for left in kept)
    assert all(rooms.guest_alive(left.guest.uuid) for left in living)
    assert len(list(rooms.store.worktrees.iterdir())) == 1
    with Rooms.open(rooms.store.path) as blind:
        blind.uri = NOWHERE
        with contextlib.suppress(HostProblem):
            clean_up(blind, dry_run=False)
    assert all(left.folder.record.exists() for left in kept)


def test_a_guest_for_a_look_goes_with_whoever_looked(rooms: Rooms, leave: Leave) -> None:
    """It holds nothing of its own: also while it runs, once nobody manages it."""
    left = leave(SandboxState.READY, runs=True, scratch_of="ab12cd34")
    with locked(left.folder.manager_lock):
        assert clean_up(rooms, dry_run=False) == []
    assert seen(clean_up(rooms, dry_run=True)) == {("sandbox", left.folder.id, "would go")}
    assert seen(clean_up(rooms, dry_run=False)) == {("sandbox", left.folder.id, "removed")}
    assert rooms.guest_alive(left.guest.uuid) is False
    assert clean_up(rooms, dry_run=False) == []


def test_a_template_is_its_makers_and_removed_when_he_is_gone(
    rooms: Rooms, facts: LibvirtFacts
) -> None:
    """A guest that is being frozen has no record; a lock tells whether anybody still wants it."""
    guest = described(rooms, facts)
    name, folder = guest.spec.id, rooms.store.folder(guest.spec.id).path
    making = rooms.store.templates / f".making-{name}"
    making.mkdir()
    (making / "ram").write_bytes(bytes(8192))
    uuid = str(uuid5(templates._NAMESPACE, f"{rooms.store.path}\0{name}"))
    marks = {"id": f"template-{name}", "uuid": uuid}
    marks["name"] = f"{templates.DOMAIN_PREFIX}{uuid[:8]}"
    rooms.hypervisor.start(TinyGuest(guest.spec.model_copy(update=marks)).xml)
    shutil.rmtree(folder)
    with locked(rooms.store.templates / f"{name}.lock"):
        assert clean_up(rooms, dry_run=False) == []
        assert rooms.guest_alive(uuid)
    assert seen(clean_up(rooms, dry_run=True)) == {("template", making.name, "would go")}
    assert seen(clean_up(rooms, dry_run=False)) == {("template", making.name, "removed")}
    assert rooms.guest_alive(uuid) is False
    assert not list(rooms.store.templates.iterdir())
    assert clean_up(rooms, dry_run=False) == []


@contextlib.contextmanager
def unknown_to_libvirt(facts: LibvirtFacts, disk: Path) -> Iterator[Callable[[], bool]]:
    """A QEMU that stands still, as libvirt would have started it; tells whether it lives."""
    uuid = str(uuid4())
    block = json.dumps({"driver": "file", "filename": str(disk), "node-name": "disk"})
    words = ("-S", "-nodefaults", "-machine", "none", "-display", "none", "-monitor", "none")
    name = f"guest=vmsandbox-{uuid[:8]},debug-threads=on"
    argv = [str(facts.qemu_binary), *words, "-uuid", uuid, "-name", name, "-blockdev", block]
    with subprocess.Popen(argv) as process:
        try:
            wait_until(lambda: uuid in {found.uuid for found in processes.running()})
            yield lambda: process.poll() is None
        finally:
            process.kill()


def test_cleanup_ends_a_guest_that_libvirt_forgot_and_no_other(
    rooms: Rooms, facts: LibvirtFacts
) -> None:
    """Others may use our images: their guests have a disk of ours, but not a sandbox's."""
    image, overlay = rooms.store.images / "rootfs", rooms.store.sandboxes / "overlay"
    for disk in (image, overlay):
        disk.write_bytes(bytes(4096))
    with (
        unknown_to_libvirt(facts, image) as others_live,
        unknown_to_libvirt(facts, overlay) as ours_lives,
    ):
        ((kind, _, outcome),) = seen(clean_up(rooms, dry_run=False))
        assert (kind, outcome) == ("guest", "removed")
        wait_until(lambda: not ours_lives())
        assert others_live()
