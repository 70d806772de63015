"""The one way out of a guest: a port on its loopback over a real sshd, and the server behind it."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapter.loopback_guest import LoopbackGuest, free_port
from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem
from vmsandbox.guest import Guest
from vmsandbox.outlet import Exchange, Handler, Outlet
from vmsandbox.outlet.server import CONNECTIONS_MOST

HERE = "gateway.vmsandbox"


def echo(exchange: Exchange) -> None:
    """Says what it was asked, and sends every piece of the body back as it comes."""
    said = f"{exchange.head.method} {exchange.head.target}\n".encode()

    def pieces() -> Iterator[bytes]:
        yield said
        yield from exchange.body()

    exchange.respond(200, [(b"X-Seen", b"yes"), (b"Connection", b"close")], pieces())


def refuse(exchange: Exchange) -> None:
    exchange.refuse(403, "egress_none", "no")


@contextlib.contextmanager
def served(egress: Handler = refuse, local: Handler = echo) -> Iterator[socket.socket]:
    """One connection of a guest to an outlet."""
    outlet = Outlet(egress, {HERE: local})
    ours, theirs = socket.socketpair()
    outlet.accept(theirs)
    with ours:
        ours.settimeout(20)
        yield ours
    outlet.close()


def answer_to(sent: bytes, egress: Handler = refuse, local: Handler = echo) -> bytes:
    """All that comes back for what is sent on one connection, which is then closed."""
    with served(egress, local) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


# --- over SSH -------------------------------------------------------------------------------------


def request(port: int, path: str = "/x", body: bytes = b"") -> bytes:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    client.request("POST", path, body, {"Host": HERE})
    return client.getresponse().read()


def test_a_port_of_the_guests_loopback_leads_to_us(guest: Guest) -> None:
    port, outlet = free_port(), Outlet(refuse, {HERE: echo})
    with contextlib.closing(outlet):
        guest.forward(port, outlet.accept).await_open(Deadline(10))
        assert request(port, "/a", b"x" * 300_000) == b"POST /a\n" + b"x" * 300_000
        assert guest.run(["echo", "beside it"]).stdout == b"beside it\n"


def test_the_port_is_there_again_when_the_connection_is(
    loopback: LoopbackGuest, guest: Guest
) -> None:
    port, outlet = free_port(), Outlet(refuse, {HERE: echo})
    with contextlib.closing(outlet):
        forward = guest.forward(port, outlet.accept)
        forward.await_open(Deadline(10))
        loopback.cut()
        deadline = Deadline(20)
        while not deadline.passed():
            with contextlib.suppress(GuestProblem, OSError, http.client.HTTPException):
                guest.connect(Deadline(10))
                assert request(port) == b"POST /x\n"
                return
            time.sleep(0.05)
        raise AssertionError("it did not come back")


def test_nothing_is_open_once_the_connection_ends(loopback: LoopbackGuest) -> None:
    port, outlet = free_port(), Outlet(refuse, {HERE: echo})
    with contextlib.closing(outlet):
        with loopback.guest() as guest:
            guest.connect(Deadline(10))
            guest.forward(port, outlet.accept).await_open(Deadline(10))
        deadline = Deadline(10)
        while not deadline.passed():
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)):
                    return
        raise AssertionError("it still listens")


def test_a_guest_that_opens_no_port_is_a_typed_problem(guest: Guest) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        forward = guest.forward(taken.getsockname()[1], lambda stream: None)
        with pytest.raises(GuestProblem) as problem:
            forward.await_open(Deadline(0.5))
        forward.end()
    assert problem.value.code == "outlet_refused"


# --- the server -----------------------------------------------------------------------------------


def test_who_answers_depends_on_what_the_request_is_about() -> None:
    assert b"POST /v1" not in answer_to(b"GET / HTTP/1.1\r\nHost: other.vmsandbox\r\n\r\n")
    origin = answer_to(f"GET /v1 HTTP/1.1\r\nHost: {HERE}:3128\r\n\r\n".encode())
    assert b"GET /v1\n" in origin
    absolute = answer_to(f"GET http://{HERE}/v1 HTTP/1.1\r\nHost: {HERE}\r\n\r\n".encode())
    assert f"GET http://{HERE}/v1\n".encode() in absolute
    for line in ("GET http://pypi.org/", "CONNECT pypi.org:443", f"CONNECT {HERE}:443"):
        out = answer_to(f"{line} HTTP/1.1\r\nHost: pypi.org\r\n\r\n".encode())
        assert b"403" in out.splitlines()[0]
        assert b"egress_none" in out


def test_a_request_for_nobody_is_told_who_is_here() -> None:
    for hosts in ("Host: localhost", f"Host: {HERE}\r\nHost: {HERE}", ""):
        out = answer_to(f"GET / HTTP/1.1\r\n{hosts}\r\n\r\n".encode())
        assert out.split(b" ")[1] in (b"421", b"400"), out


def test_bodies_stream_both_ways() -> None:
    with served() as connection:
        head = f"POST /s HTTP/1.1\r\nHost: {HERE}\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        seen = b""
        for number in range(3):
            piece = b"piece %d" % number
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            while piece not in seen:  # each comes back before the next is sent
                seen += connection.recv(65536)
        connection.sendall(b"0\r\n\r\n")


def test_a_connection_serves_many_requests() -> None:
    one = f"GET /n HTTP/1.1\r\nHost: {HERE}\r\n\r\n".encode()
    assert (
        answer_to(one * 3, local=lambda x: x.respond(200, [], [b"n"])).count(b"HTTP/1.1 200") == 3
    )


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: gateway.vmsandbox\r\nX: " + b"x" * 100_000,
        b"POST / HTTP/1.1\r\nHost: gateway.vmsandbox\r\nContent-Length: 5\r\n"
        b"Content-Length: 6\r\n\r\nhello!",
        b"GET /\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
    ids=["tls", "endless head", "two lengths", "no version", "ssh"],
)
def test_what_is_not_http_reaches_no_handler(sent: bytes) -> None:
    seen = threading.Event()
    out = answer_to(sent, local=lambda exchange: seen.set())
    assert not seen.is_set()
    assert out == b"" or out.startswith(b"HTTP/1.1 4")


def test_a_handler_that_fails_ends_its_own_request_only() -> None:
    def fail(exchange: Exchange) -> None:
        raise ZeroDivisionError("secret")

    out = answer_to(f"GET / HTTP/1.1\r\nHost: {HERE}\r\n\r\n".encode(), local=fail)
    assert b" 502 " in out.splitlines()[0]
    assert b"secret" not in out


def test_a_guest_cannot_fill_the_log_with_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    def fail(exchange: Exchange) -> None:
        raise ZeroDivisionError

    one = f"GET / HTTP/1.1\r\nHost: {HERE}\r\n\r\n".encode()
    assert answer_to(one * 200, local=fail).count(b"HTTP/1.1 502") == 200
    assert 1 <= len(caplog.records) <= 50


@pytest.mark.parametrize(
    ("headers", "kept"),
    [
        (
            "Connection: content-length, x-mine\r\nX-Mine: 1\r\nContent-Length: 3",
            ["content-length"],
        ),
        ("Content-Length: 50\r\nTransfer-Encoding: chunked", []),
    ],
    ids=["named", "overruled"],
)
def test_a_length_that_is_passed_on_is_the_true_one(headers: str, kept: list[str]) -> None:
    def tell(exchange: Exchange) -> None:
        names = [name.decode() for name, _ in exchange.head.passed_on() if name != b"host"]
        exchange.respond(200, [], [json.dumps([names, len(b"".join(exchange.body()))]).encode()])

    body = "3\r\nabc\r\n0\r\n\r\n" if "chunked" in headers else "abc"
    head = f"POST / HTTP/1.1\r\nHost: {HERE}\r\n{headers}\r\n\r\n"
    assert json.dumps([kept, 3]).encode() in answer_to((head + body).encode(), local=tell)


def test_connections_are_bounded_in_number() -> None:
    outlet = Outlet(refuse, {HERE: echo})
    pairs = [socket.socketpair() for _ in range(CONNECTIONS_MOST + 1)]
    with contextlib.closing(outlet), contextlib.ExitStack() as stack:
        for ours, theirs in pairs:
            stack.enter_context(ours)
            outlet.accept(theirs)
        last = pairs[-1][0]
        last.settimeout(10)
        assert last.recv(1) == b""
        pairs[0][0].sendall(f"GET / HTTP/1.1\r\nHost: {HERE}\r\n\r\n".encode())
        pairs[0][0].settimeout(10)
        assert pairs[0][0].recv(100).startswith(b"HTTP/1.1 200")


def test_a_tunnel_hands_over_what_came_early(tmp_path: Path) -> None:
    def tunnel(exchange: Exchange) -> None:
        stream, early = exchange.tunnel()
        stream.sendall(early + stream.recv(100))

    with served(egress=tunnel) as connection:
        connection.sendall(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\nearly ")
        seen = b""
        while not seen.endswith(b"\r\n\r\n"):
            seen += connection.recv(1)
        assert seen.startswith(b"HTTP/1.1 200")
        connection.sendall(b"late")
        assert b"".join(iter(lambda: connection.recv(100), b"")) == b"early late"
