"""Owns the apply: what must hold before it, one batch after the other, and what it leaves behind.

An apply is written down in the ledger before it begins. If it is cut short, the next apply does
the same batch again: what was written counts as done, the rest follows.
"""

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmsandbox import hostile
from vmsandbox.errors import NegativeAnswer, ReviewRefused
from vmsandbox.model import (
    ChangeSet,
    Decision,
    Digest,
    ResultRecord,
    ResultState,
    TreePath,
    Value,
    now,
)
from vmsandbox.review.checks import despite
from vmsandbox.review.decisions import (
    approval,
    approved,
    approved_paths,
    refuse_dropped,
    refuse_live,
    refuse_other_digest,
    refuse_stale,
    stale,
)
from vmsandbox.review.inspection import ResultStore
from vmsandbox.review.record import (
    Ledger,
    clear_staged,
    note,
    read,
    read_ledger,
    stepped,
    write_record,
)
from vmsandbox.selection import Selection, Step, refuse_split, select, steps_of
from vmsandbox.store import SandboxFolder, locked, write_value
from vmsandbox.target import (
    Batch,
    Conflict,
    TargetFolder,
    check,
    commit,
    stage,
    staging_paths,
)
from vmsandbox.text import quote_path

_MAX_NAMED = 50


class Applied(Value):
    """What an apply did. `finished` are paths of an earlier apply that had been cut short."""

    digest: Digest
    target: Path
    state: ResultState
    written: tuple[TreePath, ...] = ()
    already: tuple[TreePath, ...] = ()
    finished: tuple[TreePath, ...] = ()
    remaining: int = 0


class ApplyConflict(NegativeAnswer):
    """The target differs from the base where it must not; `conflicts` lists every path."""

    def __init__(self, conflicts: Sequence[Conflict], target: Path) -> None:
        named = [f"{quote_path(c.path)}: {c.what}" for c in conflicts[:_MAX_NAMED]]
        if len(conflicts) > _MAX_NAMED:
            named.append(f"and {len(conflicts) - _MAX_NAMED} more")
        super().__init__(
            "apply_conflict",
            f"nothing was written to {target}, it differs from the base:\n  " + "\n  ".join(named),
            hint="put these paths right, or choose others with --path or --exclude",
            evidence=str(target),
        )
        self.conflicts = tuple(conflicts)
        self._target = target

    @property
    def data(self) -> Mapping[str, Any]:
        return {"conflicts": [conflict.model_dump(mode="json") for conflict in self.conflicts]}

    def __reduce__(self) -> tuple[object, ...]:
        return (ApplyConflict, (self.conflicts, self._target))


def apply(
    folder: SandboxFolder,
    results: ResultStore,
    target: Path,
    *,
    is_live: Callable[[], bool],
    selection: Selection | None = None,
    digest: str | None = None,
    yes: bool = False,
    who: str | None = None,
    despite_checks: bool = False,
) -> Applied:
    """Write the chosen part of the change set to `target`.

    With `yes` this call is the approval as well, unless one of another digest lies here. Without a
    selection it is all that is approved, with `yes` all there is. Raises
    ReviewRefused ``task_live``, ``result_dropped``, ``approval_stale``, ``not_approved``, or with
    `yes` ``checks_failed`` unless `despite_checks`;
    ApplyConflict, and then nothing of the batch is written; UsageProblem ``path_unmatched``,
    ``pattern_invalid``, ``nothing_selected``, ``selection_incomplete``, ``target_missing`` or
    ``target_name``; HostProblem for a target that cannot be written.
    """
    with locked(folder.result_lock):
        refuse_live(folder, is_live)
        change_set, record = read(folder)
        refuse_other_digest(folder, change_set, record, digest)
        refuse_dropped(folder, record)
        job = _Job(folder, results, change_set, steps_of(change_set.changes))
        _refuse_bad_names(job.every)
        record, finished = _finish(job, record)
        covered = approved_paths(change_set, record, job.every)
        chosen = _chosen(job.every, covered, selection, yes)
        if not chosen:
            return Applied(digest=change_set.digest, target=target, state=record.state)
        decision = None
        if missing := [step.path for step in chosen if step.path not in covered]:
            _refuse_unapproved(job, record, missing, yes)
            failed = despite(folder, record, allowed=despite_checks)
            decision = approval(change_set, record, chosen, who, failed)
        record, batch = _write_batch(job, record, target.resolve(), chosen, decision)
        return Applied(
            digest=change_set.digest,
            target=target,
            state=record.state,
            written=tuple(item.step.path for item in batch.ready),
            already=batch.done,
            finished=finished,
            remaining=len(job.every) - len(record.applied_paths),
        )


def unapproved(folder: SandboxFolder, selection: Selection | None = None) -> tuple[bytes, ...]:
    """The paths that :func:`apply` without `yes` would refuse as not approved."""
    change_set, record = read(folder)
    every = steps_of(change_set.changes)
    covered = approved_paths(change_set, record, every)
    chosen = _chosen(every, covered, selection, yes=False)
    return tuple(step.path for step in chosen if step.path not in covered)


def chosen_paths(change_set: ChangeSet, selection: Selection) -> tuple[bytes, ...]:
    """The paths of a change set that a selection means, old names of renames included."""
    return tuple(step.path for step in select(steps_of(change_set.changes), selection))


def conflicts(folder: SandboxFolder, target: Path) -> tuple[Conflict, ...]:
    """What an apply of everything to `target` would refuse now; nothing is written."""
    change_set, record = read(folder)
    every = steps_of(change_set.changes)
    target = target.resolve()
    with TargetFolder(target, change_set.object_format) as opened:
        settled = _settled(record, target)
        removed = change_set.removed_dirs
        return check(opened, every, every, removed, settled, only_look=True).conflicts


