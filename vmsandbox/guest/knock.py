"""Owns finding the moment at which an SSH server begins to speak behind a host forward.

Knows nothing of SSH but that its server speaks first.

The forward accepts at once, whether or not anything listens in the guest. A connection that was
accepted before the guest's network was up hangs long after it is up, so a silent one is no reason
to stop trying. Nor is it hopeless: a guest that is busy booting may have it in its queue, and each
one that reaches a guest costs it a new sshd. So silent connections are kept, further ones are added
ever more slowly, and the first on which a server speaks wins.
"""

import contextlib
import select
import socket
import time

from vmsandbox.deadline import Deadline
from vmsandbox.model import Endpoint

_LOOK_S = 0.05
_FIRST_PAUSE_S = 0.05
_SILENT_PAUSE_S = 2.0
_PAUSE_FACTOR = 1.5
_REFUSED_PAUSE_MOST_S = 0.4
_SILENT_MOST = 4


class NotYet(Exception):
    """The guest does not answer for now; the text says what was seen. Never leaves this room."""


class Knocker:
    """Asks one endpoint again and again, with at most four connections at a time."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._address = (endpoint.address, endpoint.port)
        self._silent: list[socket.socket] = []
        self._reset()

    def _reset(self) -> None:
        self._next_at = 0.0
        self._refused_pause_s = _FIRST_PAUSE_S
        self._silent_pause_s = _SILENT_PAUSE_S
        self._seen = "nothing was tried"

    def close(self) -> None:
        """Give all connections up."""
        for sock in self._silent:
            sock.close()
        self._silent.clear()
        self._reset()

    def knock(self, deadline: Deadline) -> socket.socket:
        """A socket on which a server speaks, if there is one within the next 50 ms; else NotYet."""
        if time.monotonic() >= self._next_at:
            self._connect()
        speaking = self._listen(deadline.at_most(_LOOK_S))
        if speaking is None:
            raise NotYet(self._seen)
        self._silent.remove(speaking)
        self.close()
        return speaking

    def _connect(self) -> None:
        try:
            sock = socket.create_connection(self._address, timeout=_SILENT_PAUSE_S)
        except OSError as error:
            self._was_refused(f"connecting to port {self._address[1]}: {error.strerror or error}")
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._silent.append(sock)
        if len(self._silent) > _SILENT_MOST:
            self._silent.pop(0).close()
        self._seen = "the port is open, but no SSH server speaks"
        self._next_at = time.monotonic() + self._silent_pause_s
        self._silent_pause_s *= _PAUSE_FACTOR

    def _listen(self, seconds: float) -> socket.socket | None:
        poller = select.poll()
        by_descriptor = {sock.fileno(): sock for sock in self._silent}
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(seconds * 1000):
            sock = by_descriptor[descriptor]
            with contextlib.suppress(OSError):
                if sock.recv(1, socket.MSG_PEEK):
                    return sock
            sock.close()
            self._silent.remove(sock)
            self._was_refused("the port is open, but connections are closed at once")
        return None

    def _was_refused(self, seen: str) -> None:
        self._seen = seen
        self._next_at = time.monotonic() + self._refused_pause_s
        self._refused_pause_s = min(self._refused_pause_s * _PAUSE_FACTOR, _REFUSED_PAUSE_MOST_S)
