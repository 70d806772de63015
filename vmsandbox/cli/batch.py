"""Owns the verb that carries out many tasks: batch."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmsandbox.cli import granting, output
from vmsandbox.cli.attending import Wish, attended
from vmsandbox.cli.output import JsonFlag, Output
from vmsandbox.errors import UsageProblem

if TYPE_CHECKING:
    from rich.table import Table

    from vmsandbox.batch import BatchReport, Carried, Grants, Plan, TaskReport

INTERRUPTED = 130
TEMPLATES = ("vmsandbox-task.yaml", "vmsandbox-task.toml")
_REASON = 200

HELP = """\
Carry out many tasks, each in a virtual machine of its own, as many at once as this host can carry.

FILE is YAML or TOML with a list of tasks; --schema says what a task may hold. Two tasks start, what
they take is measured, then more start while memory, disk and CPU allow. Every result waits for a
decision. Ctrl-C once begins nothing more, twice ends the tasks (and collects), three times at once;
--resume goes on, also after the batch was killed; --discard gives up what is left of it and keeps
its sandboxes. The exit code is 0 if all completed, 1 if some did not, 130 if something is left to
resume.

Examples:

  vmsandbox batch tasks.yaml

  vmsandbox batch --template fix.yaml -- 101 102 107

  vmsandbox batch --resume
