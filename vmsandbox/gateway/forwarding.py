"""Owns the way of one request to its upstream and of the answer back: with the key, unbuffered, and
nowhere else.

What the guest says about who it is, is dropped; what the upstream says about who the host is, too.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import httpx

from vmsandbox.gateway.keys import Key
from vmsandbox.gateway.ledger import BUDGET_EXHAUSTED, Ledger
from vmsandbox.gateway.tokens import Meter
from vmsandbox.provider import Call, Gateway

# What these log at their lower levels has headers in it.
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)

Headers = Sequence[tuple[bytes, bytes]]

AT_ONCE_MOST = 16
"""Requests of one guest on their way: more than agents make, and what a budget may be overdrawn
by."""

TIMEOUT = httpx.Timeout(60.0, connect=15.0, read=600.0)
"""Models think for minutes before they say a word."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NEVER_UP = frozenset(
    {
        b"host",
        b"expect",
        b"accept-encoding",
        b"authorization",
        b"x-api-key",
        b"api-key",
        b"x-goog-api-key",
        b"cookie",
        b"forwarded",
        b"x-forwarded-for",
    }
)
_NEVER_DOWN = frozenset({b"set-cookie", b"set-cookie2", b"content-length", b"location", b"alt-svc"})
_HEARD_OUT_BYTES = 64 * 1024 * 1024
_PATH_MOST, _PATH_SHOWN = 16 * 1024, 200


class Head(Protocol):
    """The head of a request, header names in lower case."""

    @property
    def method(self) -> str: ...

    @property
    def target(self) -> str: ...

    @property
    def headers(self) -> Headers: ...

    def passed_on(self) -> Headers:
        """Without what concerns one connection alone."""


class Exchange(Protocol):
    """One request of a guest and the way to answer it."""

    @property
    def head(self) -> Head: ...

    def body(self) -> Iterator[bytes]: ...

    def respond(self, status: int, headers: Headers, body: Iterable[bytes] = ()) -> None: ...

    def refuse(self, status: int, code: str, message: str, hint: str = "") -> None: ...


class _Refused(Exception):
    """What the guest is answered instead of an upstream's answer."""

    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message, self.hint = status, code, message, hint


class _Route(NamedTuple):
    gateway: Gateway
    key: Key


class _Passing:
    """What is known of a request while it is on its way."""

    def __init__(self, exchange: Exchange, gateway: str, path: str) -> None:
        self.exchange = exchange
        self.gateway = gateway
        self.path = path
        self.started = time.monotonic()
        self.sent = self.received = 0
        self.status: int | None = None
        self.problem = ""
        self.meter: Meter | None = None
        self.whole = False

    def body(self) -> Iterator[bytes]:
        for piece in self.exchange.body():
            self.sent += len(piece)
            yield piece

    def call(self) -> Call:
        call = Call(
            gateway=self.gateway,
            method=self.exchange.head.method[:16],
            path=self.path[:_PATH_SHOWN],
            status=self.status,
            problem=self.problem,
            sent_bytes=self.sent,
            received_bytes=self.received,
            seconds=round(time.monotonic() - self.started, 3),
        )
        if self.meter is None:
            return call
        taken = self.meter.taken(sent_bytes=self.sent, whole=self.whole)
        if taken.guessed and self.exchange.head.method != "POST":
            return call  # it asked for nothing; what it says of an answer given before does count
        return call.model_copy(update=taken._asdict())


