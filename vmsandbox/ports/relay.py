"""Owns one connection on its way: what a client of the host sends reaches the guest's server and
back, as fast as the slower side takes it, until both have said all they had to say.

Two threads per connection block in turn, so that each side's flow control is the other's. A stream
of the guest is whatever has a socket's verbs; where it comes from is not known here.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from vmsandbox.errors import VmsandboxError

_CHUNK_BYTES = 64 * 1024
MOST_CONNECTIONS = 512
"""At once, of one sandbox; further ones wait until one of them ends."""

_RESET = struct.pack("ii", 1, 0)


class Stream(Protocol):
    """The guest's end of a connection."""

    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


Dial = Callable[[], Stream]


class Relays:
    """All connections of one sandbox. Methods may be called from any thread."""

    def __init__(self, most: int = MOST_CONNECTIONS) -> None:
        self._free = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._near: set[socket.socket] = set()
        self._closed = False

    def carry(self, near: socket.socket, dial: Dial) -> None:
        """Connect a client with what `dial` opens; waits only if there are too many already."""
        if not self._closed:
            self._free.acquire()
        with self._lock:
            if self._closed:
                near.close()
                return
            self._near.add(near)
        threading.Thread(target=self._work, args=(near, dial), name="relay", daemon=True).start()

    def close(self) -> None:
        """End all connections, and every one that comes."""
        with self._lock:
            self._closed = True
            for near in self._near:
                _shut(near, socket.SHUT_RDWR)
        self._free.release()

    def _work(self, near: socket.socket, dial: Dial) -> None:
        try:
            self._joined(near, dial)
        finally:
            with self._lock:
                self._near.discard(near)
            near.close()
            self._free.release()

    def _joined(self, near: socket.socket, dial: Dial) -> None:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            far = dial()
        except VmsandboxError:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # no empty answer
            return
        try:
            out = threading.Thread(target=_sent, args=(near, far), name="relay out", daemon=True)
            out.start()
            _received(near, far)
            out.join()
        finally:
            _quietly(far.close)


def _sent(near: socket.socket, far: Stream) -> None:
    """Client to server, then the end of what the client says."""
    try:
        while data := near.recv(_CHUNK_BYTES):
            far.sendall(data)
    except (OSError, EOFError):
        _quietly(far.close)  # nobody is left to hear the rest
        return
    _quietly(partial(far.shutdown, socket.SHUT_WR))


def _received(near: socket.socket, far: Stream) -> None:
    """Server to client, then the end of what the server says."""
    try:
        while data := far.recv(_CHUNK_BYTES):
            near.sendall(data)
    except (OSError, EOFError):
        _shut(near, socket.SHUT_RDWR)
        return
    _shut(near, socket.SHUT_WR)


def _shut(near: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        near.shutdown(how)


def _quietly(end: Callable[[], object]) -> None:
    with contextlib.suppress(OSError, EOFError):
        end()
