"""The credential gateway against real servers on loopback: where the key goes, where it does not,
what passes through how fast, and what is counted.
"""

import contextlib
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.model_server import DONE, INPUT_TOKENS, KEY, OUTPUT_TOKENS, ModelServer
from tests.upstreams import answer, free_port, outlet_port, sse, upstream
from vmsandbox.gateway.forwarding import AT_ONCE_MOST, GatewayServer
from vmsandbox.gateway.keys import keys_of
from vmsandbox.gateway.ledger import Ledger
from vmsandbox.outlet import Exchange
from vmsandbox.provider import Budget, Call, Gateway, Price, Usage

PRICES = {"stand-in": Price(input=2.0, output=10.0)}


def nowhere(exchange: Exchange, /) -> None:
    exchange.refuse(403, "nowhere", "not asked for here")


class Opened(NamedTuple):
    """A gateway that is open, a client as a guest would have it, and what was counted."""

    client: httpx.Client
    ledger: Ledger
    calls: list[Call]
    ran_out: list[str]


@contextlib.contextmanager
def gateway(url: str, budget: Budget | None = None, **fields: Any) -> Iterator[Opened]:
    """The gateway ``/provider`` to `url`, with the key of the stand-in."""
    definition = Gateway.model_validate(
        {"name": "provider", "upstream": url, "from_env": "K", **fields}
    )
    calls: list[Call] = []
    ran_out: list[str] = []
    ledger = Ledger(
        budget or Budget(), Usage(), lambda call, usage: calls.append(call), ran_out.append
    )
    server = GatewayServer([definition], keys_of([definition], {"K": KEY}), ledger)
    with (
        contextlib.closing(server),
        outlet_port({"gateway.vmsandbox": server}, nowhere) as port,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"host": "gateway.vmsandbox", "accept-encoding": "gzip, br"},
            trust_env=False,
            timeout=20.0,
        ) as client,
    ):
        yield Opened(client, ledger, calls, ran_out)


def settled(opened: Opened, calls: int = 1) -> list[Call]:
    """The calls, once that many were written down: the guest has its answer a moment before."""
    deadline = time.monotonic() + 10
    while len(opened.calls) < calls:
        assert time.monotonic() < deadline, opened.calls
        time.sleep(0.01)
    return opened.calls


def error_of(response: httpx.Response) -> Any:
    assert KEY not in response.text
    return response.json()["error"]


# --- where the key goes ---------------------------------------------------------------------------


def test_the_guests_own_proof_gives_way_to_the_hosts() -> None:
    with upstream(lambda _: [answer(b"{}")]) as server, gateway(server.url) as opened:
        opened.client.post(
            "/provider/v1/x?a=b%20c",
            content=b"body",
            headers={
                "Authorization": "Bearer vmsandbox",
                "X-Api-Key": "vmsandbox",
                "Cookie": "a=b",
                "X-Kept": "yes",
                "X-Hop": "no",
                "Connection": "keep-alive, x-hop",
            },
        )
        (asked,) = server.asked
    head, _, body = asked.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0] == "post /v1/x?a=b%20c http/1.1"
    assert body == b"body"
    assert f"authorization: bearer {KEY}".lower() in lines
    assert f"host: 127.0.0.1:{server.port}" in lines
    assert "x-kept: yes" in lines
    assert "accept-encoding: identity" in lines
    assert not [line for line in lines if line.startswith(("x-api-key", "cookie", "x-hop"))]
    assert b"vmsandbox" not in asked


def test_a_header_of_ones_own_and_a_path_of_the_upstreams() -> None:
    with (
        upstream(lambda _: [answer(b"{}")]) as server,
        gateway(f"{server.url}/team/", header="X-Api-Key") as opened,
    ):
        assert opened.client.get("/provider/v1/models").status_code == 200
        (asked,) = server.asked
    assert asked.startswith(b"GET /team/v1/models HTTP/1.1\r\n")
    assert f"x-api-key: {KEY}".encode() in asked


@pytest.mark.parametrize(
    "path",
    [
        "/provider/../admin",
        "/provider/v1/%2e%2e/admin",
        "/provider/v1/%252e%252e/admin",
        "/provider/v1/..%2fadmin",
        "/provider/v1\\..\\admin",
        "/provider/./admin",
        "/provider/v1/..;x/admin",
    ],
)
def test_no_path_leads_out_of_the_upstreams_own(path: str) -> None:
    with upstream(lambda _: [answer(b"{}")]) as server, gateway(f"{server.url}/v1") as opened:
        response = opened.client.get("/", extensions={"target": path.encode()})
        assert (response.status_code, error_of(response)["code"]) == (400, "gateway_path")
        assert not server.asked


