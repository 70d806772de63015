"""Owns the bounds on what a guest makes us hold: a packet that has no end, and a channel that is
filled beyond its window. paramiko keeps to neither by itself, and the guest's sshd is as hostile as
the rest of the guest.
"""

import errno
import socket
from typing import Self

from vmsandbox.guest.ssh import paramiko

_BUFFER_MOST_BYTES = 4 * 1024 * 1024
"""Twice the window that a channel is opened with: whoever sends more does not keep to it."""

_PACKET_MOST_BYTES = 256 * 1024
"""As OpenSSH has it."""


class PacketSocket(socket.socket):
    """A connection on which paramiko asks for the rest of a packet at once, whatever length the
    guest gave it."""

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


def end_if_flooded(channel: paramiko.Channel) -> None:
    """End the connection of a guest that sends more than a channel's window.

    For what paramiko calls when something arrives: the lock of one of the buffers is held then, so
    their lengths alone are looked at.
    """
    for pipe in (channel.in_buffer, channel.in_stderr_buffer):
        waiting = len(pipe._buffer)  # type: ignore[attr-defined]
        if waiting > _BUFFER_MOST_BYTES and (transport := channel.transport):
            transport.sock.close()
