"""Owns the verbs that look at a result in another guest: verify, inspect, and what `review --by`
does first.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from vmsandbox.cli import output
from vmsandbox.cli.attending import Wish, attended
from vmsandbox.cli.output import JsonFlag, Output, SelectorArgument
from vmsandbox.cli.run import UNPROVEN, Printer, Variables, environment, exit_code

if TYPE_CHECKING:
    from vmsandbox.model import CheckRun, Opinion
    from vmsandbox.sandbox import Halt
    from vmsandbox.store import SandboxFolder

_T = TypeVar("_T")

INTERRUPTED = 130
_ENDING = "ending it; a guest that was started for this is deleted"


def register(app: typer.Typer) -> None:
    """Add the verbs to the program."""
    app.command()(verify)
    app.command()(inspect)


def verify(
    selector: SelectorArgument,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="In a new guest that holds only base and result.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run the checks of a task again: those of `run --verify`, of its task file, or of the project.

    They run in the task's own guest, booted again if it stands still, on what is collected from it
    at that moment; what they write there is kept apart and thrown away. An approval that named
    other results no longer holds. The exit code is 1 if a check did not pass.

    Examples:

      vmsandbox verify last

      vmsandbox verify last --fresh
    """
    from vmsandbox.batch import share_of
    from vmsandbox.cli import proof_text
    from vmsandbox.sandbox import Halt, Rooms, verify_sandbox

    out = output.begin(as_json)
    printer, halt = Printer(out, quiet=False), Halt()
    with Rooms.open(note=out.note) as rooms:
        folder = rooms.store.resolve(selector)

        def work() -> "CheckRun":
            return verify_sandbox(
                rooms, folder, fresh=fresh, listener=printer, halt=halt, share=share_of(rooms)
            )

        run = _interruptible(out, halt, work)
    printer.close()
    data = {"id": folder.id, "passed": run.passed, **run.model_dump(mode="json")}
    if as_json:
        out.result(data)
    else:
        for line in proof_text.run_lines(run):
            out.console().print(line, soft_wrap=True)
    raise typer.Exit(0 if run.passed else UNPROVEN)


def inspect(
    selector: SelectorArgument,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="What to run.")],
    fresh: Annotated[
        bool, typer.Option("--fresh", help="In a new guest that holds only base and result.")
    ] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give it our terminal.")] = False,
    env: Variables = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="End it after 90s, 5m, 1h30m.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a command on a result in a guest that is thrown away; its exit code is returned.

    It boots from a copy of the disk as the task left it, with all that was installed or built. With
    --fresh, or where no such disk holds the result, it is a new guest with base (HEAD~1) and result
    (HEAD) alone. Nothing flows back to result or host, also after Ctrl-C.

    Examples:

      vmsandbox inspect last --fresh -- ./test.sh

      vmsandbox inspect last -t -- bash
    """
    from vmsandbox.batch import share_of
    from vmsandbox.config import parse_duration_s
    from vmsandbox.errors import UsageProblem
    from vmsandbox.sandbox import Halt, Rooms, inspect_sandbox

    out = output.begin(as_json)
    try:
        timeout_s = None if timeout is None else parse_duration_s(timeout)
    except ValueError as error:
        raise UsageProblem("timeout_invalid", str(error), hint="--timeout 90s") from None
    variables = environment(env or [])
    printer, halt = Printer(out, quiet=False), Halt()
    with Rooms.open(note=out.note) as rooms:
        folder = rooms.store.resolve(selector)
        work = partial(
            inspect_sandbox,
            rooms,
            folder,
            command,
            fresh=fresh,
            env=variables,
            timeout_s=timeout_s,
            tty=tty,
            listener=printer,
            halt=halt,
            share=share_of(rooms),
        )
        ended = _interruptible(out, halt, work)
    printer.close()
    out.result({"id": folder.id, **ended.model_dump(mode="json")})
    if ended.detail and ended.outcome != "completed":
        out.note(ended.detail)
    raise typer.Exit(exit_code(ended.outcome, ended.exit_code))


def let_review(out: Output, folder: "SandboxFolder", by: str, brief: Path | None) -> None:
    """Let the agent `by` judge the result of a sandbox; what it says is kept with the result."""
    from vmsandbox.batch import share_of
    from vmsandbox.sandbox import Halt, Rooms, read_brief, review_by

    goal = read_brief(brief) if brief else None
    printer, halt = Printer(out, quiet=False, to_stderr=True), Halt()
    with Rooms.open(note=out.note) as rooms:

        def work() -> "Opinion":
            return review_by(
                rooms, folder, by, goal=goal, listener=printer, halt=halt, share=share_of(rooms)
            )

        _interruptible(out, halt, work)
    printer.close()


def _interruptible(out: Output, halt: "Halt", work: Callable[[], _T]) -> _T:
    """The result of `work`. Ctrl-C ends it, and it is waited for until it has cleaned up."""
    from vmsandbox.guest import Interrupted

    try:
        return attended(out, work, (Wish(_ENDING, halt.ask),))
    except Interrupted:
        out.note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
