"""Owns what a task is given to work with: which agent it is, which gateways are open to it, what it
may spend, and whether it may ask. Decided before anything is made.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vmsandbox.config import Agent, Config, agent_of
from vmsandbox.errors import UsageProblem
from vmsandbox.gateway.keys import keys_of
from vmsandbox.model import AskRules, Brief, Budget, Equipment, Gateway
from vmsandbox.reach import GATEWAY_HOST, OUTLET_PORT

GATEWAY_URL = f"http://{GATEWAY_HOST}:{OUTLET_PORT}"

_UPSTREAMS = {
    "anthropic": ("https://api.anthropic.com", "x-api-key", "ANTHROPIC_API_KEY"),
    "openai": ("https://api.openai.com", "authorization", "OPENAI_API_KEY"),
}


class Equipped(NamedTuple):
    """A task's command and variables with those of its agent, and what goes into its record."""

    command: tuple[str, ...]
    env: dict[str, str]
    image: str | None
    on_a_terminal: bool
    equipment: Equipment


def equipped(
    settings: Config,
    *,
    command: Sequence[str],
    agent: str | None = None,
    gateways: Iterable[str] = (),
    budget: Budget = Budget(),  # noqa: B008  (frozen)
    within: Budget = Budget(),  # noqa: B008
    ask: bool = False,
    brief: Brief | None = None,
) -> Equipped:
    """Put together what is asked for and what settings say.

    Raises UsageProblem ``agent_unknown``, ``agent_incomplete``, ``agent_and_command``,
    ``agent_without_brief``, ``nothing_to_run``, ``gateway_unknown``, ``budget_without_prices``.
    """
    known = agent_of(agent, settings.agents) if agent else None
    words = _command(known, tuple(command), brief)
    names = (*settings.sandbox.gateways, *gateways, *(known.gateways if known else ()))
    opened = tuple(_gateway(name, settings.gateway) for name in dict.fromkeys(names))
    allowed = Budget(
        max_cost=budget.max_cost or settings.budget.max_cost,
        max_tokens=budget.max_tokens or settings.budget.max_tokens,
    ).narrowed(within)
    _check_prices(opened, allowed)
    asks = settings.ask.rules() if settings.ask else AskRules() if ask or known else None
    return Equipped(
        command=words,
        env=known.environment(GATEWAY_URL) if known else {},
        image=known.image if known else None,
        on_a_terminal=bool(known and known.interactive),
        equipment=Equipment(
            agent=known.name if known else "",
            report_from=known.report if known else "file",
            gateways=opened,
            budget=allowed,
            asks=asks,
        ),
    )


def _command(agent: Agent | None, command: tuple[str, ...], brief: Brief | None) -> tuple[str, ...]:
    if agent is None:
        if not command:
            raise UsageProblem(
                "nothing_to_run",
                "no command and no agent was named",
                hint="vmsandbox run -- COMMAND…    (or: vmsandbox run --agent NAME --brief FILE)",
            )
        return command
    if command:
        raise UsageProblem(
            "agent_and_command",
            f"agent {agent.name} has a command of its own",
            hint="what it shall do stands in its brief: run --agent NAME --brief FILE",
        )
    if agent.needs_brief and brief is None:
        raise UsageProblem(
            "agent_without_brief",
            f"agent {agent.name} is told by a brief what to do, and there is none",
            hint="run --agent NAME --brief FILE    (FILE may be one line of text: the goal)",
        )
    return agent.command


def _gateway(name: str, known: Mapping[str, Gateway]) -> Gateway:
    if name in known:
        return known[name]
    upstream, header, variable = _UPSTREAMS.get(
        name, ("https://…", "authorization", f"{name.upper().replace('-', '_')}_API_KEY")
    )
    raise UsageProblem(
        "gateway_unknown",
        f"no gateway {name} is set up for this user",
        hint=f'in ~/.config/vmsandbox/config.toml: [gateway.{name}] upstream = "{upstream}",'
        f' header = "{header}", from_env = "{variable}"',
    )


def _check_prices(gateways: Iterable[Gateway], budget: Budget) -> None:
    for gateway in gateways:
        if budget.max_cost is not None and not gateway.prices:
            raise UsageProblem(
                "budget_without_prices",
                f"a cost is limited, and nobody knows what gateway {gateway.name} costs",
                hint=f'[gateway.{gateway.name}.prices] "*" = {{ input = 3.0, output = 15.0 }}'
                "    (a million tokens; or use --max-tokens)",
            )


def check_keys(equipment: Equipment, texts: Iterable[str] = ()) -> None:
    """Refuse gateways whose keys are not there, and a task that is told one.

    `texts` are all that the guest is told: words of the command, values of variables. Raises
    UsageProblem ``gateway_without_key``, ``gateway_key_unusable``, ``key_in_task``.
    """
    if not equipment.gateways:
        return
    keys = keys_of(equipment.gateways, os.environ)
    if any(key.within(text) for text in texts for key in keys.values()):
        raise UsageProblem(
            "key_in_task",
            "the command or a variable of the task holds the key of a gateway, which the guest"
            " would then have",
            hint="leave it out: the gateway adds the key, the guest needs none",
        )
