"""Owns one plain HTTP request to a host: sent in origin form, answered as it comes."""

import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import h11

from vmsandbox.egress.journal import Entry
from vmsandbox.outlet import Exchange
from vmsandbox.outlet.exchange import end_to_end, next_event

_ANSWER_S = 300.0
_HEAD_MOST_BYTES = 64 * 1024


class UpstreamFailed(Exception):
    """It broke off, took too long or spoke nonsense; the text is a word for programs."""


class Fetch:
    """One request on one connection, which is used for no other."""

    def __init__(self, exchange: Exchange, upstream: socket.socket) -> None:
        self._exchange = exchange
        self._upstream = upstream
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_MOST_BYTES)
        self._sent = self._received = 0
        self._began = time.monotonic()
        self._reason = "done"

    def carry_out(self) -> None:
        """Send, and answer the guest. Raises UpstreamFailed, and OSError of the guest."""
        self._upstream.settimeout(_ANSWER_S)
        self._send(self._request())
        for piece in self._exchange.body():
            self._send(h11.Data(data=piece))
        self._send(h11.EndOfMessage())
        response = self._event()
        while isinstance(response, h11.InformationalResponse):
            response = self._event()
        if not isinstance(response, h11.Response):
            raise self._failed("upstream_nonsense")
        self._exchange.respond(
            response.status_code, end_to_end(list(response.headers)), self._answer()
        )

    def entry(self) -> Entry:
        """What it came to."""
        return Entry(
            target=self._exchange.head.target,
            verdict="closed",
            reason=self._reason,
            sent=self._sent,
            received=self._received,
            seconds=round(time.monotonic() - self._began, 3),
        )

    def _request(self) -> h11.Request:
        head = self._exchange.head
        parts = urlsplit(head.target)
        headers = [(k, v) for k, v in head.passed_on() if k not in (b"host", b"expect")]
        if head.values("transfer-encoding"):  # of which h11 knows chunked alone
            headers.append((b"transfer-encoding", b"chunked"))
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = parts.netloc.encode("latin-1")
        return h11.Request(
            method=head.method,
            target=path.encode("latin-1"),
            headers=[(b"host", host), *headers, (b"connection", b"close")],
        )

    def _answer(self) -> Iterator[bytes]:
        while isinstance(event := self._event(), h11.Data):
            self._received += len(event.data)
            yield bytes(event.data)

    def _send(self, event: h11.Event) -> None:
        try:
            data = self._h11.send(event) or b""
            self._upstream.sendall(data)
        except OSError:
            raise self._failed("upstream_broke_off") from None
        self._sent += len(data)

    def _event(self) -> h11.Event:
        try:
            return next_event(self._h11, self._upstream, _ANSWER_S)
        except OSError:
            raise self._failed("upstream_broke_off") from None
        except h11.RemoteProtocolError:
            raise self._failed("upstream_nonsense") from None

    def _failed(self, why: str) -> UpstreamFailed:
        self._reason = why
        return UpstreamFailed(why)
