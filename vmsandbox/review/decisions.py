"""Owns who decided what: approvals and drops, what they cover, and when they no longer hold."""

import contextlib
import getpass
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from vmsandbox.errors import ReviewRefused, UsageProblem
from vmsandbox.model import ChangeSet, Decision, ResultRecord, ResultState, SandboxState, Verdict
from vmsandbox.review.checks import despite
from vmsandbox.review.record import forget_ledger, note, read, stepped, write_record
from vmsandbox.selection import Selection, Step, select, steps_of
from vmsandbox.store import SandboxFolder, locked

_DIGITS = 24
"""Of a digest, what may stand for it. A guest chooses its results and need only find two of its own
that begin alike: 8 digits took it 85,000 attempts, 12 take minutes."""


def approve(
    folder: SandboxFolder,
    *,
    selection: Selection | None = None,
    digest: str | None = None,
    who: str | None = None,
    despite_checks: bool = False,
) -> ResultRecord:
    """Record that the change set (or the chosen part) may be applied.

    `digest` is what the approver has read, as :func:`short` spells it or longer; if it is not what
    lies here now, ReviewRefused ``approval_stale``. After a drop ReviewRefused ``result_dropped``.
    Checks that did not pass are ReviewRefused ``checks_failed``, unless `despite_checks`.
    """
    with locked(folder.result_lock):
        change_set, record = read(folder)
        refuse_other_digest(folder, change_set, record, digest)
        refuse_dropped(folder, record)
        if record.state in (ResultState.APPLIED, ResultState.NONE):
            return record
        chosen = select(steps_of(change_set.changes), selection)
        failed = despite(folder, record, allowed=despite_checks)
        decision = approval(change_set, record, chosen, who, failed)
        which = f" ({len(decision.paths)} paths)" if decision.paths else ""
        although = f", despite {', '.join(failed)}" if failed else ""
        note(folder, f"approved {change_set.digest}{which} by {decision.who}{although}")
        return write_record(folder, approved(record, decision))


def drop(
    folder: SandboxFolder, *, is_live: Callable[[], bool], who: str | None = None
) -> ResultRecord:
    """Decide that the rest of the change set is never applied; again is no problem.

    Raises ReviewRefused ``task_live`` or ``already_applied``.
    """
    with locked(folder.result_lock):
        refuse_live(folder, is_live)
        change_set, record = read(folder)
        if record.state is ResultState.DROPPED:
            return record
        if record.state is ResultState.APPLIED:
            raise ReviewRefused(
                "already_applied",
                f"the result of {folder.id} was applied to {record.target}",
                hint=f"vmsandbox delete {folder.id}",
            )
        forget_ledger(folder)
        decision = Decision(verdict=Verdict.DROPPED, digest=change_set.digest, who=who or decider())
        note(folder, f"dropped {change_set.digest} by {decision.who}")
        return write_record(folder, _decided(record, ResultState.DROPPED, decision))


def approval(
    change_set: ChangeSet,
    record: ResultRecord,
    chosen: Sequence[Step],
    who: str | None,
    failed: tuple[str, ...] = (),
) -> Decision:
    """The decision that the chosen steps may be applied, in spite of what `failed`."""
    all_of_it = len(chosen) == len(steps_of(change_set.changes))
    return Decision(
        verdict=Verdict.APPROVED,
        digest=change_set.digest,
        who=who or decider(),
        paths=() if all_of_it else tuple(step.path for step in chosen),
        checks=record.checks_digest,
        despite=failed,
    )


def approved(record: ResultRecord, decision: Decision) -> ResultRecord:
    """The record with an approval; nothing is written."""
    return _decided(record, ResultState.APPROVED, decision)


def _decided(record: ResultRecord, state: ResultState, decision: Decision) -> ResultRecord:
    decisions = (*record.decisions, decision)
    return stepped(record, state).model_copy(update={"decisions": decisions})


def decider() -> str:
    """The name of whoever decides: the user, or who became root through sudo."""
    sudo_user = os.environ.get("SUDO_USER")
    if sudo_user and os.geteuid() == 0:
        return f"{sudo_user} (sudo)"
    with contextlib.suppress(OSError, KeyError):
        return getpass.getuser()
    return f"uid {os.geteuid()}"