def test_a_proxy_of_the_host_hears_no_key_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    with upstream(lambda _: [answer(b"{}")]) as proxy, ModelServer() as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        with gateway(server.url) as opened:
            assert opened.client.post("/provider/v1/messages", json={}).status_code == 200
        assert not proxy.asked


def test_only_the_paths_that_are_named() -> None:
    with (
        upstream(lambda _: [answer(b"{}")]) as server,
        gateway(server.url, paths=["/v1/messages"]) as opened,
    ):
        assert opened.client.get("/provider/v1/messages/count").status_code == 200
        for path in ("/provider/v1/files", "/provider/v1/messagesx", "/provider/"):
            response = opened.client.get(path)
            assert (response.status_code, error_of(response)["code"]) == (
                403,
                "gateway_path_denied",
            )
        assert len(server.asked) == 1
        unknown = opened.client.get("/other/v1/messages")
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "gateway_unknown")


def test_a_redirect_elsewhere_does_not_take_the_key_along() -> None:
    with upstream(lambda _: [answer(b"{}")]) as elsewhere:
        there = answer(b"", f"Location: {elsewhere.url}/v1", status="307 Temporary Redirect")
        with upstream(lambda _: [there]) as server, gateway(server.url) as opened:
            response = opened.client.post("/provider/v1/messages", content=b"{}")
            assert (response.status_code, error_of(response)["code"]) == (502, "gateway_redirected")
            assert "location" not in response.headers
            assert settled(opened)[0].problem == "gateway_redirected"
        assert not elsewhere.asked


def test_a_redirect_within_the_upstream_stays_with_the_gateway() -> None:
    there = answer(b"", "Location: /v2/messages?a=b", status="308 Permanent Redirect")
    with upstream(lambda _: [there]) as server, gateway(server.url) as opened:
        response = opened.client.get("/provider/v1/messages")
        assert response.status_code == 308
        assert response.headers["location"] == "/provider/v2/messages?a=b"


# --- what an upstream says about the host ---------------------------------------------------------


def test_a_redirect_does_not_tell_the_key() -> None:
    there = answer(b"", f"Location: /v2?key={KEY}", status="302 Found")
    with upstream(lambda _: [there]) as server, gateway(server.url) as opened:
        response = opened.client.get("/provider/v1")
    assert response.headers["location"] == "/provider/v2?key=" + "*" * len(KEY)


def test_an_upstream_that_says_the_key_does_not_tell_the_guest() -> None:
    half = len(KEY) // 2

    def echo(request: bytes) -> Iterator[bytes]:
        yield b"HTTP/1.1 401 No\r\nConnection: close\r\nSet-Cookie: session=1\r\n"
        yield f"X-You: {KEY}\r\n\r\nyour key is {KEY[:half]}".encode()
        assert not threading.Event().wait(0.2)  # so that it comes in two pieces
        yield f"{KEY[half:]}, and you said: ".encode() + request + b" sk-only-the"

    with upstream(echo) as server, gateway(server.url) as opened:
        response = opened.client.post("/provider/v1/messages", content=b"{}")
        second = opened.client.get("/provider/v1/messages")
    assert response.status_code == 401
    assert KEY.encode() not in response.content
    assert response.content.startswith(b"your key is " + b"*" * len(KEY) + b", and")
    assert response.content.endswith(b" sk-only-the")
    assert response.headers["x-you"] == "*" * len(KEY)
    assert "set-cookie" not in response.headers
    assert second.status_code == 401
    assert b"session" not in server.asked[1]


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (lambda _: [b"\x16\x03\x01 what is HTTP?\r\n\r\n"], 502, "gateway_upstream_nonsense"),
        (lambda _: [], 502, "gateway_upstream_nonsense"),
        (lambda _: [b"HTTP/1.1 200 OK\r\n" + b"X" * 200_000], 502, "gateway_upstream_nonsense"),
        (
            lambda request: [b"HTTP/1.1 2 " + request.replace(b"\r\n", b" ") + b"\r\n\r\n"],
            502,
            "gateway_upstream_nonsense",
        ),
    ],
    ids=["noise", "silence", "endless head", "the request back"],
)
def test_an_upstream_that_speaks_nonsense(
    script: Callable[[bytes], list[bytes]], status: int, code: str
) -> None:
    with upstream(script) as server, gateway(server.url) as opened:
        response = opened.client.post("/provider/v1/messages", content=b"{}")
        error = error_of(response)
        assert (response.status_code, error["code"]) == (status, code)
        assert error["hint"].startswith("on the host: curl")
        settled(opened)
        assert (opened.ledger.usage.requests, opened.ledger.usage.failed) == (1, 1)


