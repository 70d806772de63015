"""Checks and opinions as a person meets them: in `review`, and where they stand in the way."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.adapter.crafted import BASE, RESULT, Case
from vmsandbox import review
from vmsandbox.cli import review as verbs
from vmsandbox.errors import VmsandboxError
from vmsandbox.model import (
    Check,
    CheckResult,
    CheckRun,
    ExecResult,
    Finding,
    Opinion,
    Outcome,
    Severity,
)
from vmsandbox.store import write_value

ID = "ab12cd34"
FAILED = CheckResult(
    name="make test", ok=False, exit_code=2, detail="exit code 2", tail="first\nlast words\n"
)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A task that says that it completed, a check that says no, and a reviewer as well."""
    state = tmp_path / "state"
    monkeypatch.setenv("VMSANDBOX_HOME", str(state))
    made = Case(tmp_path / "host", BASE, RESULT, sandbox=state / "sandboxes" / ID)
    record = made.folder.read_record()
    task = record.task.model_copy(update={"verify": (Check(command=("make", "test")),)})
    ended = ExecResult(exit_code=0, outcome=Outcome.COMPLETED)
    changed = record.model_copy(update={"task": task, "exec_result": ended})
    write_value(made.folder.record, changed)
    return made


def call(*arguments: str) -> Result:
    app = typer.Typer()
    verbs.register(app)
    return CliRunner().invoke(app, list(arguments))


def data(*arguments: str) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)["data"]


def test_checks_that_were_never_run_are_told(case: Case) -> None:
    assert "checks     not run: make test (not run)" in call("review", ID).stdout
    assert data("review", ID)["unproven"] == ["make test (not run)"]


def test_a_failed_check_is_shown_with_its_last_words_and_has_to_be_overruled(case: Case) -> None:
    run = CheckRun(fresh=True, results=(FAILED,))
    review.record_run(case.folder, case.change_set.digest, run)
    text = call("review", ID).stdout
    for wanted in (
        "checks     in a fresh guest, base and result alone",
        "  FAILED make test  (0.0 s)  exit code 2",
        "    | last words",
        f"vmsandbox verify {case.folder.read_record().name}",
        f"--digest {review.short(case.change_set, case.record)} --despite-checks",
    ):
        assert wanted in text
    for words in (["approve", ID], ["apply", ID, "--yes"]):
        refused = call(*words).exception
        assert isinstance(refused, VmsandboxError)
        assert (refused.code, refused.exit_code) == ("checks_failed", 5)
        assert "--despite-checks" in (refused.hint or "")
    assert case.content() == BASE
    digest = review.short(case.change_set, case.record)
    decided = data("approve", ID, "--despite-checks", "--digest", digest)["result"]
    assert decided["decisions"][0]["despite"] == ["make test (fresh)"]
    assert "despite 1 check(s)" in call("review", ID).stdout
    assert call("apply", ID).exit_code == 0
    assert case.content() == RESULT


def test_one_call_approves_overrules_and_applies(case: Case) -> None:
    assert call("apply", ID, "--yes", "--despite-checks").exit_code == 0
    assert case.content() == RESULT
    assert case.record.decisions[0].despite == ("make test (not run)",)


def test_what_reviewers_found_is_shown_the_gravest_first_and_cannot_reach_a_terminal(
    case: Case,
) -> None:
    found = (
        Finding(severity=Severity.INFO, text="a remark"),
        Finding(path="a\x1b[2J", line=3, severity=Severity.BLOCKER, text="bad\nvery\x1b[1m bad"),
    )
    opinion = Opinion(
        by="ann\x07",
        command=("critic",),
        digest=case.change_set.digest,
        outcome=Outcome.COMPLETED,
        exit_code=0,
        report="# Judgement\n[bold]no markup[/]\x1b[0m\n",
        findings=found,
    )
    review.attach(case.folder, opinion)
    text = call("review", ID).stdout
    assert "\x1b" not in text
    assert "\x07" not in text
    for wanted in (
        "reviewer   ann\\x07: completed, exit code 0, 2 finding(s)",
        "  blocker a\\x1b[2J:3: bad\n    | very\\x1b[1m bad\n  info    a remark\n",
        "    | [bold]no markup[/]\\x1b[0m",
        "DISAGREE   the author completed, but ann\\x07 has 1 grave finding (up to blocking)",
    ):
        assert wanted in text
    assert len(data("review", ID)["opinions"][0]["findings"]) == 2
