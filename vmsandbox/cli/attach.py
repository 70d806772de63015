"""Owns the verb attach: back to the screen of a task."""

import typer

from vmsandbox.cli import output, screen
from vmsandbox.cli.output import SelectorArgument


def register(app: typer.Typer) -> None:
    """Add the verb to the program."""
    app.command()(attach)


def attach(
    selector: SelectorArgument, detach_keys: screen.DetachKeys = screen.DEFAULT_KEYS
) -> None:
    """Go to the terminal of a task that was started with `run -it`; ctrl-p ctrl-q leaves again.

    The task goes on when you leave, close the window or lose the connection. Several people may be
    there at once. Scroll with the mouse wheel or shift-page-up. When the command ends, the exit
    code is that of `run`.

    Example: vmsandbox attach last
    """
    from vmsandbox.cli.run import conclude
    from vmsandbox.sandbox import Rooms

    out = output.begin(False)
    terminal = screen.terminal_here(detach_keys)
    with Rooms.open(note=out.note) as rooms:
        report = screen.stay(out, rooms, rooms.store.resolve(selector), terminal)
    if report:
        conclude(out, report)
