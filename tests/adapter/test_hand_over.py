"""Who has a sandbox, from the moment it is made: locks that nobody takes for another's, and a
cleanup that races with runs that are just starting.
"""

import contextlib
import fcntl
import os
import subprocess
import threading
from pathlib import Path

import pytest

from tests.adapter.left import Leave
from tests.guestless import SCRIPTS, Guestless
from tests.repositories import Repository, git
from tests.waiting import wait_until
from vmsandbox import worktree
from vmsandbox.errors import UsageProblem
from vmsandbox.model import SandboxRecord, SandboxState
from vmsandbox.sandbox import Cleaned, Manager, Rooms, clean_up, delete_sandbox, observe
from vmsandbox.sandbox.listening import Quiet
from vmsandbox.store import locked


def test_what_is_just_being_made_is_not_abandoned(rooms: Rooms, leave: Leave) -> None:
    """From the first moment until its manager has it, a sandbox belongs to whoever made it."""
    template = leave(SandboxState.QUEUED).folder.read_record()

    def make(id_: str, name: str, endpoint: object) -> SandboxRecord:
        return template.model_copy(update={"id": id_, "name": name})

    with Rooms.open(rooms.store.path) as maker:
        folder = maker.store.create("fresh", make)
        assert folder.manager_alive()
        assert observe(folder, rooms.guest_alive).managed
        with pytest.raises(UsageProblem):
            delete_sandbox(rooms, folder, force=False)
        assert folder.id not in {item.what for item in clean_up(rooms, dry_run=False)}
        with Manager.of(maker, folder, Quiet()):
            assert folder.manager_alive()
        assert not folder.manager_alive()
        delete_sandbox(maker, maker.store.create("unwanted", make), force=False)
        abandoned = maker.store.create("abandoned", make)
    assert abandoned.id in {item.what for item in clean_up(rooms, dry_run=False)}


def test_cleanup_waits_for_what_is_being_made(rooms: Rooms, tmp_path: Path) -> None:
    """Under the store's lock a folder has no record yet, and a snapshot store no sandbox."""
    project = Repository.create(tmp_path / "project", {"a": "b"})
    worktree.snapshot(project.path, rooms.store.worktrees)
    half_made = rooms.store.folder("b0000001").path
    cleaned: list[list[Cleaned]] = []
    cleaner = threading.Thread(target=lambda: cleaned.append(clean_up(rooms, dry_run=False)))
    with locked(rooms.store.lock):
        half_made.mkdir()
        cleaner.start()
        cleaner.join(1)
        assert cleaner.is_alive()
        assert half_made.exists()
        assert list(rooms.store.worktrees.iterdir())
    cleaner.join(30)
    assert {item.kind for item in cleaned[0]} == {"sandbox", "snapshots"}


def test_cleanup_races_with_runs_that_are_starting(
    rooms: Rooms, leave: Leave, tmp_path: Path
) -> None:
    """Made, snapshot taken, used: all the while somebody cleans up as fast as it goes."""
    project = Repository.create(tmp_path / "project", {"a": "b"})
    project.write("dirty", "1\n")
    template = leave(SandboxState.QUEUED).folder.read_record()
    over = threading.Event()
    problems: list[BaseException] = []

    def clean() -> None:
        with Rooms.open(rooms.store.path) as others:
            while not over.is_set():
                try:
                    clean_up(others, dry_run=False)
                except BaseException as error:
                    problems.append(error)
                    return

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        for number in range(12):
            with Rooms.open(rooms.store.path) as maker:
                folder = maker.store.create(
                    None, lambda id_, name, _: template.model_copy(update={"id": id_, "name": name})
                )
                with Manager.of(maker, folder, Quiet()):
                    project.write("dirty", f"{number}\n")
                    snapshot = worktree.snapshot(project.path, rooms.store.worktrees)
                    git(snapshot.git_dir, "rev-list", "--objects", snapshot.commit)
                    assert folder.record.exists()
            with contextlib.suppress(UsageProblem):  # now it is anybody's
                delete_sandbox(rooms, folder, force=True)
    finally:
        over.set()
        cleaner.join(30)
    assert not problems


