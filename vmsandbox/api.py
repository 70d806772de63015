"""Owns what programs ask about one result by a sandbox's selector, as the command line does.

Batches have a door of their own. Each call opens the state folder (`root`, else the usual one).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vmsandbox.model import Brief, CheckRun, ExecResult, Opinion
from vmsandbox.sandbox import Rooms, inspect_sandbox, verify_sandbox
from vmsandbox.sandbox import review_by as reviewed_by


def verify(selector: str, *, fresh: bool = False, root: Path | None = None) -> CheckRun:
    """Run the checks of a task again, with `fresh` in a new guest that holds base and result alone.

    Raises UsageProblem ``nothing_to_verify``, ``managed_elsewhere``; NegativeAnswer ``no_result``.
    """
    with Rooms.open(root) as rooms:
        return verify_sandbox(rooms, rooms.store.resolve(selector), fresh=fresh)


def inspect(
    selector: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    root: Path | None = None,
) -> ExecResult:
    """Run a command on a result in a new guest that is gone afterwards."""
    with Rooms.open(root) as rooms:
        folder = rooms.store.resolve(selector)
        return inspect_sandbox(rooms, folder, command, env=env, timeout_s=timeout_s)


def review_by(
    selector: str, agent: str, *, goal: Brief | None = None, root: Path | None = None
) -> Opinion:
    """Let another agent judge a result: a name from the project's settings, or a shell line."""
    with Rooms.open(root) as rooms:
        return reviewed_by(rooms, rooms.store.resolve(selector), agent, goal=goal)
