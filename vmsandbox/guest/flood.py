"""Owns the bounds on what a guest makes us hold, and on how long it holds us up: a packet without
end, a channel that is filled beyond its window, channels that come and go for ever, a connection
that is no longer read. paramiko has no bound on any, and the guest's sshd is as hostile as the rest
of the guest.
"""

import errno
import socket
import time
from typing import TYPE_CHECKING, Self

from vmsandbox.guest.ssh import paramiko

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BUFFER_MOST_BYTES = 4 * 1024 * 1024
"""Twice the window that a channel is opened with: whoever sends more does not keep to it."""

_PACKET_MOST_BYTES = 256 * 1024
"""As OpenSSH has it."""


_TAKES_NOTHING_S = 30.0
"""Who sends holds a lock that everybody needs who has something to say, also that it is over. Less
than anybody waits for a guest that is stopped at once."""

_CHANNELS_REMEMBERED = 20_000


class PacketSocket(socket.socket):
    """A connection on which paramiko asks for the rest of a packet at once, whatever length the
    guest gave it, and tries to send for ever, whether or not the guest takes anything."""

    patience_s = _TAKES_NOTHING_S
    _stalled_at: float | None = None

    @classmethod
    def of(cls, sock: socket.socket) -> Self:
        """In place of `sock`, which is closed."""
        timeout = sock.gettimeout()
        taken = cls(fileno=sock.detach())
        taken.settimeout(timeout)
        return taken

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        if size > _PACKET_MOST_BYTES:
            raise OSError(errno.EMSGSIZE, "the guest sends a packet that is too long")
        return super().recv(size, flags)

    def send(self, data: "ReadableBuffer", flags: int = 0, /) -> int:
        try:
            sent = super().send(data, flags)
        except TimeoutError:
            self._stalled_at = self._stalled_at or time.monotonic()
            if time.monotonic() - self._stalled_at < self.patience_s:
                raise
            self.close()
            raise OSError(errno.EPIPE, "the guest takes nothing any more") from None
        self._stalled_at = None
        return sent


def forget_channels(transport: paramiko.Transport) -> None:
    """Keep paramiko's memory of channels bounded: it knows each that there ever was by its number.

    A guest that speaks of one that was forgotten loses its connection.
    """
    seen: dict[int, bool] = transport.channels_seen
    if len(seen) > _CHANNELS_REMEMBERED:
        for number in list(seen)[: _CHANNELS_REMEMBERED // 2]:
            del seen[number]


def end_if_flooded(channel: paramiko.Channel) -> None:
    """End the connection of a guest that sends more than a channel's window.

    For what paramiko calls when something arrives: the lock of one of the buffers is held then, so
    their lengths alone are looked at.
    """
    for pipe in (channel.in_buffer, channel.in_stderr_buffer):
        waiting = len(pipe._buffer)  # type: ignore[attr-defined]
        if waiting > _BUFFER_MOST_BYTES and (transport := channel.transport):
            transport.sock.close()
