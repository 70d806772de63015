"""What checks came to is part of what an approval names: a failed one must be overruled in so many
words, and other results make an approval stale.
"""

import pytest

from tests.adapter.crafted import BASE, RESULT, Case, Make, refused
from vmsandbox import review
from vmsandbox.model import (
    Check,
    CheckResult,
    CheckRun,
    Finding,
    Opinion,
    Outcome,
    ResultState,
    Severity,
)
from vmsandbox.store import write_value

PASSED = CheckResult(name="make test", ok=True, exit_code=0, tail="12 passed")
FAILED = CheckResult(name="make test", ok=False, exit_code=2, detail="exit code 2", tail="oops")


@pytest.fixture
def case(make: Make) -> Case:
    """A result whose task says how it is proven."""
    made = make()
    record = made.folder.read_record()
    task = record.task.model_copy(update={"verify": (Check(command=("make", "test")),)})
    write_value(made.folder.record, record.model_copy(update={"task": task}))
    return made


def ran(case: Case, result: CheckResult, *, fresh: bool = False) -> None:
    run = CheckRun(fresh=fresh, results=(result,))
    review.record_run(case.folder, case.change_set.digest, run)


def test_what_was_never_proven_needs_the_word_despite(case: Case) -> None:
    refused("checks_failed", lambda: review.approve(case.folder))
    refused("checks_failed", lambda: case.apply())
    assert case.content() == BASE
    record = review.approve(case.folder, despite_checks=True)
    assert record.decisions[-1].despite == ("make test (not run)",)
    case.apply(yes=False)
    assert case.content() == RESULT


def test_a_passed_check_is_named_by_the_approval(case: Case) -> None:
    ran(case, PASSED)
    (decision,) = review.approve(case.folder).decisions
    assert decision.checks == case.record.checks_digest
    assert (decision.checks or "").startswith("sha256:")
    assert decision.despite == ()
    case.apply(yes=False)
    assert case.record.state is ResultState.APPLIED


@pytest.mark.parametrize("fresh", [False, True])
def test_a_failed_check_is_refused_and_overruled_on_record(case: Case, fresh: bool) -> None:
    ran(case, PASSED)
    ran(case, FAILED, fresh=fresh)
    refused("checks_failed", lambda: review.approve(case.folder))
    refused("checks_failed", lambda: case.apply())
    assert case.record.decisions == ()
    with case.reading() as results:
        review.apply(
            case.folder,
            results,
            case.target,
            is_live=lambda: False,
            yes=True,
            despite_checks=True,
            who="ann",
        )
    (decision,) = review.read(case.folder)[1].decisions
    assert decision.despite == ("make test (fresh)" if fresh else "make test",)
    assert case.content() == RESULT


@pytest.mark.parametrize(
    "later",
    [
        FAILED,
        PASSED.model_copy(update={"tail": "11 passed, 1 skipped"}),
        PASSED.model_copy(update={"exit_code": 5}),
    ],
    ids=["failed", "said something else", "another exit code"],
)
def test_other_results_make_an_approval_stale(case: Case, later: CheckResult) -> None:
    ran(case, PASSED)
    review.approve(case.folder)
    ran(case, later)
    assert case.record.state is ResultState.PENDING
    refused("approval_stale", lambda: case.apply(yes=False))
    refused("approval_stale", lambda: case.apply(yes=True))
    assert case.content() == BASE
    review.approve(case.folder, despite_checks=not later.ok)
    case.apply(yes=False)
    assert case.content() == RESULT


def test_a_run_in_another_kind_of_guest_is_another_result(case: Case) -> None:
    ran(case, PASSED)
    review.approve(case.folder)
    ran(case, PASSED, fresh=True)
    refused("approval_stale", lambda: case.apply(yes=False))
    assert [run.fresh for run in case.record.checks] == [False, True]


def test_the_same_results_again_change_nothing(case: Case) -> None:
    ran(case, PASSED)
    review.approve(case.folder)
    ran(case, PASSED.model_copy(update={"seconds": 99.0}))
    assert case.record.state is ResultState.APPROVED
    case.apply(yes=False)
    assert case.content() == RESULT


def test_what_proved_one_result_says_nothing_of_the_next(case: Case) -> None:
    ran(case, PASSED)
    former = case.change_set.digest
    case.collect({**RESULT, b"tool": b"other"})
    assert case.record.checks == ()
    refused("checks_failed", lambda: review.approve(case.folder))
    review.record_run(case.folder, former, CheckRun(fresh=False, results=(PASSED,)))
    assert case.record.checks == (), "it was run on the former result"


def test_once_applied_a_new_run_asks_for_no_new_approval(case: Case) -> None:
    ran(case, PASSED)
    review.approve(case.folder)
    case.apply(yes=False)
    ran(case, FAILED)
    again = case.apply(yes=False)
    assert (again.written, case.record.state) == ((), ResultState.APPLIED)


def test_the_check_results_that_were_read_can_be_demanded(case: Case) -> None:
    ran(case, PASSED)
    read = review.short(case.change_set, case.record)
    assert "+" in read
    ran(case, PASSED.model_copy(update={"tail": "other"}))
    refused("approval_stale", lambda: review.approve(case.folder, digest=read))
    assert case.record.decisions == ()
    review.approve(case.folder, digest=review.short(case.change_set, case.record))


def test_opinions_stay_with_their_result(case: Case) -> None:
    finding = Finding(severity=Severity.HIGH, text="wrong")
    said = Opinion(
        by="ann",
        command=("critic",),
        digest=case.change_set.digest,
        outcome=Outcome.COMPLETED,
        exit_code=0,
        findings=(finding,),
    )
    review.attach(case.folder, said.model_copy(update={"findings": ()}))
    review.attach(case.folder, said.model_copy(update={"by": "bob", "findings": ()}))
    review.attach(case.folder, said)
    assert [(one.by, len(one.findings)) for one in review.opinions(case.folder)] == [
        ("bob", 0),
        ("ann", 1),
    ]
    shown = review.show(case.folder, live=False)
    assert shown.disagreements == ("ann has 1 grave finding (up to high), bob has none",)
    case.collect({**RESULT, b"tool": b"other"})
    assert review.opinions(case.folder) == ()
