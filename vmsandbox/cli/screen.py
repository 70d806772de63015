"""Owns a person's stay at the screen of a task, for the verbs that begin one or come back to it."""

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vmsandbox.cli.output import Output
from vmsandbox.errors import UsageProblem

if TYPE_CHECKING:
    from vmsandbox.guest import Terminal
    from vmsandbox.sandbox import Report, Rooms
    from vmsandbox.store import SandboxFolder

DEFAULT_KEYS = "ctrl-p,ctrl-q"

Interactive = Annotated[
    bool, typer.Option("--interactive", "-i", help="With -t: stay at the terminal.")
]
Tty = Annotated[
    bool, typer.Option("--tty", "-t", help="Run in a terminal that stays: vmsandbox attach.")
]
DetachKeys = Annotated[
    str, typer.Option(metavar="KEYS", help="Leave with these, as docker spells them.")
]


def wanted(
    interactive: bool, tty: bool, *, detach: bool, as_json: bool
) -> Literal["no", "kept", "watched"]:
    """What ``-i`` and ``-t`` of `run` mean."""
    if interactive and not tty:
        raise UsageProblem(
            "flags_contradict", "a task's stdin is empty; -i needs -t", hint="run -it -- COMMAND"
        )
    if tty and as_json and not detach:
        raise UsageProblem(
            "flags_contradict", "a terminal shows no JSON", hint="run -it --detach --json"
        )
    return "no" if not tty else "kept" if detach else "watched"


def terminal_here(detach_keys: str = DEFAULT_KEYS) -> "Terminal":
    """Our own terminal, for a person to stay at; UsageProblem ``not_a_terminal``."""
    from vmsandbox.guest import Terminal, detach_bytes

    keys = detach_bytes(detach_keys)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageProblem(
            "not_a_terminal",
            "stdin and stdout are no terminal that a screen could be shown on",
            hint="vmsandbox run -t --detach; vmsandbox logs -f last",
        )
    return Terminal(tty=True, detach_keys=keys)


def begin_and_stay(
    out: Output, rooms: "Rooms", folder: "SandboxFolder", terminal: "Terminal"
) -> "Report | None":
    """Carry a new sandbox out in the background, where no lost terminal can end it, and stay."""
    from vmsandbox.sandbox import spawn_manager, stop_sandbox

    spawn_manager(folder)
    try:
        return stay(out, rooms, folder, terminal)
    except KeyboardInterrupt:  # before there was a screen: there it is a key like any other
        out.note("asking the task to end; what it did is still collected")
        stop_sandbox(rooms, folder, at_once=False)
        raise


def stay(
    out: Output, rooms: "Rooms", folder: "SandboxFolder", terminal: "Terminal"
) -> "Report | None":
    """Until the command has ended, and what came of it; None if the person left before."""
    from vmsandbox.sandbox import attach, await_report

    out.note(f"{folder.id}: ctrl-p ctrl-q leaves, the command goes on")
    if not attach(rooms, folder, terminal):
        out.note(f"left; come back: vmsandbox attach {folder.id}")
        return None
    with out.waiting("collecting"):
        report = await_report(folder)
    if report is None:
        out.note(f"nobody manages {folder.id}: vmsandbox resume {folder.id}")
    return report
