"""Owns what the density experiment measures, as values, and what follows from them. Pure.

Medians are over the guests of one way to start. Memory figures are those of the moment when all
guests were alive, so that what they share is shared by all.
"""

import math
import statistics
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import Field

from vmsandbox.model import Digest, Failure, Limits, MeasuredCost, Value, now

Start = Literal["clone", "cold"]
MIB = 1024 * 1024


class StoppedBy(StrEnum):
    """Why no more guests were started."""

    MAX = "max"
    MEMORY_GUARD = "memory_guard"
    SWAP_GUARD = "swap_guard"
    PRESSURE_GUARD = "pressure_guard"
    FAILURES = "failures"
    INTERRUPTED = "interrupted"


class HostReading(Value):
    """The host at one moment."""

    available_bytes: int = Field(description="MemAvailable")
    total_bytes: int
    swap_used_bytes: int
    memory_pressure: float | None = Field(
        description="percent of the last 10 s in which some process waited for memory; None where"
        " the kernel does not tell"
    )


class Held(Value):
    """What one guest holds of the host."""

    pss_bytes: int
    private_bytes: int
    rss_bytes: int
    disk_bytes: int = Field(description="allocated by the files of its sandbox")


class Work(Value):
    """What a workload takes on top of an idle guest."""

    private_bytes: int
    disk_bytes: int
    seconds: float


class Sample(Value):
    """One guest."""

    start: Start
    id: str
    name: str
    alive: int = Field(description="guests of the experiment alive once this one was, with it")
    first_command_s: float = Field(
        description="from the call that makes the sandbox to the result of a first command"
    )
    timings: dict[str, float] = Field(default_factory=dict, description="phases within that")
    workload_s: float | None = None
    before_work: Held | None = Field(default=None, description="where there is a workload")
    settled: Held | None = Field(default=None, description="after its own step had settled")
    idle_cpu_share: float | None = Field(default=None, description="of one core, in the last rest")
    end: Held | None = Field(default=None, description="when no more guests were started")
    answered: bool = Field(default=False, description="a command at the very end")

    @property
    def held(self) -> Held | None:
        """The latest that is known."""
        return self.end or self.settled

    @property
    def work(self) -> Work | None:
        """What its workload took, if it had one."""
        before, after = self.before_work, self.held
        if before is None or after is None or self.workload_s is None:
            return None
        return Work(
            private_bytes=after.private_bytes - before.private_bytes,
            disk_bytes=after.disk_bytes - before.disk_bytes,
            seconds=self.workload_s,
        )


class Step(Value):
    """The host after a step had settled."""

    start: Start
    alive: int
    available_drop_bytes: int = Field(description="of MemAvailable, since before the first guest")
    host: HostReading
    manager_rss_bytes: int


class Failed(Value):
    """One guest that did not do what it should."""

    start: Start
    name: str
    failure: Failure


class Pass(Value):
    """All guests of one way to start, from none to the last."""

    start: Start
    attempted: int
    stopped_by: StoppedBy
    before: HostReading
    samples: tuple[Sample, ...] = ()
    steps: tuple[Step, ...] = ()
    failures: tuple[Failed, ...] = ()
    template_bytes: int = Field(default=0, description="on disk, shared by all clones")

    @property
    def completed(self) -> int:
        """Guests that answered to the end, and of which nothing failed."""
        failed = {failed.name for failed in self.failures}
        return sum(sample.answered and sample.name not in failed for sample in self.samples)


class Conditions(Value):
    """What a reader needs to know to compare."""

    vmsandbox: str
    cpu: str
    cpus: int
    memory_bytes: int
    kernel: str
    accelerator: str
    qemu: str
    libvirt: str
    libvirt_uri: str
    machine: str
    image: str
    image_digest: Digest
    guest_cpus: int
    guest_memory_mib: int
    step: int
    hold_s: float
    workload: str | None
    at: datetime = Field(default_factory=now)


class Summary(Value):
    """What one more guest costs, and how many such guests fit on this host."""

    guests: int
    pss_bytes: int
    private_bytes: int
    disk_bytes: int
    first_command_s: float
    first_command_p95_s: float
    first_quarter_p95_s: float = Field(description="of first command, among the guests started")
    last_quarter_p95_s: float = Field(description="first, and among those started last")
    available_bytes: int | None = Field(description="of MemAvailable, per guest")
    idle_cpu_share: float | None = Field(description="of one core")
    cost_bytes: int = Field(description="memory of the host that one more guest takes")
    fits: int = Field(description="guests on this host as it was before the first")
    limited_by: Literal["memory", "disk"]
    work: Work | None = Field(default=None, description="of the workload alone, medians")
    fits_cpu_share: float | None = Field(
        description="of all CPUs, what that many idle guests would take; above 1 they are not idle"
    )


