"""Owns connections that begin in the guest: a port on its loopback that leads to us, over the one
SSH connection. Nothing listens on the host.

Knows nothing of what is spoken on them. The guest's sshd is as hostile as the rest of the guest: it
may open as many channels as it likes and send more than it was told it may.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import cast

from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem
from vmsandbox.guest.connection import FOREIGN
from vmsandbox.guest.flood import end_if_flooded, forget_channels
from vmsandbox.guest.ssh import paramiko

_ASK_AGAIN_S = 0.2
_OPEN_S = 30.0


class GuestStream:
    """One connection from the guest, with the few methods of a socket that a server needs.

    What fails raises OSError, a wait that is too long TimeoutError.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self.settimeout = channel.settimeout
        # paramiko only ever calls set and clear of what is named an Event, in its own thread.
        channel.in_buffer.set_event(cast(threading.Event, _Weir(channel)))

    def recv(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""
        return self._channel.recv(size)

    def sendall(self, data: bytes, /) -> None:
        view = memoryview(data)
        while view:
            sent = self._channel.send(view.tobytes() if len(view) < len(data) else data)
            if sent == 0:  # where paramiko's own sendall would try for ever
                raise BrokenPipeError("the guest takes no more")
            view = view[sent:]

    def shutdown(self, how: int, /) -> None:
        """As socket.shutdown."""
        with contextlib.suppress(*FOREIGN):
            self._channel.shutdown(how)

    def close(self) -> None:
        with contextlib.suppress(*FOREIGN):
            self._channel.close()


class _Weir:
    """Ends the connection of a guest that floods a channel beyond its window."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def set(self) -> None:
        end_if_flooded(self._channel)

    def clear(self) -> None:
        """Called when the buffer is empty."""


class Forward:
    """The wish that `port` on the guest's loopback leads to `accept`, for every connection to it
    that is ever made.

    `accept` is called with a :class:`GuestStream` in paramiko's thread, and must not wait.
    """

    def __init__(self, port: int, accept: Callable[[GuestStream], None]) -> None:
        self._port = port
        self._accept = accept
        self._lock = threading.Lock()
        self._granted_by: paramiko.Transport | None = None
        self._open = threading.Event()
        self._over = threading.Event()

    def renew(self, transport: paramiko.Transport) -> None:
        """Ask for it on a transport that was just made, without waiting for the answer."""
        if not self._over.is_set():
            self._open.clear()
            threading.Thread(
                target=self._ask, args=(transport,), name="forward", daemon=True
            ).start()

    def await_open(self, deadline: Deadline) -> None:
        """Raises GuestProblem ``outlet_refused`` if the guest does not open the port in time."""
        if not self._open.wait(deadline.timeout()):
            raise GuestProblem(
                "outlet_refused",
                f"the guest did not open port {self._port} of its loopback for us",
                hint="vmsandbox logs --console",
            )

    def end(self) -> None:
        """Renew it no more; what is open ends with the connection."""
        self._over.set()

    def _ask(self, transport: paramiko.Transport) -> None:
        """Until it is granted: what held the port for a former manager may still be dying."""
        deadline = Deadline(_OPEN_S)
        while transport.is_active() and not (deadline.passed() or self._over.is_set()):
            with self._lock:
                if self._granted_by is transport or self._granted(transport):
                    self._open.set()
                    return
            time.sleep(_ASK_AGAIN_S)

    def _granted(self, transport: paramiko.Transport) -> bool:
        try:
            transport.request_port_forward("127.0.0.1", self._port, self._arrived)
        except FOREIGN:
            return False
        self._granted_by = transport
        return True

    def _arrived(
        self, channel: paramiko.Channel, origin: tuple[str, int], server: tuple[str, int]
    ) -> None:
        stream = GuestStream(channel)
        forget_channels(channel.get_transport())
        if self._over.is_set():
            stream.close()
        else:
            self._accept(stream)
