"""Gateways, prices, budgets, keys and the tokens that answers name: values alone, no server."""

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vmsandbox.errors import UsageProblem
from vmsandbox.gateway.keys import Key, keys_of
from vmsandbox.gateway.tokens import Meter
from vmsandbox.provider import Budget, Gateway, Price, Tokens, Usage

SECRET = "sk-0123456789-abcdef"


def gateway(**fields: object) -> Gateway:
    return Gateway.model_validate(
        {"name": "g", "upstream": "https://api.example.com", "from_env": "K", **fields}
    )


@pytest.mark.parametrize(
    "upstream",
    [
        "http://api.example.com",  # in the clear
        "http://169.254.169.254",
        "http://localhost.example.com",
        "https://user:password@api.example.com",
        "https://api.example.com/?key=1",
        "https://api.example.com/#x",
        "ftp://api.example.com",
        "api.example.com",
        "https://",
    ],
)
def test_where_a_key_must_not_go(upstream: str) -> None:
    with pytest.raises(ValidationError):
        gateway(upstream=upstream)


@pytest.mark.parametrize("upstream", ["http://127.0.0.1:1", "http://[::1]/v1", "http://localhost"])
def test_loopback_needs_no_encryption(upstream: str) -> None:
    assert gateway(upstream=upstream + "/").upstream == upstream


@pytest.mark.parametrize(
    "fields",
    [
        {"header": "X: y"},
        {"header": "x\r\ny"},
        {"from_env": SECRET},  # a key where a name belongs
        {"from_env": "1A"},
        {"name": "a/b"},
        {"name": "Ä"},
        {"paths": ["v1"]},
        {"prices": {"*": {"input": -1, "output": 1}}},
    ],
)
def test_definitions_that_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        gateway(**fields)


def test_what_stands_before_a_key() -> None:
    assert gateway().before_key == "Bearer "
    assert gateway(header="X-Api-Key").before_key == ""
    assert gateway(prefix="token ").before_key == "token "
    assert Key(SECRET).header(gateway(header="X-Api-Key")) == (b"x-api-key", SECRET.encode())


def test_prices_go_by_the_first_name_that_fits_and_else_by_the_dearest() -> None:
    small, large = Price(input=1, output=2, cached=0.5), Price(input=10, output=20)
    priced = gateway(prices={"small-*": small, "*-large": large})
    assert priced.price("small-large") == small
    assert priced.price("unheard-of") == large
    assert gateway().price("any") is None
    tokens = Tokens(input=1_000_000, cached=2_000_000, output=3_000_000)
    assert small.of(tokens) == 1 + 1 + 6
    assert large.of(tokens) == 10 + 20 + 60


def test_a_budget_is_exhausted_when_it_is_reached() -> None:
    used = Usage(tokens=Tokens(input=60, cached=20, output=20), cost=0.5)
    assert Budget(max_tokens=100).exhausted(used) == "100 of 100 tokens are used"
    assert not Budget(max_tokens=101).exhausted(used)
    assert Budget(max_cost=0.5).exhausted(used).startswith("0.5000 of 0.5")
    assert not Budget(max_cost=0.51).exhausted(used)
    assert not Budget().exhausted(used)
    assert not Budget(max_cost=1).exhausted(Usage())


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "  \n"])
def test_a_gateway_without_its_variable(value: str | None) -> None:
    with pytest.raises(UsageProblem) as caught:
        keys_of([gateway()], {} if value is None else {"K": value})
    assert caught.value.code == "gateway_without_key"
    assert "K" in caught.value.message
    assert "export K=" in (caught.value.hint or "")


