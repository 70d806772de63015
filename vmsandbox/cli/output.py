"""Owns what reaches the terminal: results on stdout, progress on stderr, errors with their hint,
one JSON object.

Knows no verb. rich is imported only when something is really drawn, so that help stays quick.
"""

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmsandbox.errors import VmsandboxError
from vmsandbox.text import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text.", show_default=False)
]
SelectorArgument = Annotated[
    str, typer.Argument(metavar="SANDBOX", help="id, unique prefix of an id, name, or 'last'")
]

SCHEMA = 1
_PIPE_WIDTH = 500


class Output:
    """Where one call of one verb prints. `begin` it once per verb."""

    current: "Output"
    debug = False

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.started = time.monotonic()

    def console(self, *, stderr: bool = False) -> "Console":
        """A rich console on stdout or stderr; plain text when that is no terminal."""
        from rich.console import Console

        stream = sys.stderr if stderr else sys.stdout
        return Console(
            file=stream,
            markup=False,
            highlight=False,
            emoji=False,
            width=None if stream.isatty() else _PIPE_WIDTH,
        )

    def result(self, data: Any, text: "RenderableType | None" = None) -> None:
        """Print what the verb found: `data` (JSON-ready) with --json, else `text`."""
        if self.as_json:
            meta = {"seconds": round(time.monotonic() - self.started, 3)}
            self._object({"schema": SCHEMA, "data": data, "meta": meta})
        elif isinstance(text, str):
            sys.stdout.write(printable(text) + "\n")
        elif text is not None:
            self.console().print(text)

    def note(self, text: str) -> None:
        """One line of progress or advice on stderr; guest text in it is made safe."""
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()

    def error(self, error: VmsandboxError) -> None:
        """Tell what failed, the hint and the evidence; the same as an object with --json."""
        if self.as_json:
            body: dict[str, Any] = {
                "code": error.code,
                "message": error.message,
                "hint": error.hint,
                "evidence": error.evidence,
            }
            body |= {"data": error.data} if error.data else {}
            self._object({"schema": SCHEMA, "error": body, "meta": {}})
        lines = [f"error: {error.message} [{error.code}]"]
        lines += [f"hint: {error.hint}"] if error.hint else []
        lines += [f"evidence: {error.evidence}"] if error.evidence else []
        self.note("\n".join(lines))
        if Output.debug:
            traceback.print_exception(error)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show that something is on its way: a spinner on a terminal, one plain line elsewhere."""
        if self.as_json or not sys.stderr.isatty():
            if not self.as_json:
                self.note(text)
            yield
            return
        with self.console(stderr=True).status(printable(text)):
            yield

    def _object(self, value: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(value, indent=2 if sys.stdout.isatty() else None) + "\n")
        sys.stdout.flush()


Output.current = Output()


def begin(as_json: bool) -> Output:
    """Start the output of one verb; errors that follow are printed in the same form."""
    Output.current = Output(as_json=as_json)
    return Output.current


def code_and_why(exit_code: int | None, why: str) -> tuple[str, str]:
    """An exit code as it is told after an outcome, and what else there is to say of the end."""
    code = "" if exit_code is None else f"exit code {exit_code}"
    return (f", {code}" if code else ""), ("" if why == code else why)
