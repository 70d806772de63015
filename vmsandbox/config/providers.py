"""Owns the tables ``[gateway.NAME]``, ``[budget]`` and ``[ask]``: what only the user may say of
them, and how a repository narrows the rest.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from vmsandbox.asking import ANSWERED_WITHIN_S, AskRules
from vmsandbox.config.forms import DurationS
from vmsandbox.provider import Gateway
from vmsandbox.values import Value


def _named(value: Any) -> Any:
    """Each table holds its name, too."""
    if not isinstance(value, dict):
        return value
    return {
        name: {"name": name, **one} if isinstance(one, dict) else one for name, one in value.items()
    }


Gateways = Annotated[dict[str, Gateway], BeforeValidator(_named)]


class AskSection(Value):
    """The ``[ask]`` table. That it is there at all lets guests ask."""

    timeout: DurationS = Field(default=ANSWERED_WITHIN_S, description="then the answer is no")
    commands: tuple[str, ...] = Field(
        default=(), description="that ask first: git push, terraform apply *"
    )

    def rules(self) -> AskRules:
        return AskRules(timeout_s=self.timeout, commands=self.commands)


def spoken_out_of_turn(document: Mapping[str, Any]) -> list[str]:
    """What a repository's file says though only the user may: where keys go, and who gets at them
    without having been called by name."""
    said = []
    if "gateway" in document:
        said.append("gateway: only your own config.toml may say where a key goes")
    box = document.get("sandbox")
    if isinstance(box, dict) and "gateways" in box:
        said.append(
            "sandbox.gateways: only your own config.toml may give them to every task;"
            " an agent may name those that it needs"
        )
    return said


def narrowed(table: str, before: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """A table as it is when a repository's file adds what it says to what was said before."""
    both = {**before, **said}
    if table == "budget":
        return {key: min(before.get(key, value), value) for key, value in said.items()} | {
            key: value for key, value in before.items() if key not in said
        }
    if table == "ports":
        both["auto"] = before.get("auto", True) and said.get("auto", True)
    if table == "ask" and before:
        both["commands"] = [*before.get("commands", ()), *said.get("commands", ())]
        both["timeout"] = before.get("timeout", both.get("timeout", ANSWERED_WITHIN_S))
    return both
