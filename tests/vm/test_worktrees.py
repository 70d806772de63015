"""Worktrees of every kind in a real guest: in and out unchanged, and each kind of change, byte for
byte."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.guestless import files
from tests.repositories import Repository, awkward, fingerprint
from tests.sandboxes import State
from tests.vm.lives import changes_of, fed, kinds_of

# Run in the worktree in the guest: appends to every file, points every link elsewhere.
CHANGE = rb"""
import os
for base, folders, names in os.walk(b"."):
    folders[:] = [name for name in folders if name != b".git"]
    for path in [os.path.join(base, name) for name in folders + names if name != b".git"]:
        if os.path.islink(path):
            os.unlink(path)
            os.symlink(b"changed target", path)
        elif os.path.isfile(path):
            with open(path, "ab") as file:
                file.write(b"more\r\n\0\xff")
"""
ADDED = b"more\r\n\0\xff"


class Linked(NamedTuple):
    """A linked worktree with a submodule and awkward files, and its guest, which is kept."""

    state: State
    worktree: Repository
    main: Path
    before: tuple[str, str]

    def fingerprints(self) -> tuple[str, str]:
        return (
            fingerprint(self.main, without=frozenset()),
            fingerprint(self.worktree.path, without=frozenset()),
        )


@pytest.fixture(scope="module")
def linked(shared_state: State, tmp_path_factory: pytest.TempPathFactory) -> Linked:
    folder = tmp_path_factory.mktemp("worktrees")
    worktree = awkward(folder)
    found = Linked(shared_state, worktree, folder / "main", ("", ""))
    found = found._replace(before=found.fingerprints())
    look = "git status --porcelain && git symbolic-ref HEAD && git log --format=%s | tail -n 2"
    options = ("--keep", "--name", "linked", "--worktree", worktree.path)
    answer = shared_state.ok("run", *options, "--", "sh", "-c", look)
    assert answer.out == "refs/heads/topic\nwith a submodule\nfirst\n"
    return found


def test_an_unchanged_round_trip_is_an_empty_change_set(linked: Linked) -> None:
    assert kinds_of(linked.state, "linked") == {}
    assert linked.fingerprints() == linked.before
    listing = linked.state.ok("exec", "linked", "--", "find", ".", "-name", "lib.c").out
    assert listing == "./sub/lib.c\n"


def test_a_change_to_each_comes_back_byte_exact(linked: Linked) -> None:
    state, top = linked.state, linked.worktree.path
    was = files(top)
    done = fed(state, CHANGE, "exec", "-i", "linked", "--", "python3", "-")
    assert done.code == 0, done.err
    state.ok("stop", "linked")
    assert linked.fingerprints() == linked.before
    changes = changes_of(state, "linked")
    assert {change["kind"] for change in changes.values()} == {"M"}
    assert len(changes) == len(was)
    assert r'"line\nbreak"' in changes
    assert r'"inv\377\376lid"' in changes
    state.ok("apply", "--yes", "linked")
    wanted = {
        name: (kind, b"changed target" if kind == "link" else content + ADDED)
        for name, (kind, content) in was.items()
    }
    assert files(top) == wanted
    assert os.access(top / "run.sh", os.X_OK)
    state.ok("delete", "linked")
