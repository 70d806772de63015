"""Owns the bytes of a CONNECT: both ways as they come, and that TLS asks for the host that was
judged."""

import contextlib
import socket
import threading
import time

from vmsandbox.egress import hello
from vmsandbox.egress.hello import NotTls
from vmsandbox.egress.journal import Entry
from vmsandbox.outlet import Stream

_CHUNK_BYTES = 64 * 1024
_HELLO_S = 60.0
_IDLE_S = 3600.0
_TLS_HANDSHAKE = 0x16


class Tunnel:
    """One connection of the guest to one host."""

    def __init__(self, stream: Stream, upstream: socket.socket, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.ended_by = "done"
        self._stream = stream
        self._upstream = upstream
        self._greeted = False
        self._sent = self._received = 0
        self._began = time.monotonic()

    def greet(self, early: bytes) -> bytes:
        """Demand TLS: what the guest sent so far, a whole client hello for our host, of which
        nothing was passed on yet. Raises NotTls."""
        self._stream.settimeout(_HELLO_S)
        data = self._hello(early)
        self._greeted = True
        return data

    def carry(self, early: bytes) -> None:
        """Until both sides have ended, or one breaks.

        What was not greeted need not be TLS, as some protocols let the server speak first; but if
        it begins like TLS, it must be for our host: else raises NotTls, and nothing was sent.
        """
        self._stream.settimeout(_IDLE_S)
        self._upstream.settimeout(_IDLE_S)
        back = threading.Thread(target=self._carry_back, name="tunnel", daemon=True)
        back.start()
        try:
            self._carry_out(early)
        finally:
            back.join()

    def end(self, why: str = "manager_ended") -> None:
        """Cut it, from any thread."""
        if self.ended_by == "done":
            self.ended_by = why
        _shut(self._upstream, socket.SHUT_RDWR)
        _shut(self._stream, socket.SHUT_RDWR)  # a close alone wakes nobody who waits
        with contextlib.suppress(OSError):
            self._stream.close()

    def entry(self) -> Entry:
        """What it came to."""
        return Entry(
            target=f"{self.host}:{self.port}",
            verdict="closed",
            reason=self.ended_by,
            sent=self._sent,
            received=self._received,
            seconds=round(time.monotonic() - self._began, 3),
        )

    def _hello(self, data: bytes) -> bytes:
        while (name := hello.server_name(data)) is None:
            piece = self._receive()
            if not piece:
                raise NotTls("tls_expected")
            data += piece
        if name.removesuffix(".") != self.host:
            raise NotTls("tls_name_differs")
        return data

    def _receive(self) -> bytes:
        try:
            return self._stream.recv(_CHUNK_BYTES)
        except OSError:
            return b""

    def _carry_out(self, data: bytes) -> None:
        """From the guest to the host."""
        try:
            if not self._greeted:
                data = data or self._receive()
                if data[:1] == bytes([_TLS_HANDSHAKE]):
                    data = self._hello(data)
            while data:
                self._upstream.sendall(data)
                self._sent += len(data)
                data = self._receive()
            _shut(self._upstream, socket.SHUT_WR)
        except NotTls:
            self.end("denied")
            raise
        except OSError:
            self.end("broken")

    def _carry_back(self) -> None:
        try:
            while data := self._upstream.recv(_CHUNK_BYTES):
                self._stream.sendall(data)
                self._received += len(data)
            self._stream.shutdown(socket.SHUT_WR)
        except OSError:
            self.end("broken")


def _shut(sock: Stream, how: int) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(how)
