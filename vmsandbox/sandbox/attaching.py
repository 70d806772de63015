"""Owns a person's stay at the screen of a sandbox's task: waiting until it is there, showing it
until the command ends or the person leaves, and what came of it all.

Knows the guest's screen as a script that shows it; who manages the sandbox does not matter here.
"""

import time
from collections.abc import Callable

from vmsandbox.errors import GuestProblem, HostProblem, UsageProblem
from vmsandbox.guest import Deadline, Guest, Terminal
from vmsandbox.guest.task import ON_SCREEN
from vmsandbox.model import SandboxRecord, SandboxState
from vmsandbox.sandbox.access import argv_as, open_guest, running_record
from vmsandbox.sandbox.report import Report, report_of
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.store import SandboxFolder

_POLL_S = 0.1
_CONNECT_S = 180.0
_ENDED, _GOES_ON = 0, 3
"""What the guest's script says of the command when the screen is shown no more."""

_REACHABLE = (SandboxState.READY, SandboxState.RUNNING)


def attach(rooms: Rooms, folder: SandboxFolder, terminal: Terminal) -> bool:
    """Show the screen of a sandbox's task, as soon as there is one; whether its command has ended.

    False: the person left, or was sent away from within the guest, and the command goes on. Raises
    UsageProblem ``no_screen``, ``task_ended``, ``guest_not_running``; GuestProblem
    ``connection_lost``.
    """
    record = folder.read_record()
    if record.task.terminal == "no":
        raise UsageProblem(
            "no_screen",
            f"the command of {record.id} was not started with -it, so it has no screen",
            hint=f"vmsandbox logs -f {record.id}    (or: vmsandbox exec -it {record.id} -- bash)",
        )
    if record.exec_result or not _await_guest(folder):
        return _over(rooms, folder)
    with open_guest(rooms, folder, running_record(rooms, folder)) as guest:
        guest.connect(Deadline(_CONNECT_S))
        if not _await_task(folder):
            return _over(rooms, folder)
        return _show(guest, terminal, record)


def _show(guest: Guest, terminal: Terminal, record: SandboxRecord) -> bool:
    try:
        code = guest.interactive(argv_as("agent", {}, [ON_SCREEN, "show"]), terminal)
    except GuestProblem as problem:
        if problem.code == "connection_lost":
            problem.hint = f"the command goes on: vmsandbox attach {record.id}"
        raise
    if terminal.left:
        return False
    if code not in (_ENDED, _GOES_ON):
        raise GuestProblem(
            "screen_lost",
            f"the guest of {record.id} cannot show the screen (exit code {code})",
            hint=f"vmsandbox exec -it {record.id} -- bash",
        )
    return code == _ENDED


def _over(rooms: Rooms, folder: SandboxFolder) -> bool:
    """True for a task that ended under our eyes; refuses one that had ended, or never began."""
    if folder.manager_alive():
        return True
    _refuse_failed(folder.read_record())
    record = running_record(rooms, folder)
    raise UsageProblem(
        "task_ended",
        f"the command of {record.id} does not run any more",
        hint=f"vmsandbox logs {record.id}    (or: vmsandbox exec -it {record.id} -- bash)",
    )


def _await_guest(folder: SandboxFolder) -> bool:
    """Wait until there is a guest to connect to; False if nobody is about to start one."""
    return _await(folder, lambda record: record.state in _REACHABLE)


def _await_task(folder: SandboxFolder) -> bool:
    """Wait until the guest has said that the task runs; False if it ended before."""
    return _await(folder, lambda record: record.task_started)


def _await(folder: SandboxFolder, there: Callable[[SandboxRecord], bool]) -> bool:
    """The manager has deadlines of its own for all that it does."""
    deadline = Deadline(None)
    while not deadline.passed():
        managed = folder.manager_alive()
        record = folder.read_record()
        if record.exec_result or record.state is SandboxState.FAILED:
            return False
        if there(record):
            return True
        if not managed:
            return False
        time.sleep(_POLL_S)
    return False


def await_report(folder: SandboxFolder) -> Report | None:
    """What a life comes to, once its manager is done; None if it has none and nobody knows yet.

    Raises what it failed with.
    """
    deadline = Deadline(None)
    while folder.manager_alive() and not deadline.passed():
        time.sleep(_POLL_S)
    record = folder.read_record()
    _refuse_failed(record)
    return report_of(folder) if record.exec_result else None


def _refuse_failed(record: SandboxRecord) -> None:
    failed = record.failure
    if failed and record.state is SandboxState.FAILED:
        raise HostProblem(failed.code, failed.message, hint=failed.hint, evidence=failed.evidence)
