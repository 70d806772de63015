"""Owns waiting for a guest: a list of requirements, one deadline, and what to say when it passes.

Knows no particular requirement; tenacity does the repeating.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tenacity

from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem
from vmsandbox.guest.knock import NotYet

_POLL_S = 0.01


class Requirement(NamedTuple):
    """One thing that must be so before a guest is of use.

    `check` gets the deadline and returns None if it is so, else what it saw instead. It may also
    raise: then waiting is over, as when the domain has died.
    """

    name: str
    hint: str
    check: Callable[[Deadline], str | None]


class _Unmet(Exception):
    def __init__(self, requirement: Requirement, seen: str) -> None:
        super().__init__(seen)
        self.requirement = requirement
        self.seen = seen


def wait_ready(
    requirements: Sequence[Requirement],
    deadline: Deadline,
    *,
    evidence: str | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Wait until all `requirements` are met at once.

    They are asked in their order, again and again: put first what is cheap, and what tells that
    waiting is vain.

    `progress` is told the name of each when it is first met. Raises GuestProblem ``boot_timeout``
    with the hint of the first unmet one and what was seen of it last.
    """
    met: set[str] = set()
    latest: _Unmet | None = None

    def ask() -> None:
        nonlocal latest
        for requirement in requirements:
            try:
                seen = requirement.check(deadline)
            except NotYet as error:
                seen = str(error)
            if seen is not None:
                unmet = _Unmet(requirement, seen)
                if latest is None or not deadline.passed():  # what the deadline cut off says little
                    latest = unmet
                raise unmet
            if requirement.name not in met:
                met.add(requirement.name)
                progress(requirement.name)

    try:
        tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Unmet),
            stop=lambda _: deadline.passed(),
            wait=tenacity.wait_fixed(_POLL_S),
            reraise=True,
        )(ask)
    except _Unmet as last:
        unmet = latest or last
        raise GuestProblem(
            "boot_timeout",
            f"the guest was not ready after {deadline.seconds:g} s: waiting for "
            f"{unmet.requirement.name} ({unmet.seen})",
            hint=unmet.requirement.hint,
            evidence=evidence,
        ) from last