class GatewayServer:
    """Answers what a guest asks of its gateways, ``/NAME/…``; called in many threads at once.

    It is done with :meth:`close`: what is on its way is cut off.
    """

    def __init__(
        self, gateways: Iterable[Gateway], keys: Mapping[str, Key], ledger: Ledger
    ) -> None:
        self._routes = {one.name: _Route(one, keys[one.name]) for one in gateways}
        self._ledger = ledger
        self._room = threading.Semaphore(AT_ONCE_MOST)
        self._client = httpx.Client(
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=AT_ONCE_MOST),
            follow_redirects=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            mounts={"http://": None},  # is loopback: no proxy of the host may hear a key in clear
        )

    def close(self) -> None:
        self._client.close()

    def __call__(self, exchange: Exchange, /) -> None:
        name, path = _split(exchange.head.target)
        passing = _Passing(exchange, name[:32], path.partition("?")[0])
        route = self._routes.get(name)
        try:
            if route is None:
                raise self._unknown(name)
            self._admitted(route, passing, path)
        except _Refused as refused:
            passing.status, passing.problem = refused.status, refused.code
            exchange.refuse(refused.status, refused.code, refused.message, refused.hint)
        finally:
            if route is not None:
                self._ledger.count(route.gateway, passing.call())

    def _unknown(self, name: str) -> _Refused:
        known = ", ".join(f"/{one}" for one in self._routes)
        message = "there is no gateway of that name in this sandbox"
        return _Refused(404, "gateway_unknown", message, f"known here: {known or 'none'}")

    def _admitted(self, route: _Route, passing: _Passing, path: str) -> None:
        self._check(route.gateway, passing.exchange.head.method, path)
        if not self._room.acquire(blocking=False):
            raise _Refused(429, "gateway_busy", f"{AT_ONCE_MOST} requests are on their way already")
        try:
            self._pass(route, passing, path)
        finally:
            self._room.release()

    def _check(self, gateway: Gateway, method: str, path: str) -> None:
        if why := self._ledger.over:
            raise _Refused(402, BUDGET_EXHAUSTED, f"the budget of this sandbox is used up: {why}")
        if method not in _METHODS:
            raise _Refused(405, "gateway_method", "no gateway passes that method on")
        if len(path) > _PATH_MOST:
            raise _Refused(414, "gateway_path_long", f"a path has {_PATH_MOST} characters at most")
        if _leaves(path):
            raise _Refused(400, "gateway_path", "a path with . or .. or \\ is not passed on")
        bare = path.partition("?")[0]
        fits = (bare == start or bare.startswith(f"{start}/") for start in gateway.paths)
        if gateway.paths and not any(fits):
            message = f"gateway {gateway.name} does not pass that path on"
            hint = f"it passes on: {', '.join(gateway.paths)}"
            raise _Refused(403, "gateway_path_denied", message, hint)

    def _pass(self, route: _Route, passing: _Passing, path: str) -> None:
        with ExitStack() as lifetime:
            try:
                answer = self._client.send(self._request(route, passing, path), stream=True)
            except httpx.HTTPError as error:
                raise _upstream_problem(route.gateway, error) from error
            lifetime.callback(answer.close)
            headers = _headers_down(route, answer)
            passing.status = answer.status_code
            if answer.is_success:
                passing.meter = Meter(answer.headers.get("content-type", ""))
            bodiless = passing.exchange.head.method == "HEAD" or answer.status_code in (204, 304)
            body = iter(()) if bodiless else self._body(route, passing, answer)
            try:
                passing.exchange.respond(answer.status_code, headers, body)
            except OSError:
                if passing.meter:
                    _hear_out(body)
                raise

    def _request(self, route: _Route, passing: _Passing, path: str) -> httpx.Request:
        head = passing.exchange.head
        never = _NEVER_UP | {route.gateway.header.encode()}
        headers = [(name, value) for name, value in head.passed_on() if name not in never]
        headers += [route.key.header(route.gateway), (b"accept-encoding", b"identity")]
        base = httpx.URL(route.gateway.upstream)
        target = base.raw_path.rstrip(b"/") + path.encode("latin-1")
        url = base.copy_with(raw_path=target)
        content = passing.body() if _has_body(head) else None
        return self._client.build_request(head.method, url, headers=headers, content=content)

    def _body(self, route: _Route, passing: _Passing, answer: httpx.Response) -> Iterator[bytes]:
        """The answer as it comes. What breaks off on the way breaks off for the guest, too."""
        try:
            for piece in route.key.kept_out_of(answer.iter_bytes()):
                passing.received += len(piece)
                if passing.meter:
                    passing.meter.feed(piece)
                yield piece
                if self._ledger.over:
                    raise ConnectionError("the budget was used up meanwhile")
        except httpx.HTTPError as error:
            passing.problem = "gateway_upstream_cut"
            raise ConnectionError("the upstream's answer broke off") from error
        passing.whole = True


