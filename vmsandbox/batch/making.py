"""Owns how a task of a batch becomes a sandbox, and which sandboxes there are already for it."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from vmsandbox import review
from vmsandbox.batch.plan import refuse
from vmsandbox.batch.record import SKIPPED, Ended, is_resumable
from vmsandbox.batch.taskfile import Planned
from vmsandbox.document import Problem
from vmsandbox.errors import HostProblem, UsageProblem, VmsandboxError
from vmsandbox.gateway.keys import KEY_PROBLEMS
from vmsandbox.model import BatchMark, Outcome, SandboxRecord, SandboxState
from vmsandbox.sandbox import (
    Request,
    Rooms,
    check_keys,
    create_sandbox,
    has_undecided_result,
    observe,
    propose,
)
from vmsandbox.store import SandboxFolder

_LONGEST_NAME = 63


class Earlier(NamedTuple):
    """A sandbox for which a task is skipped."""

    id: str
    reason: str


class Maker:
    """Makes the sandboxes of one batch."""

    def __init__(self, rooms: Rooms, batch: str) -> None:
        self._rooms = rooms
        self._batch = batch

    def made(self, former: Collection[str]) -> dict[str, str]:
        """Sandboxes that exist for this batch, without its `former` ones: task → id."""
        return {
            record.batch.task: record.id
            for record in self._rooms.store.records()
            if record.batch and record.batch.batch == self._batch and record.id not in former
        }

    def check_keys(self, tasks: Iterable[Planned], made: Mapping[str, str]) -> None:
        """Whether the keys are here of the gateways that these tasks have yet to begin with.

        Raises UsageProblem ``gateway_without_key``, ``gateway_key_unusable``.
        """
        for task in tasks:
            if task.name in made:
                record = self._rooms.store.folder(made[task.name]).read_record()
                if not record.task_started:
                    check_keys(record.equipment)
            else:
                try:
                    propose(self._rooms, request(task, None, None))
                except VmsandboxError as error:  # else told when its turn comes
                    if error.code in KEY_PROBLEMS:
                        raise

    def make(self, task: Planned) -> SandboxFolder:
        """A new sandbox, marked as this task's from its first moment. Raises what
        :func:`vmsandbox.sandbox.create_sandbox` raises."""
        mark = BatchMark(batch=self._batch, task=task.name)
        taken = {record.name for record in self._rooms.store.records()}
        suffix = f"-{self._batch}"
        names = (task.name, task.name[: _LONGEST_NAME - len(suffix)] + suffix)
        free = next((name for name in names if name not in taken), None)
        return create_sandbox(self._rooms, request(task, free, mark))

    def there_already(self, task: Planned) -> "Earlier | None":
        """An earlier sandbox of the task that is active or waits for a decision."""
        for record in self._rooms.store.records():
            if self._is_earlier(record, task):
                folder = self._rooms.store.folder(record.id)
                if reason := self._in_the_way(folder, record):
                    return Earlier(record.id, reason)
        return None

    def completed_earlier(self, task: Planned, ended: Ended) -> bool:
        """Whether a task that was skipped had completed in its earlier sandbox."""
        return ended.outcome == SKIPPED and any(
            record.outcome is Outcome.COMPLETED and self._proven(record)
            for record in self._rooms.store.records()
            if self._is_earlier(record, task)
        )

    def _proven(self, record: SandboxRecord) -> bool:
        _, result = review.latest(self._rooms.store.folder(record.id))
        return not review.unproven(record.task.verify, result)

    def _is_earlier(self, record: SandboxRecord, task: Planned) -> bool:
        if record.batch and record.batch.batch == self._batch:
            return False
        name = record.batch.task if record.batch else record.name
        return name == task.name and record.task.worktree == task.worktree

    def _in_the_way(self, folder: SandboxFolder, record: SandboxRecord) -> str:
        status = observe(folder, self._rooms.guest_alive)
        shown = record.name if record.name == record.id else f"{record.name} ({record.id})"
        if status.managed or status.guest_alive:
            return f"sandbox {shown} is {status.state.value}"
        if has_undecided_result(folder):
            return f"the result of sandbox {shown} waits: vmsandbox review {record.id}"
        if status.state is SandboxState.QUEUED:
            return f"sandbox {shown} never started: {self._go_on(record)}"
        if record.task_started and not record.collected:
            return f"what sandbox {shown} did is not collected: {self._go_on(record)}"
        return ""

    def _go_on(self, record: SandboxRecord) -> str:
        """Its batch may have been discarded."""
        if record.batch and is_resumable(self._rooms.store, record.batch.batch):
            return f"vmsandbox batch --resume {record.batch.batch}"
        return f"vmsandbox resume {record.id}"


def request(task: Planned, name: str | None, mark: BatchMark | None) -> Request:
    """What a user would ask of a single run for the same."""
    return Request(
        command=task.command,
        agent=task.agent,
        worktree=task.worktree,
        name=name,
        env=task.env,
        brief=task.brief,
        verify=task.verify,
        publish=task.publish,
        publishes=task.auto_publish,
        net=task.grants.net,
        within_net=task.within_net,
        gateways=task.grants.gateways,
        budget=task.grants.budget,
        within_budget=task.within_budget,
        ask=task.grants.ask,
        batch=mark,
        overrides={
            "image": task.image,
            "cpus": task.cpus,
            "memory": task.memory_mib,
            "disk": task.disk_mib,
            "timeout": task.timeout_s,
            "include": task.include,
            "history": task.history,
        },
    )


def proposed(rooms: Rooms, tasks: tuple[Planned, ...]) -> tuple[Planned, ...]:
    """The tasks as they would start, with the tops of their worktrees, sizes and images.

    Makes nothing. Raises UsageProblem ``tasks_invalid`` with every problem, or the HostProblem that
    stands in everybody's way.
    """
    problems: list[Problem] = []
    found = []
    for task in tasks:
        try:
            plan = propose(rooms, request(task, None, None))
            known = {"limits": plan.limits, "image_digest": plan.image.digest}
            found.append(task.model_copy(update={"worktree": plan.task.worktree, **known}))
        except HostProblem:
            raise
        except UsageProblem as error:
            file, _, line = task.where.rpartition(":")
            problems.append(Problem(file, int(line), f"{task.name}: {error.message}"))
    refuse(problems)
    return tuple(found)
