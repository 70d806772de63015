"""Owns the ways into a batch: begin one, take one up again, or both steps in one call."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from vmsandbox.batch import making, record
from vmsandbox.batch.conducting import Conductor
from vmsandbox.batch.plan import Plan, granted, plan_files
from vmsandbox.batch.record import SKIPPED, Discarded
from vmsandbox.batch.report import BatchReport, TaskReport, Unwatched, Watcher
from vmsandbox.batch.taskfile import Grants
from vmsandbox.sandbox import Rooms
from vmsandbox.store import Store


class Carried:
    """A batch that this process manages: `run` it, from one thread."""

    def __init__(self, conductor: Conductor, id_: str, twice: tuple[TaskReport, ...] = ()) -> None:
        self.id = id_
        self._conductor = conductor
        self._twice = twice

    def run(self) -> BatchReport:
        """Bring it to its end. Raises no error of a single task."""
        report = self._conductor.run()
        return report.model_copy(update={"tasks": (*report.tasks, *self._twice)})

    def ask_to_end(self) -> None:
        """Once: begin nothing more. Twice: end what runs and collect. Three times: at once."""
        self._conductor.ask_to_end()


@contextlib.contextmanager
def beginning(
    rooms: Rooms, plan: Plan, watcher: Watcher, *, jobs: int | None = None
) -> Iterator[Carried]:
    """A new batch of these tasks; nothing of it has started yet.

    Raises UsageProblem ``tasks_invalid``, and HostProblem if this host can start no guest.
    """
    tasks = making.proposed(rooms, plan.tasks)
    twice = tuple(
        TaskReport(
            name=task.name, id=None, outcome=SKIPPED, reason=f"{task.where} says the same again"
        )
        for task in plan.twice
    )
    for task in twice:
        watcher.ended(task)
    with record.create(rooms.store, tasks, jobs) as folder:
        yield Carried(Conductor(rooms, folder, watcher), folder.id, twice)


@contextlib.contextmanager
def resuming(
    rooms: Rooms, selector: str | None, watcher: Watcher, *, jobs: int | None = None
) -> Iterator[Carried]:
    """A batch that was interrupted or killed, by id or unique prefix; None: the latest unfinished.

    Raises UsageProblem ``batch_unknown``, ``nothing_to_resume``, ``batch_managed_elsewhere``,
    ``gateway_without_key``, ``gateway_key_unusable``.
    """
    folder = record.resolve(rooms.store, selector)
    with folder.sole_manager():
        conductor = Conductor(rooms, folder, watcher, jobs=jobs)
        conductor.check_keys()
        yield Carried(conductor, folder.id)


def run_batch(
    files: Sequence[Path | str] | Plan,
    *,
    jobs: int | None = None,
    grants: Grants | None = None,
    watcher: Watcher | None = None,
    root: Path | None = None,
) -> BatchReport:
    """Carry out the tasks of these files in VMs of their own, as many at once as the host carries.

    `grants` is what they may do beyond their guests, beside what your settings let every task do;
    `root` is the state folder. Nothing on the host is changed: every result waits for a decision.
    Raises UsageProblem ``tasks_invalid`` with every problem before anything starts, and HostProblem
    if this host can start no guest; what goes wrong with a single task is in the report.
    """
    plan = files if isinstance(files, Plan) else plan_files([Path(file) for file in files])
    plan = granted(plan, grants)
    watcher = watcher or Unwatched()
    with Rooms.open(root) as rooms, beginning(rooms, plan, watcher, jobs=jobs) as batch:
        return batch.run()


def resume_batch(
    selector: str | None = None,
    *,
    jobs: int | None = None,
    watcher: Watcher | None = None,
    root: Path | None = None,
) -> BatchReport:
    """Go on with a batch that was interrupted or killed, to its end; raises as :func:`resuming`."""
    with (
        Rooms.open(root) as rooms,
        resuming(rooms, selector, watcher or Unwatched(), jobs=jobs) as batch,
    ):
        return batch.run()


def discard_batch(selector: str | None = None, *, root: Path | None = None) -> Discarded:
    """Give up a batch: nothing of it begins any more. Its sandboxes stay, with their results.

    Raises UsageProblem ``batch_unknown``, ``batch_ambiguous``, ``nothing_to_resume``,
    ``batch_managed_elsewhere``.
    """
    return record.discard(Store(root), selector)