class Outcome(Value):
    """The whole experiment."""

    conditions: Conditions
    passes: tuple[Pass, ...]
    summary: dict[Start, Summary]
    manager_rss_bytes: int = Field(description="of the experiment's own process, at its end")

    @property
    def attempted(self) -> int:
        return sum(one.attempted for one in self.passes)

    @property
    def completed(self) -> int:
        return sum(one.completed for one in self.passes)

    @property
    def failures(self) -> tuple[Failed, ...]:
        return tuple(failed for one in self.passes for failed in one.failures)

    @property
    def stopped_by(self) -> StoppedBy:
        """What ended it: the first reason that is not just having reached the number asked for."""
        reasons = [one.stopped_by for one in self.passes]
        if StoppedBy.INTERRUPTED in reasons or not reasons:
            return StoppedBy.INTERRUPTED
        return next((reason for reason in reasons if reason is not StoppedBy.MAX), StoppedBy.MAX)


# --- what follows ---------------------------------------------------------------------------------


def reserve_bytes(total_bytes: int) -> int:
    """What the host keeps for itself: 5 %, at least 1 GiB."""
    return max(1024 * MIB, total_bytes // 20)


def percentile(values: Sequence[float], share: float) -> float:
    """By the nearest rank: a value that was really seen."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarize(one: Pass, *, cpus: int, disk_free_bytes: int) -> Summary | None:
    """None if no guest was measured. `disk_free_bytes` is before the first guest."""
    measured = [sample for sample in one.samples if sample.held]
    if not measured:
        return None
    held = [sample.held for sample in measured if sample.held]
    boots = [sample.first_command_s for sample in measured]
    quarter = -(-len(boots) // 4)
    private = _median([h.private_bytes for h in held])
    disk = _median([h.disk_bytes for h in held])
    available = _available_each(one)
    idle = [s.idle_cpu_share for s in measured if s.idle_cpu_share is not None]
    share = round(statistics.median(idle), 5) if idle else None
    # Where other work frees memory meanwhile, MemAvailable alone would promise too much.
    cost = max(private, available or 0)
    room = {
        "memory": (one.before.available_bytes - reserve_bytes(one.before.total_bytes)) / cost,
        "disk": disk_free_bytes / max(disk, 1),
    }
    limit: Literal["memory", "disk"] = min(("memory", "disk"), key=room.__getitem__)
    fits = max(0, int(room[limit]))
    return Summary(
        guests=len(measured),
        pss_bytes=_median([h.pss_bytes for h in held]),
        private_bytes=private,
        disk_bytes=disk,
        first_command_s=round(statistics.median(boots), 3),
        first_command_p95_s=percentile(boots, 0.95),
        first_quarter_p95_s=percentile(boots[:quarter], 0.95),
        last_quarter_p95_s=percentile(boots[-quarter:], 0.95),
        available_bytes=available,
        idle_cpu_share=share,
        cost_bytes=cost,
        fits=fits,
        limited_by=limit,
        work=_median_work([work for sample in measured if (work := sample.work)]),
        fits_cpu_share=None if share is None else round(fits * share / cpus, 4),
    )


def _median_work(found: Sequence[Work]) -> Work | None:
    if not found:
        return None
    return Work(
        private_bytes=_median([work.private_bytes for work in found]),
        disk_bytes=_median([work.disk_bytes for work in found]),
        seconds=round(statistics.median(work.seconds for work in found), 3),
    )


def _median(values: Sequence[int]) -> int:
    return round(statistics.median(values))


def _available_each(one: Pass) -> int | None:
    if not one.steps or not one.steps[-1].alive:
        return None
    return one.steps[-1].available_drop_bytes // one.steps[-1].alive


def cost_of(one: Summary, start: Start, conditions: Conditions, limits: Limits) -> MeasuredCost:
    """What admission may count with from now on."""
    return MeasuredCost(
        image_digest=conditions.image_digest,
        cpus=limits.cpus,
        memory_mib=limits.memory_mib,
        start=start,
        workload=conditions.workload,
        accelerator=conditions.accelerator,
        guests=one.guests,
        memory_bytes=one.cost_bytes,
        pss_bytes=one.pss_bytes,
        private_bytes=one.private_bytes,
        disk_bytes=one.disk_bytes,
        first_command_s=one.first_command_s,
        idle_cpu_share=one.idle_cpu_share,
        measured_at=conditions.at,
    )
