"""Owns rules that a user adds while a guest runs, each with its end."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from vmsandbox.reach import Rule, RuleText, rules_of
from vmsandbox.store import locked, read_value, write_value
from vmsandbox.values import Value, now


class Grant(Value):
    """A rule until a moment; None: as long as the sandbox exists."""

    rule: RuleText
    until: datetime | None = None


class _Grants(Value):
    grants: tuple[Grant, ...] = ()


def read_grants(path: Path) -> tuple[Grant, ...]:
    """Those that hold at this moment."""
    kept = read_value(path, _Grants) or _Grants()
    moment = now()
    return tuple(grant for grant in kept.grants if grant.until is None or grant.until > moment)


def add_grant(path: Path, rule: str, seconds: float | None) -> Grant:
    """Let a rule hold from now on, for `seconds`; one for the same rule is replaced."""
    grant = Grant(rule=rule, until=now() + timedelta(seconds=seconds) if seconds else None)
    with locked(path.with_suffix(".lock")):
        others = [known for known in read_grants(path) if known.rule != rule]
        write_value(path, _Grants(grants=(*others, grant)))
    return grant


def granted_rules(path: Path) -> Sequence[Rule]:
    return rules_of(grant.rule for grant in read_grants(path))
