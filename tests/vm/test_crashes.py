"""What is killed while it works: managers at every point of a life, guests, daemons, whole hosts;
and what happens when two want the same sandbox. After each, `status` tells what is true, `resume`
brings the task to its one end, and nothing is left.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.disks import SmallDisk, small_disk
from tests.people import ROOT, Person
from tests.repositories import Repository
from tests.sandboxes import Answer, State
from tests.vm.lives import PATIENCE_S, Trace, kinds_of, status_of, wait_for
from vmsandbox.hypervisor import processes
from vmsandbox.model import SandboxRecord
from vmsandbox.sandbox import Rooms, observe
from vmsandbox.store import SandboxFolder

MakeRepository = Callable[..., Repository]

UNTIL_TOLD = """
echo begun >> runs
sync
echo out
until [ -e /tmp/go ]; do sleep 0.2; done
echo done >> runs
echo late
"""
KILLED = "nothing manages it (killed?): vmsandbox resume"
GONE = "its guest is gone: vmsandbox resume"
SOON_S = 30.0
"""Far from the patience with which a guest that does not answer is waited for."""


def doomed(state: State, fate: str, point: str, *arguments: str | Path) -> "subprocess.Popen[str]":
    """Start a verb that meets its fate at a point of :mod:`tests.dying`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.dying", fate, point, *map(str, arguments)],
        cwd="/",
        env=state.environment() | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer_of(process: "subprocess.Popen[str]") -> Answer:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return Answer(process.returncode, out, err)


def killed_at(state: State, point: str, *arguments: str | Path) -> None:
    answer = answer_of(doomed(state, "killed", point, *arguments))
    assert answer.code == -signal.SIGKILL, f"{point}: {answer}"


def frozen_at(state: State, point: str, *arguments: str | Path) -> "subprocess.Popen[str]":
    process = doomed(state, "frozen", point, *arguments)
    wait_for(point, lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, process)
    return process


def begin(state: State, project: Path, task: str, *options: str) -> "subprocess.Popen[str]":
    return state.start("run", *options, "--worktree", project, "--", "sh", "-c", task)


def folder_of(state: State) -> SandboxFolder:
    (id_,) = state.ids()
    return SandboxFolder(state.path / "sandboxes" / id_)


def record_of(state: State) -> SandboxRecord:
    return folder_of(state).read_record()


def wait_said(state: State, text: str, process: "subprocess.Popen[str]") -> None:
    def said() -> bool:
        files = (SandboxFolder(path).stdout for path in (state.path / "sandboxes").glob("*"))
        return any(file.exists() and text in file.read_text() for file in files)

    wait_for(f"its output {text!r}", said, process)


def kill_guest(state: State) -> None:
    qemu = processes.find(record_of(state).domain_uuid)
    assert qemu
    os.kill(qemu.pid, signal.SIGKILL)


def cleaned(state: State) -> set[tuple[str, str]]:
    items = state.ok("cleanup", "--json").data["items"]
    return {(item["kind"], item["outcome"]) for item in items}


def nothing_is_left(state: State, *traces: Trace) -> None:
    """No folder, domain, process or port; cleanup finds at most snapshots, and then nothing."""
    assert state.ids() == []
    assert [trace.everything() for trace in traces] == [[] for _ in traces]
    assert cleaned(state) <= {("snapshots", "removed")}
    assert list((state.path / "worktrees").iterdir()) == []
    assert list((state.path / "sandboxes").iterdir()) == []


@pytest.fixture
def project(make_repository: MakeRepository) -> Path:
    return make_repository("project", {"kept": "1\n"}).path


@pytest.fixture(scope="module")
def clones(shared_state: State, tmp_path_factory: pytest.TempPathFactory) -> bool:
    """Whether guests are clones here. Whoever comes first makes the template: not while something
    is about to be killed."""
    project = Repository.create(tmp_path_factory.mktemp("first") / "p", {"a": "b"}).path
    shared_state.ok("run", "--worktree", project, "--", "true")
    return record_of(shared_state).template is not None


# --- the manager ----------------------------------------------------------------------------------

# Where it is killed, what the state then is, what helps, and how many changes are up for review.
LIFE = (
    ("made", "queued", "it was never started: vmsandbox resume", None),
    ("keys", "failed", GONE, None),
    ("disk", "failed", GONE, None),
    ("seed", "starting", KILLED, None),
    ("booting", "starting", KILLED, None),
    ("sending", "ready", KILLED, None),
    ("sent", "ready", KILLED, None),
    ("begun", "running", KILLED, None),
)
END = (
    ("ended", "running", KILLED, None),
    ("collecting", "collecting", KILLED, None),
    ("installed", "collecting", KILLED, None),
    ("presented", "collecting", KILLED, 1),
    ("collected", "collecting", KILLED, 1),
    ("stopped", "stopped", "", 1),
)


def expect(state: State, shown: str, problem: str, changes: int | None) -> None:
    """As the verb `status` would say it."""
    with Rooms.open(state.path) as rooms:
        status = observe(folder_of(state), rooms.guest_alive)
    assert status.state == shown
    assert [problem in text for text in status.problems] == ([True] if problem else [])
    assert not status.managed
    assert status.changes == changes
    assert status.result == ("pending" if changes else "none")