@pytest.mark.parametrize("value", ["k3y", "two words in it", "line\nbreak-in-it", "schlüssel-123"])
def test_what_cannot_be_a_key_is_refused_and_not_said(value: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        keys_of([gateway()], {"K": value})
    assert caught.value.code == "gateway_key_unusable"
    told = f"{caught.value.message} {caught.value.hint}"
    assert value not in told
    assert not [word for word in value.split() if len(word) > 4 and word in told]


def test_a_key_shows_itself_to_nobody() -> None:
    key = keys_of([gateway()], {"K": f" {SECRET}\n"})["g"]
    assert SECRET not in f"{key} {key!r} {[key]} {vars}"
    assert key.within(f"x{SECRET}y")
    with pytest.raises(TypeError):
        pickle.dumps(key)


@given(st.lists(st.sampled_from([SECRET[:1], SECRET[:9], SECRET[9:], SECRET, "sk", "x", "\n"])))
def test_a_key_is_kept_out_however_a_text_is_cut(words: list[str]) -> None:
    text = "".join(words)
    pieces = list(Key(SECRET).kept_out_of(word.encode() for word in words))
    said = b"".join(pieces)
    assert said == text.replace(SECRET, "*" * len(SECRET)).encode()


def test_nothing_is_held_back_that_cannot_be_a_key() -> None:
    passed: list[bytes] = []

    def pieces() -> Iterator[bytes]:
        yield b"data: one\n\n"
        assert passed == [b"data: one\n\n"]  # before the next piece is asked for
        yield b"data: s"

    for piece in Key(SECRET).kept_out_of(pieces()):
        passed.append(piece)
    assert b"".join(passed) == b"data: one\n\ndata: s"


# --- tokens ---------------------------------------------------------------------------------------

Events = list[dict[str, Any]]
ANTHROPIC: Events = [
    {
        "type": "message_start",
        "message": {
            "model": "claude-x",
            "usage": {
                "input_tokens": 10,
                "cache_creation_input_tokens": 5,
                "cache_read_input_tokens": 100,
                "output_tokens": 1,
            },
        },
    },
    {"type": "content_block_delta", "delta": {"text": 'a "usage": of words'}},
    {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 42}},
    {"type": "message_stop"},
]
RESPONSES: Events = [
    {"type": "response.created", "response": {"model": "gpt-x", "usage": None}},
    {
        "type": "response.completed",
        "response": {
            "model": "gpt-x",
            "usage": {
                "input_tokens": 115,
                "input_tokens_details": {"cached_tokens": 100},
                "output_tokens": 42,
            },
        },
    },
]
CHAT: Events = [
    {"model": "gpt-x", "choices": [{}], "usage": None},
    {
        "model": "gpt-x",
        "choices": [],
        "usage": {
            "prompt_tokens": 115,
            "prompt_tokens_details": {"cached_tokens": 100},
            "completion_tokens": 42,
        },
    },
]


def stream(events: Events) -> bytes:
    return b"".join(b"data: " + json.dumps(one).encode() + b"\r\n\r\n" for one in events)


@pytest.mark.parametrize("events", [ANTHROPIC, RESPONSES, CHAT])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_every_protocol_means_the_same(events: Events, size: int) -> None:
    data = stream(events) + b"data: [DONE]\n\n"
    meter = Meter("text/event-stream; charset=utf-8")
    for start in range(0, len(data), size):
        meter.feed(data[start : start + size])
    taken = meter.taken(sent_bytes=999_999, whole=True)
    assert taken.tokens == Tokens(input=15, cached=100, output=42)
    assert taken.model in ("claude-x", "gpt-x")
    assert not taken.guessed


def test_a_stream_that_is_cut_before_its_sum_is_guessed() -> None:
    meter = Meter("text/event-stream")
    meter.feed(stream(ANTHROPIC[:1] + ANTHROPIC[1:2] * 30))
    taken = meter.taken(sent_bytes=400, whole=False)
    assert taken.guessed
    assert taken.tokens == Tokens(input=15, cached=100, output=31)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not JSON",
        b"[" * 100_000,
        b'{"usage": 7}',
        b'{"usage": {"input_tokens": -5, "output_tokens": "many"}}',
        b'{"usage": {"input_tokens": 1e99, "output_tokens": true}}',
        b'{"model": ["x"], "usage": {"output_tokens": 99999999999999}}',
    ],
)
def test_nonsense_about_tokens_counts_for_nothing(body: bytes) -> None:
    meter = Meter("application/json")
    meter.feed(body)
    taken = meter.taken(sent_bytes=0, whole=True)
    assert taken.tokens.input == 0
    assert taken.tokens.output in (0, len(body) // 4)
    assert taken.model == ""


def test_an_endless_line_is_not_kept() -> None:
    meter = Meter("text/event-stream")
    for _ in range(20):
        meter.feed(b"data: " + b"x" * 1024 * 1024)
    meter.feed(b"\n" + stream(CHAT))
    assert len(meter._rest) < 17 * 1024 * 1024
    assert meter.taken(sent_bytes=0, whole=True).tokens.output == 42
