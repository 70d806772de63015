"""An apply that is cut short, at every single step: nothing is lost, and the next call goes on.

The apply runs in a forked child. Before its n-th change to the file system the interpreter's own
audit event sends the child a real signal, for every n there is.
"""

import os
import select
import shutil
import signal
from pathlib import Path

import pytest

from tests.adapter.crafted import Case, Exe, Files, Link, Node, content
from tests.cutting import cut_at, run_child
from vmsandbox import review
from vmsandbox.errors import NegativeAnswer
from vmsandbox.model import ResultState
from vmsandbox.review import ApplyConflict

BASE: Files = {
    b"changed": b"1\n",
    b"gone": b"2\n",
    b"folder/x": b"3\n",
    b"folder/y": b"4\n",
    b"becomes-folder": b"5\n",
    b"becomes-file/z": b"6\n",
    b"tool": b"7\n",
    b"link": Link(b"gone"),
}
RESULT: Files = {
    b"changed": b"one\n",
    b"becomes-folder/deep/a": b"five\n",
    b"becomes-file": b"six\n",
    b"tool": Exe(b"7\n"),
    b"link": Link(b"changed"),
    b"new/dir/b": b"eight\n",
    b"new/link": Link(b"dir/b"),
}


class Stage:
    """One case, put back to its beginning for every attempt."""

    def __init__(self, root: Path) -> None:
        self.case = Case(root / "case", BASE, RESULT)
        self.target = root / "kept"
        shutil.copytree(self.case.target, self.target, symlinks=True)
        self.files = {p: p.read_bytes() for p in self.case.folder.path.glob("*.json*")}

    def reset(self) -> Case:
        shutil.rmtree(self.case.target)
        shutil.copytree(self.target, self.case.target, symlinks=True)
        for path in self.case.folder.path.glob("*.json*"):
            path.unlink()
        for path, data in self.files.items():
            path.write_bytes(data)
        return self.case

    def cut_at(self, step: int, number: signal.Signals) -> bool:
        """Apply, with the signal before the given step; False if there is no such step."""

        return cut_at(step, number, self.reset().apply)


def either_old_or_new(found: dict[bytes, Node]) -> None:
    """Every path is as in the base or as in the result, and nothing else is there but our own."""
    for path, node in found.items():
        if b".vmsandbox-" not in path:
            assert node in (BASE.get(path), RESULT.get(path)), path


def staged(target: Path) -> list[Path]:
    return list(target.rglob(".vmsandbox-*"))


@pytest.fixture(scope="module")
def stage(memory: Path) -> Stage:
    return Stage(memory / "stage")


def test_killed_at_every_step_the_next_call_finishes_it(stage: Stage) -> None:
    step, cut_after_a_change = 1, 0
    while stage.cut_at(step, signal.SIGKILL):
        case = stage.case
        found = content(case.target)
        either_old_or_new(found)
        cut_after_a_change += found != BASE and not all(p in found for p in BASE)
        applied = case.apply(yes=False) if case.record.decisions else case.apply()
        assert applied.state is ResultState.APPLIED, step
        assert case.content() == RESULT, step
        assert not case.folder.ledger.exists()
        step += 1
    assert step > 25
    assert cut_after_a_change > 5


def test_killed_at_many_steps_the_next_call_for_another_path_finishes_it_as_well(
    stage: Stage,
) -> None:
    """What was begun is ended first, whatever is asked for next."""
    step = 1
    while stage.cut_at(step, signal.SIGKILL):
        case = stage.case
        begun = case.folder.ledger.exists()
        case.apply(b"changed")
        assert content(case.target)[b"changed"] == b"one\n"
        if begun:
            assert case.content() == RESULT, step
        step += 3


@pytest.mark.parametrize("ending", ["drop", "abandon", "collect"])
def test_killed_at_many_steps_nothing_of_ours_stays_beside_the_users_files(
    stage: Stage, ending: str
) -> None:
    step, cleaned = 1, 0
    while stage.cut_at(step, signal.SIGKILL):
        case = stage.case
        cleaned += bool(staged(case.target))
        if ending == "drop":
            if case.record.state is not ResultState.APPLIED:
                case.drop()
        elif ending == "abandon":
            review.abandon(case.folder)
        else:
            review.present(case.folder, case.change_set)
        assert not staged(case.target), step
        either_old_or_new(content(case.target))
        step += 3
    assert cleaned > 2


def test_interrupted_at_many_steps_it_cleans_up_by_itself(stage: Stage) -> None:
    """Ctrl-C raises in the middle of whatever is done: the folder is old, or the next call ends it.

    Before the first change to the user's files it is byte for byte as it was.
    """
    step = 1
    while stage.cut_at(step, signal.SIGINT):
        case = stage.case
        found = content(case.target)
        either_old_or_new(found)
        if not case.folder.ledger.exists() and case.record.state is not ResultState.APPLIED:
            assert found == BASE, step
        case.apply()
        assert case.content() == RESULT, step
        step += 2
    assert step > 25


def test_an_edit_after_a_kill_is_kept_and_named(stage: Stage) -> None:
    """The path that was not yet written and was edited since is a conflict; the rest counts."""
    step, met = 1, 0
    while stage.cut_at(step, signal.SIGKILL):
        case = stage.case
        if case.folder.ledger.exists() and content(case.target).get(b"changed") == b"1\n":
            (case.target / "changed").write_bytes(b"mine\n")
            with pytest.raises(ApplyConflict) as caught:
                case.apply()
            assert [c.path for c in caught.value.conflicts] == [b"changed"]
            assert case.record.state is ResultState.CONFLICTED
            assert not staged(case.target)
            (case.target / "changed").write_bytes(b"1\n")
            case.apply()
            assert case.content() == RESULT
            met += 1
        step += 3
    assert met > 2


def test_an_edit_at_the_very_moment_is_never_overwritten(stage: Stage) -> None:
    """Between the check and the rename somebody saves the file: seen, and the edit stays."""
    step, met = 1, 0
    while True:
        case = stage.reset()

        def edit(count: int, case: Case = case, step: int = step) -> None:
            if count == step:
                path = os.path.join(os.fsencode(case.target), b"changed")  # noqa: PTH118
                descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
                os.write(descriptor, b"mine\n")
                os.close(descriptor)

        if os.WEXITSTATUS(run_child(case.apply, edit)) == 0 and content(case.target) == RESULT:
            break
        found = content(case.target)[b"changed"]
        assert found in (b"mine\n", b"one\n")
        if found == b"mine\n" and case.record.state is not ResultState.APPLIED:
            with pytest.raises(NegativeAnswer):
                case.apply()
            met += 1
        step += 2
    assert met > 2


def test_many_files_killed_at_random_moments(memory: Path) -> None:
    """As a user would meet it: by the clock, wherever that hits."""
    base = {b"d%d/f%d" % (n % 7, n): b"old %d\n" % n for n in range(150)}
    result = {path: data.replace(b"old", b"new") for path, data in base.items() if path[-1] % 5}
    result |= {b"e%d/f%d" % (n % 3, n): b"added\n" for n in range(100)}
    case = Case(memory / "many", base, result)
    for attempt in range(40):
        child = os.fork()
        if child == 0:
            try:
                case.apply()
            finally:
                os._exit(0)
        handle = os.pidfd_open(child)
        ended = bool(select.select([handle], [], [], 0.015 * attempt)[0])
        os.close(handle)
        if not ended:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if ended:
            break
        for path, node in case.content().items():
            assert b".vmsandbox-" in path or node in (base.get(path), result.get(path))
    case.apply()
    assert case.content() == result
    assert case.record.state is ResultState.APPLIED
