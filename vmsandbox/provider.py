"""Owns the values about model providers: where a gateway leads, what tokens cost, what was used,
and what may be used.

Must know no key: a gateway names the variable of the host's environment that holds it.
"""

import re
from datetime import datetime
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from vmsandbox.values import Value, now

GATEWAY_NAME = r"^[a-z0-9][a-z0-9-]{0,30}$"
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_PER = 1_000_000
_N = TypeVar("_N", int, float)


def _upstream(text: str) -> str:
    """A URL that a key may be sent to: without user, query and fragment; encrypted, or loopback."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an upstream is a URL such as https://api.example.com")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("an upstream has no user, query or fragment")
    if parts.scheme == "http" and not _loopback(parts.hostname):
        raise ValueError("a key is sent over http to a loopback address only: write https://")
    return text.rstrip("/")


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _header(text: str) -> str:
    if not _HEADER.fullmatch(text):
        raise ValueError(f"{text!r} is no name for a header")
    return text.lower()


def _variable(text: str) -> str:
    if not (text.isidentifier() and text.isascii()):
        raise ValueError("from_env names a variable of the host's environment, never a key itself")
    return text


def _path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("a path begins with /")
    return text


class Price(Value):
    """What a million tokens cost, in the currency that budgets are in."""

    input: float = Field(ge=0)
    output: float = Field(ge=0)
    cached: float | None = Field(default=None, ge=0, description="input read from a cache")

    def of(self, tokens: "Tokens") -> float:
        cached = self.input if self.cached is None else self.cached
        fresh = tokens.input * self.input + tokens.output * self.output
        return (fresh + tokens.cached * cached) / _PER


class Gateway(Value):
    """A way to one provider: what the guest asks of ``/NAME/…`` goes to `upstream`, with the key
    that the host has."""

    name: str = Field(pattern=GATEWAY_NAME)
    upstream: Annotated[str, AfterValidator(_upstream)]
    header: Annotated[str, AfterValidator(_header)] = "authorization"
    prefix: str | None = Field(default=None, description="before the key; Bearer if none is said")
    from_env: Annotated[str, AfterValidator(_variable)]
    paths: tuple[Annotated[str, AfterValidator(_path)], ...] = Field(
        default=(), description="beginnings of paths that may be asked for; empty: any"
    )
    prices: dict[str, Price] = Field(default_factory=dict, description="by model, with * and ?")

    @property
    def before_key(self) -> str:
        """What stands in the header before the key."""
        if self.prefix is not None:
            return self.prefix
        return "Bearer " if self.header == "authorization" else ""

    def price(self, model: str) -> Price | None:
        """Of a model, by the first name that fits; of one that none fits, the dearest there is."""
        for name, price in self.prices.items():
            if fnmatchcase(model, name):
                return price
        return max(self.prices.values(), key=lambda one: one.input + one.output, default=None)


class Tokens(Value):
    """What one answer took. `cached` input is not part of `input`."""

    input: int = Field(default=0, ge=0)
    cached: int = Field(default=0, ge=0)
    output: int = Field(default=0, ge=0)

    @property
    def total(self) -> int:
        return self.input + self.cached + self.output

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(
            input=self.input + other.input,
            cached=self.cached + other.cached,
            output=self.output + other.output,
        )


class Call(Value):
    """One request as it is logged: no query, no header, no body."""

    at: datetime = Field(default_factory=now)
    gateway: str
    method: str
    path: str = Field(description="as the guest wrote it, cut; escape to show")
    status: int | None = Field(default=None, description="of the answer that the guest got")
    problem: str = Field(default="", description="a code, where it was no answer of the upstream")
    model: str = ""
    tokens: Tokens = Tokens()
    guessed: bool = False
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0


class Usage(Value):
    """What one sandbox used of its gateways, all told."""

    requests: int = 0
    failed: int = Field(default=0, description="refused by us, or answered with an error")
    sent_bytes: int = 0
    received_bytes: int = 0
    tokens: Tokens = Tokens()
    estimated: int = Field(
        default=0, description="requests whose answer did not say its tokens: guessed by its size"
    )
    cost: float | None = Field(default=None, description="None: no prices are configured")
    exhausted: str = Field(default="", description="the budget that ran out, in words")
    refused: int = Field(default=0, description="requests for lack of budget")

    def shown(self) -> str:
        """In one line, for people; empty if nothing was asked."""
        if not self.requests:
            return ""
        guessed = f", {self.estimated} of them by size" if self.estimated else ""
        cost = "" if self.cost is None else f", cost {self.cost:.4f}"
        tokens = f"{self.tokens.input + self.tokens.cached} in, {self.tokens.output} out"
        over = f"; {self.exhausted}" if self.exhausted else ""
        return f"{self.requests} requests{guessed}, tokens {tokens}{cost}{over}"


class Budget(Value):
    """What one sandbox may use."""

    max_cost: float | None = Field(default=None, gt=0)
    max_tokens: int | None = Field(default=None, gt=0)

    def narrowed(self, other: "Budget") -> "Budget":
        """What both allow."""
        return Budget(
            max_cost=_least(self.max_cost, other.max_cost),
            max_tokens=_least(self.max_tokens, other.max_tokens),
        )

    def exhausted(self, usage: Usage) -> str:
        """Which part of it is used up, in words; empty while none is."""
        if self.max_tokens is not None and usage.tokens.total >= self.max_tokens:
            return f"{usage.tokens.total} of {self.max_tokens} tokens are used"
        if self.max_cost is not None and (usage.cost or 0.0) >= self.max_cost:
            return f"{usage.cost:.4f} of {self.max_cost:g} are spent"
        return ""


def _least(one: _N | None, other: _N | None) -> _N | None:
    given = [value for value in (one, other) if value is not None]
    return min(given, default=None)
