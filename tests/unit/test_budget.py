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
    discard,
    folders,
    is_resumable,
    resolve,
)
from vmsandbox.batch.taskfile import Planned
from vmsandbox.density.figures import MIB, reserve_bytes
from vmsandbox.errors import UsageProblem
from vmsandbox.host import Load
from vmsandbox.store import Store, locked

GIB = 1024 * MIB
ONE = Need(memory_bytes=GIB, disk_bytes=MIB, basis="density")
LARGE = Need(memory_bytes=3 * GIB, disk_bytes=MIB, basis="density")
TASK = Planned(name="a", origin="a", where="t.yaml:1", command=("true",), worktree=Path("/w"))
OTHER = TASK.model_copy(update={"name": "b", "origin": "b"})


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


def test_batches_do_not_all_start_at_once(two: Two) -> None:
    assert two.first.admit("a", ONE, load(9)).admitted
    assert two.second.admit("a", ONE, load(9)).admitted
    waits = two.first.admit("b", ONE, load(9))
    assert (waits.admitted, waits.reason) == (False, "2 guests start at this moment, on 1 CPU(s)")
    two.second.hold({"a": (0, 0)})
    assert two.first.admit("b", ONE, load(9)).admitted
    two.first.hold({}, starting=["a"])
    assert two.first.admit("c", ONE, load(9)).admitted, "only one of them still starts"


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


def test_a_guest_beside_batches_has_its_share_while_it_lives(two: Two, store: Store) -> None:
    look = store.folder("0badcafe")
    look.path.mkdir()
    budget = Budget(store, look.id)
    busy = load(1).model_copy(update={"cpu_pressure": 95.0})
    with locked(look.manager_lock):
        assert budget.alone()
        assert not two.first.admit("large", LARGE, load(2)).admitted, "it waits from now on"
        assert budget.admit("look", ONE, busy, urgent=True).admitted
        two.first.give_back()
        assert not two.first.admit("a", ONE, load(1)).admitted
        assert not two.second.admit("a", ONE, busy).admitted, "a batch heeds pressure"
    assert two.first.admit("a", ONE, load(1)).admitted, "nobody looks any more"
    assert not budget.alone()
    with locked(look.manager_lock):
        assert not budget.admit("look", ONE, load(1), urgent=True).admitted


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
    wanted = {(finished.id, "finished", False), ("half", "half made", False)}
    ways = f"batch --resume {unfinished.id}    (or: vmsandbox batch --discard {unfinished.id})"
    wanted.add((unfinished.id, f"1 of 1 task(s) left: vmsandbox {ways}", True))
    for dry_run in (True, False):
        freed = clean_up(store, dry_run=dry_run)
        assert {(one.batch, one.detail, one.kept) for one in freed} == wanted
    assert folders(store) == [BatchFolder(unfinished.path)]


def refusal(store: Store, selector: str | None) -> str:
    with pytest.raises(UsageProblem) as caught:
        discard(store, selector)
    return caught.value.code


def test_a_batch_that_is_discarded_is_never_resumed(store: Store) -> None:
    with create(store, [TASK, OTHER], None) as first, create(store, [TASK], None) as second:
        Journal(first).change("a", ended=Ended(outcome="failed"))
        assert refusal(store, first.id) == "batch_managed_elsewhere"
    assert refusal(store, None) == "batch_ambiguous"
    assert refusal(store, "zz") == "batch_unknown"
    gone = discard(store, first.id[:7])
    assert (gone.batch, gone.left, gone.sandboxes) == (first.id, ("b",), ())
    assert not is_resumable(store, first.id)
    assert is_resumable(store, second.id)
    second.progress.write_text("torn")
    assert discard(store, second.id).left == ()
    assert refusal(store, None) == "nothing_to_resume"
    assert folders(store) == []
