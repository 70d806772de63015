"""`run` from the call to the last freed byte: what it reports, what it leaves, how it is ended."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.repositories import Repository, fingerprint
from tests.sandboxes import State
from tests.vm.lives import (
    Trace,
    assert_refused,
    changes_of,
    kinds_of,
    read_until,
    status_of,
    wait_for,
)

MakeRepository = Callable[..., Repository]
TIMINGS = {"create", "boot", "sync", "run", "collect", "stop", "first_command"}


# --- one life, from run to delete -----------------------------------------------------------------


class Life(NamedTuple):
    """A task that has ended, and how its worktree was before."""

    state: State
    project: Repository
    before: str
    code: int
    data: Any

    @property
    def id(self) -> str:
        return str(self.data["id"])

    def unchanged(self) -> bool:
        return fingerprint(self.project.path, without=frozenset()) == self.before


@pytest.fixture(scope="module")
def life(shared_state: State, tmp_path_factory: pytest.TempPathFactory) -> Life:
    project = Repository.create(tmp_path_factory.mktemp("life") / "project", {"README": "hello\n"})
    project.write("dirty", "not committed\n")
    before = fingerprint(project.path, without=frozenset())
    command = ["sh", "-c", "echo hi > new.txt; exit 3"]
    answer = shared_state("run", "--json", "--", *command, cwd=project.path)
    return Life(shared_state, project, before, answer.code, answer.data)


def test_the_report_says_how_it_ended(life: Life) -> None:
    assert life.code == 3
    assert (life.data["outcome"], life.data["exit_code"]) == ("failed", 3)
    assert life.data["state"] == "stopped"
    assert life.data["result"]["digest"].startswith("sha256:")
    assert life.data["result"]["changes"] == 1
    assert life.data["timings"].keys() >= TIMINGS
    assert all(0 < seconds < 600 for seconds in life.data["timings"].values())
    found = status_of(life.state, life.id)
    assert (found["state"], found["outcome"], found["result"]) == ("stopped", "failed", "pending")
    assert found["problems"] == []


def test_the_host_has_not_changed_and_the_guest_is_gone(life: Life) -> None:
    assert life.unchanged()
    assert Trace.of(life.state, life.id).guest() == []


def test_a_review_shows_what_it_did(life: Life) -> None:
    change = changes_of(life.state, life.id)["new.txt"]
    assert (change["kind"], change["added"], change["removed"]) == ("A", 1, 0)
    shown = life.state.ok("review", life.id).out
    for part in ("new.txt", "failed", "3", life.data["image_digest"][:19], "vmsandbox approve"):
        assert part in shown
    assert "+hi" in life.state.ok("review", "--diff", life.id).out


def test_resuming_what_has_ended_reports_it_again(life: Life) -> None:
    again = life.state("resume", "--json", life.id)
    assert again.code == 3
    assert again.data == life.data
    assert Trace.of(life.state, life.id).guest() == []


def test_decide_apply_and_delete(life: Life) -> None:
    state, project = life.state, life.project
    assert_refused(state("apply", "--json", life.id), "not_approved", 5)
    assert life.unchanged()
    state.ok("approve", life.id)
    assert life.unchanged()
    state.ok("apply", life.id)
    assert (project.path / "new.txt").read_text() == "hi\n"
    after = fingerprint(project.path, without=frozenset())
    state.ok("apply", life.id)
    assert fingerprint(project.path, without=frozenset()) == after
    (project.path / "new.txt").unlink()
    assert life.unchanged()
    trace = Trace.of(state, life.id)
    assert trace.everything()
    freed = state.ok("delete", "--json", life.id).data
    assert [item["outcome"] for item in freed["items"]] == ["removed"]
    assert freed["freed_bytes"] > 100_000
    assert trace.everything() == []
    assert_refused(state("delete", "--json", life.id), "sandbox_unknown", 2)


# --- while it runs --------------------------------------------------------------------------------

# Ends every SSH connection to its guest, and says so on stdout: that line can only arrive because
# the host found the task again.
BUSY = """
echo "out 1 $GIVEN $INHERITED"
echo "err 1" >&2
[ "$(cat wanted.cfg)" = wanted ] && [ ! -e unwanted.cfg ] && git rev-list --count HEAD
session=$(pgrep -o -x sshd)
sudo pkill -x sshd
while [ -e "/proc/$session" ]; do sleep 0.1; done
echo "out 2"
while [ ! -e /tmp/go ]; do sleep 0.1; done
echo "out 3"
echo "err 2" >&2
"""
BUSY_OUT = "out 1 a b\n3\nout 2\nout 3\n"


def test_a_running_task(
    shared_state: State, make_repository: MakeRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output comes live and apart, also over a lost connection; nothing else may interfere."""
    state = shared_state
    project = make_repository("project", {".gitignore": "*.cfg\n"})
    for number in range(3):
        project.commit(f"commit {number}")
    project.write("wanted.cfg", "wanted\n")
    project.write("unwanted.cfg", "unwanted\n")
    monkeypatch.setenv("INHERITED", "b")
    options = ["--name", "busy", "--env", "GIVEN=a", "-e", "INHERITED", "--include", "wanted.*"]
    with state.start(
        "run", *options, "--history", "2", "--", "sh", "-c", BUSY, cwd=project.path
    ) as process:
        said = read_until(process, "stdout", "out 2")
        found = status_of(state, "busy")
        assert (found["state"], found["managed"], found["guest_alive"]) == ("running", True, True)
        assert found["problems"] == []
        follower = state.start("logs", "-f", "--stdout", "busy")
        _refused_while_it_runs(state, project, found["id"])
        state.ok("exec", "busy", "--", "touch", "/tmp/go")
        rest, messages = process.communicate()
    assert process.returncode == 0, messages
    assert said + rest == BUSY_OUT
    assert "err 1\n" in messages
    assert "err 2\n" in messages
    assert follower.communicate()[0] == BUSY_OUT
    assert state.ok("logs", "--stdout", "busy").out == BUSY_OUT
    assert state.ok("logs", "--stderr", "busy").out == "err 1\nerr 2\n"
    assert kinds_of(state, "busy") == {}
    assert cleaned(state)[found["id"]] == ("removed", "nothing changed")


