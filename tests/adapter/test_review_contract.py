"""What a user is promised about review, approve, apply and drop, one promise per test.

The results are made object by object with git's plumbing; the host folders are real.
"""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.adapter.crafted import Case, Exe, Files, Link, content, put
from tests.repositories import fingerprint, git
from vmsandbox import review
from vmsandbox.errors import HostProblem, NegativeAnswer, ReviewRefused, UsageProblem
from vmsandbox.model import ChangeKind, ResultState, Verdict
from vmsandbox.review import ApplyConflict, Selection

BASE: Files = {
    b"README": b"hello\n",
    b"src/a.py": b"a = 1\n",
    b"src/b.py": b"b = 1\n",
    b"src/deep/c.py": b"c = 1\n",
    b"run.sh": Exe(b"#!/bin/sh\n"),
    b"link": Link(b"README"),
    b"old/gone.txt": b"going\n" * 10,
    b"move/me.txt": b"the same before and after\n" * 20,
}
RESULT: Files = {
    b"README": b"hello\nworld\n",
    b"src/a.py": b"a = 2\n",
    b"src/b.py": b"b = 1\n",
    b"src/deep/c.py": Exe(b"c = 1\n"),
    b"src/new.py": b"new = True\n",
    b"run.sh": Exe(b"#!/bin/sh\nexit 0\n"),
    b"tool": Exe(b"#!/bin/sh\n"),
    b"link": Link(b"src/a.py"),
    b"moved/me.txt": b"the same before and after\n" * 20,
}
Make = Callable[..., Case]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    roots = (tmp_path / str(number) for number in itertools.count())

    def make_case(base: Files = BASE, result: Files = RESULT, **options: str) -> Case:
        return Case(next(roots), base, result, **options)

    return make_case


def refused(code: str, call: Callable[[], object]) -> ReviewRefused:
    with pytest.raises(ReviewRefused) as caught:
        call()
    assert caught.value.code == code
    assert caught.value.hint
    return caught.value


def conflict(call: Callable[[], object]) -> dict[bytes, str]:
    """The conflicts that a call is refused for: path → kind."""
    with pytest.raises(ApplyConflict) as caught:
        call()
    assert caught.value.code == "apply_conflict"
    return {item.path: item.kind for item in caught.value.conflicts}


# --- before the apply -----------------------------------------------------------------------------


def test_nothing_is_written_before_the_apply(make: Make) -> None:
    case = make()
    before = fingerprint(case.target)
    review.show(case.folder, live=False)
    review.approve(case.folder)
    review.conflicts(case.folder, case.target)
    with case.reading() as results:
        results.diff(case.change_set.base_tree, case.change_set.result_tree, [], 10**6)
    assert fingerprint(case.target) == before


def test_no_decision_means_that_nothing_is_applied(make: Make) -> None:
    case = make()
    before = fingerprint(case.target)
    refused("not_approved", lambda: case.apply(yes=False))
    assert fingerprint(case.target) == before
    assert case.record.state is ResultState.PENDING


def test_a_failed_apply_leaves_the_folder_byte_for_byte(make: Make) -> None:
    case = make()
    oid = next(c.new_oid for c in case.change_set.changes if c.path == b"tool")
    assert oid
    case.objects.replace(oid, b"other content\n")
    before = fingerprint(case.target)
    with pytest.raises(HostProblem, match="not what was collected"):
        case.apply()
    assert fingerprint(case.target) == before
    assert not case.folder.ledger.exists()
    shutil.rmtree(case.folder.result_git / "objects")
    (case.folder.result_git / "objects").mkdir()
    with pytest.raises(HostProblem, match="not in the store"):
        case.apply()
    assert fingerprint(case.target) == before


def test_an_apply_of_everything_makes_the_folder_equal_to_the_result(make: Make) -> None:
    case = make()
    applied = case.apply()
    assert case.content() == RESULT
    assert applied.state is case.record.state is ResultState.APPLIED
    assert applied.remaining == 0
    assert not (case.target / "old").exists()
    assert not case.folder.ledger.exists()


def test_only_the_net_effect_counts(make: Make) -> None:
    """What was made and removed again in the guest, or put back as it was, is no change."""
    case = make({b"a": b"1", b"b": b"2"}, {b"a": b"1", b"b": b"2"})
    assert case.change_set.changes == ()
    assert case.record.state is ResultState.NONE
    assert case.apply().written == ()


def test_executable_bits_and_link_targets_survive(make: Make) -> None:
    case = make()
    case.apply()
    assert (case.target / "src/deep/c.py").stat().st_mode & 0o111
    assert (case.target / "tool").stat().st_mode & 0o111
    assert not (case.target / "src/new.py").stat().st_mode & 0o111
    assert (case.target / "link").readlink() == Path("src/a.py")


