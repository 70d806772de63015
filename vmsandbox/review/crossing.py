"""Owns how results stand to each other and to the host: which paths several of them touch, what git
says to a merge of two, what still applies.

Computed in the quarantine stores and by looking at the worktrees; nothing is written. Two results
of different bases are compared by their paths alone: a merge needs a base that both have.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Literal

from pydantic import Field

from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.model import ChangeSet, Digest, ResultRecord, ResultState, TreePath, Value
from vmsandbox.review.applying import conflicts
from vmsandbox.review.record import read
from vmsandbox.selection import Step, parents, steps_of
from vmsandbox.store import SandboxFolder
from vmsandbox.target import Conflict
from vmsandbox.worktree import Quarantine

Fit = Literal["apart", "same", "merges", "conflict", "unknown", "unrelated"]

MEANING: Mapping[str, str] = {
    "apart": "touch no path that the other touches",
    "same": "touch the same paths and leave them alike",
    "merges": "touch the same paths, and git merges them cleanly",
    "conflict": "are in each other's way: git cannot merge them, or one removes a folder that"
    " the other puts something into",
    "unknown": "touch the same paths, and cannot be merged here to see",
    "unrelated": "are of other worktrees and bases",
}
"""What each way in which two results fit together means, for people."""

_OTHER_BASE = "they began from different states of the worktree"


class Standing(Value):
    """One result, and whether it applies to its worktree as that is now."""

    id: str
    name: str
    worktree: Path
    live: bool = Field(description="its task runs: the result may change")
    state: ResultState
    digest: Digest
    base_tree: str
    paths: int
    applies: bool | None = Field(description="None: cannot be told, `problem` says why")
    conflicts: tuple[Conflict, ...] = ()
    problem: str = ""


class Meeting(Value):
    """Two results. An apply merges nothing: of two that touch a path and leave it unlike, only the
    first one applies, whether git could merge them or not."""

    one: str
    other: str
    fit: Fit
    shared: tuple[TreePath, ...] = Field(default=(), description="touched by both")
    alike: tuple[TreePath, ...] = Field(default=(), description="of these, left alike by both")
    clashes: tuple[TreePath, ...] = Field(
        default=(),
        description="where git cannot merge, one has a file and the other a folder, or one puts"
        " something into a folder that the other removes",
    )
    reason: str = Field(default="", description="why it is unknown")

    @property
    def both_apply(self) -> bool:
        """Whether neither keeps the other from being applied."""
        return self.fit in ("apart", "same", "unrelated")


class Hindrance(Value):
    """What kept git from answering, and what helps."""

    code: str
    message: str
    hint: str | None = None


class Matrix(Value):
    """Every result, and every two of them."""

    results: tuple[Standing, ...]
    pairs: tuple[Meeting, ...]
    hindrances: tuple[Hindrance, ...] = ()


def matrix(
    folders: Sequence[SandboxFolder], is_live: Callable[[SandboxFolder], bool] = lambda _: False
) -> Matrix:
    """Compare these results pairwise, and each with its worktree.

    Raises NegativeAnswer ``no_result`` for a sandbox without one.
    """
    sides = [Side.of(folder) for folder in folders]
    hindrances: dict[str, Hindrance] = {}
    pairs = tuple(_meet(one, other, hindrances) for one, other in combinations(sides, 2))
    return Matrix(
        results=tuple(_standing(side, is_live(side.folder)) for side in sides),
        pairs=pairs,
        hindrances=tuple(hindrances.values()),
    )


@dataclass(frozen=True)
class Side:
    """A result, read once."""

    folder: SandboxFolder
    name: str
    worktree: Path
    change_set: ChangeSet
    record: ResultRecord
    steps: Mapping[bytes, Step]
    makes: frozenset[bytes] = field(repr=False)

    @property
    def removes(self) -> frozenset[bytes]:
        return frozenset(self.steps) - self.makes

    @classmethod
    def of(cls, folder: SandboxFolder) -> "Side":
        """Raises NegativeAnswer ``no_result``."""
        sandbox = folder.read_record()
        change_set, record = read(folder)
        steps = {step.path: step for step in steps_of(change_set.changes)}
        made = frozenset(path for path, step in steps.items() if step.new_oid)
        return cls(folder, sandbox.name, sandbox.task.worktree, change_set, record, steps, made)


def meet(one: Side, other: Side) -> tuple[Meeting, tuple[Hindrance, ...]]:
    """How two results fit together."""
    hindrances: dict[str, Hindrance] = {}
    return _meet(one, other, hindrances), tuple(hindrances.values())


def _standing(side: Side, live: bool) -> Standing:
    applies: bool | None = None
    found: tuple[Conflict, ...] = ()
    problem = ""
    try:
        found = conflicts(side.folder, side.worktree)
        applies = not found
    except (UsageProblem, HostProblem) as error:
        problem = error.message
    return Standing(
        id=side.folder.id,
        name=side.name,
        worktree=side.worktree,
        live=live,
        state=side.record.state,
        digest=side.change_set.digest,
        base_tree=side.change_set.base_tree,
        paths=len(side.steps),
        applies=applies,
        conflicts=found,
        problem=problem,
    )


def _meet(one: Side, other: Side, hindrances: dict[str, Hindrance]) -> Meeting:
    met = Meeting(one=one.folder.id, other=other.folder.id, fit="unrelated")
    one_base = one.change_set.base_tree == other.change_set.base_tree
    if not one_base and one.worktree != other.worktree:
        return met
    shared = tuple(sorted(one.steps.keys() & other.steps.keys()))
    alike = tuple(path for path in shared if _end(one.steps[path]) == _end(other.steps[path]))
    ways = {*_in_the_way(one, other), *_in_the_way(other, one)}
    met = _but(met, shared=shared, alike=alike, clashes=tuple(sorted(ways)))
    if alike == shared and not ways:
        return _but(met, fit="same" if shared else "apart")
    if not one_base:
        return _but(met, fit="unknown", reason=_OTHER_BASE)
    try:
        clashes = _unmerged(one, other) if alike != shared else ()
    except HostProblem as error:
        hindrances[error.code] = Hindrance(code=error.code, message=error.message, hint=error.hint)
        return _but(met, fit="unknown", reason=error.message)
    # Beside a file in the way git names one that it made up for the occasion.
    known = {path for path in clashes if path in one.steps or path in other.steps}
    found = tuple(sorted({*ways, *known} or clashes))
    return _but(met, fit="conflict" if found else "merges", clashes=found)


def _but(meeting: Meeting, **fields: object) -> Meeting:
    return meeting.model_copy(update=fields)


def _end(step: Step) -> tuple[int, str | None]:
    return step.new_mode, step.new_oid


def _in_the_way(one: Side, other: Side) -> Iterable[bytes]:
    """Where the other, once it is applied, has put something that keeps one from being applied."""
    files = _folders(one.steps) & (other.makes - one.makes)
    folders = _folders(other.makes) & (one.removes - _folders(one.makes))
    return {*files, *folders, *_foreign(one, other)}


def _folders(paths: Iterable[bytes]) -> set[bytes]:
    return {above for path in paths for above in parents(path)}


def _foreign(one: Side, other: Side) -> Iterable[bytes]:
    """What the other puts into a folder that one has yet to empty, as it removes all in it.

    An apply removes no folder that something else lies in.
    """
    removed = frozenset(one.change_set.removed_dirs)
    contested = removed & _folders(one.removes - other.removes)
    for path in other.makes - one.steps.keys() if contested else ():
        innermost = next((above for above in parents(path) if above in removed), None)
        if innermost in contested:
            yield path


def _unmerged(one: Side, other: Side) -> tuple[bytes, ...]:
    """The paths at which git cannot merge, as it names them."""
    ours, theirs = one.change_set, other.change_set
    with Quarantine(one.folder.result_git).reading() as results:
        return results.merge(
            ours.base_tree, ours.result_tree, theirs.result_tree, other.folder.result_git
        ).conflicts
