"""Owns the course of the experiment: steps, settling, measuring, the guard, and how it ends.

A *pass* starts guests of one kind until something says that it is enough, and frees them. Passes
follow each other, so that each way to start is measured on a host of its own. While guests settle
nothing of ours runs.
"""

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from vmsandbox import __version__
from vmsandbox.density import costs, probes
from vmsandbox.density.figures import (
    MIB,
    Conditions,
    HostReading,
    Outcome,
    Pass,
    Start,
    Step,
    StoppedBy,
    cost_of,
    summarize,
)
from vmsandbox.density.fleet import Fleet, Member, tiny_worktree
from vmsandbox.density.guard import expected_bytes, stop_reason
from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.model import LaunchPlan, Value
from vmsandbox.sandbox import Request, Rooms, propose

FAILURES_IN_A_ROW = 3
"""After these nothing else is to be expected of the next."""

Journal = Callable[[str, Value], None]
"""Takes a kind and a value for each thing that was found, as it is found."""


class Asked(Value):
    """What the user wants measured. `overrides` holds the flags of the ``[sandbox]`` table."""

    max: int
    step: int
    hold_s: float = Field(gt=0)
    workload: str | None = None
    starts: tuple[Start, ...]
    overrides: Mapping[str, Any] = Field(default_factory=dict)


class Experiment:
    """One experiment, checked when it is made: a refusal leaves nothing behind.

    Raises UsageProblem ``max_invalid``, ``step_invalid``, and what a run of such a sandbox raises:
    ``image_unknown``, ``memory_too_small``, ``config_invalid``, …
    """

    def __init__(self, rooms: Rooms, asked: Asked, note: Callable[[str], None]) -> None:
        _check(asked)
        self.rooms = rooms
        self.asked = asked
        self.plan = _plan(rooms, asked)
        self.conditions = _conditions(self.plan, asked)
        self._note = note
        self._over = threading.Event()
        self._at_once = threading.Event()
        self._fleet: Fleet | None = None

    def run(self, journal: Journal) -> Outcome:
        """Measure, and free every guest. Raises what making a template raises."""
        journal("conditions", self.conditions)
        disk_free = shutil.disk_usage(self.rooms.store.path).free
        passes = tuple(self._pass(start, journal) for start in self.asked.starts)
        summaries = {
            one.start: summary
            for one in passes
            if (summary := summarize(one, cpus=self.plan.host.cpus, disk_free_bytes=disk_free))
        }
        for start, summary in summaries.items():
            costs.keep(self.rooms.store, cost_of(summary, start, self.conditions, self.plan.limits))
        outcome = Outcome(
            conditions=self.conditions,
            passes=passes,
            summary=summaries,
            manager_rss_bytes=probes.own_rss_bytes(),
        )
        journal("outcome", outcome)
        return outcome

    def stop(self) -> None:
        """End early: no more guests, the last question, a report. Again: without the question.

        From any thread, but not from a signal handler.
        """
        if self._over.is_set():
            self._at_once.set()
        self._over.set()
        if self._fleet:
            self._fleet.interrupt(at_once=self._at_once.is_set())

    def _pass(self, start: Start, journal: Journal) -> Pass:
        overrides = dict(self.asked.overrides)
        try:
            with Fleet(self.rooms, start, overrides, self._over) as fleet:
                self._fleet = fleet
                template_bytes = fleet.warm(self.plan) if start == "clone" else 0
                course = _Course(self, fleet, journal)
                found = course.run()
                self._note(f"freeing {len(fleet.members)} guest(s)")
                return found.model_copy(update={"template_bytes": template_bytes})
        except HostProblem as problem:
            if problem.code != "interrupted":
                raise
            return Pass(
                start=start, attempted=0, stopped_by=StoppedBy.INTERRUPTED, before=probes.host()
            )
        finally:
            self._fleet = None

    # --- what a pass needs ----------------------------------------------------------------------

    def wait(self, seconds: float) -> bool:
        """Let time pass; False if the experiment ended meanwhile."""
        return not self._over.wait(seconds)

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def at_once(self) -> threading.Event:
        return self._at_once

    def known_cost(self, start: Start) -> int | None:
        """What an earlier experiment found such a guest to take."""
        limits = self.plan.limits
        known = costs.measured(
            self.rooms.store,
            self.plan.image.digest,
            cpus=limits.cpus,
            memory_mib=limits.memory_mib,
            start=start,
        )
        return known.memory_bytes if known else None

    def note(self, text: str) -> None:
        self._note(text)