def test_a_lost_executable_bit_is_a_change_of_its_own(make: Make) -> None:
    case = make({b"x": Exe(b"x")}, {b"x": b"x"})
    case.apply()
    assert case.content() == {b"x": b"x"}


def test_a_rename_is_shown_as_a_rename(make: Make) -> None:
    case = make()
    renames = [c for c in case.change_set.changes if c.kind is ChangeKind.RENAMED]
    assert [(c.old_path, c.path) for c in renames] == [(b"move/me.txt", b"moved/me.txt")]
    case.apply()
    assert not (case.target / "move").exists()


@pytest.mark.parametrize("object_format", ["sha1", "sha256"])
def test_both_object_formats_work(make: Make, object_format: str) -> None:
    case = make(object_format=object_format)
    case.apply()
    assert case.content() == RESULT


def test_odd_names_come_through_byte_for_byte(make: Make) -> None:
    base = {b"a\nb": b"1", b"\xff\xfe": b"2", b" lead": b"3", b"-rf": b"4", b'q"uo\\te': b"5"}
    result = {b"a\nb": b"x", b"\xff\xfe": b"y", b"dir\x01/\x80": b"z", b"-rf": b"4"}
    case = make(base, result)
    case.apply()
    assert case.content() == result


@pytest.mark.parametrize(
    ("base", "result"),
    [
        ({b"p": b"file"}, {b"p": Link(b"q")}),
        ({b"p": Link(b"q")}, {b"p": b"file"}),
        ({b"p": b"file"}, {b"p/q": b"x", b"p/r/s": b"y"}),
        ({b"p/q": b"x", b"p/r/s": b"y"}, {b"p": b"file"}),
        ({b"p": Link(b"o"), b"o/x": b"1"}, {b"p/q": b"x", b"o/x": b"1"}),
        ({b"p/q": b"x", b"p/r/s": b"y"}, {b"p": Link(b"elsewhere")}),
        ({b"p": Exe(b"x")}, {b"p": Link(b"x")}),
    ],
    ids=[
        "file-to-link",
        "link-to-file",
        "file-to-folder",
        "folder-to-file",
        "link-to-folder",
        "folder-to-link",
        "executable-to-link",
    ],
)
def test_a_path_may_change_its_type(make: Make, base: Files, result: Files) -> None:
    case = make(base, result)
    case.apply()
    assert case.content() == result
    again = case.apply()
    assert again.written == ()
    assert case.content() == result


# --- conflicts ------------------------------------------------------------------------------------


def edit(case: Case, path: bytes, node: bytes | Exe | Link) -> None:
    put(case.target, path, node)


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


# --- choosing paths -------------------------------------------------------------------------------


def changed(case: Case, before: dict[bytes, object]) -> set[bytes]:
    after = case.content()
    return {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)}


def test_a_path_touches_itself_and_what_lies_below(make: Make) -> None:
    case = make()
    before: dict[bytes, object] = dict(case.content())
    case.apply(b"src")
    assert changed(case, before) == {b"src/a.py", b"src/new.py", b"src/deep/c.py"}
    assert case.record.state is ResultState.PENDING


def test_a_path_is_no_prefix_of_a_name(make: Make) -> None:
    case = make({b"ab": b"1", b"a": b"1"}, {b"ab": b"2", b"a": b"2"})
    case.apply(b"a")
    assert case.content() == {b"ab": b"1", b"a": b"2"}


@pytest.mark.parametrize("spelling", [b"src/", b"./src", b"src//", b"./src/."])
def test_a_folder_may_be_spelled_as_a_shell_does(make: Make, spelling: bytes) -> None:
    case = make()
    assert len(case.apply(spelling).written) == 3


@pytest.mark.parametrize(
    "first",
    [(b"src",), (b"README", b"link"), (b"move",), (b"moved",), (b"src/deep", b"old", b"tool")],
    ids=repr,
)
def test_two_batches_that_cover_everything_equal_one(make: Make, first: tuple[bytes, ...]) -> None:
    whole, split = make(), make()
    whole.apply()
    partly = split.apply(*first)
    assert partly.state is ResultState.PENDING
    assert partly.remaining == len(whole.record.applied_paths) - len(partly.written)
    split.apply()
    assert split.content() == whole.content() == RESULT
    assert fingerprint(split.target) == fingerprint(whole.target)
    assert split.record.state is whole.record.state is ResultState.APPLIED
    assert split.record.applied_paths == whole.record.applied_paths


