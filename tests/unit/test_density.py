"""What the density experiment concludes from its figures, and when it stops."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.outcomes import DIGEST, GIB, HOST, conditions, failed, one_pass, outcome
from vmsandbox.density import costs, probes
from vmsandbox.density.figures import (
    MIB,
    Held,
    HostReading,
    StoppedBy,
    cost_of,
    percentile,
    reserve_bytes,
    summarize,
)
from vmsandbox.density.guard import PRESSURE_LIMIT, expected_bytes, stop_reason
from vmsandbox.model import Limits, MeasuredCost
from vmsandbox.store import Store

# --- when it is enough ----------------------------------------------------------------------------


def test_the_reserve_is_a_share_of_a_large_host_and_a_gibibyte_of_a_small_one() -> None:
    assert reserve_bytes(4 * GIB) == GIB
    assert reserve_bytes(200 * GIB) == 10 * GIB


@given(
    available=st.integers(0, 64 * GIB), total=st.integers(GIB, 64 * GIB), cost=st.integers(0, GIB)
)
def test_the_reserve_is_never_touched(available: int, total: int, cost: int) -> None:
    now = HOST.model_copy(update={"available_bytes": available, "total_bytes": total})
    stopped = stop_reason(HOST, now, cost)
    assert (stopped is None) == (available - cost >= reserve_bytes(total))


def test_a_host_that_begins_to_swap_or_to_wait_gets_no_more_guests() -> None:
    swapping = HOST.model_copy(update={"swap_used_bytes": 64 * MIB})
    assert stop_reason(HOST, swapping, 0) is StoppedBy.SWAP_GUARD
    assert stop_reason(swapping, swapping, 0) is None  # what was swapped before does not count
    waiting = HOST.model_copy(update={"memory_pressure": PRESSURE_LIMIT + 1})
    assert stop_reason(HOST, waiting, 0) is StoppedBy.PRESSURE_GUARD
    untold = HOST.model_copy(update={"memory_pressure": None})
    assert stop_reason(HOST, untold, 0) is None


def after(taken_mib: int) -> HostReading:
    return HOST.model_copy(update={"available_bytes": HOST.available_bytes - taken_mib * MIB})


def test_what_a_step_will_take_is_told_by_those_alive() -> None:
    def expected(taken_mib: int, alive: int, assumed_mib: int | None, left: int = 4) -> float:
        assumed = assumed_mib and assumed_mib * MIB
        return (
            expected_bytes(
                HOST, after(taken_mib), alive=alive, left=left, assumed=assumed, most=1024 * MIB
            )
            / MIB
        )

    assert expected(0, 0, None) == 1024  # one guest, however large
    assert expected(0, 0, 90) == 4 * 90  # an earlier experiment knew
    assert expected(1000, 10, None) == 4 * 100
    assert expected(500, 10, 90) == 4 * 90  # the careful one of two
    assert expected(-300, 10, None) == 4 * 16  # others freed memory meanwhile


# --- what follows ---------------------------------------------------------------------------------


def test_a_percentile_was_really_seen() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(1, 101)], 0.95) == 95.0
    assert percentile([7.0], 0.95) == 7.0


def test_a_summary_says_what_one_more_costs_and_how_many_fit() -> None:
    summary = summarize(one_pass(8), cpus=2, disk_free_bytes=100 * GIB)
    assert summary
    assert (summary.guests, summary.available_bytes, summary.cost_bytes) == (8, 80 * MIB, 80 * MIB)
    assert (summary.pss_bytes, summary.private_bytes) == (100 * MIB, 70 * MIB)
    assert summary.first_command_s == 1.045
    assert (summary.first_quarter_p95_s, summary.last_quarter_p95_s) == (1.02, 1.08)
    # 20 GiB are available, 5 % of 24 GiB stay with the host
    assert (summary.fits, summary.limited_by) == (
        (20 * GIB - 24 * GIB // 20) // (80 * MIB),
        "memory",
    )


def test_the_scarcer_of_memory_and_disk_limits_and_cpu_is_told() -> None:
    full = summarize(one_pass(4, idle=0.5), cpus=2, disk_free_bytes=6 * MIB)
    assert full
    assert (full.fits, full.limited_by, full.fits_cpu_share) == (6, "disk", 1.5)


def test_memory_that_others_free_meanwhile_makes_no_guest_cheap() -> None:
    quiet = one_pass(4)
    step = quiet.steps[0].model_copy(update={"available_drop_bytes": -GIB})
    summary = summarize(
        quiet.model_copy(update={"steps": (step,)}), cpus=2, disk_free_bytes=100 * GIB
    )
    assert summary
    assert summary.cost_bytes == summary.private_bytes


def test_the_figures_of_the_end_count() -> None:
    early = one_pass(2)
    settled = early.samples[0].settled
    assert settled
    later = settled.model_copy(update={"pss_bytes": 10 * MIB})
    samples = tuple(s.model_copy(update={"end": later}) for s in early.samples)
    summary = summarize(early.model_copy(update={"samples": samples}), cpus=2, disk_free_bytes=GIB)
    assert summary
    assert summary.pss_bytes == 10 * MIB


def test_a_workload_is_told_apart_from_the_idle_guest() -> None:
    idle = one_pass(3)
    assert summarize(idle, cpus=2, disk_free_bytes=GIB).work is None  # type: ignore[union-attr]
    before = Held(pss_bytes=0, private_bytes=20 * MIB, rss_bytes=0, disk_bytes=MIB // 2)
    worked = [
        sample.model_copy(update={"before_work": before, "workload_s": 4.0 + number})
        for number, sample in enumerate(idle.samples)
    ]
    summary = summarize(idle.model_copy(update={"samples": worked}), cpus=2, disk_free_bytes=GIB)
    assert summary
    assert summary.work
    assert summary.work.private_bytes == summary.private_bytes - 20 * MIB
    assert (summary.work.disk_bytes, summary.work.seconds) == (MIB // 2, 5.0)


def test_nothing_measured_is_no_summary() -> None:
    assert summarize(one_pass(0), cpus=2, disk_free_bytes=GIB) is None
    assert outcome(one_pass(0)).summary == {}


def test_only_guests_that_did_everything_are_completed() -> None:
    one = one_pass(3, failed=(failed("density-002", "no"),))
    silent = one.samples[0].model_copy(update={"answered": False})
    one = one.model_copy(update={"samples": (silent, *one.samples[1:])})
    assert (outcome(one).attempted, outcome(one).completed) == (3, 1)


def test_the_first_real_reason_stops_an_experiment() -> None:
    reached = one_pass(1)
    guarded = one_pass(1, start="cold", stopped_by=StoppedBy.MEMORY_GUARD)
    cut = one_pass(0, start="cold", stopped_by=StoppedBy.INTERRUPTED)
    assert outcome(reached).stopped_by is StoppedBy.MAX
    assert outcome(reached, guarded).stopped_by is StoppedBy.MEMORY_GUARD
    assert outcome(guarded, cut).stopped_by is StoppedBy.INTERRUPTED


# --- costs that are kept --------------------------------------------------------------------------


def cost(each_mib: int, *, workload: str | None = None, memory_mib: int = 512) -> MeasuredCost:
    summary = summarize(one_pass(4, each_mib=each_mib), cpus=2, disk_free_bytes=GIB)
    assert summary
    told = conditions(workload=workload)
    return cost_of(summary, "clone", told, Limits(memory_mib=memory_mib))


def test_a_measured_cost_is_found_by_image_and_size(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert costs.measured(store, DIGEST, cpus=1, memory_mib=512) is None
    costs.keep(store, cost(90))
    costs.keep(store, cost(300, memory_mib=2048))
    found = costs.measured(store, DIGEST, cpus=1, memory_mib=512)
    assert found == cost(90).model_copy(update={"measured_at": found and found.measured_at})
    assert costs.measured(store, DIGEST, cpus=2, memory_mib=512) is None
    assert costs.measured(store, DIGEST, cpus=1, memory_mib=512, start="cold") is None


def test_a_new_cost_replaces_the_old_one_and_the_dearest_workload_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for each in (90, 80):
        costs.keep(store, cost(each))
    found = costs.measured(store, DIGEST, cpus=1, memory_mib=512)
    assert found
    assert found.memory_bytes == 80 * MIB
    costs.keep(store, cost(200, workload="make"))
    found = costs.measured(store, DIGEST, cpus=1, memory_mib=512)
    assert found
    assert found.workload == "make"


@pytest.mark.parametrize("text", ["", "{", '{"version": 2, "costs": []}'])
def test_costs_that_cannot_be_read_are_unknown(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path)
    store.costs.write_text(text)
    assert costs.measured(store, DIGEST, cpus=1, memory_mib=512) is None
    costs.keep(store, cost(90))
    assert costs.measured(store, DIGEST, cpus=1, memory_mib=512)


# --- probes ---------------------------------------------------------------------------------------


def test_the_host_is_read() -> None:
    host = probes.host()
    assert 0 < host.available_bytes < host.total_bytes
    assert probes.own_rss_bytes() > MIB


def test_time_on_a_cpu_is_counted_finely() -> None:
    before = probes.cpu_s(os.getpid())
    began = time.process_time()
    while time.process_time() - began < 0.004:
        pass
    after = probes.cpu_s(os.getpid())
    assert before is not None
    assert after is not None
    assert 0 < after - before < 5
    assert probes.cpu_s(2**22 + 1) is None
