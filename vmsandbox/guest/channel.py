"""Owns one command on one channel: what goes in, what comes out, how it ended.

Knows no scripts. Both streams of a channel are read by one thread, and a deadline bounds every
wait, because a hostile guest may answer nothing at all.
"""

import contextlib
import io
import os
import select
import shlex
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem, UsageProblem
from vmsandbox.guest.connection import FOREIGN, Connection
from vmsandbox.guest.flood import end_if_flooded
from vmsandbox.guest.ssh import paramiko
from vmsandbox.text import printable

if TYPE_CHECKING:
    from typing_extensions import Buffer

Stream = Literal["stdout", "stderr"]

_LINE_MAX_BYTES = 128 * 1024 - 1
"""The guest's sshd hands a command to ``sh -c`` as one argument; this is Linux's MAX_ARG_STRLEN."""

_CHUNK_BYTES = 64 * 1024
_STDERR_KEPT_BYTES = 16 * 1024
_LONGEST_S = 24 * 3600.0


class Completed(NamedTuple):
    """A command that ended; `code` is -1 if a signal ended it, `stderr` its last 16 KiB."""

    code: int
    stdout: bytes
    stderr: bytes


def command_line(argv: Sequence[str], *, folder: str | None = None) -> bytes:
    """`argv` as a POSIX shell must see it, started in `folder`.

    Raises UsageProblem ``command_too_long`` or ``command_invalid`` (NUL).
    """
    step = "" if folder is None else f"cd {shlex.quote(folder)} && "
    line = os.fsencode(f"{step}exec {shlex.join(argv)}")
    if b"\0" in line:
        raise UsageProblem("command_invalid", "a command cannot hold a NUL byte")
    if len(line) > _LINE_MAX_BYTES:
        raise UsageProblem(
            "command_too_long",
            f"the command takes {len(line)} bytes, a guest takes {_LINE_MAX_BYTES}",
            hint="put the long part into a file in the worktree",
        )
    return line