def test_the_last_file_of_a_vanishing_folder_takes_the_folder_along(make: Make) -> None:
    case = make({b"d/a": b"1", b"d/s/b": b"2"}, {b"x": b"1"})
    case.apply(b"d/s")
    assert case.content() == {b"d/a": b"1"}
    assert not (case.target / "d/s").exists()
    case.apply()
    assert not (case.target / "d").exists()


def test_patterns_choose_as_in_a_gitignore(make: Make) -> None:
    case = make()
    before: dict[bytes, object] = dict(case.content())
    case.apply(include=("*.py",), exclude=("deep/",))
    assert changed(case, before) == {b"src/a.py", b"src/new.py"}


def test_exclude_alone_takes_from_everything(make: Make) -> None:
    case = make()
    case.apply(exclude=("/src", "old"))
    assert case.record.state is ResultState.PENDING
    assert {p for p in case.content() if p.startswith((b"src", b"old"))} == {
        p for p in BASE if p.startswith((b"src", b"old"))
    }


@pytest.mark.parametrize(
    ("paths", "patterns", "code"),
    [
        ((b"nowhere",), {}, "path_unmatched"),
        ((b"src", b"src/b.py"), {}, "path_unmatched"),
        ((), {"include": ("*.rs",)}, "path_unmatched"),
        ((b"src",), {"include": ("README",)}, "nothing_selected"),
        ((), {"exclude": ("*",)}, "nothing_selected"),
    ],
    ids=repr,
)
def test_a_choice_that_fits_nothing_is_a_mistake(
    make: Make, paths: tuple[bytes, ...], patterns: dict[str, tuple[str, ...]], code: str
) -> None:
    case = make()
    with pytest.raises(UsageProblem) as caught:
        case.apply(*paths, include=patterns.get("include", ()), exclude=patterns.get("exclude", ()))
    assert caught.value.code == code
    assert case.content() == BASE


@pytest.mark.parametrize(
    ("base", "result", "path"),
    [
        ({b"p": b"1", b"z": b"1"}, {b"p/q": b"2", b"z": b"1"}, b"p/q"),
        ({b"p/q": b"1", b"p/r": b"1"}, {b"p": b"2", b"z": b"1"}, None),
    ],
)
def test_half_of_a_change_of_type_cannot_be_chosen(
    make: Make, base: Files, result: Files, path: bytes | None
) -> None:
    case = make(base, result)
    with pytest.raises(UsageProblem) as caught:
        case.apply(path) if path else case.apply(include=("/p",), exclude=("p/r",))
    assert caught.value.code == "selection_incomplete"
    assert case.content() == base


# --- again, after, and instead --------------------------------------------------------------------


def test_applying_again_changes_nothing(make: Make) -> None:
    case = make()
    case.apply()


    def stamps() -> dict[Path, tuple[int, int, int]]:
        status = {path: path.lstat() for path in case.target.rglob("*")}
        return {p: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for p, s in status.items()}

    before = stamps(), case.folder.result_record.read_bytes()
    again = case.apply()
    assert again.written == ()
    assert again.state is ResultState.APPLIED
    assert (stamps(), case.folder.result_record.read_bytes()) == before


def test_what_the_user_edits_after_an_apply_stays(make: Make) -> None:
    case = make()
    case.apply(b"src")
    edit(case, b"src/a.py", b"a = 3\n")
    case.apply()
    assert case.content() == {**RESULT, b"src/a.py": b"a = 3\n"}
    assert case.record.state is ResultState.APPLIED


def test_apply_after_drop_is_refused(make: Make) -> None:
    case = make()
    case.drop()
    refused("result_dropped", case.apply)
    refused("result_dropped", lambda: review.approve(case.folder))
    assert case.content() == BASE
    assert case.record.state is ResultState.DROPPED


def test_drop_again_is_no_problem_and_drop_after_apply_is_refused(make: Make) -> None:
    case = make()
    assert case.drop().decisions == case.drop().decisions
    other = make()
    other.apply()
    refused("already_applied", other.drop)


def test_the_rest_can_be_dropped_after_a_part_was_applied(make: Make) -> None:
    case = make()
    case.apply(b"src")
    record = case.drop()
    assert record.state is ResultState.DROPPED
    assert record.applied_paths == (b"src/a.py", b"src/deep/c.py", b"src/new.py")
    refused("result_dropped", case.apply)


def test_a_live_task_refuses_both(make: Make) -> None:
    case = make()
    case.live = True
    refused("task_live", case.apply)
    refused("task_live", case.drop)
    assert case.content() == BASE
    case.live = False
    case.apply()


def test_without_a_result_there_is_nothing_to_apply(make: Make) -> None:
    case = make()
    case.folder.change_set.unlink()
    with pytest.raises(NegativeAnswer, match="no collected result"):
        case.apply()


