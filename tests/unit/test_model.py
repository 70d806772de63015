"""The values of floor 0: frozen, strict, and digests that mean what they say."""

import json
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vmsandbox.model import (
    Change,
    ChangeKind,
    ChangeSet,
    Decision,
    Limits,
    ResultRecord,
    ResultState,
    SandboxState,
    Task,
    Verdict,
    canonical_json,
    digest_of,
    result_may_become,
    sandbox_may_become,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
TREE_PATHS = st.binary(min_size=1, max_size=40).filter(lambda path: b"\0" not in path)
OID = "a" * 40
DIGEST = "sha256:" + "b" * 64


# --- states ---------------------------------------------------------------------------------------


def test_a_sandbox_walks_the_road_from_queued_to_stopped() -> None:
    road = list(SandboxState)[:-1]
    assert road[0] is SandboxState.QUEUED
    assert road[-1] is SandboxState.STOPPED
    for current, following in pairwise(road):
        assert sandbox_may_become(current, following), (current, following)
    assert sandbox_may_become(SandboxState.RUNNING, SandboxState.READY)


@pytest.mark.parametrize("state", SandboxState)
def test_any_sandbox_may_fail_and_staying_is_no_step(state: SandboxState) -> None:
    assert sandbox_may_become(state, SandboxState.FAILED)
    assert sandbox_may_become(state, state)


@pytest.mark.parametrize(
    ("current", "following"),
    [
        ("queued", "ready"),
        ("queued", "running"),
        ("starting", "running"),
        ("starting", "collecting"),
        ("stopped", "running"),
        ("stopped", "ready"),
        ("failed", "running"),
        ("failed", "ready"),
        ("ready", "queued"),
    ],
)
def test_a_sandbox_skips_no_step(current: str, following: str) -> None:
    assert not sandbox_may_become(SandboxState(current), SandboxState(following))


def test_only_pending_follows_no_result() -> None:
    reachable = {s for s in ResultState if result_may_become(ResultState.NONE, s)}
    assert reachable == {ResultState.NONE, ResultState.PENDING}


def test_a_decided_result_is_never_decided_again() -> None:
    decided = [ResultState.APPLIED, ResultState.DROPPED]
    for current, following in product(decided, ResultState):
        allowed = following in (current, ResultState.PENDING)
        assert result_may_become(current, following) is allowed, (current, following)


@pytest.mark.parametrize("state", ResultState)
def test_a_new_collection_makes_any_result_pending_and_none_forgets(state: ResultState) -> None:
    assert result_may_become(state, ResultState.PENDING)
    assert result_may_become(state, ResultState.NONE) is (state is ResultState.NONE)


# --- digests --------------------------------------------------------------------------------------


@given(JSON)
def test_canonical_json_is_ascii_and_says_the_same(value: object) -> None:
    spelled = canonical_json(value)
    assert spelled.isascii()
    assert json.loads(spelled) == value
    assert canonical_json(json.loads(spelled)) == spelled


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_a_digest_does_not_see_the_order_of_keys(value: dict[str, int]) -> None:
    turned = dict(reversed(value.items()))
    assert digest_of(turned) == digest_of(value)


def test_a_digest_is_the_same_everywhere() -> None:
    empty_object = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert digest_of({}) == f"sha256:{empty_object}"


def test_a_change_set_digest_covers_each_part() -> None:
    parts = ["base", "result", "image", "task"]
    whole = ChangeSet.digest_for(*parts)
    for position in range(4):
        other = [*parts[:position], "other", *parts[position + 1 :]]
        assert ChangeSet.digest_for(*other) != whole
    assert ChangeSet.digest_for("result", "base", "image", "task") != whole


def task(**changes: object) -> Task:
    fields: dict[str, object] = {"command": ("make",), "worktree": Path("/srv/project")}
    return Task.model_validate(fields | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"command": ("make", "test")},
        {"worktree": Path("/srv/other")},
        {"env": {"A": "1"}},
        {"include": ("dist/*",)},
        {"history": "none"},
    ],
)
def test_a_task_digest_covers_each_field(changes: dict[str, object]) -> None:
    assert task(**changes).digest() != task().digest()


def test_a_task_digest_holds_no_value_of_the_environment() -> None:
    assert task(env={"TOKEN": "one"}).digest() == task(env={"TOKEN": "two"}).digest()


# --- values ---------------------------------------------------------------------------------------


@given(TREE_PATHS)
def test_a_path_of_any_bytes_survives_json(path: bytes) -> None:
    change = Change(kind=ChangeKind.ADDED, path=path, new_mode=0o100644, new_oid=OID)
    spelled = change.model_dump_json()
    spelled.encode("utf-8", "strict")
    assert Change.model_validate_json(spelled) == change


@given(st.lists(TREE_PATHS, max_size=3))
def test_a_result_record_survives_json(paths: list[bytes]) -> None:
    decision = Decision(verdict=Verdict.APPROVED, digest=DIGEST, who="me", paths=tuple(paths))
    record = ResultRecord(
        state=ResultState.PENDING,
        digest=DIGEST,
        decisions=(decision,),
        applied_paths=tuple(paths),
        target=Path("/srv/project"),
    )
    assert ResultRecord.model_validate_json(record.model_dump_json()) == record


def test_values_are_frozen_and_know_their_fields() -> None:
    limits = Limits()
    with pytest.raises(ValidationError, match="frozen"):
        limits.cpus = 2
    with pytest.raises(ValidationError, match="Extra inputs"):
        Limits.model_validate({"cpu": 2})


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Limits(cpus=0), "cpus"),
        (lambda: Limits(memory_mib=1), "memory_mib"),
        (lambda: Limits(disk_mib=0), "disk_mib"),
        (lambda: Limits(timeout_s=0), "timeout_s"),
        (lambda: task(command=()), "command"),
        (lambda: task(history="some"), "history"),
        (lambda: task(history="0"), "history"),
        (lambda: Decision(verdict=Verdict.DROPPED, digest="sha256:1", who="me"), "digest"),
    ],
)
def test_senseless_values_name_their_field(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        make()
