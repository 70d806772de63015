"""Owns the decision whether one more guest fits on this host now. Pure.

What a guest will take is promised to it when it is admitted; what it already holds shows in the
host's figures, so only the rest of the promise counts against the next one.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from vmsandbox.density.figures import MIB, reserve_bytes
from vmsandbox.host import Load
from vmsandbox.model import Limits, Value

FIRST = 2
"""Guests that start before anything of this batch was measured."""

CPU_PRESSURE_LIMIT = 80.0
"""Percent of ten seconds in which some process waited for a CPU."""

MEMORY_PRESSURE_LIMIT = 10.0
"""The same for memory: long before it hurts for good."""

DISK_RESERVE_BYTES = 2048 * MIB
_QEMU_BYTES = 160 * MIB
"""What QEMU itself holds beside a guest's memory, with its translation cache."""

Basis = Literal["density", "guests", "configured"]


class Need(Value):
    """What one guest will take of the host."""

    memory_bytes: int
    disk_bytes: int
    basis: Basis = Field(description="what says so: an experiment, this batch's own guests, size")


class Promise(Value):
    """What was promised to a guest of any batch, and what of that it holds by now."""

    memory_bytes: int
    disk_bytes: int
    held_memory_bytes: int = 0
    held_disk_bytes: int = 0
    starting: bool = Field(
        default=False, description="it was admitted, and what it takes does not show in full yet"
    )

    @property
    def memory_left(self) -> int:
        return max(0, self.memory_bytes - self.held_memory_bytes)

    @property
    def disk_left(self) -> int:
        return max(0, self.disk_bytes - self.held_disk_bytes)


class Verdict(NamedTuple):
    """Whether it may start; else why not, and whether it never could on this host."""

    admitted: bool
    reason: str = ""
    never: bool = False
    lacking: str = ""
    """What it waits for, in a word that stays the same while figures change."""


def need(limits: Limits, measured: tuple[int, int] | None, seen: tuple[int, int] | None) -> Need:
    """What a guest of this size will take: (memory, disk) bytes as an experiment `measured` them,
    and as the largest of this batch's guests of the size was `seen` to take; else its size.

    A guest that was seen to take more than the experiment's is believed.
    """
    if measured is None and seen is None:
        memory = limits.memory_mib * MIB + _QEMU_BYTES
        return Need(memory_bytes=memory, disk_bytes=limits.disk_mib * MIB, basis="configured")
    known = [figures for figures in (measured, seen) if figures]
    return Need(
        memory_bytes=max(memory for memory, _ in known),
        disk_bytes=max(disk for _, disk in known),
        basis="density" if seen is None or known[0] > seen else "guests",
    )


def limit(measured: int, jobs: int | None) -> int:
    """How many guests of a batch may run: two, and twice as many as were measured after that."""
    return min(max(FIRST, 2 * measured), jobs or 1024)


def decide(wanted: Need, load: Load, promises: Sequence[Promise], *, alone: bool) -> Verdict:
    """Whether a guest may start. `alone`: no other guest of a batch runs on this host.

    Where a guest is alone, waiting would change nothing: it is not held back by pressure, nor by
    the size of a disk that nobody has measured.
    """
    memory = _memory(wanted, load, promises)
    if not memory.admitted:
        return memory
    disk = _disk(wanted, load, promises, alone=alone)
    if not disk.admitted or alone:
        return disk
    return _pressed(load, promises)


def _memory(wanted: Need, load: Load, promises: Sequence[Promise]) -> Verdict:
    reserve = reserve_bytes(load.total_bytes)
    free = load.available_bytes - reserve - sum(one.memory_left for one in promises)
    if wanted.memory_bytes <= free:
        return Verdict(True)
    told = (
        f"it needs {_mib(wanted.memory_bytes)} of memory ({wanted.basis}),"
        f" {_mib(max(free, 0))} are free beside the reserve and what others were promised"
    )
    never = wanted.memory_bytes > load.total_bytes - reserve
    return Verdict(False, told, never=never, lacking="memory")


def _disk(wanted: Need, load: Load, promises: Sequence[Promise], *, alone: bool) -> Verdict:
    free = load.disk_free_bytes - DISK_RESERVE_BYTES - sum(one.disk_left for one in promises)
    tries = alone and wanted.basis == "configured" and free > 0
    if wanted.disk_bytes <= free or tries:
        return Verdict(True)
    told = (
        f"it needs {_mib(wanted.disk_bytes)} of disk ({wanted.basis}),"
        f" {_mib(max(free, 0))} are free beside the reserve and what others were promised"
    )
    return Verdict(False, told, lacking="disk")


def _pressed(load: Load, promises: Sequence[Promise]) -> Verdict:
    """Pressure is that of the last seconds: guests that start now are counted instead."""
    if (load.memory_pressure or 0.0) > MEMORY_PRESSURE_LIMIT:
        told = f"memory pressure is {load.memory_pressure:.0f} %"
        return Verdict(False, told, lacking="memory pressure")
    if (load.cpu_pressure or 0.0) > CPU_PRESSURE_LIMIT:
        told = f"CPU pressure is {load.cpu_pressure:.0f} %, above {CPU_PRESSURE_LIMIT:.0f} %"
        return Verdict(False, told, lacking="cpu")
    starting = sum(one.starting for one in promises)
    if starting >= max(FIRST, load.cpus):
        told = f"{starting} guests start at this moment, on {load.cpus} CPU(s)"
        return Verdict(False, told, lacking="cpu")
    return Verdict(True)


def _mib(count: int) -> str:
    return f"{count / MIB:.0f} MiB"
