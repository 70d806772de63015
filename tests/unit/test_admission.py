"""Admission: what a guest will take, how many may run, and whether one more fits."""

import pytest

from vmsandbox.batch.admission import (
    CPU_PRESSURE_LIMIT,
    DISK_RESERVE_BYTES,
    Need,
    Promise,
    decide,
    limit,
    need,
)
from vmsandbox.density.figures import MIB, reserve_bytes
from vmsandbox.host import Load
from vmsandbox.model import Limits

GIB = 1024 * MIB
TOTAL = 24 * GIB
RESERVE = reserve_bytes(TOTAL)


def load(
    *, memory: int = 20 * GIB, disk: int = 60 * GIB, cpu: float | None = 0.0, waits: float = 0.0
) -> Load:
    return Load(
        available_bytes=memory,
        total_bytes=TOTAL,
        disk_free_bytes=disk,
        memory_pressure=waits,
        cpu_pressure=cpu,
    )


def wanted(memory: int = GIB, disk: int = MIB, basis: str = "density") -> Need:
    return Need.model_validate({"memory_bytes": memory, "disk_bytes": disk, "basis": basis})


def promise(memory: int, held: int = 0, *, disk: int = 0) -> Promise:
    return Promise(memory_bytes=memory, held_memory_bytes=held, disk_bytes=disk)


def test_what_a_guest_takes_is_measured_else_seen_else_its_size() -> None:
    size = Limits(memory_mib=512, disk_mib=4096)
    unknown = need(size, None, None)
    assert unknown.memory_bytes > 512 * MIB
    assert (unknown.disk_bytes, unknown.basis) == (4096 * MIB, "configured")
    measured = need(size, (90 * MIB, 4 * MIB), None)
    assert (measured.memory_bytes, measured.basis) == (90 * MIB, "density")
    seen = need(size, None, (200 * MIB, 9 * MIB))
    assert (seen.memory_bytes, seen.disk_bytes, seen.basis) == (200 * MIB, 9 * MIB, "guests")
    both = need(size, (90 * MIB, 10 * MIB), (200 * MIB, 9 * MIB))
    assert (both.memory_bytes, both.disk_bytes) == (200 * MIB, 10 * MIB), "the larger of each"


def test_it_starts_with_two_and_raises_what_was_measured() -> None:
    assert [limit(measured, None) for measured in range(5)] == [2, 2, 4, 6, 8]
    assert [limit(measured, 3) for measured in range(4)] == [2, 2, 3, 3]
    assert limit(0, 1) == 1


@pytest.mark.parametrize(
    ("host", "promises", "admitted"),
    [
        (load(memory=RESERVE + GIB), (), True),
        (load(memory=RESERVE + GIB - 1), (), False),
        (load(memory=RESERVE + 2 * GIB), (promise(GIB),), True),
        (load(memory=RESERVE + 2 * GIB), (promise(GIB + 1),), False),
        # What it holds already is no longer in MemAvailable, so only the rest counts.
        (load(memory=RESERVE + GIB), (promise(GIB, GIB),), True),
        (load(memory=RESERVE + GIB), (promise(GIB, GIB // 2),), False),
        (load(memory=RESERVE + GIB), (promise(GIB, 3 * GIB),), True),
        (load(disk=DISK_RESERVE_BYTES + MIB), (), True),
        (load(disk=DISK_RESERVE_BYTES + MIB - 1), (), False),
        (load(disk=DISK_RESERVE_BYTES + 2 * MIB), (promise(0, disk=2 * MIB),), False),
        (load(cpu=CPU_PRESSURE_LIMIT), (promise(0),), True),
        (load(cpu=CPU_PRESSURE_LIMIT + 1), (promise(0),), False),
        (load(cpu=None), (promise(0),), True),
        (load(waits=11), (promise(0),), False),
    ],
)
def test_it_fits_beside_the_reserve_and_what_was_promised(
    host: Load, promises: tuple[Promise, ...], admitted: bool
) -> None:
    verdict = decide(wanted(), host, promises, alone=not promises)
    assert verdict.admitted == admitted
    assert bool(verdict.reason) == (not admitted) == bool(verdict.lacking)


def test_no_more_start_at_once_than_there_are_cpus() -> None:
    """The pressure of a start shows when it is too late to ask for it."""
    starts, runs = Promise(memory_bytes=0, disk_bytes=0, starting=True), promise(0)
    small, large = load(), load().model_copy(update={"cpus": 4})
    assert decide(wanted(), small, (starts, runs, runs), alone=False).admitted, "two on any host"
    assert decide(wanted(), large, (starts,) * 3, alone=False).admitted
    for host, promises in ((small, (starts, starts)), (large, (starts,) * 4)):
        verdict = decide(wanted(), host, promises, alone=False)
        assert (verdict.admitted, verdict.lacking) == (False, "cpu")
    assert decide(wanted(), small, (starts, starts), alone=True).admitted, "somebody waits for it"


def test_a_guest_alone_waits_for_no_pressure_nor_for_a_disk_that_nobody_measured() -> None:
    assert decide(wanted(), load(cpu=100, waits=100), (), alone=True).admitted
    unmeasured = wanted(disk=100 * GIB, basis="configured")
    assert decide(unmeasured, load(), (), alone=True).admitted
    assert not decide(unmeasured, load(), (promise(0),), alone=False).admitted
    assert not decide(wanted(disk=100 * GIB), load(), (), alone=True).admitted
    assert not decide(unmeasured, load(disk=DISK_RESERVE_BYTES), (), alone=True).admitted


def test_what_never_fits_is_known_at_once() -> None:
    assert decide(wanted(TOTAL), load(), (), alone=True).never
    assert not decide(wanted(4 * GIB), load(memory=3 * GIB), (), alone=True).never
