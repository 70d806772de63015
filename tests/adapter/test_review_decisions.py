"""Who decides what, by which digest, and which part of a change set is meant."""

import json
import os

import pytest

from tests.adapter.crafted import BASE, RESULT, Case, Files, Make, refused
from tests.repositories import fingerprint
from vmsandbox import review
from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.model import ResultState, Verdict
from vmsandbox.review import ApplyConflict, Selection

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
    review.approve(case.folder, digest=read.removeprefix("sha256:")[:24])
    case.collect({**RESULT, b"tool": b"other"})
    refused("approval_stale", lambda: review.approve(case.folder, digest=read))
    refused("approval_stale", lambda: case.apply(digest=read))
    assert case.content() == BASE


def test_a_ledger_that_cannot_be_read_keeps_nobody_from_deleting(make: Make) -> None:
    case = make()
    case.folder.ledger.write_text("{")
    with pytest.raises(HostProblem, match="cannot be read"):
        case.apply()
    review.abandon(case.folder)
    assert case.content() == BASE


@pytest.mark.parametrize("digits", [8, 12, 23])
def test_so_few_digits_that_a_guest_can_imitate_them_are_refused(make: Make, digits: int) -> None:
    case = make()
    named = case.change_set.digest.removeprefix("sha256:")[:digits]
    for call in (
        lambda: review.approve(case.folder, digest=named),
        lambda: case.apply(digest=named),
    ):
        with pytest.raises(UsageProblem) as caught:
            call()
        assert caught.value.code == "digest_short"
    assert case.record.decisions == ()


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
