"""Owns the files of questions, one for each below ``approvals/``: the host's alone to write."""

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from vmsandbox.asking import Answer, Approval
from vmsandbox.errors import NegativeAnswer, UsageProblem
from vmsandbox.model import Event
from vmsandbox.store import SandboxFolder, locked, read_value, write_value
from vmsandbox.values import now

PENDING_MOST = 32
EVER_MOST = 1000
"""Of one sandbox: a guest cannot fill the host's disk with questions."""

_ID = re.compile(r"([0-9a-f]{1,8})-([0-9]{1,4})")


class TooMany(Exception):
    """The sandbox has asked enough."""


def questions(folder: SandboxFolder) -> tuple[Approval, ...]:
    """All that a sandbox ever asked, as it stands now, oldest first."""
    found = (read_value(path, Approval) for path in _place(folder).glob("*.json"))
    moment = now()
    kept = [one.at(moment) for one in found if one is not None]
    return tuple(sorted(kept, key=lambda one: (one.asked_at, one.id)))


def pending(folder: SandboxFolder) -> tuple[Approval, ...]:
    """What waits for an answer."""
    return tuple(one for one in questions(folder) if one.answer is Answer.PENDING)


def question(folder: SandboxFolder, number: int) -> Approval | None:
    """One of them as it stands now."""
    found = read_value(_file(folder, number), Approval)
    return found and found.at(now())


def ask(
    folder: SandboxFolder, text: str, command: Sequence[str], rule: str, timeout_s: float
) -> Approval:
    """Write a new question down. Texts must be safe to show. Raises TooMany."""
    place = _place(folder)
    place.mkdir(mode=0o700, exist_ok=True)
    with locked(place / "lock"):
        number = 1 + max((int(path.stem) for path in place.glob("*.json")), default=0)
        if number > EVER_MOST or len(pending(folder)) >= PENDING_MOST:
            raise TooMany
        asked = Approval(
            id=f"{folder.id}-{number}",
            text=text,
            command=tuple(command),
            rule=rule,
            expires_at=now() + timedelta(seconds=timeout_s),
        )
        write_value(_file(folder, number), asked)
    folder.append_event(Event(phase="ask", text=f"{asked.id}: {text}"))
    return asked


def answer(
    folder: SandboxFolder, number: int, given: Answer, *, who: str, reason: str = ""
) -> Approval:
    """Answer a question that waits.

    Raises NegativeAnswer ``approval_over`` if it does not wait any more, UsageProblem
    ``approval_unknown``.
    """

    def answered(asked: Approval) -> Approval:
        if asked.answer is not Answer.PENDING:
            by = f" by {asked.who}" if asked.who else ""
            raise NegativeAnswer(
                "approval_over",
                f"question {asked.id} does not wait any more: {asked.answer}{by}",
                hint="vmsandbox approvals --all",
            )
        return asked.model_copy(
            update={"answer": given, "who": who, "reason": reason, "answered_at": now()}
        )

    done = _changed(folder, number, answered)
    by = f" by {done.who}" if done.who else ""
    folder.append_event(Event(phase="ask", text=f"{done.id}: {done.answer}{by}"))
    return done


def _changed(
    folder: SandboxFolder, number: int, change: Callable[[Approval], Approval]
) -> Approval:
    place = _place(folder)
    if not place.is_dir():
        raise unknown(f"{folder.id}-{number}")
    with locked(place / "lock"):
        if (asked := question(folder, number)) is None:
            raise unknown(f"{folder.id}-{number}")
        changed = change(asked)
        write_value(_file(folder, number), changed)
    return changed


def find(folders: Iterable[SandboxFolder], id_: str) -> tuple[SandboxFolder, int]:
    """The sandbox and the number that an id means; the sandbox's part may be a unique beginning.

    Raises UsageProblem ``approval_unknown``.
    """
    if match := _ID.fullmatch(id_):
        found = [folder for folder in folders if folder.id.startswith(match[1])]
        if len(found) == 1 and _file(found[0], int(match[2])).exists():
            return found[0], int(match[2])
    raise unknown(id_)


def unknown(id_: str) -> UsageProblem:
    return UsageProblem(
        "approval_unknown", f"no question {id_!r} was asked", hint="vmsandbox approvals"
    )


def _place(folder: SandboxFolder) -> Path:
    return folder.path / "approvals"


def _file(folder: SandboxFolder, number: int) -> Path:
    return _place(folder) / f"{number}.json"
