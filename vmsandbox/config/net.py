"""Owns the ``[net]`` table: what the user lets a guest reach, and how a repository narrows it."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import Field

from vmsandbox.model import Value
from vmsandbox.reach import (
    AddressText,
    HostText,
    Net,
    NetMode,
    NetworkText,
    Policy,
    Rule,
    RuleText,
    rules_of,
)


class NetSection(Value):
    """The ``[net]`` table."""

    mode: NetMode | None = Field(default=None, description="none, allow or public")
    allow: tuple[RuleText, ...] = Field(
        default=(), description="pypi.org, *.github.com:443, @python"
    )
    deny: tuple[RuleText, ...] = Field(default=(), description="beats allow; also every port of it")
    allow_private: tuple[NetworkText, ...] = Field(
        default=(), description="addresses or networks, e.g. 10.1.2.3: the user's own config alone"
    )
    hosts: dict[HostText, tuple[AddressText, ...]] = Field(
        default_factory=dict, description="names with their addresses, instead of asking DNS"
    )

    def layer(self, flags: "NetSection") -> Policy:
        """What the user lets through; rules on the command line are for mode allow."""
        asked = self.mode or NetMode.NONE
        if flags.allow and asked is NetMode.NONE:
            asked = NetMode.ALLOW
        return Policy(mode=flags.mode or asked, allow=(*self.allow, *flags.allow), deny=self.deny)

    def narrowing(self) -> Policy:
        """What a repository lets through of that."""
        mode = self.mode or (NetMode.ALLOW if self.allow else NetMode.PUBLIC)
        return Policy(mode=mode, allow=self.allow, deny=self.deny, narrows=True)


OWN_WORD = ("allow_private", "hosts")
"""Keys that a repository may not say."""


def net_of(
    sources: Sequence[tuple[str, str, bool]],
    flags: Mapping[str, Any],
    within: Mapping[str, Any] | None = None,
) -> Net:
    """What a sandbox may reach by (name, TOML text, the user's own) sources that were found right,
    and the flags of the command line; `within` narrows it once more, as a repository does."""
    own, layers = NetSection(), []
    for _, text, users in sources:
        table = tomllib.loads(text).get("net")
        if table is None:
            continue
        if users:
            own = NetSection.model_validate(table)
        else:
            layers.append(NetSection.model_validate(table).narrowing())
    if within:
        layers.append(NetSection.model_validate(within).narrowing())
    layers.insert(0, own.layer(NetSection.model_validate(flags)))
    return Net(layers=tuple(layers), private=own.allow_private, hosts=own.hosts)


def asked_in_vain(net: Net) -> tuple[str, ...]:
    """Rules of a repository for what the user does not let through, so that they do nothing."""
    own, *others = net.layers
    asked = [text for layer in others for text in layer.allow]
    return tuple(text for text in asked if not all(map(partial(_lets, own), rules_of([text]))))


def _lets(policy: Policy, rule: Rule) -> bool:
    host = f"any.{rule.host}" if rule.below else rule.host
    return not any(policy.objection(host, port) for port in rule.ports)


def not_its_own(document: Mapping[str, Any]) -> list[str]:
    """What a repository's file says though only the user may."""
    table = document.get("net")
    said = [key for key in OWN_WORD if isinstance(table, dict) and key in table]
    return [f"net.{key}: only your own config.toml may say this" for key in said]