def approved_paths(
    change_set: ChangeSet, record: ResultRecord, every: Iterable[Step]
) -> frozenset[bytes]:
    """The paths that approvals of this very digest, with these very check results, cover."""
    covered: set[bytes] = set()
    for decision in record.decisions:
        if decision.verdict is Verdict.APPROVED and _holds(decision, change_set, record):
            covered |= set(decision.paths or (step.path for step in every))
    return frozenset(covered)


def stale(change_set: ChangeSet, record: ResultRecord) -> Decision | None:
    """The last decision, if it approves something else than what lies here now."""
    last = record.decisions[-1] if record.decisions else None
    if last is None or last.verdict is not Verdict.APPROVED or _holds(last, change_set, record):
        return None
    return last


def _holds(decision: Decision, change_set: ChangeSet, record: ResultRecord) -> bool:
    """Whether a decision names what lies here now. One that has served needs no proof any more."""
    if decision.digest != change_set.digest:
        return False
    return record.state is ResultState.APPLIED or decision.checks == record.checks_digest


def task_runs(folder: SandboxFolder, guest_alive: Callable[[str], bool | None]) -> bool:
    """Whether the task still runs, so that its result may change; a guest that is merely kept does
    not count. `guest_alive` is asked about a domain only where nobody manages it."""
    record = folder.read_record()
    busy = (SandboxState.STARTING, SandboxState.RUNNING, SandboxState.COLLECTING)
    if record.state not in busy:
        return False
    return folder.manager_alive() or guest_alive(record.domain_uuid) is not False


# --- refusals -------------------------------------------------------------------------------------


def refuse_live(folder: SandboxFolder, is_live: Callable[[], bool]) -> None:
    if is_live():
        raise ReviewRefused(
            "task_live",
            f"the task of {folder.id} still runs, its result may change",
            hint=f"vmsandbox logs -f {folder.id}    (or: vmsandbox stop {folder.id})",
        )


def refuse_dropped(folder: SandboxFolder, record: ResultRecord) -> None:
    if record.state is ResultState.DROPPED:
        raise ReviewRefused(
            "result_dropped",
            f"the result of {folder.id} was dropped",
            hint=f"vmsandbox delete {folder.id}",
        )


def short(change_set: ChangeSet, record: ResultRecord) -> str:
    """What an approval names, as short as is safe: the digest of the change set, and after a
    plus that of the check results if there are any."""
    digests = [change_set.digest, *([record.checks_digest] if record.checks_digest else [])]
    return "+".join(digest.removeprefix("sha256:")[:_DIGITS] for digest in digests)


def refuse_other_digest(
    folder: SandboxFolder, change_set: ChangeSet, record: ResultRecord, digest: str | None
) -> None:
    """Refuse if `digest` (or its beginning) is given and names something else."""
    if digest is None:
        return
    wanted, plus, checks = (part.removeprefix("sha256:") for part in digest.partition("+"))
    if min(len(wanted), len(checks) if plus else len(wanted)) < _DIGITS:
        raise UsageProblem(
            "digest_short",
            f"give at least {_DIGITS} hexadecimal digits of the digest, as fewer can be imitated",
            hint=f"vmsandbox review {folder.id}    (says what to give)",
        )
    if not change_set.digest.startswith(f"sha256:{wanted}"):
        refuse_stale(folder, f"sha256:{wanted}", change_set.digest)
    if plus and not (record.checks_digest or "").startswith(f"sha256:{checks}"):
        refuse_stale(folder, change_set.digest, change_set.digest)


def refuse_stale(folder: SandboxFolder, approved: str, current: str) -> NoReturn:
    what = f"approved was {approved}, but the result of {folder.id} is now {current}"
    if approved == current:
        what = f"the checks of {folder.id} came to something else than was read with {approved}"
    raise ReviewRefused(
        "approval_stale",
        what,
        hint=f"vmsandbox review {folder.id} && vmsandbox approve {folder.id}",
    )
