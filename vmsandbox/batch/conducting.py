"""Owns a batch on its way: which task begins when, and what stands in the batch's record about it.

One thread conducts, each running sandbox has a thread of its own. What is written down comes
first: whoever takes a killed batch up again finds every task either untouched, begun, or ended.
"""

import contextlib
import queue
import time
from collections.abc import Iterator

from vmsandbox import host
from vmsandbox.batch import admission
from vmsandbox.batch.admission import Need, Verdict
from vmsandbox.batch.budget import Budget
from vmsandbox.batch.making import Maker
from vmsandbox.batch.record import QUEUED, SKIPPED, BatchFolder, Ended, Journal
from vmsandbox.batch.report import BatchReport, TaskReport, Watcher
from vmsandbox.batch.taskfile import Planned
from vmsandbox.batch.worker import Held, Worker
from vmsandbox.density import measured as density_cost
from vmsandbox.errors import VmsandboxError
from vmsandbox.model import Outcome
from vmsandbox.sandbox import Rooms
from vmsandbox.store import SandboxFolder

_LOOK_S = 1.0
_PATIENCE_S = 300.0
"""How long a task waits for room on a host on which no other guest of a batch runs."""

_Size = tuple[str, int, int]


class Conductor:
    """Carries a batch out that this process manages."""

    def __init__(
        self, rooms: Rooms, folder: BatchFolder, watcher: Watcher, *, jobs: int | None = None
    ) -> None:
        self._rooms = rooms
        self._folder = folder
        self._plan = folder.read()
        self._journal = Journal(folder)
        self._jobs = jobs or self._plan.jobs
        self._watcher = watcher
        self._budget = Budget(rooms.store, folder.id)
        self._maker = Maker(rooms, folder.id)
        self._over: queue.SimpleQueue[tuple[str, Ended | None]] = queue.SimpleQueue()
        self._workers: dict[str, Worker] = {}
        self._reasons: dict[str, str] = {}
        self._lacking: dict[str, str] = {}
        self._given_up: set[str] = set()
        self._seen: dict[_Size, Held] = {}
        self._measured = 0
        self._asked = 0
        self._stuck_since: float | None = None

    # --- being asked to end ---------------------------------------------------------------------

    def ask_to_end(self) -> None:
        """First: begin nothing more. Then: end what runs, and still collect. Then: at once. From
        any thread."""
        self._asked += 1
        if self._asked > 1:
            for worker in list(self._workers.values()):
                self._stop(worker)
        self._over.put(("", None))  # wakes the conductor

    def _stop(self, worker: Worker) -> None:
        with contextlib.suppress(VmsandboxError):  # a full disk must not keep it running
            self._journal.change(worker.task.name, stopped=True)
        worker.ask_to_end(at_once=self._asked > 2)

    # --- the whole batch ------------------------------------------------------------------------

    def run(self) -> BatchReport:
        """Bring every task to its end, or to where it can be taken up again.

        What cannot be written down ends the batch, but not what runs: that is waited for.
        """
        self._budget.give_back()  # what an earlier manager of this batch had reserved
        try:
            self._take_up()
            self._conduct()
        finally:
            for worker in list(self._workers.values()):
                worker.join()
        self._budget.give_back()
        return self.report()

    def _conduct(self) -> None:
        looked = 0.0
        while self._workers or (not self._asked and self._open()):
            if not self._asked:
                self._begin_what_fits()
            self._wait(_LOOK_S)
            if time.monotonic() - looked >= _LOOK_S:
                self._look()
                looked = time.monotonic()

    def _open(self) -> list[Planned]:
        """Tasks of which nothing has come, and that nobody works on."""
        return [
            task
            for task in self._plan.tasks
            if not self._journal.of(task.name).ended
            and task.name not in self._workers
            and task.name not in self._given_up
        ]

    def _wait(self, seconds: float) -> None:
        """For something to end; then take all that has."""
        try:
            self._ended(*self._over.get(timeout=seconds))
            while True:
                self._ended(*self._over.get_nowait())
        except queue.Empty:
            return

    def _ended(self, name: str, ended: Ended | None) -> None:
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        worker.join()
        self._learn(worker)
        self._measured += 1
        self._budget.release(name)
        if ended is None:
            self._given_up.add(name)
            self._reasons[name] = f"stopped; vmsandbox batch --resume {self._folder.id} goes on"
        elif ended.outcome == Outcome.CANCELLED and self._journal.of(name).stopped:
            self._reopen(name, worker.folder.id)
        else:
            self._end(name, ended)

    def _reopen(self, name: str, sandbox: str) -> None:
        """A task that this batch stopped begins anew, later, in another sandbox; what it had done
        stays where it is."""
        former = (*self._journal.of(name).former, sandbox)
        self._journal.change(name, sandbox=None, begun=False, stopped=False, former=former)
        self._reasons[name] = f"stopped; what it had done is in sandbox {sandbox}"
        if self._asked:
            self._given_up.add(name)

    def _end(self, name: str, ended: Ended, **fields: str) -> None:
        if ended.evidence is None and ended.outcome != SKIPPED:  # no sandbox: this is all there is
            ended = ended.model_copy(update={"evidence": self._folder.progress})
        self._journal.change(name, ended=ended, **fields)
        self._watcher.ended(self._task_report(name, self._journal.of(name).sandbox, ended))

    # --- taking up ------------------------------------------------------------------------------

    def check_keys(self) -> None:
        """Before a batch goes on: its tasks would fail for good without the keys of their gateways.

        Raises UsageProblem ``gateway_without_key``, ``gateway_key_unusable``.
        """
        self._maker.check_keys(self._open(), self._made())

    def _made(self) -> dict[str, str]:
        former = {id_ for task in self._plan.tasks for id_ in self._journal.of(task.name).former}
        return self._maker.made(former)

    def _take_up(self) -> None:
        """Find what an earlier manager of this batch had made, and what needs no sandbox at all."""
        made = self._made()
        for task in self._open():
            progress = self._journal.of(task.name)
            if (sandbox := made.get(task.name)) is not None:
                if progress.sandbox != sandbox:
                    self._journal.change(task.name, sandbox=sandbox)
            elif progress.begun:
                reason = "its sandbox was deleted before it had ended"
                self._end(task.name, Ended(outcome=Outcome.CANCELLED, reason=reason))
            elif earlier := self._maker.there_already(task):
                skipped = Ended(outcome=SKIPPED, reason=earlier.reason)
                self._end(task.name, skipped, sandbox=earlier.id)
            else:
                self._queued(task, "not its turn yet", "turn")
        for task in self._open():
            if sandbox := self._journal.of(task.name).sandbox:
                self._adopt(task, self._rooms.store.folder(sandbox))

    def _adopt(self, task: Planned, folder: SandboxFolder) -> None:
        """A guest that runs takes its share already; another has to wait for its turn."""
        record = folder.read_record()
        if self._rooms.guest_runs(record):
            self._budget.adopt(task.name, self._need(task))
            self._work(task, folder)

    def _queued(self, task: Planned, reason: str, lacking: str) -> None:
        """Told once for each thing that it lacks, not for each figure."""
        self._reasons[task.name] = reason
        if self._lacking.get(task.name) != lacking:
            self._lacking[task.name] = lacking
            self._watcher.queued(task.name, reason)

    # --- beginning ------------------------------------------------------------------------------

    def _begin_what_fits(self) -> None:
        """In the order of the batch: who does not fit is not overtaken."""
        for task in self._ready():
            if self._asked or not self._begin(task):
                break

    def _ready(self) -> Iterator[Planned]:
        """Open tasks whose dependencies have completed; those that can never be are ended."""
        for task in self._open():
            waits = False
            for other in self._before(task):
                ended = self._journal.of(other.name).ended
                if ended is None:
                    waits = True
                elif not (ended.completed or self._maker.completed_earlier(other, ended)):
                    unproven = ", but a check did not pass" if ended.unproven else ""
                    reason = f"it comes after {other.name}, which is {ended.outcome}{unproven}"
                    self._end(task.name, Ended(outcome=Outcome.CANCELLED, reason=reason))
                    waits = True
                    break
            if not waits:
                yield task
            elif not self._journal.of(task.name).ended:
                self._reasons[task.name] = f"it comes after {', '.join(task.after)}"

    def _before(self, task: Planned) -> list[Planned]:
        return [other for other in self._plan.tasks if other.origin in task.after]

    def _begin(self, task: Planned) -> bool:
        """Start a task if it fits; False if it has to wait."""
        most = admission.limit(self._measured + self._now_measured(), self._jobs)
        if len(self._workers) >= most:
            reason = f"{len(self._workers)} tasks run, at most {most} may for now"
            self._queued(task, reason, "place")
            return False
        load = host.load(self._rooms.store.path)
        verdict = self._budget.admit(task.name, self._need(task), load)
        if verdict.admitted:
            self._stuck_since = None
            self._admitted(task)
            return True
        self._queued(task, verdict.reason, verdict.lacking)
        if verdict.never or self._stuck(verdict):
            self._end(task.name, Ended(outcome=Outcome.HOST_FULL, reason=verdict.reason))
            return True
        return False

    def _admitted(self, task: Planned) -> None:
        try:
            self._work(task, self._sandbox(task))
        except VmsandboxError as error:
            self._budget.release(task.name)
            outcome = Outcome.HOST_FULL if error.code in _FULL else Outcome.FAILED
            reason = f"{error.message} [{error.code}]"
            self._end(task.name, Ended(outcome=outcome, reason=reason))

    def _now_measured(self) -> int:
        return sum(worker.measured for worker in self._workers.values())

    def _stuck(self, verdict: Verdict) -> bool:
        """Whether it has waited long enough for room that no guest of any batch could give back."""
        if self._workers or verdict.lacking not in ("memory", "disk") or not self._budget.alone():
            self._stuck_since = None
            return False
        self._stuck_since = self._stuck_since or time.monotonic()
        return time.monotonic() - self._stuck_since > _PATIENCE_S

    def _sandbox(self, task: Planned) -> SandboxFolder:
        """The task's sandbox: the one there is, else made now."""
        if known := self._journal.of(task.name).sandbox:
            return self._rooms.store.folder(known)
        folder = self._maker.make(task)
        self._journal.change(task.name, sandbox=folder.id)
        self._watcher.created(task.name, folder.id)
        return folder

    def _work(self, task: Planned, folder: SandboxFolder) -> None:
        self._journal.change(task.name, begun=True)
        worker = Worker(self._rooms, task, folder, self._over.put)
        self._workers[task.name] = worker
        worker.start()
        if self._asked > 1:  # whoever asked did not see it yet
            self._stop(worker)

    # --- measuring ------------------------------------------------------------------------------

    def _need(self, task: Planned) -> Need:
        digest, cpus, memory_mib = size = _size(task)
        cost = density_cost(self._rooms.store, digest, cpus=cpus, memory_mib=memory_mib)
        known = (cost.memory_bytes, cost.disk_bytes) if cost else None
        return admission.need(task.limits, known, self._seen.get(size))

    def _look(self) -> None:
        """What every guest holds now, for this batch's estimate and for other batches."""
        held = {}
        for name, worker in self._workers.items():
            if figures := worker.look():
                held[name] = figures
            if worker.measured:
                self._learn(worker)
        self._budget.hold(held, [n for n, worker in self._workers.items() if not worker.measured])

    def _learn(self, worker: Worker) -> None:
        if worker.most is not None:
            size = _size(worker.task)
            before = self._seen.get(size, (0, 0))
            self._seen[size] = max(before[0], worker.most[0]), max(before[1], worker.most[1])

    # --- telling --------------------------------------------------------------------------------

    def report(self) -> BatchReport:
        """What came of every task so far."""
        tasks = []
        for task in self._plan.tasks:
            progress = self._journal.of(task.name)
            stopped = progress.begun or progress.former
            outcome = Outcome.CANCELLED.value if stopped else QUEUED
            open_one = Ended(outcome=outcome, reason=self._reasons.get(task.name, ""))
            sandbox = progress.sandbox or next(reversed(progress.former), None)
            tasks.append(self._task_report(task.name, sandbox, progress.ended or open_one))
        open_names = {t.name for t in self._plan.tasks if not self._journal.of(t.name).ended}
        return BatchReport(batch=self._folder.id, tasks=tuple(tasks), unfinished=len(open_names))

    @staticmethod
    def _task_report(name: str, sandbox: str | None, ended: Ended) -> TaskReport:
        return TaskReport(name=name, id=sandbox, **ended.model_dump())


_FULL = ("host_disk_full", "host_memory_full")


def _size(task: Planned) -> _Size:
    return task.image_digest, task.limits.cpus, task.limits.memory_mib
