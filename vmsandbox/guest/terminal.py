"""Owns a person's side of an interactive command: the raw terminal, its size, and its restoration.

The only place where bytes of a guest reach a terminal as they are: a person asked for it.
"""

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import struct
import termios
import threading
import tty
from collections.abc import Iterator
from types import FrameType

from vmsandbox.deadline import Deadline
from vmsandbox.errors import UsageProblem
from vmsandbox.guest.channel import Command
from vmsandbox.guest.marks import overlap
from vmsandbox.guest.ssh import paramiko

_CHUNK_BYTES = 32 * 1024
_WINDOW_POLL_MS = 20
"""paramiko does not tell when the guest takes more; only asked while input is waiting."""

_END_S = 10.0

DETACH_KEYS = "ctrl-p,ctrl-q"
"""As docker has it, and as it spells it."""

_HOLD_MS = 500
"""How long the first of the keys to leave with is kept from the command."""

_KEY = re.compile(r"ctrl-([a-z@\[\\\]^_])|([a-zA-Z])")
_AS_BEFORE = (
    b"\x1b[r\x1b[?1049l\x1b[0m\x1b(B\x0f\x1b[?25h\x1b[?7h\x1b[?1l\x1b>"
    b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1004l\x1b[?2004l\x1b[>4m\r\n"
)
"""For a terminal whose program could not clean up (xterm's ctlseqs): the whole window and ordinary
screen, no colours, a cursor, plain keys, no mouse, no focus reports, no brackets when pasting."""


class Terminal:
    """Three file descriptors of ours that a guest's command gets as its own.

    With `tty` the command gets a terminal that is as large as ours and stays so, and ours is raw
    until the command ends, however it ends; SIGTERM and SIGHUP still restore it. With
    `detach_keys` (of :func:`detach_bytes`) a person may leave before, also if the guest hangs.
    """

    def __init__(
        self,
        *,
        tty: bool,
        stdin: int = 0,
        stdout: int = 1,
        stderr: int = 2,
        detach_keys: bytes = b"",
    ) -> None:
        self._tty = tty
        self._keys = detach_keys
        self.left = False
        """The person pressed the keys to leave with, and the command may go on."""
        self._stdin = stdin
        self._outputs = {"stdout": stdout, "stderr": stderr}

    def description(self) -> tuple[str, int, int] | None:
        """TERM, columns, lines; None without `tty`."""
        if not self._tty:
            return None
        return os.environ.get("TERM", "xterm-256color"), *_size(self._stdin)

    def attach(self, command: Command) -> int:
        """Carry bytes both ways until the command ends, and return its exit code; -1 if a signal
        ended it or the person :attr:`left`. Raises GuestProblem ``connection_lost``."""
        with contextlib.ExitStack() as lifetime:
            resized = None
            if self._tty:
                lifetime.enter_context(_raw(self._stdin))
                resized = lifetime.enter_context(_resizes())
            self._carry(command, resized)
        in_order = False
        try:
            code = -1 if self.left else command.completed(deadline=Deadline(_END_S)).code
            in_order = not self.left
        finally:
            if self._tty and not in_order:
                _write(self._outputs["stdout"], _AS_BEFORE)
        return code

    def _carry(self, command: Command, resized: int | None) -> None:
        poller = select.poll()
        poller.register(command.bell, select.POLLIN)
        if resized is not None:
            poller.register(resized, select.POLLIN)
        source = _Input(self._stdin, command.channel, self._keys)
        while not self._show(command):
            source.watch(poller)
            ready = {fd for fd, _ in poller.poll(source.patience_ms())}
            if resized in ready:
                os.read(resized or 0, _CHUNK_BYTES)
                command.channel.resize_pty(*_size(self._stdin))
            if self._stdin in ready:
                source.read()
            elif not ready:
                source.let_go()
            if source.left:
                self.left = True
                return
            source.send()

    def _show(self, command: Command) -> bool:
        arrived = command.arrived()
        while True:
            try:
                stream, data = next(arrived)
            except StopIteration as end:
                return bool(end.value)
            _write(self._outputs[stream], data)


class _Input:
    """Our stdin on its way to the command. Never blocks: the command may wait for us to read."""

    def __init__(self, fd: int, channel: paramiko.Channel, keys: bytes) -> None:
        self._fd = fd
        self._channel = channel
        self._keys = keys
        self._held = b""
        self._ended = False
        self.waiting = b""
        self.left = False
        """The person pressed the keys to leave with."""

    def patience_ms(self) -> int | None:
        """How long nothing may happen before we go on."""
        if self.waiting:
            return _WINDOW_POLL_MS
        return _HOLD_MS if self._held else None

    def watch(self, poller: select.poll) -> None:
        if self.waiting or self._ended:
            with contextlib.suppress(KeyError):
                poller.unregister(self._fd)
        else:
            poller.register(self._fd, select.POLLIN)

    def read(self) -> None:
        try:
            typed = os.read(self._fd, _CHUNK_BYTES)
        except OSError:  # our terminal has gone
            typed = b""
        if not typed:
            self._ended = True
            with contextlib.suppress(OSError):
                self._channel.shutdown_write()
        typed = self._held + typed
        self.left = bool(self._keys) and self._keys in typed
        held = overlap(typed, self._keys) if self._keys and not self._ended else 0
        self.waiting, self._held = typed[: len(typed) - held], typed[len(typed) - held :]

    def let_go(self) -> None:
        """What was held back was no beginning of the keys to leave with."""
        if not self.waiting:
            self.waiting, self._held = self._held, b""

    def send(self) -> None:
        while self.waiting and self._channel.send_ready():
            try:
                self.waiting = self.waiting[self._channel.send(self.waiting) :]
            except (OSError, paramiko.SSHException):  # the command takes no more
                self.waiting, self._ended = b"", True


def detach_bytes(keys: str) -> bytes:
    """What a terminal sends for ``ctrl-p,ctrl-q`` or ``ctrl-],d``.

    Raises UsageProblem ``detach_keys_invalid``.
    """
    found = [_KEY.fullmatch(key) for key in keys.split(",")]
    if not all(found):
        raise UsageProblem(
            "detach_keys_invalid",
            f"not keys to leave with: {keys!r}",
            hint=f"letters and ctrl-LETTER, separated by commas: --detach-keys {DETACH_KEYS}",
        )
    return bytes(ord(m[1].upper()) & 0x1F if m[1] else ord(m[2]) for m in found if m)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _size(fd: int) -> tuple[int, int]:
    """Columns and lines of the terminal."""
    try:
        lines, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)))
    except OSError:
        lines = columns = 0
    fallback = shutil.get_terminal_size()
    return columns or fallback.columns, lines or fallback.lines


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """The terminal in raw mode, and back, also when we are asked to end."""
    before = termios.tcgetattr(fd)
    with _signals(_leave, signal.SIGTERM, signal.SIGHUP):
        try:
            tty.setraw(fd)
            yield
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _resizes() -> Iterator[int]:
    """A descriptor that becomes readable when our terminal changes its size."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def tell(number: int, frame: FrameType | None) -> None:
        # Not here: what runs now may hold paramiko's locks.
        with contextlib.suppress(BlockingIOError):
            os.write(writer, b"w")

    with _signals(tell, signal.SIGWINCH):
        try:
            yield reader
        finally:
            os.close(reader)
            os.close(writer)


@contextlib.contextmanager
def _signals(handler: object, *numbers: signal.Signals) -> Iterator[None]:
    """`handler` for these signals for a while; only the main thread can have any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
