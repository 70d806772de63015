"""Owns the verb that measures what one more guest costs: density."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmsandbox.cli import output
from vmsandbox.cli.output import JsonFlag, Output
from vmsandbox.cli.run import Cpus, Image, Memory
from vmsandbox.errors import UsageProblem
from vmsandbox.text import printable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from vmsandbox.density import Asked, Experiment, Outcome

INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the verb to the program."""
    app.command()(density)


def density(
    most: Annotated[int, typer.Option("--max", metavar="N", help="Guests to start.")] = 8,
    step: Annotated[int, typer.Option(metavar="N", help="Guests between measurements.")] = 4,
    image: Image = None,
    memory: Memory = None,
    cpus: Cpus = None,
    hold: Annotated[
        str, typer.Option(metavar="TIME", help="Let each step settle for 5s, 1m.")
    ] = "5s",
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help="Each guest runs this first, as agent; docker: a container.",
        ),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Boot from the image, do not clone.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Clones, then cold starts.")] = False,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="[default: ./vmsandbox-density-TIME]"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Start more and more guests on this host, measure what each costs, and free them all.

    Stops before the host would swap. Ctrl-C ends it early, with a report. Leaves report.html,
    figures.jsonl and pictures in a folder. 1 if a guest failed, 130 if interrupted.

    Example: vmsandbox density --max 32 --compare
    """
    from vmsandbox import density as room
    from vmsandbox.sandbox import Rooms

    out = output.begin(as_json)
    asked = _asked(
        most, step, hold, workload, cold, compare, {"image": image, "memory": memory, "cpus": cpus}
    )
    with Rooms.open(note=out.note) as rooms:
        experiment = room.Experiment(rooms, asked, _quiet if as_json else out.note)
        folder = (out_folder or room.default_folder()).absolute()
        with room.opened(folder) as report:
            with _heeding(out, experiment):
                outcome = experiment.run(report.journal)
            files = report.finish(outcome)
    out.result(_data(outcome, files), None if as_json else _summary(outcome, files[0]))
    if len(files) == 2 and not as_json:
        out.note(f"no pictures without matplotlib: {room.INSTALL}")
    _exit(outcome)


def _quiet(text: str) -> None:
    return


def _asked(
    most: int,
    step: int,
    hold: str,
    workload: str | None,
    cold: bool,
    compare: bool,
    overrides: dict[str, Any],
) -> "Asked":
    from vmsandbox.config import parse_duration_s
    from vmsandbox.density import Asked

    if cold and compare:
        raise UsageProblem(
            "flags_contradict",
            "--cold and --compare contradict each other",
            hint="--compare measures both ways to start",
        )
    try:
        hold_s = parse_duration_s(hold)
    except ValueError as error:
        raise UsageProblem("hold_invalid", f"--hold: {error}", hint="--hold 5s") from None
    return Asked(
        max=most,
        step=step,
        hold_s=hold_s,
        workload=workload,
        starts=("clone", "cold") if compare else ("cold",) if cold else ("clone",),
        overrides=overrides,
    )


@contextlib.contextmanager
def _heeding(out: Output, experiment: "Experiment") -> Iterator[None]:
    """A signal ends the experiment early instead of the process; a second one hurries it."""
    asked = 0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        out.note(
            "ending early; what is known is reported and all is freed (again: hurry)"
            if asked == 1
            else "freeing all that was started"
        )
        threading.Thread(target=experiment.stop, name="stop", daemon=True).start()

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _data(outcome: "Outcome", files: tuple[Path, ...]) -> dict[str, Any]:
    data = outcome.model_dump(mode="json", exclude={"passes": {"__all__": {"samples", "steps"}}})
    return data | {
        "attempted": outcome.attempted,
        "completed": outcome.completed,
        "stopped_by": outcome.stopped_by.value,
        "failures": [failed.model_dump(mode="json") for failed in outcome.failures],
        "files": [str(file) for file in files],
    }


def _exit(outcome: "Outcome") -> None:
    from vmsandbox.density import StoppedBy

    if outcome.stopped_by is StoppedBy.INTERRUPTED:
        raise typer.Exit(INTERRUPTED)
    if outcome.failures or not outcome.completed:
        raise typer.Exit(1)


def _summary(outcome: "Outcome", page: Path) -> "Group":
    from rich.console import Group
    from rich.text import Text

    ended = f"{outcome.completed} of {outcome.attempted} guests did all that was asked"
    lines = [Text(f"{ended}; stopped by {outcome.stopped_by.value}")]
    for failed in outcome.failures:
        failure = failed.failure
        told = f"{failed.name} ({failed.start}, {failure.phase}): {failure.message}"
        lines.append(Text(f"{printable(told)} [{failure.code}]", style="red"))
    return Group(_table(outcome), *lines, Text(f"report: {page}"))


def _table(outcome: "Outcome") -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from vmsandbox.density import summary_rows

    c = outcome.conditions
    size = f"{c.image}, {c.guest_cpus} CPU, {c.guest_memory_mib} MiB, {c.accelerator}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=Text(f"one more VM: {size}"))
    table.title_justify = "left"
    table.add_column("")
    names = list(outcome.summary)
    for name in names:
        table.add_column(name, no_wrap=True)
    columns = [summary_rows(outcome.summary[name]) for name in names]
    for position, (label, _) in enumerate(columns[0] if columns else []):
        cells = [Text(column[position][1]) for column in columns]
        table.add_row(Text(label), *cells, style="bold" if label == "one more takes" else None)
    return table
