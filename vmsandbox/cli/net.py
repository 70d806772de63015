"""Owns the verb that shows and widens what a guest may reach."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from vmsandbox.cli import output
from vmsandbox.cli.life import size
from vmsandbox.cli.output import JsonFlag, Output, SelectorArgument
from vmsandbox.errors import UsageProblem

if TYPE_CHECKING:
    from vmsandbox.egress import Entry, Summary
    from vmsandbox.sandbox.reaching import NetStatus
    from vmsandbox.store import SandboxFolder

_LISTED = 30
_WATCH_S = 0.5

HELP = """\
Show what a guest may reach and what it did reach; let it reach more while it runs.

A rule is pypi.org, *.github.com, host:443 or @PRESET. What the settings deny stays denied, and
addresses that are not public stay out of reach.

Examples:

  vmsandbox net last -f

  vmsandbox net last allow pypi.org --for 10m
"""


def register(app: typer.Typer) -> None:
    """Add the verb to the program."""
    app.command(help=HELP)(net)


def net(
    selector: SelectorArgument,
    action: Annotated[
        str | None, typer.Argument(metavar="allow", help="Let it reach what RULE names.")
    ] = None,
    rule: Annotated[str | None, typer.Argument(metavar="RULE", help="See above.")] = None,
    duration: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="How long a rule holds: 90s, 10m.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", "--watch", help="Show decisions as they come.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show and widen what a guest may reach; HELP tells the user how."""
    from vmsandbox.sandbox.reaching import net_status
    from vmsandbox.store import Store

    out = output.begin(as_json)
    folder = Store().resolve(selector)
    if action is not None:
        _allow(out, folder, action, rule, duration)
        return
    status = net_status(folder)
    if not follow:
        out.result(status.model_dump(mode="json"), _text(status))
        return
    if not as_json:
        out.result(None, _text(status))
    _follow(out, folder)


def _allow(
    out: Output, folder: "SandboxFolder", action: str, rule: str | None, duration: str | None
) -> None:
    from vmsandbox.config import parse_duration_s
    from vmsandbox.sandbox.reaching import let_reach

    hint = f"vmsandbox net {folder.id} allow pypi.org --for 10m"
    if action != "allow" or rule is None:
        raise UsageProblem("action_unknown", f"not known: {action} {rule or ''}", hint=hint)
    try:
        seconds = parse_duration_s(duration) if duration else None
    except ValueError as error:
        raise UsageProblem("duration_invalid", str(error), hint=hint) from None
    grant = let_reach(folder, rule, seconds)
    until = f"until {grant.until.isoformat(' ', 'seconds')}" if grant.until else "from now on"
    out.result(grant.model_dump(mode="json"), f"{folder.id}: {rule} is allowed {until}")


def _follow(out: Output, folder: "SandboxFolder") -> None:
    from vmsandbox.egress import read_entries

    offset = read_entries(folder.egress_log)[1]
    while True:
        entries, offset = read_entries(folder.egress_log, offset)
        for entry in entries:
            out.result(entry.model_dump(mode="json"), _line(entry))
        time.sleep(_WATCH_S)


def _line(entry: "Entry") -> str:
    moved = f"  sent {size(entry.sent)}, received {size(entry.received)}"
    return (
        f"{entry.at.isoformat(' ', 'seconds')}  {entry.verdict:7}  {entry.target}  {entry.reason}"
        f"{moved if entry.verdict == 'closed' else ''}"
    )


def _text(status: "NetStatus") -> str:
    lines = [f"{status.name}: net {status.mode}" + ("" if status.open else ", shut now")]
    for number, layer in enumerate(status.net.layers):
        whose = "the project" if number else "you"
        said = [f"allow {', '.join(layer.allow)}"] if layer.allow else []
        said += [f"deny {', '.join(layer.deny)}"] if layer.deny else []
        lines.append(f"  {whose}: {layer.mode}" + "".join(f"; {part}" for part in said))
    for grant in status.grants:
        until = f" until {grant.until.isoformat(' ', 'seconds')}" if grant.until else ""
        lines.append(f"  added: {grant.rule}{until}")
    return "\n".join([*lines, *summary_lines(status.summary, _LISTED)])


def summary_lines(summary: "Summary", most: int) -> list[str]:
    """What a guest reached and wanted to reach, for people."""
    if not summary.targets:
        return ["nothing was asked for"]
    lines = [
        f"{summary.allowed} let through, sent {size(summary.sent)}, received"
        f" {size(summary.received)}; {summary.denied} denied"
        + (", more refusals were not written down" if summary.full else "")
    ]
    for target in summary.targets[:most]:
        why = f"  {target.reason}" if target.reason else ""
        lines.append(f"  {target.verdict:7} {target.times:4} x {target.target}{why}")
    hidden = len(summary.targets) - most + summary.more
    return lines + ([f"  and {hidden} more"] if hidden > 0 else [])
