"""Owns what programs ask about results by their sandboxes' selectors, as the command line does.

Batches have a door of their own. Each call opens the state folder (`root`, else the usual one).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from vmsandbox import review
from vmsandbox.batch import share_of
from vmsandbox.forwards import PublishedPort
from vmsandbox.model import Brief, CheckRun, Opinion
from vmsandbox.review import Comparison, Matrix, Queue
from vmsandbox.sandbox import (
    Inspected,
    Manager,
    Quiet,
    Report,
    Rooms,
    fork_sandbox,
    inspect_sandbox,
    verify_sandbox,
)
from vmsandbox.sandbox import published_ports as published_of
from vmsandbox.sandbox import review_by as reviewed_by


def verify(selector: str, *, fresh: bool = False, root: Path | None = None) -> CheckRun:
    """Run the checks of a task again, with `fresh` in a new guest that holds base and result alone.

    Raises UsageProblem ``nothing_to_verify``, ``managed_elsewhere``; NegativeAnswer ``no_result``.
    """
    with Rooms.open(root) as rooms:
        folder = rooms.store.resolve(selector)
        return verify_sandbox(rooms, folder, fresh=fresh, share=share_of(rooms))


def inspect(
    selector: str,
    command: Sequence[str],
    *,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    root: Path | None = None,
) -> Inspected:
    """Run a command on a result in a guest that is gone afterwards: on a copy of the disk as the
    task left it, with `fresh` (or where there is none) in a new one with base and result alone."""
    with Rooms.open(root) as rooms:
        return inspect_sandbox(
            rooms,
            rooms.store.resolve(selector),
            command,
            fresh=fresh,
            env=env,
            timeout_s=timeout_s,
            share=share_of(rooms),
        )


def review_by(
    selector: str, agent: str, *, goal: Brief | None = None, root: Path | None = None
) -> Opinion:
    """Let another agent judge a result: a name from the project's settings, or a shell line."""
    with Rooms.open(root) as rooms:
        folder = rooms.store.resolve(selector)
        return reviewed_by(rooms, folder, agent, goal=goal, share=share_of(rooms))


def waiting(*, batch: str = "", root: Path | None = None) -> Queue:
    """The results that wait for a decision, the oldest first; with `batch` only of that one."""
    with Rooms.open(root) as rooms:
        folders = [rooms.store.folder(record.id) for record in rooms.store.records()]
        live = partial(review.task_runs, guest_alive=rooms.guest_alive)
        return review.waiting(folders, live, batch=batch)


def compare(one: str, other: str, *, root: Path | None = None) -> Comparison:
    """Two results side by side. Raises NegativeAnswer ``no_result``."""
    with Rooms.open(root) as rooms:
        live = partial(review.task_runs, guest_alive=rooms.guest_alive)
        return review.compare(rooms.store.resolve(one), rooms.store.resolve(other), live)


def conflicts(selectors: Sequence[str], *, root: Path | None = None) -> Matrix:
    """Which of these results get in each other's way, and which apply to their worktree now.

    Raises NegativeAnswer ``no_result``.
    """
    with Rooms.open(root) as rooms:
        live = partial(review.task_runs, guest_alive=rooms.guest_alive)
        return review.matrix([rooms.store.resolve(selector) for selector in selectors], live)


def published_ports(selector: str, *, root: Path | None = None) -> tuple[PublishedPort, ...]:
    """What is published of a running sandbox. Raises UsageProblem ``guest_not_running``,
    ``not_published``."""
    with Rooms.open(root) as rooms:
        return published_of(rooms, rooms.store.resolve(selector))[1].ports


def fork(
    selector: str,
    command: Sequence[str] = (),
    *,
    name: str | None = None,
    keep: bool = False,
    root: Path | None = None,
) -> Report:
    """Go on from where a task stopped, in a sandbox of its own, to its end.

    Raises UsageProblem ``sandbox_live``, ``nothing_to_fork``, ``name_taken``, and what a run does.
    """
    with Rooms.open(root) as rooms:
        source = rooms.store.resolve(selector)
        folder = fork_sandbox(rooms, source, command=command, name=name, keep=keep)
        with Manager.of(rooms, folder, Quiet()) as manager:
            return manager.carry_out()