def test_another_target_is_written_instead(make: Make, tmp_path: Path) -> None:
    case = make()
    copy = tmp_path / "copy"
    shutil.copytree(case.target, copy, symlinks=True)
    case.apply(target=copy)
    assert content(copy) == RESULT
    assert case.content() == BASE
    assert case.record.target == copy
    case.apply()
    assert case.content() == RESULT


def test_a_missing_target_is_a_mistake(make: Make, tmp_path: Path) -> None:
    case = make()
    with pytest.raises(UsageProblem, match="no folder to write to"):
        case.apply(target=tmp_path / "nowhere")


# --- decisions ------------------------------------------------------------------------------------


def test_a_decision_names_the_digest_and_says_who_and_when(make: Make) -> None:
    case = make()
    record = review.approve(case.folder, who="ann")
    (decision,) = record.decisions
    assert decision.digest == case.change_set.digest
    assert (decision.who, decision.verdict) == ("ann", Verdict.APPROVED)
    assert abs((decision.when - case.change_set.collected_at).total_seconds()) < 60
    assert record.state is ResultState.APPROVED
    assert "ann" in case.folder.events.read_text()
    case.apply(yes=False)
    assert case.record.decisions == (decision,)


def test_who_decides_through_sudo_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "ann")
    name = review.decider()
    assert name == ("ann (sudo)" if os.geteuid() == 0 else name)
    monkeypatch.delenv("SUDO_USER")
    monkeypatch.setenv("LOGNAME", "bob")
    assert review.decider() == "bob"


def test_an_approval_of_another_digest_is_stale_and_refused(make: Make) -> None:
    case = make()
    review.approve(case.folder)
    case.collect({**RESULT, b"README": b"hello\nworle\n"})  # one byte differs
    assert case.record.state is ResultState.PENDING
    refused("approval_stale", lambda: case.apply(yes=False))
    refused("approval_stale", lambda: case.apply(yes=True))
    assert case.content() == BASE
    review.approve(case.folder)
    case.apply(yes=False)
    assert case.content() == {**RESULT, b"README": b"hello\nworle\n"}


def test_the_digest_that_was_read_can_be_demanded(make: Make) -> None:
    case = make()
    read = case.change_set.digest
    refused("approval_stale", lambda: case.apply(digest="0" * 64))
    review.approve(case.folder, digest=read.removeprefix("sha256:")[:12])
    case.collect({**RESULT, b"tool": b"other"})
    refused("approval_stale", lambda: review.approve(case.folder, digest=read))
    refused("approval_stale", lambda: case.apply(digest=read))
    assert case.content() == BASE


def test_a_part_can_be_approved_and_then_only_that_is_applied(make: Make) -> None:
    case = make()
    review.approve(case.folder, selection=Selection(paths=(b"src",)))
    refused("not_approved", lambda: case.apply(b"README", yes=False))
    applied = case.apply(yes=False)
    assert set(applied.written) == {b"src/a.py", b"src/new.py", b"src/deep/c.py"}
    assert applied.remaining
    assert case.content()[b"README"] == b"hello\n"


def test_an_approval_that_served_is_not_stale_for_the_next_result(make: Make) -> None:
    case = make()
    case.apply()
    case.collect({**RESULT, b"later": b"1"})
    with pytest.raises(ApplyConflict):
        case.apply(b"README", target=case.target.parent)  # not refused as stale
    case.apply()
    assert case.content() == {**RESULT, b"later": b"1"}


def test_a_change_set_that_does_not_fit_its_digest_is_refused(make: Make) -> None:
    case = make()
    document = json.loads(case.folder.change_set.read_text())
    document["result_tree"] = document["base_tree"]
    case.folder.change_set.write_text(json.dumps(document))
    with pytest.raises(HostProblem, match="does not fit its own digest"):
        case.apply()


# --- the user's repository ------------------------------------------------------------------------


def test_the_users_git_is_neither_run_nor_touched(make: Make) -> None:
    """A repository whose config would run code: an apply must not notice it."""
    case = make()
    git(case.target, "init", "--quiet")
    git(case.target, "add", "--all")
    marker = case.target.parent / "ran"
    for key in ("core.fsmonitor", "filter.x.clean", "filter.x.smudge", "diff.external"):
        git(case.target, "config", key, f"touch {marker}; cat")
    (case.target / ".git/hooks").mkdir(exist_ok=True)
    before = fingerprint(case.target / ".git", without=frozenset())
    case.apply()
    assert fingerprint(case.target / ".git", without=frozenset()) == before
    assert not marker.exists()
    subprocess.run(["git", "-C", case.target, "-c", "core.fsmonitor=", "status"], check=True)
    assert case.content() == RESULT