# --- locks ----------------------------------------------------------------------------------------


def test_a_folder_that_is_gone_is_not_made_again(rooms: Rooms, leave: Leave) -> None:
    left = leave(SandboxState.STOPPED)
    delete_sandbox(rooms, left.folder, force=False)
    for call in (
        lambda: rooms.store.update(left.folder, lambda record: record),
        lambda: contextlib.ExitStack().enter_context(locked(left.folder.result_lock)),
        lambda: contextlib.ExitStack().enter_context(Manager.of(rooms, left.folder, Quiet())),
        lambda: delete_sandbox(rooms, left.folder, force=True),
    ):
        with pytest.raises(UsageProblem) as gone:
            call()
        assert gone.value.code == "sandbox_unknown"
        assert not left.folder.path.exists()


def test_a_manager_is_not_kept_out_by_those_who_only_look(rooms: Rooms, leave: Leave) -> None:
    folder = leave(SandboxState.STOPPED).folder
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            folder.manager_alive()

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(300):
            with locked(folder.manager_lock, wait=False):
                assert folder.manager_alive()
            assert not folder.manager_alive()
    finally:
        over.set()
        for looker in lookers:
            looker.join()


def test_two_managers_are_one_too_many(rooms: Rooms, leave: Leave) -> None:
    folder = leave(SandboxState.STOPPED).folder
    with Manager.of(rooms, folder, Quiet()):
        folder.stop_request.touch()
        with pytest.raises(UsageProblem) as refused, Manager.of(rooms, folder, Quiet()):
            pass
        assert refused.value.code == "managed_elsewhere"
        assert refused.value.hint
        assert folder.stop_request.exists(), "it was not meant for the one that was refused"
    assert not folder.stop_request.exists()
    assert not folder.stop_now_request.exists()


# --- in the guest ---------------------------------------------------------------------------------


def test_a_guest_takes_one_worktree_at_a_time(tmp_path: Path) -> None:
    """What a manager that was killed had begun goes on in the guest; the next one has to wait."""
    project = Repository.create(tmp_path / "project", {"a": "b"})
    guest = Guestless(project.path, tmp_path / "guest")
    guest.state.mkdir(parents=True)
    sending = threading.Thread(target=guest.send)
    with (guest.state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sending.start()
        sending.join(1)
        assert sending.is_alive()
        assert not guest.inside.exists()
    sending.join(60)
    assert (guest.inside / "a").read_text() == "b"


def test_a_task_that_was_cut_off_before_it_began_has_not_begun(tmp_path: Path) -> None:
    """Its host went away at the very start, and with the connection what was started on it: the
    next host starts it."""
    tasks, cgroups = tmp_path / "tasks", tmp_path / "cgroups"
    supervisor = cgroups / "vmsandbox.supervisor"
    for folder in (tasks / "first", tmp_path / "captures/first", supervisor):
        folder.mkdir(parents=True)
    for place in ("first", "t1"):
        (cgroups / f"vmsandbox.task.{place}").mkdir()
    for name in ("out", "err"):
        os.mkfifo(tasks / f"first/{name}.fifo")
    os.mkfifo(supervisor / "cgroup.procs")  # holds up whoever wants to leave the connection
    environment = {
        "PATH": os.environ["PATH"],
        "VMSANDBOX_TASKS": str(tasks),
        "VMSANDBOX_CAPTURES": str(tmp_path / "captures"),
        "VMSANDBOX_CGROUPS": str(cgroups),
    }
    script = str(SCRIPTS / "task")
    start = (script, "start", "t1", "0", "200", "64", str(tmp_path), "--", "echo", "done")
    with subprocess.Popen(start, env=environment, stdin=subprocess.PIPE) as cut:
        wait_until((tmp_path / "captures/first/err").exists)
        cut.kill()
    status = subprocess.run([script, "status"], env=environment, capture_output=True)
    assert status.stdout == b"refused none\n"
    (supervisor / "cgroup.procs").unlink()
    again = subprocess.run(start, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    assert again.stdout.startswith(b"following t1 "), again
