"""Owns the server: a thread per connection, bounded in number, size and time, and the choice of the
handler by what a request is about.
"""

import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

import h11

from vmsandbox.outlet.exchange import Exchange, Handler, Head, Stream, next_event

CONNECTIONS_MOST = 128
_HEAD_MOST_BYTES = 64 * 1024
_HEAD_S = 120.0
_TOLD_MOST = 20
"""Failures of ours that are logged: a guest that has found one can repeat it."""
_log = logging.getLogger(__name__)


class Outlet:
    """Serves connections of one guest.

    `local` are handlers by host name, for requests that are about us; all else is for `egress`.
    """

    def __init__(self, egress: Handler, local: Mapping[str, Handler]) -> None:
        self._egress = egress
        self._local = local
        self._lock = threading.Lock()
        self._open: set[Stream] = set()
        self._over = False
        self._told = itertools.count(1)

    def accept(self, stream: Stream) -> None:
        """Serve a connection in a thread of its own; one too many is closed. Never waits."""
        with self._lock:
            welcome = not self._over and len(self._open) < CONNECTIONS_MOST
            if welcome:
                self._open.add(stream)
        if welcome:
            threading.Thread(target=self._serve, args=(stream,), name="outlet", daemon=True).start()
        else:
            _close(stream)

    def close(self) -> None:
        """End all connections, and accept none any more."""
        with self._lock:
            self._over = True
            streams = list(self._open)
        for stream in streams:
            _close(stream)

    def _serve(self, stream: Stream) -> None:
        try:
            connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_MOST_BYTES)
            while self._serve_one(stream, connection):
                connection.start_next_cycle()
        except (OSError, h11.RemoteProtocolError):
            pass  # the guest's own doing
        finally:
            with self._lock:
                self._open.discard(stream)
            _close(stream)

    def _serve_one(self, stream: Stream, connection: h11.Connection) -> bool:
        """Whether the connection may be used for another request."""
        try:
            request = next_event(connection, stream, _HEAD_S)
        except h11.RemoteProtocolError as error:
            _say_bad(stream, connection, error)
            return False
        assert isinstance(request, h11.Request)
        exchange = Exchange(stream, connection, request)
        self._handle(exchange)
        if exchange.tunnelled:
            return False
        if connection.they_are_waiting_for_100_continue:
            return False  # they may send the body or not
        while connection.their_state is h11.SEND_BODY:  # what the handler did not want to read
            next_event(connection, stream, _HEAD_S)
        return connection.our_state is connection.their_state is h11.DONE

    def _handle(self, exchange: Exchange) -> None:
        handler = self._handler(exchange.head)
        try:
            if handler is None:
                hint = f"known here: {', '.join(sorted(self._local)) or 'nothing'}"
                exchange.refuse(421, "not_served_here", "nobody of that name is here", hint)
            else:
                handler(exchange)
        except (OSError, h11.RemoteProtocolError):
            raise
        except Exception as error:  # a bug of ours must not look like an answer
            if next(self._told) <= _TOLD_MOST:
                _log.exception("a handler failed")
            if exchange.answered:
                raise ConnectionError("the answer was cut short") from error
            exchange.refuse(502, "outlet_failed", "the host could not answer this request")

    def _handler(self, head: Head) -> Handler | None:
        if head.method == "CONNECT":
            return self._egress
        if head.target.startswith("/"):
            hosts = head.values("host")
            return self._local.get(_host_of(hosts[0])) if len(hosts) == 1 else None
        return self._local.get(_host_of(head.target.partition("://")[2]), self._egress)


def _host_of(authority: str) -> str:
    """The host that an authority, or what follows the scheme of a URL, names."""
    with contextlib.suppress(ValueError):
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    return ""


def _say_bad(stream: Stream, connection: h11.Connection, error: h11.RemoteProtocolError) -> None:
    if connection.our_state is h11.SEND_RESPONSE or connection.our_state is h11.IDLE:
        status = error.error_status_hint
        head = h11.Response(
            status_code=status, headers=[(b"Content-Length", b"0"), (b"Connection", b"close")]
        )
        with contextlib.suppress(OSError, h11.LocalProtocolError):
            stream.sendall(connection.send(head) or b"")


def _close(stream: Stream) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)  # a close alone wakes nobody who waits
    with contextlib.suppress(OSError):
        stream.close()
