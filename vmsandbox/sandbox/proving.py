"""Owns looks at a result that lies in the store: its checks once more, any command on it, and the
opinion of another agent.

Nothing flows back but what is said: check results and opinions are kept with the result.
"""

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from pydantic import Field

from vmsandbox import brief, review, spending
from vmsandbox.config import PRESETS
from vmsandbox.errors import GuestProblem, UsageProblem
from vmsandbox.guest import Guest, Interrupted
from vmsandbox.model import (
    Brief,
    CheckRun,
    ExecResult,
    Finding,
    Opinion,
    SandboxRecord,
)
from vmsandbox.sandbox import briefing, checking
from vmsandbox.sandbox.create import settings_here
from vmsandbox.sandbox.equipping import Equipped, check_keys, equipped
from vmsandbox.sandbox.life import Manager
from vmsandbox.sandbox.listening import Halt, Listener, Quiet
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.sandbox.scratch import Scratch, Share, scratch_guest, scratch_on_its_disk, unasked
from vmsandbox.store import SandboxFolder
from vmsandbox.text import printable

REVIEW_TIMEOUT_S = 3600.0
_NAME_CHARACTERS = 60


def verify_sandbox(
    rooms: Rooms,
    folder: SandboxFolder,
    *,
    fresh: bool = False,
    listener: Listener | None = None,
    halt: Halt | None = None,
    share: Share = unasked,
) -> CheckRun:
    """Run the checks of a task again and write down what they came to.

    They run in the task's own guest, booted again from its disk if need be, on what is collected
    from it at that moment; with `fresh` in a new guest that holds base and result alone. Raises
    UsageProblem ``nothing_to_verify``, ``managed_elsewhere``; NegativeAnswer ``no_result``.
    """
    record = folder.read_record()
    if not record.task.verify:
        raise UsageProblem(
            "nothing_to_verify",
            f"no checks were named for {record.id}",
            hint=f"vmsandbox inspect {record.id} -- COMMAND    (or name them: run --verify)",
        )
    listener, halt = listener or Quiet(), halt or Halt()
    if not fresh:
        return _in_its_guest(rooms, folder, record, listener, halt, share)
    with scratch_guest(rooms, folder, listener, halt, share) as scratch:
        listener.phase("verify")
        results = checking.run_checks(scratch.guest, scratch.folder, record, apart=False)
        run = CheckRun(fresh=True, results=results)
        review.record_run(folder, scratch.change_set.digest, run)
    return run


def _in_its_guest(
    rooms: Rooms,
    folder: SandboxFolder,
    record: SandboxRecord,
    listener: Listener,
    halt: Halt,
    share: Share,
) -> CheckRun:
    review.read(folder)  # refuses what was never collected
    runs = rooms.guest_runs(record)
    keep = record.keep and runs
    with Manager.of(rooms, folder, listener) as manager:
        give_up = partial(_let_go, manager) if keep else manager.ask_to_end
        room = unasked if runs else share
        try:
            with halt.heeded_by(give_up), room(folder, manager.check_ending):
                manager.ensure_guest()
                manager.collect()
                manager.verify(again=True)
        except Interrupted:
            if keep:
                manager.guest.resume()
                checking.end_checks(manager.guest)
            raise
        finally:
            manager.rest(keep=keep)
    _, result = review.read(folder)
    return next(run for run in result.checks if not run.fresh)


def _let_go(manager: Manager) -> None:
    """Stop waiting for a guest that shall go on."""
    with contextlib.suppress(GuestProblem):
        manager.guest.interrupt()


class Inspected(ExecResult):
    """What a command on a result came to."""

    fresh: bool = Field(description="in a new guest that held only base and result")


def inspect_sandbox(
    rooms: Rooms,
    folder: SandboxFolder,
    command: Sequence[str],
    *,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    tty: bool = False,
    listener: Listener | None = None,
    halt: Halt | None = None,
    share: Share = unasked,
) -> Inspected:
    """Run a command on the result in a guest that is gone afterwards; nothing flows back.

    The guest boots from a copy of the disk as the task left it; with `fresh`, or where there is no
    such disk, it is a new one that holds base and result alone. With `tty` the command gets our
    terminal, and no timeout.
    """
    listener, halt = listener or Quiet(), halt or Halt()
    with contextlib.ExitStack() as stack:
        scratch = None
        if not fresh:
            copy = scratch_on_its_disk(rooms, folder, listener, halt, share)
            scratch = stack.enter_context(copy)
        if new := scratch is None:
            stack.close()
            scratch = stack.enter_context(scratch_guest(rooms, folder, listener, halt, share))
        if tty:
            ended = scratch.attach(command, env=_variables(scratch, env or {}))
        else:
            ended = _run(scratch, command, env or {}, timeout_s)
        return Inspected(fresh=new, **ended.model_dump())


def _run(
    scratch: Scratch, command: Sequence[str], env: Mapping[str, str], timeout_s: float | None
) -> ExecResult:
    return scratch.run(command, env=_variables(scratch, env), timeout_s=timeout_s)


def _variables(scratch: Scratch, env: Mapping[str, str]) -> dict[str, str]:
    return {**scratch.record.task.env, **env, "VMSANDBOX_ID": scratch.record.id}


# --- another agent's opinion ----------------------------------------------------------------------


def review_by(
    rooms: Rooms,
    folder: SandboxFolder,
    by: str,
    *,
    goal: Brief | None = None,
    timeout_s: float | None = REVIEW_TIMEOUT_S,
    listener: Listener | None = None,
    halt: Halt | None = None,
    share: Share = unasked,
) -> Opinion:
    """Let another agent judge a result, and keep what it says with the result.

    `by` names an agent of the project's settings, or is a line for the guest's shell. It gets base,
    result and the goal, from `goal` or else from the task's own brief, and nothing of what the
    author said.
    """
    task = folder.read_record().task
    asked = goal or task.brief or Brief()
    agent = _reviewer(by, task.worktree, asked)
    halt, listener = halt or Halt(), listener or Quiet()
    with scratch_guest(rooms, folder, listener, halt, share, agent) as scratch:
        briefing.hand_over(scratch.guest, brief.for_reviewer(asked).encode())
        ended = _run(scratch, agent.command, {**agent.env, **briefing.REVIEWER}, timeout_s)
        used = spending.used(scratch.folder).shown()
        report = briefing.said(scratch.guest)[1]
        findings, problem = _findings(scratch.guest)
        opinion = Opinion(
            by=printable(by, newlines=False)[:_NAME_CHARACTERS],
            command=agent.command,
            digest=scratch.change_set.digest,
            outcome=ended.outcome,
            exit_code=ended.exit_code,
            detail="; ".join(filter(None, (ended.detail, used))),
            report=printable(report),
            findings=findings,
            problem=problem,
        )
        review.attach(folder, opinion)
    return opinion


def _reviewer(by: str, worktree: Path, asked: Brief) -> Equipped:
    """The agent of that name and what it needs; what is none is a line for the shell."""
    settings = settings_here(worktree, {})
    named = by in settings.agents or by in PRESETS
    given = equipped(
        settings,
        command=() if named else ("/bin/sh", "-c", by),
        agent=by if named else None,
        brief=asked,
    )
    check_keys(given.equipment, (*given.command, *given.env.values()))
    return given


def _findings(guest: Guest) -> tuple[tuple[Finding, ...], str]:
    """What it found, or why that cannot be read."""
    try:
        return review.parse_findings(briefing.findings(guest)), ""
    except ValueError as error:
        return (), str(error)
