"""Owns what a guest may reach by name: rules, presets, and the decision. Pure; resolves nothing.

A rule names hosts: ``pypi.org``, ``*.github.com`` (every name below it), each for HTTP and HTTPS,
or for one port (``pypi.org:443``); ``@NAME`` stands for the rules of a preset. An address is no
rule: what TLS and HTTP are held to is a name. Deny beats allow. Whoever narrows adds a layer, and
every layer must agree.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

from vmsandbox.values import Value

OUTLET_PORT = 3128
"""On the guest's loopback, where proxies are by custom: its one way out."""

GATEWAY_HOST, ASK_HOST = "gateway.vmsandbox", "ask.vmsandbox"
"""Names of the guest's own loopback, for what of the host itself answers there."""

NO_PROXY = f"localhost,127.0.0.1,::1,{GATEWAY_HOST},{ASK_HOST}"

WEB_PORTS = frozenset({80, 443})
"""What a rule without a port is about; there TLS or HTTP must name the host again."""

PRESETS: Mapping[str, tuple[str, ...]] = {
    # Package indexes: the index and where its files lie.
    "python": ("pypi.org", "files.pythonhosted.org"),
    "npm": ("registry.npmjs.org",),
    "debian": ("deb.debian.org", "security.debian.org"),
    "rust": ("crates.io", "index.crates.io", "static.crates.io"),
    "go": ("proxy.golang.org", "sum.golang.org"),
    "ruby": ("rubygems.org", "index.rubygems.org"),
    "docker": (
        "registry-1.docker.io",
        "auth.docker.io",
        "production.cloudflare.docker.com",
    ),
    "github": (
        "github.com",
        "github.com:22",
        "api.github.com",
        "codeload.github.com",
        "raw.githubusercontent.com",
        "objects.githubusercontent.com",
    ),
    # Model providers, for an agent that holds a key of its own; better is a gateway, see there.
    "anthropic": ("api.anthropic.com:443",),
    "openai": ("api.openai.com:443",),
}

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")


class Rule(NamedTuple):
    """Which hosts on which port (None: the web's ports)."""

    host: str
    below: bool
    port: int | None

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return f"{'*.' if self.below else ''}{self.host}{port}"

    @property
    def ports(self) -> frozenset[int]:
        return WEB_PORTS if self.port is None else frozenset({self.port})

    def fits(self, host: str, port: int) -> bool:
        if port not in self.ports:
            return False
        return host.endswith(f".{self.host}") if self.below else host == self.host


def host_name(text: str) -> str:
    """A host name in the one spelling that rules, TLS and HTTP are compared in.

    Raises ValueError for what is no name: an address in any spelling that some resolver takes for
    one, a name that is not ASCII, an empty one.
    """
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if not name.isascii() or len(name) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"not a host name: {text[:80]!r}")
    # inet_aton takes 2130706433, 0x7f.1 and 017700000001; no top-level domain is a number.
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        raise ValueError(f"an address is not a name: {text[:80]!r}")
    return name


def parse_rule(text: str) -> Rule:
    """``pypi.org``, ``*.github.com``, either with ``:PORT``. Raises ValueError."""
    host, colon, port = text.strip().partition(":")
    if colon and not (re.fullmatch(r"[1-9][0-9]{0,4}", port) and int(port) < 65536):
        raise ValueError(f"not a rule: {text[:80]!r} (write pypi.org, *.github.com or host:443)")
    below = host.startswith("*.")
    return Rule(host_name(host.removeprefix("*.")), below, int(port) if colon else None)


def rules_of(texts: Iterable[str]) -> list[Rule]:
    """The rules that texts stand for, presets replaced by theirs. Raises ValueError."""
    found: list[Rule] = []
    for text in texts:
        if text.startswith("@"):
            found.extend(map(parse_rule, _preset(text[1:])))
        else:
            found.append(parse_rule(text))
    return found


def _preset(name: str) -> tuple[str, ...]:
    if name not in PRESETS:
        known = ", ".join(f"@{known}" for known in sorted(PRESETS))
        raise ValueError(f"no preset @{name[:40]} (there are {known})")
    return PRESETS[name]


def _rule_text(text: str) -> str:
    rules_of([text])
    return text


def _network_text(text: str) -> str:
    ipaddress.ip_network(text)
    return text


def _address_text(text: str) -> str:
    ipaddress.ip_address(text)
    return text


RuleText = Annotated[str, AfterValidator(_rule_text)]
NetworkText = Annotated[str, AfterValidator(_network_text)]
AddressText = Annotated[str, AfterValidator(_address_text)]
HostText = Annotated[str, AfterValidator(host_name)]


class NetMode(StrEnum):
    """How far a guest may reach."""

    NONE = "none"
    ALLOW = "allow"
    PUBLIC = "public"


class Policy(Value):
    """What one source of settings lets through."""

    mode: NetMode = NetMode.NONE
    allow: tuple[RuleText, ...] = Field(
        default=(), description="with mode public: ports beyond the web's"
    )
    deny: tuple[RuleText, ...] = ()
    narrows: bool = Field(
        default=False, description="mode public is about every port: another layer has said which"
    )

    def objection(self, host: str, port: int) -> str:
        """Why not, in one word for programs; empty if nothing speaks against it."""
        if self.mode is NetMode.NONE:
            return "net_none"
        if any(_covers(rule, host, port) for rule in rules_of(self.deny)):
            return "rule_denies"
        if self.mode is NetMode.PUBLIC and (self.narrows or port in WEB_PORTS):
            return ""
        allowed = any(rule.fits(host, port) for rule in rules_of(self.allow))
        return "" if allowed else "no_rule_allows"


def _covers(rule: Rule, host: str, port: int) -> bool:
    """A deny without a port is about every port, and with ``*.`` about the name itself, too."""
    if rule.port is not None and rule.port != port:
        return False
    return host == rule.host or (rule.below and host.endswith(f".{rule.host}"))


class Net(Value):
    """What a sandbox may reach: all its layers must agree. `private` and `hosts` are the user's own
    word alone."""

    layers: tuple[Policy, ...] = ()
    private: tuple[NetworkText, ...] = Field(
        default=(), description="addresses and networks that may be reached though not public"
    )
    hosts: Mapping[HostText, tuple[AddressText, ...]] = Field(
        default_factory=dict, description="names that are not asked of any DNS"
    )

    @property
    def mode(self) -> NetMode:
        """The narrowest of the layers."""
        order = list(NetMode)
        modes = [order.index(layer.mode) for layer in self.layers]
        return order[min(modes, default=0)]

    def objection(self, host: str, port: int, granted: Iterable[Rule] = ()) -> str:
        """Why a host (as :func:`host_name` gives it) may not be reached; empty if it may.

        `granted` are rules that the user added since: no layer needs to allow what they name, but
        each may deny it.
        """
        found = [layer.objection(host, port) for layer in self.layers] or ["net_none"]
        hard = [word for word in found if word and word != "no_rule_allows"]
        if hard:
            return hard[0]
        if any(rule.fits(host, port) for rule in granted):
            return ""
        return next(filter(None, found), "")


def environment(net: Net) -> dict[str, str]:
    """What tells programs in the guest of their way out; nothing if there is none."""
    if net.mode is NetMode.NONE:
        return {}
    proxy = f"http://127.0.0.1:{OUTLET_PORT}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    told = dict.fromkeys(names, proxy) | dict.fromkeys(("no_proxy", "NO_PROXY"), NO_PROXY)
    return told | {"NODE_USE_ENV_PROXY": "1"}
