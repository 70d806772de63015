"""Owns what the rest of vmsandbox can do with a guest: :class:`Guest`, the face of this package.

Knows how connection, channels and the task script fit together, and what to do when a connection is
lost. A guest's answer, also a bad one, is data; only what vmsandbox itself needs and does not get
is an error.
"""

import contextlib
import io
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, Self

from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem
from vmsandbox.guest import task
from vmsandbox.guest.capture import Capture
from vmsandbox.guest.channel import (
    Command,
    Completed,
    RemoteOutput,
    command_line,
    exchange,
)
from vmsandbox.guest.connection import Connection
from vmsandbox.guest.following import TaskRun
from vmsandbox.guest.incoming import Forward, GuestStream
from vmsandbox.guest.outgoing import open_stream
from vmsandbox.guest.ready import Requirement, wait_ready
from vmsandbox.guest.ssh import paramiko
from vmsandbox.guest.task import TaskSpec
from vmsandbox.guest.terminal import Terminal
from vmsandbox.model import Endpoint, ExecResult, Outcome

ANSWER_MAX_BYTES = 16 * 1024 * 1024
_RECONNECT_S = 60.0
_OPEN_S = 60.0
_OVERTIME_S = 60.0
_SEEDED = "/run/vmsandbox/seeded"
# Waits inside the guest for a while: asking again and again over SSH would slow its boot down.
_WAIT_SEEDED = (
    f"i=0; while [ ! -e {_SEEDED} ] && [ $((i += 1)) -le 40 ]; do sleep 0.05; done; "
    f'read -r id < {_SEEDED}; echo "$id"'
)


