"""What reviewers say: read strictly, made safe, and held against what author and checks say."""

import json
from typing import Any

import pytest

from vmsandbox.model import CheckResult, CheckRun, Finding, Opinion, Outcome, ResultRecord, Severity
from vmsandbox.review import disagreements, parse_findings

DIGEST = f"sha256:{'0' * 64}"


def test_findings_are_read_and_made_safe() -> None:
    written = [
        {"path": "src/a.py", "line": 7, "severity": "high", "text": "Off by one."},
        {
            "path": "\x1b[2Jevil\n",
            "line": None,
            "severity": "info",
            "text": "\x1b]0;x\x07two\nlines",
        },
        {"severity": "blocker", "text": "No test."},
    ]
    first, second, third = parse_findings(json.dumps(written).encode())
    assert first == Finding(path="src/a.py", line=7, severity=Severity.HIGH, text="Off by one.")
    assert (second.path, second.text) == ("\\x1b[2Jevil\\x0a", "\\x1b]0;x\\x07two\nlines")
    assert (third.path, third.line, third.severity.grave) == ("", None, True)


@pytest.mark.parametrize("nothing", [b"", b" \n", b"[]"])
def test_no_findings(nothing: bytes) -> None:
    assert parse_findings(nothing) == ()


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (b"not json \x1b[31m", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[" + b" " * 300_000 + b"]", "more than 256 KiB"),
        ({"severity": "high", "text": "x"}, "the whole: Input should be a valid list"),
        ([{"severity": "terrible", "text": "x"}], "0.severity: Input should be 'info'"),
        ([{"severity": "high", "text": "x", "line": "7"}], "0.line: Input should be a valid int"),
        ([{"severity": "high", "text": "x", "line": 0}], "0.line: Input should be greater"),
        ([{"severity": "high", "text": "x", "line": True}], "0.line: Input should be a valid int"),
        ([{"severity": "high", "text": ""}], "0.text: String should have at least 1"),
        ([{"severity": "high", "text": "x", "\x1b[1m": 1}], "0.\\x1b[1m: Extra inputs"),
        ([{"severity": "high", "text": "x" * 9000}], "0.text: String should have at most"),
        ([{"severity": "low", "text": "x"}] * 201, "the whole: List should have at most 200"),
        ([{}] * 5, "and 7 more problems"),
    ],
)
def test_what_is_no_list_of_findings_is_told_and_not_guessed_at(written: Any, problem: str) -> None:
    data = written if isinstance(written, bytes) else json.dumps(written).encode()
    with pytest.raises(ValueError) as caught:
        parse_findings(data)
    assert problem in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def opinion(by: str, *severities: Severity, **changes: Any) -> Opinion:
    found = tuple(Finding(severity=severity, text="x") for severity in severities)
    fields = {"by": by, "command": ("x",), "digest": DIGEST, "exit_code": 0, "findings": found}
    return Opinion.model_validate({"outcome": Outcome.COMPLETED, **fields, **changes})


def ran(ok: bool) -> ResultRecord:
    result = CheckResult(name="t", ok=ok, exit_code=0)
    return ResultRecord(checks=(CheckRun(fresh=True, results=(result,)),))


GRAVE = opinion("ann", Severity.HIGH, Severity.BLOCKER, Severity.LOW)
CONTENT = opinion("bob", Severity.MEDIUM)


@pytest.mark.parametrize(
    ("author", "record", "said", "told"),
    [
        (Outcome.COMPLETED, ResultRecord(), [CONTENT], []),
        (Outcome.FAILED, ResultRecord(), [GRAVE], []),
        (
            Outcome.COMPLETED,
            ResultRecord(),
            [GRAVE],
            ["the author completed, but ann has 2 grave findings (up to blocking)"],
        ),
        (
            Outcome.COMPLETED,
            ran(True),
            [opinion("eve", Severity.HIGH)],
            ["the author completed and all checks passed, but eve has 1 grave finding"],
        ),
        (Outcome.FAILED, ran(True), [GRAVE], ["all checks passed, but ann has 2 grave findings"]),
        (Outcome.FAILED, ran(False), [GRAVE], []),
        (
            Outcome.FAILED,
            ResultRecord(),
            [GRAVE, CONTENT],
            ["ann has 2 grave findings (up to blocking), bob has none"],
        ),
        (Outcome.FAILED, ResultRecord(), [GRAVE, opinion("b", outcome=Outcome.TIMEOUT)], []),
        (Outcome.FAILED, ResultRecord(), [GRAVE, opinion("b", problem="not JSON")], []),
    ],
)
def test_where_they_contradict_each_other(
    author: Outcome, record: ResultRecord, said: list[Opinion], told: list[str]
) -> None:
    found = disagreements(author, record, said)
    assert len(found) == len(told)
    assert all(sentence.startswith(start) for sentence, start in zip(found, told, strict=True))
