"""Owns the verb that examines and mends the host: doctor."""

from typing import TYPE_CHECKING, Annotated

import typer

from vmsandbox.cli import output
from vmsandbox.cli.output import JsonFlag, Output
from vmsandbox.errors import UsageProblem

if TYPE_CHECKING:
    from rich.table import Table

    from vmsandbox.host import Check


def register(app: typer.Typer) -> None:
    """Add the verb to the program."""
    app.command()(doctor)


def doctor(
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend first: start libvirt, open /dev/kvm to its group.")
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="End the daemons that --fix started; guests go on.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Examine this host: what keeps guests from starting, or makes them slow. 1 if they cannot.

    Example: vmsandbox doctor --fix
    """
    from vmsandbox import doctor as room

    out = output.begin(as_json)
    if stop:
        if fix:
            raise UsageProblem(
                "flags_contradict",
                "--fix and --stop contradict each other",
                hint="vmsandbox doctor --fix",
            )
        _show_stopped(out, room.stop())
        return
    done = room.mend() if fix else []
    for text in done:
        out.note(text)
    with out.waiting("examining the host"):
        checks = room.examine(out.note, again=fix)
    failed = any(check.status == "fail" for check in checks)
    data = {
        "ok": not failed,
        "mended": done,
        "checks": [check.model_dump(mode="json") for check in checks],
    }
    out.result(data, None if as_json else _table(checks))
    if failed:
        raise typer.Exit(1)


def _show_stopped(out: Output, names: list[str]) -> None:
    text = f"ended {', '.join(names)}" if names else "nothing of ours runs"
    out.result({"stopped": names}, text)


def _table(checks: "list[Check]") -> "Table":
    from rich.table import Table
    from rich.text import Text

    style = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in ("status", "name"):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        detail = check.detail + (f"\nhint: {check.hint}" if check.hint else "")
        mark = Text(check.status.value, style=style[check.status.value])
        table.add_row(mark, Text(check.name), Text(detail))
    return table