def test_an_upstream_that_is_down() -> None:
    with gateway(f"http://127.0.0.1:{free_port()}") as opened:
        response = opened.client.post("/provider/v1/messages", content=b"{}")
        assert (response.status_code, error_of(response)["code"]) == (502, "gateway_upstream_down")
        assert response.headers["x-vmsandbox-error"] == "gateway_upstream_down"


def test_an_answer_that_breaks_off_breaks_off_for_the_guest() -> None:
    torn = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
    with upstream(lambda _: [torn]) as server, gateway(server.url) as opened:
        with pytest.raises(httpx.RemoteProtocolError):
            opened.client.post("/provider/v1/messages", content=b"{}")
        assert settled(opened)[0].problem == "gateway_upstream_cut"


# --- streams --------------------------------------------------------------------------------------


def test_events_come_as_they_are_said() -> None:
    go_on = threading.Event()

    def script(_: bytes) -> Iterator[bytes]:
        yield sse("first")
        assert go_on.wait(20)
        yield b"data: second\n\n"

    with (
        upstream(script) as server,
        gateway(server.url) as opened,
        opened.client.stream("POST", "/provider/v1/messages", content=b"{}") as response,
    ):
        lines = response.iter_lines()
        assert next(lines) == "data: first"  # while the upstream still waits
        go_on.set()
        assert [line for line in lines if line] == ["data: second"]


def test_a_request_body_goes_up_as_it_comes() -> None:
    seen = threading.Event()

    def script(request: bytes) -> Iterator[bytes]:
        yield answer(request.partition(b"\r\n\r\n")[2])

    def pieces() -> Iterator[bytes]:
        yield b"one"
        yield b"two"
        seen.set()

    with upstream(script) as server, gateway(server.url) as opened:
        response = opened.client.post("/provider/v1/x", content=pieces())
        assert b"one" in response.content
        assert b"two" in response.content
        assert seen.is_set()
        assert settled(opened)[0].sent_bytes == 6


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"tools": [], "input": []}),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/messages", {"stream": True}),
    ],
)
def test_what_each_protocol_says_it_took_is_counted(path: str, body: Any) -> None:
    with ModelServer() as server, gateway(server.url, prices=PRICES) as opened:
        response = opened.client.post(f"/provider{path}", json=body)
        assert response.status_code == 200
        assert response.text.count("data: ") > 3
        (call,) = settled(opened)
        usage = opened.ledger.usage
    assert (call.model, call.tokens.input, call.tokens.output, call.guessed) == (
        "stand-in",
        INPUT_TOKENS,
        OUTPUT_TOKENS,
        False,
    )
    assert call.received_bytes == len(response.content)
    assert usage.cost == pytest.approx((INPUT_TOKENS * 2 + OUTPUT_TOKENS * 10) / 1e6)
    assert path == call.path
    assert path != "/v1/messages" or DONE.split(" ")[0] in response.text


def test_an_answer_in_one_piece_and_packed_is_counted_too() -> None:
    said = {"model": "m", "usage": {"prompt_tokens": 30, "completion_tokens": 4}}
    said["usage"]["prompt_tokens_details"] = {"cached_tokens": 10}  # type: ignore[index]
    packed = answer(
        gzip.compress(json.dumps(said).encode()),
        "Content-Type: application/json",
        "Content-Encoding: gzip",
    )
    with upstream(lambda _: [packed]) as server, gateway(server.url) as opened:
        response = opened.client.post("/provider/v1/chat/completions", json={})
        assert response.json() == said
        (call,) = settled(opened)
    assert (call.tokens.input, call.tokens.cached, call.tokens.output) == (20, 10, 4)


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [Budget(max_tokens=1500), Budget(max_cost=0.003)])
def test_a_budget_that_is_used_up_shuts_the_gateway(budget: Budget) -> None:
    with ModelServer() as server, gateway(server.url, budget, prices=PRICES) as opened:
        for _ in range(2):
            assert opened.client.post("/provider/v1/messages", json={}).status_code == 200
            settled(opened, len(server.asked))
        refused = opened.client.post("/provider/v1/messages", json={})
        assert (refused.status_code, error_of(refused)["code"]) == (402, "budget_exhausted")
        assert len(server.asked) == 2
        assert len(opened.ran_out) == 1
        assert opened.ledger.usage.exhausted == opened.ran_out[0]