@dataclass(frozen=True)
class _Job:
    """What stays the same through one call of apply."""

    folder: SandboxFolder
    results: ResultStore
    change_set: ChangeSet
    every: tuple[Step, ...]


def _chosen(
    every: tuple[Step, ...],
    covered: Collection[bytes],
    selection: Selection | None,
    yes: bool,
) -> tuple[Step, ...]:
    if selection is not None or yes:
        return select(every, selection)
    return tuple(step for step in every if step.path in covered) or every


def _refuse_unapproved(
    job: _Job, record: ResultRecord, missing: Sequence[bytes], yes: bool
) -> None:
    """Only `yes` approves by this very call, and it replaces no approval of something else."""
    if (old := stale(job.change_set, record)) is not None:
        refuse_stale(job.folder, old.digest, job.change_set.digest)
    if yes:
        return
    id_ = job.folder.id
    raise ReviewRefused(
        "not_approved",
        f"{len(missing)} changed paths of {id_} are not approved, nothing was written",
        hint=f"vmsandbox review {id_} && vmsandbox approve {id_}",
    )


def _refuse_bad_names(steps: Iterable[Step]) -> None:
    """A second wall: the names were judged when the result came in."""
    bad = ((step.path, hostile.refuse_name(step.path)) for step in steps)
    hostile.raise_refusals([hostile.Refusal(path, reason) for path, reason in bad if reason])


def _finish(job: _Job, record: ResultRecord) -> tuple[ResultRecord, tuple[bytes, ...]]:
    """Do an apply that was cut short to its end; returns the paths that it wrote now."""
    ledger = read_ledger(job.folder)
    if ledger is None:
        return record, ()
    clear_staged(ledger)
    if ledger.digest != job.change_set.digest or not ledger.target.is_dir():
        job.folder.ledger.unlink()
        return record, ()
    paths = frozenset(ledger.paths)
    chosen = [step for step in job.every if step.path in paths]
    record, batch = _write_batch(job, record, ledger.target, chosen, ledger.decision)
    return record, tuple(item.step.path for item in batch.ready)


def _write_batch(
    job: _Job,
    record: ResultRecord,
    path: Path,
    chosen: Sequence[Step],
    decision: Decision | None,
) -> tuple[ResultRecord, Batch]:
    """Check, and write all of the batch or nothing. A fresh `decision` is recorded with it."""
    if decision is not None and decision not in record.decisions:
        record = approved(record, decision)
    settled = _settled(record, path)
    refuse_split(chosen, job.every, settled)
    with TargetFolder(path, job.change_set.object_format) as target:
        batch = check(target, chosen, job.every, job.change_set.removed_dirs, settled)
        if batch.conflicts:
            _conflicted(job, record, batch, path)
            raise ApplyConflict(batch.conflicts, path)
        if batch.ready:
            _write_ready(job, target, batch, chosen, decision)
    applied = settled | set(batch.done) | {item.step.path for item in batch.ready}
    record = _recorded(job, record, path, applied)
    job.folder.ledger.unlink(missing_ok=True)
    by = f", approved by {decision.who}" if decision else ""
    note(job.folder, f"applied {len(batch.ready)} of {len(chosen)} chosen paths to {path}{by}")
    return record, batch


def _write_ready(
    job: _Job,
    target: TargetFolder,
    batch: Batch,
    chosen: Sequence[Step],
    decision: Decision | None,
) -> None:
    staging = staging_paths(batch, secrets.token_hex(6))
    ledger = Ledger(
        digest=job.change_set.digest,
        target=target.path,
        paths=tuple(step.path for step in chosen),
        staged=tuple(staging.values()),
        decision=decision,
    )
    write_value(job.folder.ledger, ledger)
    try:
        stage(target, batch, staging, job.results.open_blob)
    except BaseException:
        job.folder.ledger.unlink(missing_ok=True)  # nothing was changed: nothing to finish
        raise
    commit(target, batch, staging)


def _conflicted(job: _Job, record: ResultRecord, batch: Batch, path: Path) -> None:
    job.folder.ledger.unlink(missing_ok=True)
    note(job.folder, f"apply to {path} refused: {len(batch.conflicts)} conflicts")
    if record.state is ResultState.APPLIED:  # elsewhere; that stays true
        return
    applied = _settled(record, path) | set(batch.done)
    record = stepped(record, ResultState.CONFLICTED)
    write_record(job.folder, _with_applied(record, applied, path) if applied else record)


def _recorded(
    job: _Job, record: ResultRecord, path: Path, applied: frozenset[bytes]
) -> ResultRecord:
    """Write down what is applied, unless it is known already or all of it was applied elsewhere."""
    if record.state is ResultState.APPLIED and (
        record.target != path or applied == set(record.applied_paths)
    ):
        return record
    complete = len(applied) == len(job.every)
    state = ResultState.APPLIED if complete else ResultState.PENDING
    return write_record(job.folder, _with_applied(stepped(record, state), applied, path))


def _with_applied(record: ResultRecord, applied: frozenset[bytes], path: Path) -> ResultRecord:
    update = {"applied_paths": tuple(sorted(applied)), "applied_at": now(), "target": path}
    return record.model_copy(update=update)


def _settled(record: ResultRecord, target: Path) -> frozenset[bytes]:
    """What an earlier apply wrote to this very target."""
    return frozenset(record.applied_paths if record.target == target else ())
