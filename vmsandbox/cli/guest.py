"""Owns the verbs that step into a running guest: ssh, ssh-config, exec."""

import os
import sys
from typing import Annotated

import typer

from vmsandbox.cli import output
from vmsandbox.cli.output import SelectorArgument
from vmsandbox.cli.run import Variables, environment
from vmsandbox.errors import UsageProblem


def register(app: typer.Typer) -> None:
    """Add the verbs to the program."""
    app.command(context_settings={"allow_interspersed_args": False})(ssh)
    app.command(name="ssh-config")(ssh_config)
    app.command(name="exec", context_settings={"allow_interspersed_args": False})(exec_)


def ssh(
    selector: SelectorArgument,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND…", help="Run this instead of a shell.")
    ] = None,
    root: Annotated[bool, typer.Option("--root", help="As root instead of agent.")] = False,
) -> None:
    """Open a shell in a running guest with the system's ssh and the sandbox's pinned host key.

    Examples:

      vmsandbox ssh last

      vmsandbox ssh last -- tail -f server.log
    """
    from vmsandbox.sandbox import Rooms, ssh_argv

    output.begin(False)
    words = _words(command or [])
    with Rooms.open() as rooms:
        argv = ssh_argv(
            rooms,
            rooms.store.resolve(selector),
            words,
            user="root" if root else "agent",
            terminal=sys.stdin.isatty() and (not words or sys.stdout.isatty()),
        )
    os.execvp(argv[0], argv)


def ssh_config(
    selector: Annotated[
        str | None, typer.Argument(metavar="SANDBOX", help="[default: every running sandbox]")
    ] = None,
) -> None:
    """Print OpenSSH configuration with which `ssh NAME`, scp, rsync and editors reach the guests.

    Example: vmsandbox ssh-config >> ~/.ssh/config
    """
    from vmsandbox.sandbox import Rooms, ssh_config_text

    output.begin(False)
    with Rooms.open() as rooms:
        folders = [rooms.store.resolve(selector)] if selector else rooms.store.folders()
        sys.stdout.write(ssh_config_text(rooms, folders, skip_stopped=selector is None))


def exec_(
    selector: SelectorArgument,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="What to run.")],
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Pass stdin on.")
    ] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal.")] = False,
    env: Variables = None,
    root: Annotated[bool, typer.Option("--root", help="As root instead of agent.")] = False,
) -> None:
    """Run a command in a running guest, in the worktree's folder; its exit code is returned.

    Examples:

      vmsandbox exec last -- git status

      vmsandbox exec -it last -- bash
    """
    from vmsandbox.sandbox import Rooms, exec_command

    output.begin(False)
    words = _words(command)
    if not words:
        raise UsageProblem("command_missing", "no command", hint=f"vmsandbox ssh {selector}")
    with Rooms.open() as rooms:
        code = exec_command(
            rooms,
            rooms.store.resolve(selector),
            words,
            env=environment(env or []),
            interactive=interactive,
            tty=tty,
            user="root" if root else "agent",
        )
    raise typer.Exit(code)


def _words(command: list[str]) -> list[str]:
    """The command without the ``--`` that may stand between the sandbox and it.

    click takes it away only where options may follow arguments, which here would be the command's.
    """
    return command[1:] if command[:1] == ["--"] else command