def test_a_manager_is_killed_at_every_point_of_one_life(
    state: State, project: Path, clones: bool
) -> None:
    call: tuple[str | Path, ...] = ("run", "--worktree", project, "--", "sh", "-c", UNTIL_TOLD)
    for point, shown, problem, changes in LIFE:
        if point == "seed" and not clones:  # only clones are sent their seed
            continue
        killed_at(state, point, *call)
        expect(state, shown, problem, changes)
        call = ("resume", "last")
    trace = Trace.of(state, folder_of(state).id)
    manager = state.start("resume", "last")
    wait_said(state, "out\n", manager)
    manager.kill()
    assert answer_of(manager).code == -signal.SIGKILL
    assert status_of(state, "last")["problems"] == [f"{KILLED} {trace.folder.name}"]
    state.ok("exec", "last", "--", "touch", "/tmp/go")  # the guest goes on, managed or not

    for point, shown, problem, changes in END:
        killed_at(state, point, "resume", "last")
        expect(state, shown, problem, changes)
    assert trace.guest() == []
    done = state.ok("resume", "--json", "last").data
    assert (done["outcome"], done["exit_code"], done["state"]) == ("completed", 0, "stopped")
    assert folder_of(state).stdout.read_text() == "out\nlate\n"
    assert kinds_of(state, "last") == {"runs": "A"}
    state.ok("apply", "--yes", "last")
    assert (project / "runs").read_text() == "begun\ndone\n", "once, and to its end"


@pytest.mark.parametrize(
    ("life", "delete"),
    [
        ("half made", None),
        ("made", "deleting"),
        ("disk", "leaving"),
        ("seed", "emptying"),
        ("booting", None),
    ],
)
def test_delete_frees_what_a_killed_manager_left(
    state: State, project: Path, clones: bool, life: str, delete: str | None
) -> None:
    """Also if it is killed itself; `cleanup` frees the rest."""
    if life == "seed" and not clones:
        life = "booting"
    killed_at(state, life, "run", "--worktree", project, "--", "true")
    traces = [] if life == "half made" else [Trace.of(state, folder_of(state).id)]
    if delete:
        killed_at(state, delete, "delete", "--all", "--force")
    shown = state.ok("status", "--json").data["sandboxes"]
    assert len(shown) == (delete != "emptying"), "then it is no sandbox any more"
    assert all(left["problems"] for left in shown)
    if delete == "deleting":  # it is one still
        state.ok("delete", "last")
    elif life == "booting":
        state.ok("delete", "--force", "last")
    else:
        assert all("vmsandbox cleanup" in left["problems"][0] for left in shown)
        assert cleaned(state) >= {("sandbox", "removed")}
    nothing_is_left(state, *traces)


# --- the guest, and the host ----------------------------------------------------------------------


@pytest.mark.usefixtures("clones")
@pytest.mark.parametrize("victim", ["guest", "host"])
def test_what_was_on_the_disk_is_collected_after_a_kill(
    state: State, project: Path, victim: str
) -> None:
    """QEMU alone, or with its manager as when the power fails."""
    run = begin(state, project, UNTIL_TOLD, "--json")
    wait_said(state, "out\n", run)
    if victim == "host":
        run.kill()
    kill_guest(state)
    killed = time.monotonic()
    answer = answer_of(run)
    assert time.monotonic() - killed < SOON_S
    status = status_of(state, "last")
    assert status["state"] == "failed"
    if victim == "guest":
        assert (answer.code, answer.error["code"]) == (125, "guest_gone")
        assert "vmsandbox resume" in answer.error["hint"]
        assert (status["outcome"], status["failure"]["code"]) == ("connection_lost", "guest_gone")
    else:
        assert answer.code == -signal.SIGKILL
        assert GONE in status["problems"][0]
    resumed = state("resume", "--json", "last")
    assert resumed.code == 125, "the task has no exit code of its own"
    assert (resumed.data["outcome"], resumed.data["state"]) == ("connection_lost", "stopped")
    assert resumed.data["result"]["changes"] == 1
    status = status_of(state, "last")
    assert (status["state"], status["result"], status["failure"]) == ("stopped", "pending", None)
    state.ok("apply", "--yes", "last")
    assert (project / "runs").read_text() == "begun\n", "it was not begun a second time"
    trace = Trace.of(state, folder_of(state).id)
    state.ok("delete", "last")
    nothing_is_left(state, trace)


@pytest.fixture
def full(state: State) -> Iterator[SmallDisk]:
    """The state folder's sandboxes on a file system that can be filled."""
    (state.path / "sandboxes").mkdir(mode=0o711, exist_ok=True)
    with small_disk(state.path / "sandboxes", "96m") as disk:
        yield disk
        state.ok("delete", "--all", "--force")


