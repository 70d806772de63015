"""The shared budget and the record of batches: what is promised once is promised, a batch that
nobody manages counts for nothing, and whoever waits longest is next.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from vmsandbox.batch.admission import Need
from vmsandbox.batch.budget import Budget
from vmsandbox.batch.record import (
    BatchFolder,
    Ended,
    Journal,
    clean_up,
    create,
    folders,
    resolve,
)
from vmsandbox.batch.taskfile import Planned
from vmsandbox.density.figures import MIB, reserve_bytes
from vmsandbox.errors import UsageProblem
from vmsandbox.host import Load
from vmsandbox.store import Store

GIB = 1024 * MIB
ONE = Need(memory_bytes=GIB, disk_bytes=MIB, basis="density")
LARGE = Need(memory_bytes=3 * GIB, disk_bytes=MIB, basis="density")
TASK = Planned(name="a", origin="a", where="t.yaml:1", command=("true",), worktree=Path("/w"))


def load(gib: int) -> Load:
    """A host with so much memory free beside its reserve."""
    return Load(
        available_bytes=reserve_bytes(24 * GIB) + gib * GIB,
        total_bytes=24 * GIB,
        disk_free_bytes=60 * GIB,
        memory_pressure=0.0,
        cpu_pressure=0.0,
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


class Two:
    """Two batches that are managed, by us, and can be ended."""

    def __init__(self, store: Store) -> None:
        self.ends = [ExitStack(), ExitStack()]
        self.folders = [end.enter_context(create(store, [TASK], None)) for end in self.ends]
        self.first, self.second = (Budget(store, folder.id) for folder in self.folders)


@pytest.fixture
def two(store: Store) -> Iterator[Two]:
    both = Two(store)
    yield both
    for end in both.ends:
        end.close()


def test_batches_share_what_there_is(two: Two) -> None:
    assert two.first.admit("a", ONE, load(2)).admitted
    assert two.second.admit("a", ONE, load(2)).admitted
    assert not two.second.admit("b", ONE, load(2)).admitted
    two.first.release("a")
    assert two.second.admit("b", ONE, load(2)).admitted


def test_a_promise_is_made_once(two: Two) -> None:
    assert two.first.admit("a", ONE, load(2)).admitted
    assert two.first.admit("a", ONE, load(0)).admitted, "it has its share already"
    assert two.second.admit("a", ONE, load(2)).admitted, "and it counts only once"


def test_what_a_guest_holds_by_now_is_no_longer_promised(two: Two) -> None:
    assert two.first.admit("a", ONE, load(2)).admitted
    two.first.hold({"a": (GIB, 0)})  # MemAvailable is less by as much
    assert two.second.admit("a", ONE, load(1)).admitted
    assert not two.second.admit("b", ONE, load(1)).admitted


def test_the_promises_of_a_batch_that_was_killed_are_void(two: Two) -> None:
    assert two.first.admit("a", ONE, load(1)).admitted
    assert not two.second.admit("a", ONE, load(1)).admitted
    two.ends[0].close()
    assert two.second.admit("a", ONE, load(1)).admitted


def test_a_batch_that_waits_longer_is_not_overtaken(two: Two) -> None:
    assert two.first.admit("a", ONE, load(4)).admitted
    assert not two.first.admit("large", LARGE, load(3)).admitted
    passed_over = two.second.admit("a", ONE, load(3))
    assert (passed_over.admitted, passed_over.lacking) == (False, "turn")
    two.first.release("large")
    assert not two.second.admit("a", ONE, load(3)).admitted
    two.first.give_back()
    assert two.second.admit("a", ONE, load(3)).admitted


def test_a_batch_that_is_taken_up_again_asks_anew(two: Two) -> None:
    assert two.first.admit("a", ONE, load(1)).admitted
    two.first.give_back()
    assert not two.first.admit("a", LARGE, load(1)).admitted


def test_one_that_waits_and_is_killed_holds_nobody_up(two: Two) -> None:
    assert two.second.admit("a", ONE, load(4)).admitted
    assert not two.first.admit("large", LARGE, load(3)).admitted
    two.ends[0].close()
    assert two.second.admit("b", ONE, load(3)).admitted


# --- the record -----------------------------------------------------------------------------------


def test_the_latest_unfinished_batch_is_resumed(store: Store) -> None:
    with create(store, [TASK], None) as first, create(store, [TASK], 3) as second:
        assert [folder.managed() for folder in folders(store)] == [True, True]
    assert second.read().jobs == 3
    assert resolve(store, None).id == second.id
    assert resolve(store, first.id[:6]).id == first.id
    Journal(second).change("a", ended=Ended(outcome="failed"))
    assert resolve(store, "last").id == first.id
    assert Journal(second).of("a").ended == Ended(outcome="failed")
    Journal(first).change("a", ended=Ended(outcome="completed"))
    for selector, code in ((None, "nothing_to_resume"), ("zz", "batch_unknown"), ("", "batch_")):
        with pytest.raises(UsageProblem) as caught:
            resolve(store, selector)
        assert caught.value.code.startswith(code)


def test_a_batch_has_one_manager(store: Store) -> None:
    with create(store, [TASK], None) as folder:
        with pytest.raises(UsageProblem) as caught, folder.sole_manager():
            pass
        assert caught.value.code == "batch_managed_elsewhere"
    with folder.sole_manager():
        assert folder.managed()


def test_cleaning_up_keeps_what_is_managed_or_unfinished(store: Store) -> None:
    with create(store, [TASK], None) as unfinished, create(store, [TASK], None) as finished:
        Journal(finished).change("a", ended=Ended(outcome="completed"))
        assert clean_up(store, dry_run=False) == []
    (store.batches / "half").mkdir()
    wanted = {(finished.id, "finished"), ("half", "half made")}
    for dry_run in (True, False):
        freed = clean_up(store, dry_run=dry_run)
        assert {(one.batch, one.detail) for one in freed} == wanted
    assert folders(store) == [BatchFolder(unfinished.path)]
