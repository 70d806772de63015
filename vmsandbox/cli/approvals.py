"""Owns the verbs that answer what guests ask: approvals, approvals allow, approvals deny."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmsandbox.cli import output
from vmsandbox.cli.output import JsonFlag
from vmsandbox.text import command_line, printable

if TYPE_CHECKING:
    from rich.table import Table

    from vmsandbox.asking import Answer, Approval

Question = Annotated[str, typer.Argument(metavar="ID", help="as `approvals` lists it")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="What the guest is told.")]

HELP = """\
List what guests ask a person by vmsandbox-ask, and answer it.

Examples:

  vmsandbox approvals

  vmsandbox approvals allow 2512f579-1
"""

app = typer.Typer(help=HELP)


@app.callback(invoke_without_command=True)
def approvals(
    context: typer.Context,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what was answered, with who and when.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List what waits for an answer; HELP tells the user how."""
    if context.invoked_subcommand:
        return
    from vmsandbox.approvals import pending, questions
    from vmsandbox.store import Store

    out = output.begin(as_json)
    ask = questions if everything else pending
    found = sorted(
        (one for folder in Store().folders() for one in ask(folder)),
        key=lambda one: one.asked_at,
    )
    data = {"approvals": [one.model_dump(mode="json") for one in found]}
    out.result(data, _table(found) if found else "nothing waits")


@app.command()
def allow(question: Question, reason: Reason = "", as_json: JsonFlag = False) -> None:
    """Let the guest do what it asked for.

    Example: vmsandbox approvals allow 2512f579-1
    """
    from vmsandbox.asking import Answer

    _answer(question, Answer.ALLOWED, reason, as_json)


@app.command()
def deny(question: Question, reason: Reason = "", as_json: JsonFlag = False) -> None:
    """Refuse it.

    Example: vmsandbox approvals deny 2512f579-1 --reason 'not on a Friday'
    """
    from vmsandbox.asking import Answer

    _answer(question, Answer.DENIED, reason, as_json)


def _answer(question: str, given: "Answer", reason: str, as_json: bool) -> None:
    from vmsandbox.approvals import answer, find
    from vmsandbox.review import decider
    from vmsandbox.store import Store

    out = output.begin(as_json)
    folder, number = find(Store().folders(), question)
    reason = printable(reason, newlines=False)
    done = answer(folder, number, given, who=decider(), reason=reason)
    data: dict[str, Any] = done.model_dump(mode="json")
    out.result(data, f"{done.id}: {done.answer} by {done.who}: {done.text}")


def _table(found: "list[Approval]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("id", "asked", "answer"):
        table.add_column(title, no_wrap=True)
    for title in ("question", "command"):
        table.add_column(title, overflow="fold", min_width=16)
    for one in found:
        answered = one.answer.value + (f" by {one.who}" if one.who else "")
        asked = one.asked_at.isoformat(" ", "seconds")
        table.add_row(one.id, asked, answered, one.text, command_line(one.command))
    return table