@pytest.mark.usefixtures("clones")
def test_the_disk_of_the_host_is_full(state: State, full: SmallDisk, project: Path) -> None:
    """A guest that cannot write stands still, and says nothing for ever."""
    task = "echo work > work; sync; echo ready; until [ -e /tmp/go ]; do sleep 0.2; done; "
    run = begin(state, project, task + "head -c 64M /dev/urandom > big; sync; sleep 999", "--json")
    wait_said(state, "ready\n", run)
    id_ = next(path.name for path in full.path.iterdir() if path.is_dir())
    full.fill(leave_bytes=1 << 20)
    state("exec", id_, "--", "touch", "/tmp/go")
    answer = answer_of(run)
    assert (answer.code, answer.error["code"]) == (125, "host_disk_full"), answer
    assert "vmsandbox cleanup" in answer.error["hint"]
    full.free()
    trace = Trace.of(state, id_)
    assert trace.guest() == []
    assert state("resume", "--json", id_).data["outcome"] in ("host_full", "connection_lost")
    assert "work" in kinds_of(state, id_)
    state.ok("delete", id_)
    assert trace.everything() == []


# --- libvirt --------------------------------------------------------------------------------------


@pytest.fixture
def persons_project(person: Person) -> Path:
    script = "mkdir -p crash && cd crash && git init -q -b main && echo 1 > kept && git add kept"
    script += " && git -c user.name=Ann -c user.email=ann@example.org commit -q -m first"
    done = person.run(["sh", "-c", script])
    assert done.returncode == 0, done.stderr
    return person.home / "crash"


def daemons_of(person: Person, *names: str) -> list[psutil.Process]:
    theirs = (p for p in psutil.process_iter(["uids", "name"]) if p.info["uids"])
    return [p for p in theirs if p.info["uids"].real == person.uid and p.info["name"] in names]


def test_libvirt_is_killed_and_loses_its_memory(
    persons_state: State, person: Person, persons_project: Path
) -> None:
    """The run goes on without its daemon; a guest that libvirt forgot is still seen and freed."""
    state = persons_state
    run = begin(state, persons_project, UNTIL_TOLD, "--json", "--keep", "--cold")
    wait_said(state, "out\n", run)
    for daemon in daemons_of(person, "libvirtd", "virtqemud"):
        daemon.kill()
    state.ok("exec", "last", "--", "touch", "/tmp/go")
    answer = answer_of(run)
    assert answer.code == 0, answer
    assert (answer.data["state"], answer.data["result"]["changes"]) == ("ready", 1)

    id_ = answer.data["id"]
    uuid = record_of(state).domain_uuid
    watched = daemons_of(person, "tini", "sh", "libvirtd", "virtqemud")
    for daemon in watched:
        daemon.kill()
    psutil.wait_procs(watched, timeout=30)
    shutil.rmtree(person.home / "run/libvirt/qemu")
    status = status_of(state, id_)
    assert (status["state"], status["guest_alive"]) == ("ready", True)
    assert (status["result"], status["changes"]) == ("pending", 1)
    assert state("delete", "--json", id_).error["code"] == "sandbox_live"
    state.ok("delete", "--force", id_)
    assert processes.find(uuid) is None
    nothing_is_left(state)


# --- two at once ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("clones")
def test_a_sandbox_that_is_managed_is_left_to_its_manager(state: State, project: Path) -> None:
    """While it collects: nobody else may have it, and who asks for its end gets the result."""
    run = frozen_at(
        state, "collecting", "run", "--json", "--worktree", project, "--", "touch", "new"
    )
    try:
        others = (("resume",), ("delete",), ("apply", "--yes"))
        errors = [state(*verb, "--json", "last").error for verb in others]
        assert [e["code"] for e in errors] == ["managed_elsewhere", "sandbox_live", "task_live"]
        assert all(error["hint"] for error in errors)
        assert cleaned(state) == set()
        assert status_of(state, "last")["managed"]
        stop = state.start("stop", "last")
        wait_for("the request", folder_of(state).stop_request.exists, stop)
    finally:
        os.kill(run.pid, signal.SIGCONT)
    answer = answer_of(run)
    assert (answer.code, answer.data["outcome"]) == (0, "completed"), answer
    assert answer_of(stop).code == 0
    assert kinds_of(state, "last") == {"new": "A"}


@pytest.mark.usefixtures("clones")
@pytest.mark.parametrize("phase", ["create", "boot", "sync", "run", "collect"])
def test_delete_by_force_in_every_phase(state: State, project: Path, phase: str) -> None:
    points = {"create": "disk", "boot": "booting", "sync": "sending", "collect": "collecting"}
    if phase == "run":
        run = begin(state, project, UNTIL_TOLD)
        wait_said(state, "out\n", run)
    else:
        run = frozen_at(state, points[phase], "run", "--worktree", project, "--", "true")
    trace = Trace.of(state, folder_of(state).id)
    delete = state.start("delete", "--force", "last")
    wait_for("the request", SandboxFolder(trace.folder).stop_now_request.exists, delete)
    os.kill(run.pid, signal.SIGCONT)
    asked = time.monotonic()
    assert answer_of(delete).code == 0
    assert time.monotonic() - asked < SOON_S
    answer = answer_of(run)
    assert answer.code in ((0, 130) if phase == "collect" else (130,)), answer
    nothing_is_left(state, trace)