def cleaned(state: State, *options: str) -> dict[str, tuple[str, str]]:
    """What `cleanup` did, and why, by what it did it to."""
    items = state.ok("cleanup", "--json", *options).data["items"]
    return {item["what"]: (item["outcome"], item["detail"]) for item in items}


def _refused_while_it_runs(state: State, project: Repository, id_: str) -> None:
    run = ("run", "--json", "--name", "busy", "--worktree", project.path, "--", "true")
    assert_refused(state(*run), "name_taken", 125)
    assert_refused(state("resume", "--json", "busy"), "managed_elsewhere", 125)
    assert_refused(state("delete", "--json", "busy"), "sandbox_live", 2)
    assert_refused(state("apply", "--json", "--yes", "busy"), "task_live", 5)
    assert_refused(state("drop", "--json", "busy"), "task_live", 5)
    assert id_ not in cleaned(state)


# --- two at once ----------------------------------------------------------------------------------

SERVER = """
import os, socket, time
server = socket.create_server(("", 3000))
open("mine.txt", "w").write(os.getcwd())
print("listening", flush=True)
while not os.path.exists("/tmp/go"):
    time.sleep(0.1)
"""


def listens(state: State, name: str) -> bool:
    return "listening" in state.ok("logs", name).out


def test_two_at_once_on_the_same_port(shared_state: State, make_repository: MakeRepository) -> None:
    state = shared_state
    main = make_repository("main")
    worktrees = {
        name: main.linked_worktree(main.path.parent / name, name).path for name in ("red", "blue")
    }
    for name, path in worktrees.items():
        start = ("run", "--detach", "--json", "--name", name, "--worktree", path)
        id_ = state.ok(*start, "--", "python3", "-c", SERVER).data["id"]
        found = status_of(state, name)
        assert (found["id"], found["managed"], found["exec_result"]) == (id_, True, None)
    wait_for("both listen", lambda: all(listens(state, name) for name in worktrees))
    assert {status_of(state, name)["state"] for name in worktrees} == {"running"}
    only = state.ok("status", "--json", "--project", worktrees["red"]).data["sandboxes"]
    assert [one["name"] for one in only] == ["red"]
    trace = Trace.of(state, status_of(state, "blue")["id"])

    state.ok("exec", "red", "--", "touch", "/tmp/go")
    assert state.ok("stop", "--json", "blue").data["stopped"][0]["was"] == "stopped"
    assert trace.guest() == []
    state.ok("logs", "-f", "red")
    outcomes = {name: status_of(state, name)["outcome"] for name in worktrees}
    assert outcomes == {"red": "completed", "blue": "cancelled"}
    for name, path in worktrees.items():
        assert kinds_of(state, name) == {"mine.txt": "A"}
        state.ok("apply", "--yes", name)
        assert (path / "mine.txt").read_text() == str(path)
    state.ok("delete", *worktrees)


