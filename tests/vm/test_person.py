"""Somebody who is not root, through qemu:///session: the whole life, a batch, and doctor."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.people import Person
from tests.repositories import Repository, fingerprint
from tests.sandboxes import State
from tests.vm.lives import kinds_of, status_of


@pytest.fixture
def project(person: Person) -> Iterator[Repository]:
    """A repository of theirs, in their home, for a while."""
    path = person.home / "project"
    script = (
        "git init -q -b main project && cd project && echo hello > README && git add README"
        " && git -c user.name=Ann -c user.email=ann@example.org commit -q -m first"
    )
    done = person.run(["sh", "-c", script])
    assert done.returncode == 0, done.stderr
    yield Repository(path)
    shutil.rmtree(path)


def test_doctor(persons_state: State) -> None:
    answer = persons_state("doctor", "--fix", "--json")
    assert answer.code == 0, answer.out
    assert answer.data["ok"]
    assert "qemu:///session" in answer.out


def test_a_batch(persons_state: State, person: Person, project: Repository) -> None:
    """Through a libvirt and a budget of their own, as many at once as fit."""
    state = persons_state
    tasks = [{"name": name, "command": f"id -un > {name}"} for name in ("one", "two", "three")]
    file = person.home / "tasks.yaml"
    file.write_text(json.dumps({"defaults": {"worktree": str(project.path)}, "tasks": tasks}))
    answer = state("batch", "--json", file)
    assert answer.code == 0, answer
    assert [task["outcome"] for task in answer.data["tasks"]] == ["completed"] * 3
    matrix = state.ok("conflicts", "--json").data
    assert [one["applies"] for one in matrix["results"]] == [True] * 3
    for task in answer.data["tasks"]:
        state.ok("apply", "--yes", task["id"])
        written: Path = project.path / task["name"]
        assert (written.read_text(), written.stat().st_uid) == ("agent\n", person.uid)
    state.ok("cleanup")
    assert state.ok("cleanup", "--json").data["items"] == []
    assert state.ids() == []


def test_a_whole_life(persons_state: State, person: Person, project: Repository) -> None:
    state = persons_state
    before = fingerprint(project.path, without=frozenset())
    task = "sudo id -un > root.txt; echo hi > new.txt; exit 3"
    run = ("run", "--json", "--name", "mine", "--worktree", project.path)
    answer = state(*run, "--", "sh", "-c", task)
    assert answer.code == 3, answer.err
    assert (answer.data["outcome"], answer.data["result"]["changes"]) == ("failed", 2)
    assert fingerprint(project.path, without=frozenset()) == before
    assert kinds_of(state, "mine") == {"new.txt": "A", "root.txt": "A"}
    assert "new.txt" in state.ok("review", "mine").out
    state.ok("apply", "--yes", "mine")
    for name, content in {"new.txt": "hi\n", "root.txt": "root\n"}.items():
        written: Path = project.path / name
        assert written.read_text() == content
        assert written.stat().st_uid == person.uid
    found = status_of(state, "mine")
    assert (found["guest_alive"], found["result"], found["problems"]) == (False, "applied", [])
    items = state.ok("cleanup", "--json").data["items"]
    assert (found["id"], "removed") in [(item["what"], item["outcome"]) for item in items]
    assert state.ok("cleanup", "--json").data["items"] == []
    assert state.ok("status", "--json").data["sandboxes"] == []
