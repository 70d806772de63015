"""Owns the options that let guests do more than work: reach hosts, use gateways, ask a person."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vmsandbox.batch import Grants

NetFlag = Annotated[
    str | None,
    typer.Option(
        "--net",
        metavar="none|allow|public",
        help="What the guest may reach: nothing, what rules allow, or all that is public."
        " [default: none]",
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="RULE", help="Let it reach pypi.org, *.github.com:443, @npm. Repeatable."),
]
Gateways = Annotated[
    list[str] | None,
    typer.Option("--gateway", metavar="NAME", help="Open a gateway of your settings. Repeatable."),
]
MaxCost = Annotated[
    float | None,
    typer.Option(metavar="COST", min=0.0, help="End the task when its gateways have cost this."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="End the task when it has used so many tokens."),
]
Ask = Annotated[bool, typer.Option("--ask", help="Let the guest ask you: vmsandbox-ask.")]


def grants(
    net: str | None,
    allow: list[str] | None,
    gateways: list[str] | None,
    max_cost: float | None,
    max_tokens: int | None,
    *,
    ask: bool,
) -> "Grants | None":
    """What a batch is let do; None if none of the options was given."""
    if not any((net, allow, gateways, max_cost, max_tokens, ask)):
        return None
    from vmsandbox.batch import Grants
    from vmsandbox.model import Budget

    return Grants(
        net={"mode": net, "allow": tuple(allow or ())},
        gateways=tuple(gateways or ()),
        budget=Budget(max_cost=max_cost or None, max_tokens=max_tokens),
        ask=ask,
    )