class Guest:
    """A guest as its host reaches it. All methods may be called from any thread.

    `key` is the private key and `host_key` the pinned public key line that were made for this
    guest; `alive` tells whether its domain still exists, so that nobody waits for a dead one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        key: str,
        host_key: str,
        user: str = "root",
        alive: Callable[[], bool] = lambda: True,
        script: tuple[str, ...] = task.SCRIPT,
    ) -> None:
        self._connection = Connection(endpoint, key=key, host_key=host_key, user=user)
        self._alive = alive
        self._script = script
        self.close = self._connection.close
        self.interrupt = self._connection.interrupt
        self.resume = self._connection.resume

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- readiness ---

    def answers(self) -> Requirement:
        """SSH answers with the pinned key. Checking it makes the connection."""

        def check(deadline: Deadline) -> None:
            self._connection.attempt(deadline)

        return Requirement("SSH", "vmsandbox logs --console", check)

    def seeded(self, sandbox_id: str) -> Requirement:
        """The guest has applied the seed of this sandbox."""

        def check(deadline: Deadline) -> str | None:
            line = _WAIT_SEEDED.encode()
            try:
                with self._started(line, Deadline(deadline.at_most(30)), "the check") as command:
                    answer = command.gathered(task.LINE_MAX_BYTES)
            except GuestProblem as problem:  # a booting guest may also restart its sshd
                return problem.message
            found = answer.strip().decode(errors="replace")
            return None if found == sandbox_id else f"{_SEEDED} says {found[:64]!r}"

        return Requirement("its seed", "vmsandbox logs --console", check)

    def connect(self, deadline: Deadline) -> None:
        """Connect if not connected. Raises GuestProblem ``boot_timeout``, ``host_key_mismatch``,
        and ``connection_lost`` if the domain is gone."""

        def check(_: Deadline) -> None:
            if not self._alive():
                raise self._connection.lost("its domain is gone")

        domain = Requirement("its domain", "vmsandbox status", check)
        wait_ready([domain, self.answers()], deadline)

    # --- the other way round ---

    def forward(self, port: int, accept: Callable[[GuestStream], None]) -> Forward:
        """Let `port` on the guest's loopback lead to `accept`, now and whenever the connection is
        made again; one such port per guest. See :class:`Forward`."""
        forward = Forward(port, accept)
        self._connection.opened = forward.renew
        with contextlib.suppress(GuestProblem):
            forward.renew(self._connection.check())
        return forward

    # --- to servers in the guest ---

    def dial(self, address: str, port: int, *, timeout_s: float = _OPEN_S) -> GuestStream:
        """Connect to a server in the guest, be it on loopback alone; over a connection that is made
        (again) if there is none. Raises GuestProblem ``guest_port_refused``, ``connection_lost``.
        """
        deadline = Deadline(timeout_s)
        try:
            self._connection.check()
        except GuestProblem:
            self.connect(deadline)
        return open_stream(self._connection, address, port, deadline)

    # --- commands ---

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout_s: float | None = 60,
        folder: str | None = None,
        stdout_max_bytes: int = ANSWER_MAX_BYTES,
        progress: Callable[[int], None] | None = None,
    ) -> Completed:
        """Run a command to its end and take its answer, whatever the exit code is.

        `progress` is told how many bytes of `stdin` were sent. Raises GuestProblem
        ``connection_lost``, ``guest_command_timeout``, ``guest_answer_invalid`` (too long);
        UsageProblem ``command_too_long``.
        """
        with self._command(argv, timeout_s, folder) as command:
            return command.completed(_answer(command, stdin, stdout_max_bytes, progress))

    def stream_in(
        self,
        argv: Sequence[str],
        chunks: Iterable[bytes],
        *,
        timeout_s: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> bytes:
        """Like :meth:`run` for a command that must succeed: its stdout, or GuestProblem
        ``guest_command_failed`` with its last words."""
        with self._command(argv, timeout_s) as command:
            answer = _answer(command, chunks, ANSWER_MAX_BYTES, progress)
            return command.succeeded(answer).stdout

    @contextlib.contextmanager
    def stream_out(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None
    ) -> Iterator[BinaryIO]:
        """The stdout of a command as a readable file, see :class:`RemoteOutput`. `stdin` should be
        small: it is sent before anything is read."""
        with self._command(argv, timeout_s) as command:
            command.feed([stdin] if stdin else [])
            yield io.BufferedReader(RemoteOutput(command), 256 * 1024)

    @contextlib.contextmanager
    def follow(self, argv: Sequence[str]) -> Iterator[BinaryIO]:
        """The stdout of a command that tells something for as long as we listen: its stdin ends
        when we leave or are killed."""
        with self._command(argv, None) as command:
            yield io.BufferedReader(RemoteOutput(command), 64 * 1024)

    def interactive(
        self, argv: Sequence[str], terminal: Terminal, *, folder: str | None = None
    ) -> int:
        """Let a person use a command; its exit code, or -1 if a signal ended it."""
        line = command_line(argv, folder=folder)
        size = terminal.description()
        with self._started(line, Deadline(_OPEN_S), argv[0], terminal=size) as command:
            return terminal.attach(command)

    # --- the task ---

    def run_task(
        self, spec: TaskSpec, capture: Capture, *, started: Callable[[], None] = lambda: None
    ) -> ExecResult:
        """Start `spec` unless it was started before, and follow it to its end.

        The task does not depend on the connection: a lost one is made again and followed from
        where `capture` ended, and so does a later call, from another process too. `started` is
        called when the guest has said that it runs. Raises GuestProblem ``task_running`` if
        another task runs, ``task_refused``, ``guest_answer_invalid``.
        """
        # The guest enforces the timeout; a guest that does not is not waited for.
        deadline = Deadline(spec.timeout_s and spec.timeout_s + spec.grace_s + _OVERTIME_S)
        task_run = TaskRun(spec, capture, self._script, started)
        while True:
            try:
                result = self._attend(task_run, spec.id, deadline)
            except GuestProblem as problem:
                result = self._ended_without(problem)
            if result:
                return result

    def _attend(self, task_run: TaskRun, task_id: str, deadline: Deadline) -> ExecResult | None:
        try:
            with self._command(task_run.argv(), _OPEN_S, what="the task script") as command:
                result = task_run.attend(command, deadline)
                if result or task_run.cut_short:
                    return result
                self._connection.check()  # raises if it was the connection that ended
        except task.Refused as refused:
            if refused.why != "exists":
                raise _refusal(refused) from refused
            task_run.known = True
            return None
        return self._result_by_status(task_id)

    def _result_by_status(self, task_id: str) -> ExecResult | None:
        """How a task ended whose streams ended without saying so; None if it still runs."""
        status = self.task_status()
        if status is None or status.id != task_id:
            raise task.invalid_answer(b"" if status is None else status.id.encode())
        if status.report:
            return task.exec_result(status.report, time.time() - status.uptime_s)
        if status.state == "running":
            return None
        return ExecResult(
            exit_code=None,
            outcome=Outcome.FAILED,
            detail="what watched over the task in the guest was killed, or the guest restarted",
        )

    def _ended_without(self, problem: GuestProblem) -> ExecResult | None:
        """The outcome of a task whose guest does not answer; None if it answers again."""
        if problem.code == "guest_command_timeout":
            detail = "the guest did not enforce the timeout"
            return ExecResult(exit_code=None, outcome=Outcome.TIMEOUT, detail=detail)
        if problem.code != "connection_lost":
            raise problem
        try:
            self.connect(Deadline(_RECONNECT_S))
        except GuestProblem as final:
            return ExecResult(exit_code=None, outcome=Outcome.CONNECTION_LOST, detail=final.message)
        return None

    def task_status(self) -> task.Status | None:
        """The latest task as the guest tells it; None if there never was one."""
        return task.parse_status(self._ask("status"))

    def stop_task(self, task_id: str, *, grace_s: float = 10) -> None:
        """End the task and every process that it left behind: SIGTERM, and SIGKILL after `grace_s`.

        Returns when all are gone. Whoever follows the task gets the outcome `cancelled`, unless it
        had ended before.
        """
        answer = self._ask("stop", task_id, str(task.polls(grace_s)), timeout_s=grace_s + _OPEN_S)
        if answer != f"stopped {task_id}\n".encode():
            raise task.invalid_answer(answer)

    def _ask(self, *words: str, timeout_s: float = _OPEN_S) -> bytes:
        argv = [*self._script, *words]
        with self._command(argv, timeout_s, what="the task script") as command:
            return command.gathered(task.LINE_MAX_BYTES)

    # --- channels ---

    @contextlib.contextmanager
    def _command(
        self,
        argv: Sequence[str],
        timeout_s: float | None,
        folder: str | None = None,
        *,
        what: str | None = None,
    ) -> Iterator[Command]:
        line = command_line(argv, folder=folder)
        with self._started(line, Deadline(timeout_s), what or shlex.join(argv)[:80]) as command:
            yield command

    @contextlib.contextmanager
    def _started(
        self,
        line: bytes,
        deadline: Deadline,
        what: str,
        *,
        terminal: tuple[str, int, int] | None = None,
    ) -> Iterator[Command]:
        """Start `line` on a channel of the connection, which is made (again) if there is none."""
        channel = self._channel(deadline)
        with Command.started(self._connection, channel, line, deadline, what, terminal) as command:
            yield command

    def _channel(self, deadline: Deadline) -> paramiko.Channel:
        try:
            return self._connection.channel(deadline)
        except GuestProblem:
            self.connect(Deadline(deadline.at_most(_RECONNECT_S)))
            return self._connection.channel(deadline)


def check_task(spec: TaskSpec) -> None:
    """Raise UsageProblem ``command_too_long`` or ``command_invalid`` for what no guest could be
    told."""
    command_line(task.start_argv(spec))


def _answer(
    command: Command,
    stdin: bytes | Iterable[bytes],
    limit_bytes: int,
    progress: Callable[[int], None] | None,
) -> bytes:
    if stdin == b"":
        command.feed([])
        return command.gathered(limit_bytes)
    chunks = [stdin] if isinstance(stdin, bytes) else stdin
    return exchange(command, chunks, stdout_max_bytes=limit_bytes, progress=progress)


def _refusal(refused: task.Refused) -> GuestProblem:
    if refused.why == "busy":
        return GuestProblem(
            "task_running",
            f"another task ({refused.other}) runs in this guest",
            hint="wait for it, or end it: vmsandbox stop",
        )
    reasons = {
        "no-folder": "its folder does not exist in the guest",
        "none": "the guest knows no such task",
    }
    return GuestProblem(
        "task_refused",
        f"the guest did not start the task: {reasons.get(refused.why, refused.why)}",
        hint="vmsandbox logs --console",
    )
