"""Owns stepping into a running guest: ssh, exec, ssh-config, and reading logs as they grow."""

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from vmsandbox import reach
from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.guest import Guest, Terminal, ssh_config
from vmsandbox.guest import ssh_argv as openssh_argv
from vmsandbox.guest.task import as_user, user_environment
from vmsandbox.model import SandboxRecord
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.store import SandboxFolder

_LOG_CHUNK_BYTES = 1 << 20


def open_guest(rooms: Rooms, folder: SandboxFolder, record: SandboxRecord) -> Guest:
    """The way into a sandbox's guest: its own key, the pinned host key; not yet connected."""
    return Guest(
        record.endpoint,
        key=folder.client_key.read_text(),
        host_key=folder.host_key.read_text(),
        alive=lambda: rooms.guest_alive(record.domain_uuid) is not False,
    )


def running_record(rooms: Rooms, folder: SandboxFolder) -> SandboxRecord:
    """The record of a sandbox whose guest runs; UsageProblem ``guest_not_running`` else."""
    record = folder.read_record()
    if rooms.guest_alive(record.domain_uuid) is False:
        raise UsageProblem(
            "guest_not_running",
            f"the guest of sandbox {record.id} does not run ({record.state.value})",
            hint="run the task with --keep to look into its guest afterwards",
            evidence=str(folder.console),
        )
    return record


def ssh_argv(
    rooms: Rooms,
    folder: SandboxFolder,
    command: Sequence[str],
    *,
    user: str = "agent",
    terminal: bool = False,
) -> list[str]:
    """argv of the system's ssh client into a running guest, in the worktree's folder."""
    record = running_record(rooms, folder)
    there = f"cd {shlex.quote(str(record.task.worktree))} 2>/dev/null; "
    inside = there + (" ".join(command) if command else "exec ${SHELL:-/bin/sh} -l")
    options = ["-o", f"User={user}", "-t" if terminal else "-T"]
    return openssh_argv(folder.ssh_config, record.name, [inside], options=options)


def ssh_config_text(
    rooms: Rooms, folders: Sequence[SandboxFolder], *, skip_stopped: bool = False
) -> str:
    """OpenSSH configuration for these sandboxes; with `skip_stopped` only where a guest runs."""
    blocks = []
    for folder in folders:
        with contextlib.suppress(HostProblem):
            record = folder.read_record()
            runs = rooms.guest_alive(record.domain_uuid)
            if folder.client_key.exists() and (runs or not skip_stopped):
                blocks.append(
                    ssh_config(
                        record.name,
                        record.endpoint,
                        key=folder.client_key,
                        known_hosts=folder.known_hosts,
                    )
                )
    return "\n".join(blocks)


def exec_command(
    rooms: Rooms,
    folder: SandboxFolder,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    interactive: bool,
    tty: bool,
    user: str = "agent",
) -> int:
    """Run a command in a running guest, with our own stdin and terminal if asked for.

    Returns its exit code. Starts in the worktree's folder.
    """
    record = running_record(rooms, folder)
    argv = argv_as(user, {**reach.environment(record.net), **record.task.env, **env}, command)
    with contextlib.ExitStack() as stack:
        guest = stack.enter_context(open_guest(rooms, folder, record))
        stdin = 0
        if not (interactive or tty):
            stdin = stack.enter_context(Path("/dev/null").open("rb")).fileno()
        terminal = Terminal(tty=tty, stdin=stdin)
        return guest.interactive(argv, terminal, folder=str(record.task.worktree))


def argv_as(user: str, env: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """argv of root's that runs a command as `user` with what a login would set, and `env`."""
    variables = {**user_environment(user), **env}
    return [
        *(as_user(user, user) if user != "root" else ()),
        "/usr/bin/env",
        *(f"{name}={value}" for name, value in variables.items()),
        *command,
    ]


class LogTail:
    """What was added to a file since the last look; a file that shrank is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> bytes:
        """The new bytes; nothing if the file does not exist (yet)."""
        pieces = []
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            if file.seek(0, 2) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            while piece := file.read(_LOG_CHUNK_BYTES):
                pieces.append(piece)
            self._offset = file.tell()
        return b"".join(pieces)
