"""Owns which paths of a change set are meant: steps, and choosing among them. Pure.

A *step* is what one path goes through from base to result. A rename is two steps, so that choosing
a folder touches that folder alone; it is still shown as a rename. Knows no files and no git.
"""

import shlex
from collections.abc import Callable, Collection, Iterable, Sequence

from vmsandbox.errors import UsageProblem
from vmsandbox.model import Change, ChangeKind, Oid, TreePath, Value
from vmsandbox.text import quote_path

CASE_COLLISION = "case-collision"
"""The flag of a name that differs from another of the tree only in case or Unicode form."""


class Step(Value):
    """One path, from its object in the base to that in the result; mode 0 and no oid: nothing."""

    path: TreePath
    old_mode: int = 0
    old_oid: Oid | None = None
    new_mode: int = 0
    new_oid: Oid | None = None
    collides: bool = False


class Selection(Value):
    """What a user chose; nothing chosen means everything.

    `paths` are exact paths or folders. `include` and `exclude` are patterns as in a ``.gitignore``.
    """

    paths: tuple[TreePath, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def is_all(self) -> bool:
        return not (self.paths or self.include or self.exclude)


def steps_of(changes: Iterable[Change]) -> tuple[Step, ...]:
    """The steps of a change set, sorted by path."""
    steps: list[Step] = []
    for change in changes:
        old_path = change.path
        if change.kind is ChangeKind.RENAMED and change.old_path is not None:
            old_path = change.old_path
        old = {"old_mode": change.old_mode, "old_oid": change.old_oid}
        new = {
            "new_mode": change.new_mode,
            "new_oid": change.new_oid,
            "collides": CASE_COLLISION in change.flags,
        }
        if old_path == change.path:
            steps.append(Step.model_validate({"path": change.path, **old, **new}))
        else:
            steps.append(Step.model_validate({"path": old_path, **old}))
            steps.append(Step.model_validate({"path": change.path, **new}))
    return tuple(sorted(steps, key=lambda step: step.path))


def select(steps: Sequence[Step], selection: Selection | None) -> tuple[Step, ...]:
    """The chosen steps; without a selection all of them.

    Raises UsageProblem ``path_unmatched`` for a path or pattern that fits no step,
    ``pattern_invalid``, ``nothing_selected`` if nothing is left.
    """
    if selection is None or selection.is_all:
        return tuple(steps)
    chosen = _below(steps, [_plain(path) for path in selection.paths])
    if selection.include:
        included = [_matching(steps, pattern) for pattern in selection.include]
        _all_matched(zip(selection.include, included, strict=True))
        chosen = [step for step in chosen if any(step.path in paths for paths in included)]
    if selection.exclude:
        fits = _matcher(selection.exclude)
        chosen = [step for step in chosen if not fits(step.path)]
    if not chosen:
        raise UsageProblem(
            "nothing_selected",
            "the given paths and patterns together select no change",
            hint="vmsandbox review SANDBOX --stat    (lists the changed paths)",
        )
    return tuple(chosen)


def refuse_split(chosen: Sequence[Step], steps: Sequence[Step], done: Collection[bytes]) -> None:
    """Refuse a choice that cannot be written without its other half.

    A file that becomes a folder (or the reverse) needs both: nothing can be put below a file that
    stays. Raises UsageProblem ``selection_incomplete``.
    """
    inside = {step.path for step in chosen}
    left = [step.path for step in steps if step.new_oid is None]
    waiting = {path for path in left if path not in inside and path not in done}
    if not waiting:
        return
    above = {parent: path for path in waiting for parent in parents(path)}
    for step in chosen:
        if step.new_oid is None:
            continue
        partner = above.get(step.path) or next(
            (parent for parent in parents(step.path) if parent in waiting), None
        )
        if partner is not None:
            raise UsageProblem(
                "selection_incomplete",
                f"{quote_path(step.path)} can only be written together with the deletion of"
                f" {quote_path(partner)}",
                hint=f"--path {shlex.quote(quote_path(min(partner, step.path, key=len)))}",
            )


def parents(path: bytes) -> Iterable[bytes]:
    """Every folder above a path, the innermost first, without the root."""
    while (cut := path.rfind(b"/")) > 0:
        path = path[:cut]
        yield path


def _plain(path: bytes) -> bytes:
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    return b"/".join(parts)


def _below(steps: Sequence[Step], wanted: Sequence[bytes]) -> list[Step]:
    if not wanted:
        return list(steps)
    below = {
        path: {
            s.path for s in steps if not path or s.path == path or s.path.startswith(path + b"/")
        }
        for path in wanted
    }
    _all_matched((quote_path(path), found) for path, found in below.items())
    chosen: set[bytes] = set().union(*below.values())
    return [step for step in steps if step.path in chosen]


def _matching(steps: Sequence[Step], pattern: str) -> set[bytes]:
    fits = _matcher([pattern])
    return {step.path for step in steps if fits(step.path)}


_NEWLINE = "\udc0a"
"""Stands for a newline: of its own accord no name decodes to it. Patterns mean it like any other
character, but they become regular expressions, in which "." is anything but a newline and "$" is
also before a last one."""


def _matcher(patterns: Sequence[str]) -> Callable[[bytes], bool]:
    from pathspec import PathSpec  # slow to import, and seldom needed

    lines = [pattern.replace("\n", _NEWLINE) for pattern in patterns]
    try:
        spec = PathSpec.from_lines("gitignore", lines)
    except ValueError as error:
        raise UsageProblem(
            "pattern_invalid",
            f"not a pattern of a .gitignore: {', '.join(map(repr, patterns))}",
            hint="--exclude '*.lock'    or    --exclude 'docs/**'",
        ) from error

    def fits(path: bytes) -> bool:
        name = path.decode("utf-8", "surrogateescape").replace("\n", _NEWLINE)
        return bool(spec.match_file(name))

    return fits


def _all_matched(found: Iterable[tuple[str, Collection[bytes]]]) -> None:
    empty = [shown for shown, paths in found if not paths]
    if empty:
        raise UsageProblem(
            "path_unmatched",
            f"no changed path fits {', '.join(empty)}",
            hint="vmsandbox review SANDBOX --stat    (lists the changed paths)",
        )
