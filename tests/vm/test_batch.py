"""Batches in real guests: each task ends as what it is, dependencies are kept, and a batch that is
killed is brought to its end with every task exactly once.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.repositories import Repository
from tests.sandboxes import Answer, State
from tests.vm.lives import PATIENCE_S, kinds_of, read_until, status_of, wait_for

MakeRepository = Callable[..., Repository]

EAT_MEMORY = "kept = []\nwhile True: kept.append(bytearray(b'x' * (1 << 20)))"
SAY = """\
cat "$VMSANDBOX_BRIEF" > brief
printf 'blocked: needs a \\033[31mkey\\nmore' > "$VMSANDBOX_STATUS"
printf '# Done\\a\\n' > "$VMSANDBOX_REPORT"
"""
UNTIL_TOLD = 'echo begun >> "$0"; sync; until [ -e /tmp/go ]; do sleep 0.2; done; echo done >> "$0"'


@pytest.fixture
def project(make_repository: MakeRepository) -> Path:
    return make_repository("project", {"kept": "1\n"}).path


def task_file(project: Path, *tasks: dict[str, Any]) -> Path:
    """YAML is a superset of JSON."""
    file = project.parent / "tasks.yaml"
    file.write_text(json.dumps({"defaults": {"worktree": str(project)}, "tasks": tasks}, indent=1))
    return file


def by_name(answer: Answer) -> dict[str, Any]:
    return {task["name"]: task for task in answer.data["tasks"]}


def test_every_task_ends_as_what_it_is(shared_state: State, project: Path) -> None:
    state = shared_state
    file = task_file(
        project,
        {"name": "says", "command": SAY, "brief": {"goal": "Say so."}},
        {"name": "fails", "command": "echo half > half; exit 3"},
        {"name": "eats", "command": ["python3", "-c", EAT_MEMORY]},
        {"name": "follows", "command": "echo f > f", "after": ["says"]},
        {"name": "never", "command": "true", "after": ["fails"]},
    )
    answer = state("batch", "--json", "--jobs", "2", file)
    assert answer.code == 1, answer
    found = by_name(answer)
    assert {name: (task["outcome"], task["exit_code"]) for name, task in found.items()} == {
        "says": ("completed", 0),
        "fails": ("failed", 3),
        "eats": ("guest_oom", 137),
        "follows": ("completed", 0),
        "never": ("cancelled", None),
    }
    assert "lack of memory" in found["eats"]["reason"]
    assert found["never"]["reason"] == "it comes after fails, which is failed"
    assert found["never"]["id"] is None
    assert all(Path(task["evidence"]).exists() for task in found.values())
    assert answer.data["unfinished"] == 0
    assert "created says" in answer.err
    assert "queued follows" in answer.err
    assert "failed eats (guest_oom; " in answer.err
    assert not list(project.glob("half")), "nothing is applied by itself"

    assert kinds_of(state, "fails") == {"half": "A"}
    said = status_of(state, "says")
    assert said["agent_status"] == "blocked: needs a \\x1b[31mkey"
    assert said["batch"] == {"batch": answer.data["batch"], "task": "says"}
    shown = state.ok("review", "--json", "says").data
    assert shown["report"] == "# Done\\x07\n"
    assert shown["brief"]["goal"] == "Say so."
    assert kinds_of(state, "says") == {"brief": "A"}, "what it was told lies outside the worktree"

    again = state("batch", "--json", file)
    skipped = by_name(again)
    assert (skipped["says"]["outcome"], skipped["fails"]["outcome"]) == ("skipped", "skipped")
    assert "vmsandbox review" in skipped["says"]["reason"]
    assert skipped["says"]["id"] == found["says"]["id"]
    assert skipped["follows"]["outcome"] == "skipped"


def begin(state: State, file: Path) -> "subprocess.Popen[str]":
    return state.start("batch", "--json", "--jobs", "2", file)


def started(state: State, count: int) -> Callable[[], bool]:
    """Whether so many tasks have started in their guests."""

    def look() -> bool:
        records = (state.path / "sandboxes").glob("*/record.json")
        return [json.loads(path.read_text())["task_started"] for path in records].count(
            True
        ) >= count

    return look


def test_a_killed_batch_is_resumed_with_every_task_exactly_once(
    state: State, project: Path
) -> None:
    file = task_file(
        project,
        {"name": "one", "command": ["sh", "-c", UNTIL_TOLD, "one"]},
        {"name": "two", "command": ["sh", "-c", UNTIL_TOLD, "two"]},
        {"name": "three", "command": "echo once >> three", "after": ["one"]},
    )
    batch = begin(state, file)
    wait_for("both tasks", started(state, 2), batch)
    batch.send_signal(signal.SIGKILL)
    assert batch.wait(PATIENCE_S) == -signal.SIGKILL
    batch.communicate()
    assert len(state.ids()) == 2

    (killed,) = (path for path in (state.path / "batches").iterdir() if path.is_dir())
    resumed = state.start("batch", "--json", "--resume", killed.name[:4])
    for name in ("one", "two"):
        state.ok("exec", name, "--", "touch", "/tmp/go")
    out, err = resumed.communicate(timeout=PATIENCE_S)
    answer = Answer(resumed.returncode, out, err)
    assert answer.code == 0, answer
    found = by_name(answer)
    assert {task["outcome"] for task in found.values()} == {"completed"}
    assert len(state.ids()) == 3
    for name, once in (("one", "begun\ndone\n"), ("two", "begun\ndone\n"), ("three", "once\n")):
        state.ok("apply", "--yes", name)
        assert (project / name).read_text() == once
    nothing = state("batch", "--resume")
    assert (nothing.code, "[nothing_to_resume]" in nothing.err) == (2, True)
    state.ok("delete", "--all", "--force")
    assert {i["kind"] for i in state.ok("cleanup", "--json").data["items"]} >= {"batch"}
    assert [path.name for path in (state.path / "batches").iterdir() if path.is_dir()] == []


def test_a_stopped_batch_keeps_what_was_done_and_begins_the_task_anew(
    state: State, project: Path
) -> None:
    """Ctrl-C as a terminal sends it: to the whole process group."""
    file = task_file(project, {"name": "one", "command": ["sh", "-c", UNTIL_TOLD, "one"]})
    batch = subprocess.Popen(
        state.argv("batch", "--json", file),
        env=state.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for("the task", started(state, 1), batch)
    os.killpg(batch.pid, signal.SIGINT)
    read_until(batch, "stderr", "beginning nothing more")  # two at once would be one
    os.killpg(batch.pid, signal.SIGINT)
    out, err = batch.communicate(timeout=PATIENCE_S)
    answer = Answer(batch.returncode, out, err)
    assert answer.code == 130, answer
    first = by_name(answer)["one"]
    assert (first["outcome"], answer.data["unfinished"]) == ("cancelled", 1)
    assert kinds_of(state, first["id"]) == {"one": "A"}, "what it had done was collected"

    resumed = state.start("batch", "--json", "--resume")
    wait_for("a second sandbox", lambda: len(state.ids()) == 2, resumed)
    (second,) = set(state.ids()) - {first["id"]}
    wait_for("it runs", lambda: status_of(state, second)["state"] == "running", resumed)
    state.ok("exec", second, "--", "touch", "/tmp/go")
    out, err = resumed.communicate(timeout=PATIENCE_S)
    found = by_name(Answer(resumed.returncode, out, err))["one"]
    assert (resumed.returncode, found["outcome"], found["id"]) == (0, "completed", second), err
