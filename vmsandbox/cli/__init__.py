"""Owns the command line's top: the list of verbs and how errors become exit codes. No logic of its
own.

Verb modules import only typer, errors and output at their top, and rooms below inside their
functions, so that
``vmsandbox --help`` answers before libvirt, paramiko and pydantic are read.
"""

import os
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from vmsandbox import __version__
from vmsandbox.cli.output import Output
from vmsandbox.errors import VmsandboxError

RUN_FAILED = 125
"""`run` returns the workload's exit code; this one says that vmsandbox itself failed, as with
docker run."""
CARRYING = ("run", "resume", "fork", "inspect", "attach")

app = typer.Typer(
    name="vmsandbox",
    help="One VM per coding agent: a git worktree goes in, one reviewed change set comes out.",
    epilog=(
        "Examples:\n\n"
        "  vmsandbox run -- ./test.sh\n\n"
        "  vmsandbox status\n\n"
        "  vmsandbox review last && vmsandbox apply last\n\n"
        "  vmsandbox ssh last"
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vmsandbox {__version__}")
        raise typer.Exit


@app.callback()
def top(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    Output.debug = debug


def _register() -> None:
    from vmsandbox.cli import (
        approvals,
        attach,
        batch,
        brief,
        density,
        doctor,
        guest,
        image,
        life,
        net,
        ports,
        proof,
        review,
        review_many,
        run,
    )

    for module in (run, batch, life, guest, net, review, review_many, proof, density, doctor):
        module.register(app)
    ports.register(app)
    attach.register(app)
    app.add_typer(image.app, name="image")
    app.add_typer(brief.app, name="brief")
    app.add_typer(approvals.app, name="approvals")


def program() -> None:
    """Entry point of the ``vmsandbox`` program: :func:`main`, and then the process is over.

    Threads of libraries, such as libvirt's events, are still in C code then. To take the
    interpreter down under them has ended in a segmentation fault, after all was done.
    """
    code: object = 0
    _escape_what_cannot_be_encoded()
    try:
        main()
    except SystemExit as leaving:
        code = leaving.code
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 1
    os._exit(code if isinstance(code, int) else int(code is not None))


def _escape_what_cannot_be_encoded() -> None:
    """Names are any text, and not every locale has every character."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """What the program does; SystemExit says how it ended."""
    _register()
    try:
        app()
    except VmsandboxError as error:
        Output.current.error(error)
        sys.exit(RUN_FAILED if _verb() in CARRYING else error.exit_code)
    except KeyboardInterrupt:
        Output.current.note("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _verb() -> str:
    return next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
