"""What a user is promised about an apply and a drop, one promise per test.

The results are made object by object with git's plumbing; the host folders are real.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.adapter.crafted import (
    BASE,
    RESULT,
    Exe,
    Files,
    Link,
    Make,
    content,
    put,
    refused,
)
from tests.repositories import fingerprint, git
from vmsandbox import review
from vmsandbox.errors import HostProblem, NegativeAnswer, UsageProblem
from vmsandbox.model import ChangeKind, ResultState

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
    put(case.target, b"src/a.py", b"a = 3\n")
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