"""


def register(app: typer.Typer) -> None:
    """Add the verb to the program."""
    app.command(help=HELP)(batch)


def batch(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE…|-- ID…", help="Task files, or ids for a template."),
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Where {{id}} is an ID. [default: {TEMPLATES[0]}]"),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", metavar="N", min=1, help="At most so many at once."),
    ] = None,
    net: granting.NetFlag = None,
    allow: granting.Allow = None,
    gateway: granting.Gateways = None,
    max_cost: granting.MaxCost = None,
    max_tokens: granting.MaxTokens = None,
    ask: granting.Ask = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a batch: its id, or the latest unfinished.")
    ] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Give a batch up: its id, or the only unfinished.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a task file.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """HELP tells the user."""
    from vmsandbox import batch as room
    from vmsandbox.sandbox import Rooms

    out = output.begin(as_json)
    if schema:
        out.result(room.schema(), json.dumps(room.schema(), indent=2))
        return
    if discard:
        _discard(out, _only(names or [], "--discard"))
        return
    watcher = _Lines(out)
    grants = granting.grants(net, allow, gateway, max_cost, max_tokens, ask=ask)
    plan = _plan(names or [], template, grants, resume=resume)
    with Rooms.open(note=out.note) as rooms:
        way_in = (
            room.beginning(rooms, plan, watcher, jobs=jobs)
            if plan
            else room.resuming(rooms, _only(names or [], "--resume"), watcher, jobs=jobs)
        )
        with way_in as carried:
            report = attended(out, carried.run, _wishes(carried))
    out.result(report.model_dump(mode="json"), table(report))
    _say(out, report)
    if report.unfinished:
        raise typer.Exit(INTERRUPTED)
    if not report.well:
        raise typer.Exit(1)


def _wishes(carried: "Carried") -> tuple[Wish, ...]:
    again = f"vmsandbox batch --resume {carried.id} goes on"
    notes = (
        f"beginning nothing more; what runs goes on (again: end it); {again}",
        "ending the tasks; what they did is still collected (again: at once)",
        f"stopping at once; the disks are kept: {again}",
    )
    return tuple(Wish(note, carried.ask_to_end) for note in notes)


def _plan(
    names: list[str], template: Path | None, grants: "Grants | None", *, resume: bool
) -> "Plan | None":
    """None: a batch that was begun goes on."""
    from vmsandbox.batch import granted

    if not resume:
        return granted(_named(names, template), grants)
    if grants:
        raise UsageProblem(
            "grants_are_kept",
            "a batch goes on with what it was let do when it began",
            hint="vmsandbox batch --resume    (without --net, --allow, --gateway, --max-…, --ask)",
        )
    return None


def _named(names: list[str], template: Path | None) -> "Plan":
    from vmsandbox.batch import plan_files, plan_ids

    if not names:
        raise UsageProblem(
            "nothing_named", "no task file named", hint="vmsandbox batch FILE…    (see --help)"
        )
    if template is None and "--" not in sys.argv:
        return plan_files([Path(name) for name in names])
    found = template or next((Path(t) for t in TEMPLATES if Path(t).exists()), None)
    if found is None:
        raise UsageProblem(
            "no_template",
            f"ids need a task template, and there is no {TEMPLATES[0]} here",
            hint="vmsandbox batch --template FILE -- ID…",
        )
    return plan_ids(found, names)


def _discard(out: Output, selector: str | None) -> None:
    from vmsandbox.batch import discard_batch

    gone = discard_batch(selector)
    out.result(gone.model_dump(mode="json"), f"discarded batch {gone.batch}")
    if gone.left:
        out.note(f"{len(gone.left)} task(s) are given up: {', '.join(gone.left)}")
    if gone.sandboxes:
        out.note(f"{len(gone.sandboxes)} sandbox(es) stay: {', '.join(gone.sandboxes)}")


def _only(names: list[str], way: str) -> str | None:
    if len(names) > 1:
        raise UsageProblem(
            "too_many_batches", "one batch at a time", hint=f"vmsandbox batch {way} [BATCH]"
        )
    return names[0] if names else None


class _Lines:
    """One line on stderr for everything that happens to a task."""

    def __init__(self, out: Output) -> None:
        self._out = out

    def created(self, name: str, id_: str) -> None:
        self._out.note(f"created {name} {id_}")

    def queued(self, name: str, reason: str) -> None:
        self._out.note(f"queued {name} ({reason})")

    def ended(self, task: "TaskReport") -> None:
        self._out.note(f"{task.outcome if task.well else 'failed'} {task.name}{_why(task)}")


def _why(task: "TaskReport") -> str:
    said = [] if task.well or task.outcome == "failed" else [task.outcome]
    said += [_short(task.reason)] if task.reason else []
    if task.result and task.result.changes:
        said.append(f"{task.result.changes} change(s)")
    if task.result and (proof := task.result.proof()):
        said.append(_short(proof))
    return f" ({'; '.join(said)})" if said else ""


def _short(reason: str) -> str:
    return " ".join(reason.split())[:_REASON]


def table(report: "BatchReport") -> "Table":
    """What came of every task, a row for each; guest text in it is made safe."""
    from rich import box
    from rich.table import Table

    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("name", "id", "outcome", "exit", "result", "changes", "checks"):
        rows.add_column(title, no_wrap=True)
    rows.add_column("reason", overflow="fold", min_width=16)
    for task in report.tasks:
        rows.add_row(
            task.name,
            task.id or "",
            task.outcome,
            "" if task.exit_code is None else str(task.exit_code),
            task.result.state.value if task.result else "",
            str(task.result.changes) if task.result else "",
            _checks(task),
            _reason(task),
        )
    return rows


def _reason(task: "TaskReport") -> str:
    """Why, and the file that says more about what did not go well."""
    from vmsandbox.text import printable

    said = [_short(task.reason)] if task.reason else []
    said += [f"evidence: {task.evidence}"] if task.evidence and not task.well else []
    return printable("\n".join(said))


def _checks(task: "TaskReport") -> str:
    if task.result is None or not task.result.checks:
        return ""
    return f"{len(task.result.unproven)} FAILED" if task.result.unproven else "passed"


def _say(out: Output, report: "BatchReport") -> None:
    if report.unfinished:
        out.note(f"{report.unfinished} task(s) are left: vmsandbox batch --resume {report.batch}")
    elif any(task.result and task.result.changes for task in report.tasks):
        out.note(f"next: vmsandbox review --batch {report.batch}")
