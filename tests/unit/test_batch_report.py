"""What a batch makes of proof, and tells: a task whose checks did not pass is not well."""

from pathlib import Path

import pytest
from rich.console import Console

from vmsandbox.batch import BatchReport, TaskReport
from vmsandbox.batch.record import Ended
from vmsandbox.cli.batch import table
from vmsandbox.model import ResultState
from vmsandbox.sandbox.report import ResultSummary


def task(outcome: str, *unproven: str, checks: int = 0) -> TaskReport:
    result = ResultSummary(
        state=ResultState.PENDING, digest="d", changes=1, checks=checks, unproven=unproven
    )
    return TaskReport(name="t", id="i", outcome=outcome, result=result)


@pytest.mark.parametrize(
    ("found", "well", "proof"),
    [
        (task("completed"), True, ""),
        (task("completed", checks=2), True, "2 check(s) passed"),
        (task("completed", "b", checks=2), False, "check(s) that did not pass: b"),
        (task("failed", checks=2), False, "2 check(s) passed"),
        (task("skipped", "b", checks=1), True, "check(s) that did not pass: b"),
    ],
)
def test_a_task_is_well_if_it_completed_and_was_proven(
    found: TaskReport, well: bool, proof: str
) -> None:
    assert found.well is well
    assert BatchReport(batch="b", tasks=(found,)).well is well
    assert found.result
    assert found.result.proof() == proof


@pytest.mark.parametrize(
    ("found", "completed"),
    [
        (task("completed", checks=2), True),
        (task("completed", "b", checks=2), False),
        (task("failed"), False),
    ],
)
def test_what_comes_after_a_task_needs_its_proof(found: TaskReport, completed: bool) -> None:
    ended = Ended(outcome=found.outcome, result=found.result)
    assert ended.completed is completed


def test_the_table_names_the_evidence_of_what_did_not_go_well() -> None:
    lost = {"reason": "it went \x1b[31maway", "evidence": Path("/s/console.log")}
    bad = task("connection_lost").model_copy(update=lost)
    good = task("completed").model_copy(update={"evidence": Path("/s/stderr.log")})
    console = Console(width=160)
    with console.capture() as shown:
        console.print(table(BatchReport(batch="b", tasks=(bad, good))))
    lines = [line.split() for line in shown.get().splitlines()]
    assert ["evidence:", "/s/console.log"] in lines
    assert "it went \\x1b[31maway" in shown.get()
    assert "stderr.log" not in shown.get()
