"""Owns one request of the guest and its answer, as handlers see them. h11 does the parsing.

Bodies stream both ways: no more than one chunk of either is ever held here.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from http.client import responses
from typing import NamedTuple, Protocol

import h11

CHUNK_BYTES = 64 * 1024
_IDLE_S = 300.0
"""How long the guest may keep us waiting for the next piece of a body, or with taking one."""

Headers = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""What concerns one connection alone (RFC 9110, 7.6.1) and is never passed on."""


class Stream(Protocol):
    """What a connection of the guest must be able to do; a connected socket can."""

    def recv(self, size: int, /) -> bytes: ...

    def sendall(self, data: bytes, /) -> None: ...

    def settimeout(self, seconds: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class Head(NamedTuple):
    """The head of a request. Header names are lower case, as h11 gives them."""

    method: str
    target: str
    headers: Headers

    def values(self, name: str) -> list[str]:
        """All values of a header, in their order."""
        wanted = name.lower().encode()
        return [value.decode("latin-1") for key, value in self.headers if key == wanted]

    def passed_on(self) -> list[tuple[bytes, bytes]]:
        """The headers without those that concern this connection alone."""
        return end_to_end(self.headers)


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """`headers` without those that concern one connection alone, by name or by Connection.

    Of a length there is one word at most: chunks overrule Content-Length (RFC 9112, 6.3), and
    nobody takes it out by naming it.
    """
    left_out = {
        option.strip().lower()
        for key, value in headers
        if key.lower() == b"connection"
        for option in value.split(b",")
    } - {b"content-length"}
    if any(key.lower() == b"transfer-encoding" for key, _ in headers):
        left_out.add(b"content-length")
    return [(k, v) for k, v in headers if k.lower() not in HOP_BY_HOP | left_out]


class Exchange:
    """One request and the way to answer it. Used by one thread.

    Raises OSError where the guest hangs up or keeps us waiting too long, h11.RemoteProtocolError
    where it breaks the protocol; the server ends the connection then.
    """

    def __init__(self, stream: Stream, connection: h11.Connection, request: h11.Request) -> None:
        self._stream = stream
        self._h11 = connection
        self.head = Head(
            request.method.decode("ascii"), request.target.decode("latin-1"), list(request.headers)
        )
        self.answered = False
        self.tunnelled = False

    def body(self) -> Iterator[bytes]:
        """The body of the request, piece by piece as it comes."""
        if self._h11.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            self._send(self._h11.send(go_on))
        while True:
            event = next_event(self._h11, self._stream, _IDLE_S)
            if not isinstance(event, h11.Data):
                return
            yield bytes(event.data)

    def respond(self, status: int, headers: Headers, body: Iterable[bytes] = ()) -> None:
        """Answer; each piece of `body` goes out as soon as it is there.

        Headers that concern one connection alone are left out; without a Content-Length the body is
        chunked.
        """
        self.answered = True
        response = h11.Response(
            status_code=status, reason=_reason(status), headers=end_to_end(headers)
        )
        self._stream.settimeout(_IDLE_S)
        self._send(self._h11.send(response))
        for piece in body:
            if piece:
                self._send(self._h11.send(h11.Data(data=piece)))
        self._send(self._h11.send(h11.EndOfMessage()))

    def refuse(self, status: int, code: str, message: str, hint: str = "") -> None:
        """Answer with an error that people and programs can read."""
        said = {"code": code, "message": message} | ({"hint": hint} if hint else {})
        text = json.dumps({"error": said}).encode() + b"\n"
        headers = [
            (b"Content-Type", b"application/json"),
            (b"Content-Length", str(len(text)).encode()),
            (b"X-Vmsandbox-Error", code.encode()),
        ]
        self.respond(status, headers, [text] if self.head.method != "HEAD" else [])

    def tunnel(self) -> tuple[Stream, bytes]:
        """Agree to a CONNECT: the raw connection, and what the guest sent of it already."""
        self.answered = self.tunnelled = True
        agreed = h11.Response(status_code=200, reason=b"Connection established", headers=[])
        self._send(self._h11.send(agreed))
        return self._stream, self._h11.trailing_data[0]

    def _send(self, data: bytes | None) -> None:
        if data:
            self._stream.sendall(data)


def _reason(status: int) -> bytes:
    """The customary words; not every client takes a status line without."""
    return responses.get(status, "").encode()


def next_event(connection: h11.Connection, stream: Stream, patience_s: float) -> h11.Event:
    """The next event of a peer; OSError at the end of its stream, or if it takes too long."""
    stream.settimeout(patience_s)
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(stream.recv(CHUNK_BYTES))
    if isinstance(event, h11.ConnectionClosed):
        raise ConnectionError("the peer hung up")
    assert not isinstance(event, type), event  # h11.PAUSED: nobody asks in that state
    return event


class Handler(Protocol):
    """Answers requests; called in many threads at once.

    It must answer each exchange once, by respond, refuse or tunnel. What it raises beyond that is
    answered with 502 if nothing was sent yet, and ends the connection.
    """

    def __call__(self, exchange: Exchange, /) -> None: ...