def test_who_leaves_before_the_sum_is_said_is_charged_by_size() -> None:
    def script(_: bytes) -> Iterator[bytes]:
        yield sse(*['{"choices": [{"delta": {"content": "x"}}]}'] * 40)
        assert gone.wait(20)
        yield b"data: more\n\n" * 100_000

    gone = threading.Event()
    with upstream(script) as server, gateway(server.url, Budget(max_tokens=30)) as opened:
        with opened.client.stream("POST", "/provider/v1/x", content=b"{}") as response:
            next(response.iter_lines())
        gone.set()
        (call,) = settled(opened)
        assert call.guessed
        assert call.tokens.output >= 40
        assert opened.ledger.over


def test_who_hangs_up_pays_for_what_was_made() -> None:
    """Whether its answer comes in one piece or, with the sum at its end, in many."""
    said = {"model": "stand-in", "usage": {"input_tokens": 10, "output_tokens": 5000}}
    whole = answer(json.dumps(said | {"text": "x" * 2**20}).encode())
    events = sse("{}", *['{"delta": "x"}'] * 20, json.dumps({"response": said}))
    for made in (whole, events):
        gone = threading.Event()

        def script(_: bytes, made: bytes = made, gone: threading.Event = gone) -> Iterator[bytes]:
            yield made[:100]
            assert gone.wait(20)
            yield made[100:]

        with upstream(script) as server, gateway(server.url, Budget(max_tokens=5000)) as opened:
            with opened.client.stream("POST", "/provider/v1/x", content=b"{}") as response:
                assert response.status_code == 200
            gone.set()
            (call,) = settled(opened)
            assert (call.tokens.output, call.guessed) == (5000, False)
            assert opened.ledger.over


def test_what_is_fetched_later_is_counted() -> None:
    said = {"id": "r1", "usage": {"input_tokens": 10, "output_tokens": 5000}}

    def script(request: bytes) -> list[bytes]:
        done = request.startswith(b"GET")
        return [answer(json.dumps(said if done else {"id": "r1", "usage": None}).encode())]

    with upstream(script) as server, gateway(server.url, Budget(max_tokens=5000)) as opened:
        opened.client.post("/provider/v1/responses", json={"background": True})
        opened.client.get("/provider/v1/responses/r1")
        assert settled(opened, 2)[1].tokens.output == 5000
        assert opened.client.get("/provider/v1/models").status_code == 402


def test_a_path_beyond_all_sense_is_refused() -> None:
    with ModelServer() as server, gateway(server.url) as opened:
        response = opened.client.get("/provider" + "/a" * 20_000)
    assert (response.status_code, error_of(response)["code"]) == (414, "gateway_path_long")


def test_what_asks_for_no_sum_is_charged_by_size() -> None:
    with ModelServer() as server, gateway(server.url) as opened:
        body = {"stream": True, "messages": [{"role": "user", "content": "x" * 4000}]}
        opened.client.post("/provider/v1/chat/completions", json=body)
        (call,) = settled(opened)
    assert call.guessed
    assert call.tokens.input >= 1000
    assert call.tokens.output >= 5


def test_more_at_once_than_agents_make_is_refused() -> None:
    go_on = threading.Event()
    arrived = threading.Semaphore(0)

    def script(_: bytes) -> Iterator[bytes]:
        arrived.release()
        assert go_on.wait(20)
        yield answer(b"{}")

    def ask(opened: Opened) -> None:
        opened.client.get("/provider/v1/slow")

    with upstream(script) as server, gateway(server.url) as opened:
        threads = [threading.Thread(target=ask, args=(opened,)) for _ in range(AT_ONCE_MOST)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert arrived.acquire(timeout=20)
        refused = opened.client.get("/provider/v1/slow")
        assert (refused.status_code, error_of(refused)["code"]) == (429, "gateway_busy")
        go_on.set()
        for thread in threads:
            thread.join()