# --- ends that are not the command's own ----------------------------------------------------------


def test_a_timeout_ends_daemons_too(shared_state: State, make_repository: MakeRepository) -> None:
    """And what it had done comes back. Also: `stop --now`."""
    state = shared_state
    project = make_repository()
    daemons = "setsid sleep 1111 & (setsid nohup sleep 1112 &) ; echo half > half.txt; sleep 1113"
    answer = state(
        "run", "--json", "--keep", "--name", "slow", "--timeout", "3s", "--", "sh", "-c", daemons,
        cwd=project.path,
    )  # fmt: skip
    assert answer.code == 124, answer.err
    assert (answer.data["outcome"], answer.data["exit_code"]) == ("timeout", None)
    assert "ended with all its processes" in answer.data["detail"]
    assert state("exec", "slow", "--", "pgrep", "sleep").code == 1
    assert kinds_of(state, "slow") == {"half.txt": "A"}
    trace = Trace.of(state, answer.data["id"])
    assert trace.guest()
    assert_refused(state("delete", "--json", "slow"), "sandbox_live", 2)
    assert state.ok("stop", "--now", "--json", "slow").data["stopped"][0]["was"] == "stopped"
    assert trace.guest() == []
    assert state.ok("stop", "--json", "slow").data["stopped"][0]["was"] == "already stopped"
    assert kinds_of(state, "slow") == {"half.txt": "A"}
    state.ok("drop", "slow")
    assert_refused(state("apply", "--json", "--yes", "slow"), "result_dropped", 5)
    assert not (project.path / "half.txt").exists()
    assert cleaned(state, "--dry-run")[answer.data["id"]] == ("would go", "result dropped")
    assert trace.everything() == [str(trace.folder)]
    assert cleaned(state)[answer.data["id"]] == ("removed", "result dropped")
    assert trace.everything() == []


ASKED = """
trap 'echo asked > asked.txt; exit 0' TERM
echo ready
while :; do sleep 0.1; done
"""


def test_interrupted_once_it_still_collects(shared_state: State, tmp_path: Path) -> None:
    """In a repository that has no commit yet."""
    state = shared_state
    project = Repository.create(tmp_path / "unborn")
    project.write("first", "file\n")
    before = fingerprint(project.path, without=frozenset())
    with state.start("run", "--name", "asked", "--", "sh", "-c", ASKED, cwd=project.path) as run:
        read_until(run, "stdout", "ready")
        run.send_signal(signal.SIGINT)
        _, messages = run.communicate()
    assert run.returncode == 130, messages
    found = status_of(state, "asked")
    assert (found["state"], found["outcome"], found["changes"]) == ("stopped", "cancelled", 1)
    assert found["problems"] == []
    assert fingerprint(project.path, without=frozenset()) == before
    assert Trace.of(state, found["id"]).guest() == []
    state.ok("apply", "--yes", "asked")
    assert (project.path / "asked.txt").read_text() == "asked\n"
    state.ok("delete", "asked")


STUBBORN = """
trap '' TERM
echo half > half.txt
echo ready
while :; do sleep 0.1; done
"""


def test_interrupted_twice_it_stops_at_once_and_loses_nothing(
    shared_state: State, make_repository: MakeRepository
) -> None:
    state = shared_state
    project = make_repository()
    before = fingerprint(project.path, without=frozenset())
    run = ("run", "--json", "--name", "twice", "--", "sh", "-c", STUBBORN)
    with state.start(*run, cwd=project.path) as process:
        read_until(process, "stderr", "ready")
        process.send_signal(signal.SIGINT)
        read_until(process, "stderr", "asking the task to end")
        process.send_signal(signal.SIGINT)
        out, messages = process.communicate()
    assert process.returncode == 130, messages
    report = json.loads(out)["data"]
    assert (report["outcome"], report["result"], report["state"]) == ("cancelled", None, "stopped")
    trace = Trace.of(state, report["id"])
    assert trace.guest() == []

    again = state("resume", "--json", "twice")  # boots from the disk, collects, stops
    assert again.code == 130, again.err
    assert (again.data["outcome"], again.data["result"]["changes"]) == ("cancelled", 1)
    assert kinds_of(state, "twice") == {"half.txt": "A"}
    assert trace.guest() == []
    assert fingerprint(project.path, without=frozenset()) == before
    state.ok("delete", "--force", "twice")
    assert trace.everything() == []
