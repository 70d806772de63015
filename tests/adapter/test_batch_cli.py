"""The verbs `batch` and `brief check` as far as no guest is needed: what they refuse, and that then
nothing was started.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.people import ROOT
from tests.sandboxes import State
from tests.warm import WarmState
from vmsandbox.batch import Planned
from vmsandbox.batch.record import create
from vmsandbox.store import Store


@pytest.fixture
def state(tmp_path: Path) -> State:
    return WarmState(tmp_path / "state")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "w").mkdir()
    return tmp_path


def nothing_started(state: State) -> bool:
    return state.ids() == [] and not (state.path / "batches").exists()


def test_every_problem_of_every_file_is_told_and_nothing_starts(state: State, folder: Path) -> None:
    (folder / "a.yaml").write_text("tasks: [{name: a, command: x, worktree: w, cpu: 1}]\n")
    (folder / "b.toml").write_text('[[tasks]]\nname = "b"\ncommand = "x"\nworktree = "no"\n')
    answer = state("batch", "--json", "a.yaml", "b.toml", "c.yaml", cwd=folder)
    assert (answer.code, answer.error["code"]) == (2, "tasks_invalid")
    for line in (
        "a.yaml:1: tasks.0.cpu: unknown key",
        "b.toml:4: tasks.0.worktree: there is no folder no",
        "c.yaml: cannot be read",
    ):
        assert line in answer.error["message"]
    assert nothing_started(state)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], "nothing_named"),
        (["--resume"], "nothing_to_resume"),
        (["--resume", "abc"], "batch_unknown"),
        (["--resume", "a", "b"], "too_many_batches"),
        (["--discard"], "nothing_to_resume"),
        (["--discard", "abc"], "batch_unknown"),
        (["--discard", "a", "b"], "too_many_batches"),
        (["--", "7"], "no_template"),
        (["--template", "none.yaml", "--", "7"], "tasks_invalid"),
    ],
)
def test_what_cannot_be_meant(state: State, folder: Path, arguments: list[str], code: str) -> None:
    answer = state("batch", *arguments, cwd=folder)
    assert (answer.code, f"[{code}]" in answer.err) == (2, True), answer
    assert "hint: " in answer.err
    assert nothing_started(state)


def test_an_unfinished_batch_is_discarded_and_its_sandboxes_stay(state: State) -> None:
    task = Planned(name="a", origin="a", command=("true",), worktree=Path("/w"))
    with create(Store(state.path), [task], None) as folder:
        refused = state("batch", "--json", "--discard", folder.id)
        assert (refused.code, refused.error["code"]) == (2, "batch_managed_elsewhere")
    gone = state.ok("batch", "--json", "--discard")
    assert gone.data == {"batch": folder.id, "left": ["a"], "sandboxes": []}
    assert "1 task(s) are given up: a" in gone.err
    assert not folder.path.exists()


def test_the_schema_is_json(state: State) -> None:
    assert json.loads(state.ok("batch", "--schema").out)["properties"].keys() >= {"tasks"}
    assert state.ok("batch", "--schema", "--json").data["title"] == "TaskFile"


def test_a_brief_is_judged(state: State, folder: Path) -> None:
    (folder / "b.yaml").write_text("goal: It works.\nwhy: Because.\n")
    answer = state.ok("brief", "check", "b.yaml", cwd=folder)
    assert answer.out == "goal: It works.\n"
    assert "nothing is said about 'tried'" in answer.err
    assert "'why'" not in answer.err
    (folder / "b.yaml").write_text("why: Because.\n")
    for words in (["brief", "check"], ["run", "--brief"]):
        tail = ["--", "true"] if words[0] == "run" else []
        refused = state(*words, "b.yaml", *tail, cwd=folder)
        assert "[brief_empty]" in refused.err
    assert state.ids() == []


def test_programs_find_it_at_the_top_and_only_when_they_ask(folder: Path) -> None:
    program = """
import sys, vmsandbox
assert not {"pydantic", "paramiko", "libvirt"} & set(sys.modules)
from vmsandbox import run_batch
from vmsandbox.errors import UsageProblem
try:
    run_batch(["none.yaml"])
except UsageProblem as problem:
    print(problem.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "VMSANDBOX_HOME": str(folder / "state")},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("tasks_invalid\n", "")