class Bell:
    """Rings, as a readable descriptor, when something has arrived on either stream of a channel.

    paramiko's own ``Channel.fileno`` can lose a ring when both streams are used at once: one stream
    is emptied while the other is filled, in two threads, and the flag they share ends up lowered.
    This bell is never lowered by paramiko, only by whoever then looks at both streams.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        self._lock = threading.Lock()
        self._channel = channel
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closed = False
        # They only ever call set and clear of what is named an Event.
        channel.in_buffer.set_event(cast(threading.Event, self))
        channel.in_stderr_buffer.set_event(cast(threading.Event, self))

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        """Called by paramiko's thread."""
        end_if_flooded(self._channel)
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._writer, b"*")

    def clear(self) -> None:
        """Called by paramiko when a stream is empty, which says nothing about the other."""

    def silence(self) -> None:
        """To be called before the streams are looked at."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, _CHUNK_BYTES)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._reader)
            os.close(self._writer)


class Command:
    """A command that runs in the guest, on a channel of its own. `what` names it in errors."""

    def __init__(
        self,
        connection: Connection,
        channel: paramiko.Channel,
        bell: Bell,
        deadline: Deadline,
        what: str,
    ) -> None:
        self.channel = channel
        self.bell = bell
        self._connection = connection
        self._deadline = deadline
        self._what = what
        self._stderr = b""

    @classmethod
    @contextlib.contextmanager
    def started(
        cls,
        connection: Connection,
        channel: paramiko.Channel,
        line: bytes,
        deadline: Deadline,
        what: str,
        terminal: tuple[str, int, int] | None = None,
    ) -> Iterator["Command"]:
        """Start `line` on a fresh channel, in a terminal (TERM, columns, lines) if asked.

        The channel is closed in the end, whatever happens. Raises GuestProblem ``connection_lost``.
        """
        with contextlib.ExitStack() as lifetime:
            lifetime.callback(_close, channel)
            bell = Bell(channel)
            lifetime.callback(bell.close)
            with connection.translated(), _closed_at(channel, deadline):
                if terminal:
                    channel.get_pty(*terminal)
                channel.exec_command(line)
            yield cls(connection, channel, bell, deadline, what)

    def received(self, deadline: Deadline | None = None) -> Iterator[tuple[Stream, bytes]]:
        """What the guest sends, as it comes, until it ends both streams."""
        left = (deadline or self._deadline).timeout
        poller = select.poll()
        poller.register(self.bell, select.POLLIN)
        while not (yield from self.arrived()):
            seconds = left()
            if not poller.poll(None if seconds is None else seconds * 1000):
                raise self._timeout()

    def arrived(self) -> Generator[tuple[Stream, bytes], None, bool]:
        """What is there by now, without waiting; returns whether both streams have ended."""
        self.bell.silence()
        ended = bool(self.channel.eof_received or self.channel.closed)
        while self.channel.recv_ready():
            yield "stdout", self.channel.recv(_CHUNK_BYTES)
        while self.channel.recv_stderr_ready():
            yield "stderr", self.channel.recv_stderr(_CHUNK_BYTES)
        return ended

    def stdout(self) -> Iterator[bytes]:
        """The guest's stdout, as it comes; the end of stderr is kept for :meth:`completed`."""
        for stream, data in self.received():
            if stream == "stdout":
                yield data
            else:
                self._stderr = (self._stderr + data)[-_STDERR_KEPT_BYTES:]

    def feed(self, chunks: Iterable[bytes], progress: Callable[[int], None] | None = None) -> None:
        """Send `chunks` to stdin as fast as the command takes them, then end it.

        A command that ends before it has read everything is no error here: its exit code says why.
        `progress` is told the bytes sent so far.
        """
        sent = 0
        for chunk in chunks:
            if not self._send(chunk):
                return
            sent += len(chunk)
            if progress:
                progress(sent)
        with contextlib.suppress(OSError):
            self.channel.shutdown_write()

    def _send(self, chunk: bytes) -> bool:
        self.channel.settimeout(self._deadline.timeout())
        try:
            self.channel.sendall(chunk)
        except TimeoutError as error:
            raise self._timeout() from error
        except (OSError, paramiko.SSHException):  # the command closed its stdin, or the guest left
            return False
        return True

    def completed(self, stdout: bytes = b"", *, deadline: Deadline | None = None) -> Completed:
        """Wait for the exit code, after both streams have ended."""
        if not self.channel.status_event.wait((deadline or self._deadline).timeout()):
            raise self._timeout()
        with self._connection.translated():
            if self.channel.exit_status == -1 and not self.channel.get_transport().is_active():
                raise EOFError(f"in the middle of {self._what}")
        return Completed(self.channel.exit_status, stdout, self._stderr)

    def succeeded(self, stdout: bytes = b"") -> Completed:
        """Like :meth:`completed`; GuestProblem ``guest_command_failed`` if the code is not 0."""
        completed = self.completed(stdout)
        if completed.code == 0:
            return completed
        how = "was killed" if completed.code < 0 else f"failed with exit code {completed.code}"
        said = printable(completed.stderr.strip()[-2000:])
        raise GuestProblem(
            "guest_command_failed",
            f"{self._what} {how} in the guest" + (f": {said}" if said else ""),
            hint="vmsandbox logs --console",
        )

    def gathered(self, limit_bytes: int) -> bytes:
        """All of stdout; GuestProblem ``guest_answer_invalid`` if it is longer than allowed."""
        gathered = io.BytesIO()
        for data in self.stdout():
            if gathered.tell() + len(data) > limit_bytes:
                _close(self.channel)
                raise GuestProblem(
                    "guest_answer_invalid", f"{self._what} wrote more than {limit_bytes} bytes"
                )
            gathered.write(data)
        return gathered.getvalue()

    def _timeout(self) -> GuestProblem:
        return GuestProblem(
            "guest_command_timeout",
            f"{self._what} did not end within {self._deadline.seconds:g} s in the guest",
            hint="vmsandbox logs --console",
        )


def _close(channel: paramiko.Channel) -> None:
    with contextlib.suppress(*FOREIGN):  # there may be nobody left to tell
        channel.close()


@contextlib.contextmanager
def _closed_at(channel: paramiko.Channel, deadline: Deadline) -> Iterator[None]:
    """Close the channel at the deadline: paramiko's requests wait for their answer for ever."""
    timer = threading.Timer(deadline.at_most(_LONGEST_S), _close, (channel,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exchange(
    command: Command,
    chunks: Iterable[bytes],
    *,
    stdout_max_bytes: int,
    progress: Callable[[int], None] | None = None,
) -> bytes:
    """Send stdin and gather stdout at the same time: neither side may wait for the other."""
    with ThreadPoolExecutor(1, "guest-stdout") as aside:
        gathered = aside.submit(command.gathered, stdout_max_bytes)
        try:
            command.feed(chunks, progress)
        except BaseException:
            _close(command.channel)  # ends the reading as well
            raise
        return gathered.result()


class RemoteOutput(io.RawIOBase):
    """The stdout of a running command as a readable file.

    At its end the exit code is checked: GuestProblem ``guest_command_failed`` comes in place of
    the end of file, so that a stream that was cut off never looks whole.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        self._chunks = command.stdout()
        self._pending = memoryview(b"")
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer") -> int:
        if not self._pending:
            self._pending = memoryview(self._next())
        target = memoryview(buffer).cast("B")
        size = min(len(target), len(self._pending))
        target[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size

    def _next(self) -> bytes:
        for data in self._chunks:
            return data
        if not self._ended:
            self._command.succeeded()
            self._ended = True
        return b""
