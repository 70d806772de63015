"""Owns two results of one brief beside each other: what each changed, how long it took, what
proves it, and where both went the same way.
"""

from collections.abc import Callable

from pydantic import Field

from vmsandbox.model import ExecResult, TreePath, Value
from vmsandbox.review.crossing import Hindrance, Meeting, Side, meet
from vmsandbox.review.show import Review, show
from vmsandbox.store import SandboxFolder


class Comparison(Value):
    """Two reviews, and what they have in common. `problems` are sentences for people."""

    sides: tuple[Review, Review]
    run_s: tuple[float | None, float | None] = Field(description="how long each task ran")
    meeting: Meeting
    only: tuple[tuple[TreePath, ...], tuple[TreePath, ...]] = Field(
        description="paths that one of both alone touches"
    )
    same_brief: bool = Field(description="the same brief; where there is none, the same command")
    same_base: bool
    same_result: bool = Field(description="every byte alike")
    problems: tuple[str, ...] = ()
    hindrances: tuple[Hindrance, ...] = ()


def compare(
    one: SandboxFolder,
    other: SandboxFolder,
    is_live: Callable[[SandboxFolder], bool] = lambda _: False,
) -> Comparison:
    """Put two results beside each other; nothing is written, no guest is asked.

    Raises NegativeAnswer ``no_result`` if one of both has none.
    """
    left, right = Side.of(one), Side.of(other)
    shown = (show(one, live=is_live(one)), show(other, live=is_live(other)))
    meeting, hindrances = meet(left, right)
    touched = frozenset(meeting.shared)
    same_brief = _asked(shown[0]) == _asked(shown[1])
    same_base = left.change_set.base_tree == right.change_set.base_tree
    return Comparison(
        sides=shown,
        run_s=(_run_s(shown[0].exec_result), _run_s(shown[1].exec_result)),
        meeting=meeting,
        only=(
            tuple(path for path in left.steps if path not in touched),
            tuple(path for path in right.steps if path not in touched),
        ),
        same_brief=same_brief,
        same_base=same_base,
        same_result=left.change_set.result_tree == right.change_set.result_tree,
        problems=_problems(same_brief, same_base),
        hindrances=hindrances,
    )


def _asked(shown: Review) -> object:
    return shown.brief or shown.command


def _run_s(ended: ExecResult | None) -> float | None:
    if ended is None or ended.started_at is None or ended.ended_at is None:
        return None
    return (ended.ended_at - ended.started_at).total_seconds()


def _problems(same_brief: bool, same_base: bool) -> tuple[str, ...]:
    found = {
        "they were not asked for the same": not same_brief,
        "they began from different states of the worktree": not same_base,
    }
    return tuple(text for text, holds in found.items() if holds)
