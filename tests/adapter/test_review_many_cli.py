"""The verbs about several results as a person or a program calls them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import vmsandbox
from tests import terminals
from tests.adapter.crafted import BASE, RESULT, Case, Files
from tests.adapter.several import Several
from tests.repositories import fingerprint
from vmsandbox import review
from vmsandbox.cli import review as verbs
from vmsandbox.cli import review_many
from vmsandbox.errors import ReviewRefused, UsageProblem
from vmsandbox.model import (
    BatchMark,
    Brief,
    Check,
    CheckResult,
    CheckRun,
    ExecResult,
    Origin,
    Outcome,
    ResultState,
    now,
)
from vmsandbox.store import write_value

QUESTION = "quit: q [q]: "
EVIL: Files = {**RESULT, b"\x1b[2J\nname": b"1", b"README": b"other\n"}


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Several:
    made = Several(tmp_path)
    monkeypatch.setenv("VMSANDBOX_HOME", str(made.state))
    return made


@pytest.fixture
def two(several: Several) -> Sequence[Case]:
    ended = ExecResult(
        exit_code=3, outcome=Outcome.FAILED, detail="\x1b[31m", started_at=now(), ended_at=now()
    )
    mark = BatchMark(batch="1f2e3d4c", task="fix")
    first = several(batch=mark, exec_result=ended)
    second = several(EVIL, forked_from=Origin(id="1b12cd34", name="task-1"))
    return first, second


def call(*arguments: str) -> Result:
    app = typer.Typer()
    verbs.register(app)
    review_many.register(app)
    return CliRunner().invoke(app, arguments)


def text(*arguments: str, code: int = 0) -> str:
    result = call(*arguments)
    assert result.exit_code == code, result.exception
    assert "\x1b" not in result.stdout
    return result.stdout


def data(*arguments: str, code: int = 0) -> Any:
    return json.loads(text(*arguments, "--json", code=code))["data"]


# --- what waits -----------------------------------------------------------------------------------


def test_all_that_waits_is_one_table(two: Sequence[Case]) -> None:
    shown = text("review", "--all")
    assert "failed (3)" in shown
    assert "executable, link" in shown
    assert "task-2" in shown
    found = data("review", "--all")["results"]
    assert [one["id"] for one in found] == [case.folder.id for case in two]
    assert found[0]["outcome"] == "failed"
    assert found[0]["exit_code"] == 3
    assert found[0]["flags"] == ["executable", "link"]
    assert (
        found[1]["flags"] == ["executable", "link", "odd-name"] or "odd-name" in found[1]["flags"]
    )
    assert found[1]["forked_from"]["name"] == "task-1"
    two[0].drop()
    assert len(data("review", "--all")["results"]) == 1
    two[1].drop()
    assert "no result waits" in text("review", "--all")


def test_a_batch_is_asked_for_by_the_beginning_of_its_id(two: Sequence[Case]) -> None:
    (found,) = data("review", "--all", "--batch", "1f2e")["results"]
    assert found["id"] == two[0].folder.id
    assert data("review", "--all", "--batch", "ffff")["results"] == []


def test_the_checks_are_counted(two: Sequence[Case]) -> None:
    case = two[0]
    record = case.folder.read_record()
    checks = (Check(name="lint", command=("lint",)), Check(name="test", command=("make", "test")))
    task = record.task.model_copy(update={"verify": checks})
    write_value(case.folder.record, record.model_copy(update={"task": task}))
    assert "0 of 2" in text("review", "--all")
    results = (
        CheckResult(name="lint", ok=True, exit_code=0),
        CheckResult(name="test", ok=False, exit_code=2, detail="exit code 2"),
    )
    review.record_run(case.folder, case.change_set.digest, CheckRun(fresh=False, results=results))
    assert "1 of 2" in text("review", "--all")
    assert data("review", "--all")["results"][0]["unproven"] == ["test"]
    shown = text("compare", two[0].folder.id, two[1].folder.id)
    assert "ok  lint" in shown
    assert "failed  test: exit code 2" in shown


def test_without_a_terminal_nothing_is_asked(two: Sequence[Case]) -> None:
    before = fingerprint(two[0].folder.path)
    assert text("review") == text("review", "--all")
    assert fingerprint(two[0].folder.path) == before


def test_one_or_all(two: Sequence[Case]) -> None:
    result = call("review", two[0].folder.id, "--all")
    assert isinstance(result.exception, UsageProblem)
    assert result.exception.code == "all_or_one"


def test_on_a_terminal_results_are_chosen_by_number(two: Sequence[Case]) -> None:
    code, seen = terminals.on_a_terminal(
        QUESTION, ["0", "nonsense", "2", "a 1, 2", "l", "q"], "review"
    )
    assert code == 0, seen
    assert seen.count("not understood") == 2
    assert "+other" in seen
    assert "\x1b[2J" not in seen
    assert [case.record.state for case in two] == [ResultState.APPROVED] * 2
    assert seen.count(" pending   ") == 2, "as they were listed first"
    assert seen.count(" approved  ") == 2, "and again after `l`"
    assert two[0].content() == BASE, "an approval alone changes nothing"


def test_on_a_terminal_a_drop_is_asked_about_once_more(two: Sequence[Case]) -> None:
    code, seen = terminals.on_a_terminal("]: ", ["d 1 2", "n", "y", "q"], "review")
    assert code == 0, seen
    assert [case.record.state for case in two] == [ResultState.PENDING, ResultState.DROPPED]


def test_an_approval_from_the_list_names_what_the_list_showed(two: Sequence[Case]) -> None:
    """Collected again while the list is on the screen, a result is not approved unseen."""
    one, other = two
    shown = data("review", "--all")["results"][0]
    one.collect({**RESULT, b"README": b"hello\nworle\n"})  # one byte differs
    with pytest.raises(ReviewRefused) as caught:
        review.approve(one.folder, digest=shown["named"])
    assert caught.value.code == "approval_stale"
    review.approve(other.folder, digest=data("review", "--all")["results"][1]["named"])


# --- compare and conflicts ------------------------------------------------------------------------


def test_compare_puts_two_results_side_by_side(two: Sequence[Case]) -> None:
    one, other = two
    one.folder.report.write_bytes(b"# Why\n\x1b[2Jevil [bold]text[/]\n")
    record = one.folder.read_record()
    task = record.task.model_copy(update={"brief": Brief(goal="Fix it.")})
    write_value(one.folder.record, record.model_copy(update={"task": task, "name": "claude"}))
    shown = text("compare", one.folder.id, other.folder.id)
    for wanted in (
        "claude",
        "task-2",
        "failed, exit code 3",
        "0.0 s",
        "\\x1b[2Jevil [bold]text[/]",
        "differ",
        "alike",
        '"\\033[2J\\nname"',
        "they are in each other's way: git cannot merge them",
        "they were not asked for the same",
    ):
        assert wanted in shown
    found = data("compare", one.folder.id, other.folder.id)
    assert [side["name"] for side in found["sides"]] == ["claude", "task-2"]
    assert found["sides"][0]["run_s"] < 1
    assert found["meeting"]["clashes"] == ["README"]
    assert not found["meeting"]["both_apply"]
    assert not found["same_brief"]
    assert found["only"] == [[], ['"\\033[2J\\nname"']]


def test_conflicts_are_a_matrix(several: Several) -> None:
    cases = [several({**BASE, b"README": content}) for content in (b"a\n", b"b\n", b"a\n")]
    cases.append(several({**BASE, b"\x1b[2J": b"1"}))
    shown = text("conflicts", code=1)
    assert [line.split() for line in shown.splitlines() if line.strip()[:2] in ("1 ", "4 ")][
        -2:
    ] == [
        ["1", "x", "=", "."],
        ["4", ".", ".", "."],
    ]
    assert "task-1 and task-2: README" in shown
    found = data("conflicts", code=1)
    fits = {(pair["one"], pair["other"]): pair["fit"] for pair in found["pairs"]}
    assert len(fits) == 6
    assert fits[cases[0].folder.id, cases[1].folder.id] == "conflict"
    assert all(one["applies"] for one in found["results"])
    assert data("conflicts", "task-1", "task-3", "task-4")["pairs"]
    cases[0].apply()
    assert "no: README" in text("conflicts", "task-2", code=1)
    assert data("conflicts", "task-3", "task-4")["results"][0]["applies"]


def test_conflicts_of_nothing(several: Several) -> None:
    several.state.mkdir()
    assert "no result waits" in text("conflicts")
    assert data("conflicts") | {"meaning": {}} == {
        "results": [],
        "pairs": [],
        "hindrances": [],
        "meaning": {},
    }


# --- from Python ----------------------------------------------------------------------------------


def test_programs_are_told_the_same(two: Sequence[Case]) -> None:
    ids = [case.folder.id for case in two]
    assert [one.id for one in vmsandbox.waiting().results] == ids
    assert [one.id for one in vmsandbox.waiting(batch="1f2e").results] == ids[:1]
    (pair,) = vmsandbox.conflicts(["task-1", "task-2"]).pairs
    assert (pair.fit, pair.clashes) == ("conflict", (b"README",))
    assert vmsandbox.compare("task-1", "task-2").meeting == pair