class _Course:
    """One pass under way."""

    def __init__(self, experiment: Experiment, fleet: Fleet, journal: Journal) -> None:
        self.experiment = experiment
        self.asked = experiment.asked
        self.fleet = fleet
        self.journal = journal
        self.assumed = experiment.known_cost(fleet.start_kind)
        self.before = probes.host()
        self.attempted = 0
        self.in_a_row = 0
        self.steps: list[Step] = []

    def run(self) -> Pass:
        stopped: StoppedBy | None = None
        while stopped is None:
            started, stopped = self._start_some()
            if started:
                self._settle(started)
        self._end()
        return Pass(
            start=self.fleet.start_kind,
            attempted=self.attempted,
            stopped_by=StoppedBy.INTERRUPTED if self.experiment.is_over else stopped,
            before=self.before,
            samples=tuple(member.sample for member in self.fleet.members),
            steps=tuple(self.steps),
            failures=tuple(self.fleet.failures),
        )

    def _start_some(self) -> tuple[list[Member], StoppedBy | None]:
        """The guests of one step, and why it was the last."""
        started: list[Member] = []
        for left in range(min(self.asked.step, self.asked.max - self.attempted), 0, -1):
            if reason := self._reason(left):
                return started, reason
            self.attempted += 1
            if member := self.fleet.start(self.attempted):
                started.append(member)
                self.in_a_row = 0
            elif self.experiment.is_over:
                self.attempted -= 1
            else:
                self.in_a_row += 1
        if self.attempted < self.asked.max:
            return started, None
        return started, StoppedBy.MAX if self.fleet.members else StoppedBy.FAILURES

    def _reason(self, left: int) -> StoppedBy | None:
        """Why the next guest should not be started, of which the step has `left`."""
        if self.experiment.is_over:
            return StoppedBy.INTERRUPTED
        if self.in_a_row >= FAILURES_IN_A_ROW:
            return StoppedBy.FAILURES
        now = probes.host()
        expected = expected_bytes(
            self.before,
            now,
            alive=len(self.fleet.members),
            left=left,
            assumed=self.assumed,
            most=self.experiment.plan.limits.memory_mib * MIB,
        )
        return stop_reason(self.before, now, expected)

    def _settle(self, started: list[Member]) -> None:
        """Work, rest, measure. What did not come to rest is not measured here."""
        alive = f"{self.fleet.start_kind}: {len(self.fleet.members)} started"
        if self.asked.workload:
            self.experiment.note(f"{alive}, {len(started)} working")
            self.fleet.work(started, self.asked.workload)
        self.experiment.note(f"{alive}, settling for {self.asked.hold_s:g} s")
        if not self.experiment.wait(self.asked.hold_s / 2):
            return
        began, before = time.monotonic(), self.fleet.cpu_s()
        if not self.experiment.wait(self.asked.hold_s / 2):
            return
        after, seconds = self.fleet.cpu_s(), time.monotonic() - began
        step = self._step(probes.host())  # before anything else moves the host's memory
        for member in self.fleet.members:  # those that have rested longest tell it best
            share = _share(before, after, member.sample.id, seconds)
            member.learn(idle_cpu_share=share)
        for member in started:
            member.learn(settled=self.fleet.held(member))
            self.journal("guest", member.sample)
        self.journal("step", step)
        self._tell(step, started)

    def _step(self, host: HostReading) -> Step:
        step = Step(
            start=self.fleet.start_kind,
            alive=len(self.fleet.members),
            available_drop_bytes=self.before.available_bytes - host.available_bytes,
            host=host,
            manager_rss_bytes=probes.own_rss_bytes(),
        )
        self.steps.append(step)
        return step

    def _tell(self, step: Step, started: list[Member]) -> None:
        first = statistics.median(member.sample.first_command_s for member in started)
        each = max(step.available_drop_bytes, 0) / step.alive / MIB
        self.experiment.note(
            f"{step.start}: {step.alive} of {self.asked.max} alive, first command {first:.2f} s,"
            f" {each:.0f} MiB of the host each, {step.host.available_bytes / MIB / 1024:.1f} GiB"
            " available"
        )

    def _end(self) -> None:
        """With all alive: what each holds, and whether each answers."""
        for member in self.fleet.members:
            member.learn(end=self.fleet.held(member))
        if self.fleet.members:
            self.experiment.note(f"asking {len(self.fleet.members)} guest(s) for an answer")
        self.fleet.ask_all(self.experiment.at_once)
        for member in self.fleet.members:
            self.journal("end", member.sample)
        for failed in self.fleet.failures:
            self.journal("failure", failed)


def _share(
    before: Mapping[str, float], after: Mapping[str, float], id_: str, seconds: float
) -> float | None:
    """Of one core; None if it was not there all the time."""
    if id_ not in before or id_ not in after:
        return None
    return round(max(after[id_] - before[id_], 0.0) / seconds, 5)


def _check(asked: Asked) -> None:
    for name, value in (("max", asked.max), ("step", asked.step)):
        if value < 1:
            raise UsageProblem(
                f"{name}_invalid",
                f"--{name} {value}: an experiment needs at least one guest",
                hint=f"--{name} {8 if name == 'max' else 4}",
            )


def _plan(rooms: Rooms, asked: Asked) -> LaunchPlan:
    """What each start will do; refuses what cannot start."""
    with tiny_worktree() as folder:
        overrides = dict(asked.overrides)
        request = Request(command=("true",), worktree=folder, overrides=overrides)
        return propose(rooms, request)


def _conditions(plan: LaunchPlan, asked: Asked) -> Conditions:
    host = plan.host
    return Conditions(
        vmsandbox=__version__,
        cpu=host.cpu_model,
        cpus=host.cpus,
        memory_bytes=host.memory_bytes,
        kernel=host.kernel,
        accelerator=host.accelerator.value,
        qemu=host.qemu_version,
        libvirt=host.libvirt_version,
        libvirt_uri=host.libvirt_uri,
        machine=host.machine,
        image=plan.image.name,
        image_digest=plan.image.digest,
        guest_cpus=plan.limits.cpus,
        guest_memory_mib=plan.limits.memory_mib,
        step=asked.step,
        hold_s=asked.hold_s,
        workload=asked.workload,
    )