def _hear_out(body: Iterator[bytes]) -> None:
    """Read what a guest that hung up does not want any more: its end says what it cost."""
    heard = 0
    with suppress(OSError):
        while heard < _HEARD_OUT_BYTES and (piece := next(body, b"")):
            heard += len(piece)


def _has_body(head: Head) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in head.headers)


def _split(target: str) -> tuple[str, str]:
    """The gateway's name, and what is asked of its upstream, from either form of a target."""
    if not target.startswith("/"):
        parts = urlsplit(target)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    bare, mark, query = target.partition("?")
    name, slash, rest = bare[1:].partition("/")
    return name, f"/{rest}{mark}{query}" if slash else f"/{mark}{query}"


def _leaves(path: str) -> bool:
    """Whether some server might read it as another place than below the upstream's own path."""
    bare = path.partition("?")[0]
    for _ in range(3):  # also where it is quoted twice
        names = {part.partition(";")[0] for part in bare.split("/")}  # some take ..;x for ..
        if "\\" in bare or {".", ".."} & names or not bare.isprintable():
            return True
        bare = unquote(bare, "latin-1")
    return False


def _headers_down(route: _Route, answer: httpx.Response) -> list[tuple[bytes, bytes]]:
    """What the guest gets of the answer's headers. Raises _Refused for a redirect elsewhere."""
    coded = answer.headers.get("content-encoding", "identity").lower()
    decoded = coded in ("gzip", "deflate")
    never = _NEVER_DOWN | ({b"content-encoding"} if decoded else set())
    headers = [
        (name, route.key.starred(value))
        for name, value in answer.headers.raw
        if name.lower() not in never
    ]
    if (length := answer.headers.get("content-length")) and not decoded:
        headers.append((b"content-length", length.encode()))
    if answer.has_redirect_location:
        headers.append((b"location", route.key.starred(_location(route.gateway, answer))))
    return headers


def _location(gateway: Gateway, answer: httpx.Response) -> bytes:
    """Where a redirect leads, if it stays with the upstream: as a path of the gateway."""
    try:
        there = answer.url.join(answer.headers["location"])
        base = httpx.URL(gateway.upstream)
    except (httpx.InvalidURL, ValueError):
        there, base = httpx.URL(), httpx.URL("http://invalid")
    below = base.raw_path.rstrip(b"/")
    if (there.scheme, there.host, there.port) != (base.scheme, base.host, base.port) or not (
        there.raw_path.startswith(below + b"/")
    ):
        raise _Refused(
            502,
            "gateway_redirected",
            f"the upstream of gateway {gateway.name} redirects to another place; the key does not"
            " go there",
            f"on the host: set upstream of [gateway.{gateway.name}] to where it moved",
        )
    return b"/" + gateway.name.encode() + there.raw_path.removeprefix(below)


def _upstream_problem(gateway: Gateway, error: httpx.HTTPError) -> _Refused:
    """Which it is, without a word of what was sent or received."""
    host = httpx.URL(gateway.upstream).host
    hint = f"on the host: curl -sSI {gateway.upstream}"
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        message = f"{host} did not answer in time"
        return _Refused(504, "gateway_upstream_slow", message, hint)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        return _Refused(502, "gateway_upstream_down", f"{host} cannot be reached", hint)
    message = f"{host} did not answer as an HTTP server does"
    return _Refused(502, "gateway_upstream_nonsense", message, hint)
