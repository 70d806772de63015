"""Owns what the checks of a result came to: the latest run of each kind, and what is not proven.

They stand in the result's own record, so that a decision and what it rests on are one file. New
results are new facts: an approval that named others no longer holds.
"""

from collections.abc import Sequence

from vmsandbox.errors import ReviewRefused
from vmsandbox.model import Check, CheckRun, Digest, ResultRecord, ResultState
from vmsandbox.review.record import note, read, stepped, write_record
from vmsandbox.store import SandboxFolder, locked


def record_run(folder: SandboxFolder, digest: Digest, run: CheckRun) -> ResultRecord:
    """Write down what the checks came to on the change set `digest`.

    If another result lies here by now, they say nothing of it and nothing is written.
    """
    with locked(folder.result_lock):
        change_set, record = read(folder)
        if change_set.digest != digest:
            return record
        others = [one for one in record.checks if one.fresh != run.fresh]
        runs = tuple(sorted((*others, run), key=lambda one: one.fresh))
        changed = record.model_copy(update={"checks": runs})
        if changed.checks_digest != record.checks_digest and record.state is ResultState.APPROVED:
            changed = stepped(changed, ResultState.PENDING)
        ok = sum(result.ok for result in run.results)
        where = " in a fresh guest" if run.fresh else ""
        note(folder, f"{ok} of {len(run.results)} checks passed{where}: {digest}")
        return write_record(folder, changed)


def unproven(wanted: Sequence[Check], record: ResultRecord) -> tuple[str, ...]:
    """The checks that did not pass, by name; all of them if they were never run on this result."""
    if not record.checks:
        return tuple(f"{check.title} (not run)" for check in wanted)
    return tuple(
        result.name + (" (fresh)" if run.fresh else "")
        for run in record.checks
        for result in run.results
        if not result.ok
    )


def despite(folder: SandboxFolder, record: ResultRecord, *, allowed: bool) -> tuple[str, ...]:
    """What an approval of this result would be given in spite of.

    Raises ReviewRefused ``checks_failed`` if there is something and it is not `allowed`.
    """
    failed = unproven(folder.read_record().task.verify, record)
    if failed and not allowed:
        raise ReviewRefused(
            "checks_failed",
            f"{len(failed)} check(s) of {folder.id} did not pass: {', '.join(failed)}",
            hint=f"vmsandbox verify {folder.id}    (runs them again; or approve with"
            " --despite-checks)",
            evidence=str(folder.result_record),
        )
    return failed
