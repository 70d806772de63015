"""Owns what is written down of a batch: its tasks, once, and what came of each; the only writer.

A batch is a folder below ``batches/``. A task that was begun is never begun again: which sandbox is
its own stands in the sandbox's record from its first moment, and that it begins is written here
before it does.
"""

import contextlib
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vmsandbox.batch.taskfile import Planned
from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.model import Outcome, Value, now
from vmsandbox.sandbox.report import ResultSummary
from vmsandbox.store import Store, host_problem, is_locked, locked, read_value, write_value

SKIPPED = "skipped"
QUEUED = "queued"


class BatchRecord(Value):
    """batch.json: all that was asked."""

    version: Literal[1] = 1
    id: str
    created_at: datetime = Field(default_factory=now)
    jobs: int | None = None
    tasks: tuple[Planned, ...]


class Ended(Value):
    """What came of a task, for good."""

    outcome: str = Field(description="one of the outcomes of a task, or skipped")
    exit_code: int | None = None
    result: ResultSummary | None = None
    reason: str = ""
    evidence: Path | None = None

    @property
    def completed(self) -> bool:
        """Whether it came to a good end, as far as its checks can tell."""
        return self.outcome == Outcome.COMPLETED and not self.unproven

    @property
    def unproven(self) -> bool:
        """Whether a check did not pass."""
        return bool(self.result and self.result.unproven)


class TaskProgress(Value):
    """How far one task is."""

    sandbox: str | None = None
    begun: bool = False
    stopped: bool = Field(default=False, description="this batch was told to end it")
    former: tuple[str, ...] = Field(
        default=(), description="sandboxes in which it was stopped before it was begun anew"
    )
    ended: Ended | None = None


class Progress(Value):
    """progress.json: every task that is no longer as it was planned."""

    version: Literal[1] = 1
    tasks: Mapping[str, TaskProgress] = Field(default_factory=dict)


@dataclass(frozen=True)
class BatchFolder:
    """The files of one batch."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def plan(self) -> Path:
        return self.path / "batch.json"

    @property
    def progress(self) -> Path:
        return self.path / "progress.json"

    @property
    def lock(self) -> Path:
        return self.path / "manager.lock"

    def managed(self) -> bool:
        """Whether a process carries this batch out now."""
        return is_locked(self.lock)

    def read(self) -> BatchRecord:
        """Raises UsageProblem ``batch_unknown`` if it was never whole."""
        if (record := read_value(self.plan, BatchRecord)) is None:
            raise _unknown(self.id)
        return record

    def read_progress(self) -> Progress:
        return read_value(self.progress, Progress) or Progress()

    def finished(self) -> bool:
        """Whether something came of every task."""
        return not self.left()

    def left(self) -> tuple[str, ...]:
        """The tasks of which nothing has come."""
        known = self.read_progress().tasks
        names = (task.name for task in self.read().tasks)
        return tuple(name for name in names if not known.get(name, TaskProgress()).ended)

    @contextlib.contextmanager
    def sole_manager(self) -> Iterator[None]:
        """Raises UsageProblem ``batch_managed_elsewhere`` if another process carries it out."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.lock, wait=False))
            except BlockingIOError:
                raise UsageProblem(
                    "batch_managed_elsewhere",
                    f"another process carries batch {self.id} out now",
                    hint="vmsandbox status --watch",
                ) from None
            yield


def _unknown(selector: str) -> UsageProblem:
    return UsageProblem(
        "batch_unknown", f"no batch {selector!r}", hint="vmsandbox batch FILE…    begins one"
    )


@contextlib.contextmanager
def create(store: Store, tasks: Sequence[Planned], jobs: int | None) -> Iterator[BatchFolder]:
    """A new batch, managed by us inside."""
    folder = BatchFolder(store.batches / secrets.token_hex(4))
    try:
        folder.path.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise host_problem(error, folder.path) from error
    with folder.sole_manager():
        write_value(folder.plan, BatchRecord(id=folder.id, jobs=jobs, tasks=tuple(tasks)))
        yield folder


def folders(store: Store) -> list[BatchFolder]:
    """Every batch, the oldest first."""
    if not store.batches.is_dir():
        return []
    found = [BatchFolder(path) for path in store.batches.iterdir() if path.is_dir()]
    return sorted(found, key=lambda folder: (folder.path.stat().st_mtime, folder.id))


