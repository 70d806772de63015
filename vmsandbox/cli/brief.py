"""Owns the verb that judges a brief: brief check."""

from pathlib import Path
from typing import Annotated

import typer

from vmsandbox.cli import output
from vmsandbox.cli.output import JsonFlag

app = typer.Typer(no_args_is_help=True, help="Look at briefs: what an agent is told.")


@app.callback()
def top() -> None:
    """Verbs about briefs."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A brief: .yaml, .toml or .md.")],
    as_json: JsonFlag = False,
) -> None:
    """Tell whether a brief can be handed to an agent, and which parts it lacks.

    Refuses one without a goal (2). What else is missing is a warning each.

    Example: vmsandbox brief check briefs/parser.md
    """
    from vmsandbox.brief import missing
    from vmsandbox.sandbox import read_brief

    out = output.begin(as_json)
    brief = read_brief(file)
    lacking = missing(brief)
    if not as_json:
        for part in lacking:
            out.note(f"warning: {file}: nothing is said about {part!r}")
    data = {"brief": brief.model_dump(mode="json"), "missing": list(lacking)}
    out.result(data, f"goal: {brief.goal}")
