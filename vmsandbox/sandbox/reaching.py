"""Owns what a user sees and changes of a sandbox's egress while it runs."""

from pydantic import Field

from vmsandbox.egress import Grant, Summary, add_grant, read_grants, summary_of
from vmsandbox.errors import UsageProblem
from vmsandbox.model import Value
from vmsandbox.reach import Net, NetMode, rules_of
from vmsandbox.store import SandboxFolder


class NetStatus(Value):
    """What a guest may reach, and what it did reach."""

    id: str
    name: str
    mode: NetMode = Field(description="the narrowest of all layers")
    open: bool = Field(description="whether a manager is there to let anything through")
    net: Net
    grants: tuple[Grant, ...] = ()
    summary: Summary


def net_status(folder: SandboxFolder) -> NetStatus:
    """How the egress of a sandbox stands."""
    record = folder.read_record()
    mode = record.net.mode
    return NetStatus(
        id=record.id,
        name=record.name,
        mode=mode,
        open=mode is not NetMode.NONE and folder.manager_alive(),
        net=record.net,
        grants=read_grants(folder.egress_grants),
        summary=summary_of(folder.egress_log),
    )


def let_reach(folder: SandboxFolder, rule: str, seconds: float | None) -> Grant:
    """Let a guest reach one thing more from now on, for `seconds` or as long as the sandbox exists.

    What the settings deny stays denied. Raises UsageProblem ``rule_invalid``, ``net_none``.
    """
    record = folder.read_record()
    try:
        rules_of([rule])
    except ValueError as error:
        raise UsageProblem(
            "rule_invalid", str(error), hint=f"vmsandbox net {record.name} allow pypi.org:443"
        ) from None
    if record.net.mode is NetMode.NONE:
        raise UsageProblem(
            "net_none",
            f"sandbox {record.id} was started without egress, so it has no way out to widen",
            hint="vmsandbox run --net allow --allow RULE …",
        )
    return add_grant(folder.egress_grants, rule, seconds)
