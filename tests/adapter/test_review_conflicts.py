"""Where the host's folder differs from the base: one conflict, and nothing is written."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.adapter.crafted import RESULT, Case, Exe, Link, Make, Node, conflict, put
from tests.repositories import fingerprint
from vmsandbox.model import ResultState
from vmsandbox.review import ApplyConflict


def edit(case: Case, path: bytes, node: Node) -> None:
    put(case.target, path, node)


# --- conflicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "path", "kind"),
    [
        (lambda c: edit(c, b"README", b"mine\n"), b"README", "content"),
        (lambda c: edit(c, b"README", Exe(b"hello\n")), b"README", "mode"),
        (lambda c: edit(c, b"README", Link(b"src")), b"README", "type"),
        (lambda c: (c.target / "README").unlink(), b"README", "missing"),
        (lambda c: edit(c, b"src/new.py", b"mine\n"), b"src/new.py", "exists"),
        (lambda c: (c.target / "src/new.py").mkdir(), b"src/new.py", "exists"),
        (lambda c: edit(c, b"old/gone.txt", b"mine\n"), b"old/gone.txt", "content"),
        (lambda c: edit(c, b"link", Link(b"mine")), b"link", "content"),
        (lambda c: edit(c, b"moved", b"mine"), b"moved/me.txt", "way"),
        (lambda c: edit(c, b"move/me.txt", b"mine"), b"move/me.txt", "content"),
        (lambda c: os.mkfifo(c.target / "tool"), b"tool", "exists"),
    ],
    ids=[
        "edited",
        "made-executable",
        "became-link",
        "deleted",
        "file-in-the-way",
        "folder-in-the-way",
        "deletion-of-edited",
        "link-edited",
        "folder-is-file",
        "rename-of-edited",
        "fifo-in-the-way",
    ],
)
def test_one_conflict_and_nothing_of_the_batch_is_written(
    make: Make, spoil: Callable[[Case], object], path: bytes, kind: str
) -> None:
    case = make()
    spoil(case)
    before = fingerprint(case.target)
    assert conflict(case.apply) == {path: kind}
    assert fingerprint(case.target) == before
    assert case.record.state is ResultState.CONFLICTED
    assert not case.folder.ledger.exists()


def test_every_conflict_of_a_batch_is_listed(make: Make) -> None:
    case = make()
    edit(case, b"README", b"mine")
    edit(case, b"tool", b"mine")
    (case.target / "src/a.py").unlink()
    with pytest.raises(ApplyConflict) as caught:
        case.apply()
    assert [c.path for c in caught.value.conflicts] == [b"README", b"src/a.py", b"tool"]
    for named in ("README: edited", "src/a.py: no longer", "tool: new in the result"):
        assert named in caught.value.message


def test_unrelated_edits_do_not_block(make: Make) -> None:
    case = make()
    edit(case, b"src/b.py", b"my own\n")
    edit(case, b"notes.txt", b"my own\n")
    case.apply()
    assert case.content() == {**RESULT, b"src/b.py": b"my own\n", b"notes.txt": b"my own\n"}


def test_after_the_conflict_is_put_right_the_same_apply_goes_through(make: Make) -> None:
    case = make()
    edit(case, b"README", b"mine\n")
    conflict(case.apply)
    edit(case, b"README", b"hello\n")
    case.apply()
    assert case.content() == RESULT


def test_a_path_that_already_is_as_in_the_result_is_no_conflict(make: Make) -> None:
    case = make()
    edit(case, b"README", b"hello\nworld\n")
    edit(case, b"tool", Exe(b"#!/bin/sh\n"))
    applied = case.apply()
    assert set(applied.already) == {b"README", b"tool"}
    assert case.content() == RESULT


@pytest.mark.parametrize("foreign", ["old/notes.txt", "old/.cache/x", "old/sub/deep/build.o"])
def test_deleting_a_folder_with_foreign_files_in_it_is_refused(make: Make, foreign: str) -> None:
    case = make()
    edit(case, foreign.encode(), b"ignored or untracked, and not the base's\n")
    before = fingerprint(case.target)
    assert conflict(case.apply) == {b"old": "foreign"}
    assert fingerprint(case.target) == before


def test_a_file_in_place_of_a_folder_with_foreign_files_is_refused(make: Make) -> None:
    case = make({b"p/q": b"x"}, {b"p": b"file"})
    edit(case, b"p/mine", b"foreign\n")
    assert conflict(case.apply) == {b"p": "foreign"}
    assert case.content() == {b"p/q": b"x", b"p/mine": b"foreign\n"}


def test_a_folder_that_keeps_files_of_the_base_may_hold_foreign_ones(make: Make) -> None:
    case = make({b"d/a": b"1", b"d/b": b"2"}, {b"d/a": b"1"})
    edit(case, b"d/mine", b"foreign\n")
    case.apply()
    assert case.content() == {b"d/a": b"1", b"d/mine": b"foreign\n"}


@pytest.mark.parametrize("swap", ["src", "old"])
def test_a_folder_that_was_swapped_for_an_outward_link_is_refused(
    make: Make, tmp_path: Path, swap: str
) -> None:
    case = make()
    outside = tmp_path / "outside"
    (case.target / swap).rename(outside)
    (case.target / swap).symlink_to(outside)
    before, before_outside = fingerprint(case.target), fingerprint(outside)
    found = conflict(case.apply)
    assert set(found.values()) == {"way"}
    assert all(path.startswith(swap.encode() + b"/") for path in found)
    assert fingerprint(case.target) == before
    assert fingerprint(outside) == before_outside