def resolve(store: Store, selector: str | None) -> BatchFolder:
    """A batch by id or unique prefix; without one the latest that is unfinished.

    Raises UsageProblem ``batch_unknown``, ``batch_ambiguous``, ``nothing_to_resume``.
    """
    known = [folder for folder in folders(store) if folder.plan.exists()]
    if selector is None or selector == "last":
        open_ones = [folder for folder in known if not folder.finished()]
        if not open_ones:
            raise UsageProblem(
                "nothing_to_resume", "no batch is unfinished", hint="vmsandbox status"
            )
        return max(open_ones, key=lambda folder: folder.read().created_at)
    found = [folder for folder in known if folder.id.startswith(selector)]
    if len(found) > 1:
        raise UsageProblem(
            "batch_ambiguous",
            f"{selector!r} fits {len(found)} batches: {', '.join(f.id for f in found[:8])}",
            hint="use more of the id",
        )
    if not found or not selector:
        raise _unknown(selector)
    return found[0]


def is_resumable(store: Store, batch: str) -> bool:
    """Whether there is a batch of this id that could be gone on with."""
    folder = BatchFolder(store.batches / batch)
    return folder.plan.exists() and not folder.finished()


class Journal:
    """The progress of a batch that we manage; every change is on disk before the call returns."""

    def __init__(self, folder: BatchFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskProgress] = dict(folder.read_progress().tasks)

    def of(self, task: str) -> TaskProgress:
        return self._tasks.get(task, TaskProgress())

    def change(self, task: str, **fields: Any) -> None:
        """Raises HostProblem ``host_disk_full``, ``state_unwritable``."""
        with self._lock:
            changed = self.of(task).model_copy(update=fields)
            write_value(self._folder.progress, Progress(tasks={**self._tasks, task: changed}))
            self._tasks[task] = changed


class Discarded(Value):
    """A batch that was given up."""

    batch: str
    left: tuple[str, ...] = Field(description="tasks that it will not go on with")
    sandboxes: tuple[str, ...] = Field(description="its sandboxes, which stay as they are")


def discard(store: Store, selector: str | None) -> Discarded:
    """Remove the record of a batch, finished or not; None: the only one that is unfinished.

    Its sandboxes stay, with their results. Raises UsageProblem as :func:`resolve`,
    ``batch_ambiguous`` also if several are unfinished, and ``batch_managed_elsewhere``.
    """
    if selector is None:
        _refuse_several(store)
    folder = resolve(store, selector)
    left: tuple[str, ...] = ()
    with folder.sole_manager():
        with contextlib.suppress(HostProblem):  # also one that cannot be read any more
            left = folder.left()
        _remove(folder)
    mine = (one.id for one in store.records() if one.batch and one.batch.batch == folder.id)
    return Discarded(batch=folder.id, left=left, sandboxes=tuple(mine))


def _refuse_several(store: Store) -> None:
    whole = (folder for folder in folders(store) if folder.plan.exists())
    unfinished = [folder.id for folder in whole if not folder.finished()]
    if len(unfinished) > 1:
        raise UsageProblem(
            "batch_ambiguous",
            f"{len(unfinished)} batches are unfinished: {', '.join(unfinished)}",
            hint=f"vmsandbox batch --discard {unfinished[-1]}",
        )


def _remove(folder: BatchFolder) -> None:
    """The plan first: without it, it is a leftover and no longer a batch."""
    folder.plan.unlink(missing_ok=True)
    shutil.rmtree(folder.path, ignore_errors=True)


class Freed(Value):
    """A batch that cleaning up looked at."""

    batch: str
    detail: str
    kept: bool = False


def clean_up(store: Store, *, dry_run: bool) -> list[Freed]:
    """Remove batches that are finished, or were never whole. One that is managed is left out, one
    that is unfinished is kept and told."""
    found = []
    for folder in folders(store):
        with contextlib.suppress(UsageProblem, HostProblem), folder.sole_manager():
            left = folder.left() if (whole := folder.plan.exists()) else ()
            detail = _open(folder, left) if left else "finished" if whole else "half made"
            found.append(Freed(batch=folder.id, detail=detail, kept=bool(left)))
            if not (left or dry_run):
                _remove(folder)
    return found


def _open(folder: BatchFolder, left: Sequence[str]) -> str:
    ways = f"vmsandbox batch --resume {folder.id}    (or: vmsandbox batch --discard {folder.id})"
    return f"{len(left)} of {len(folder.read().tasks)} task(s) left: {ways}"
