"""Owns the verdict on a batch: which paths can be written, which already are, which conflict.

A path can be written only if it still equals the base in bytes, type and executable bit. It counts
as written if it already equals the result. Anything else is a conflict.
"""

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vmsandbox.model import TreePath, Value
from vmsandbox.selection import Step, parents
from vmsandbox.target.folder import BlockedError, Found, TargetFolder, lstat
from vmsandbox.text import quote_path

ConflictKind = Literal["content", "mode", "type", "missing", "exists", "way", "foreign", "case"]
_MAX_FOREIGN_NAMED = 5


class Conflict(Value):
    """A path that the batch may not touch, and what differs."""

    path: TreePath
    kind: ConflictKind
    what: str


@dataclass(frozen=True)
class Ready:
    """A step that may be done: `found` is what it replaces, `stage_in` the nearest folder."""

    step: Step
    found: Found
    stage_in: bytes


@dataclass(frozen=True)
class Batch:
    """The verdict on all steps chosen at once."""

    ready: tuple[Ready, ...]
    done: tuple[bytes, ...]
    conflicts: tuple[Conflict, ...]
    doomed_dirs: tuple[bytes, ...]  # the innermost first


def check(
    target: TargetFolder,
    chosen: Sequence[Step],
    every: Sequence[Step],
    removed_dirs: Collection[bytes],
    settled: Collection[bytes] = (),
    *,
    only_look: bool = False,
) -> Batch:
    """Compare the target with `chosen`, a part of `every` step of the change set.

    `removed_dirs` are the folders that the result no longer has. `settled` are paths that an
    earlier apply wrote: if they differ now, the user went on working on them, and they stay.

    Whether a folder without any letter in its names ignores case shows only by writing. With
    `only_look` that is left open, and such a conflict is not among those found.
    """
    return _Checker(target, chosen, every, removed_dirs, settled, only_look).batch()


class _Checker:
    def __init__(
        self,
        target: TargetFolder,
        chosen: Sequence[Step],
        every: Sequence[Step],
        removed_dirs: Collection[bytes],
        settled: Collection[bytes],
        only_look: bool,
    ) -> None:
        self.target = target
        self.chosen = chosen
        self.by_path = {step.path: step for step in every}
        self.chosen_paths = {step.path for step in chosen}
        self.settled = settled
        self.only_look = only_look
        self.new_folders = {p for step in every if step.new_oid for p in parents(step.path)}
        self.doomed = self._doomed(removed_dirs)

    def _doomed(self, removed_dirs: Collection[bytes]) -> frozenset[bytes]:
        """Removed folders that this batch empties: none of their files is left for later."""
        removed = frozenset(removed_dirs)
        touched = {p for step in self.chosen for p in parents(step.path) if p in removed}
        for path, step in self.by_path.items():
            if step.new_oid is not None or path in self.chosen_paths:
                continue
            if not touched.isdisjoint(above := set(parents(path))) and self._exists(path):
                touched -= above
        return frozenset(touched)

    def _exists(self, path: bytes) -> bool:
        with contextlib.suppress(BlockedError), self.target.parent(path) as (above, name):
            return lstat(above, name) is not None
        return False

    def batch(self) -> Batch:
        ready: list[Ready] = []
        done: list[bytes] = []
        conflicts: list[Conflict] = []
        for step in self.chosen:
            match self._judge(step):
                case Ready() as item:
                    ready.append(item)
                case Conflict() as conflict:
                    conflicts.append(conflict)
                case None:
                    done.append(step.path)
        conflicts += self._foreign({item.step.path for item in ready})
        conflicts += self._case_conflicts(ready)
        doomed = sorted(self.doomed, key=lambda path: path.count(b"/"), reverse=True)
        return Batch(tuple(ready), tuple(done), tuple(conflicts), tuple(doomed))

    def _judge(self, step: Step) -> "Ready | Conflict | None":
        """None: the path already is as in the result."""
        stage_in = step.path.rpartition(b"/")[0]
        try:
            found = self.target.look(step.path)
        except BlockedError as blocked:
            if not blocked.missing and (conflict := self._blocked(step, blocked.at)):
                return conflict
            found, stage_in = Found("missing"), blocked.at.rpartition(b"/")[0]
        if _equals(found, step.new_mode, step.new_oid):
            return None
        if found.kind == "folder" and step.new_oid is None and step.path in self.new_folders:
            return None  # the file is gone, and the folder that replaces it has begun to be made
        if found.kind == "folder" and step.old_oid is None and step.path in self.doomed:
            return Ready(step, found, stage_in)
        if _equals(found, step.old_mode, step.old_oid):
            return Ready(step, found, stage_in)
        if step.path in self.settled:
            return None
        return _difference(step, found)

    def _blocked(self, step: Step, at: bytes) -> Conflict | None:
        """A file or link where a folder is needed; fine if this very change set explains it."""
        other = self.by_path.get(at)
        found = self.target.look(at)
        if other is not None:
            replaced = step.new_oid is None and _equals(found, other.new_mode, other.new_oid)
            leaves = other.new_oid is None and at in self.chosen_paths
            if replaced or (leaves and _equals(found, other.old_mode, other.old_oid)):
                return None
        return Conflict(
            path=step.path, kind="way", what=f"{quote_path(at)} is a {found.kind}, not a folder"
        )

    def _foreign(self, leaving: Collection[bytes]) -> Iterator[Conflict]:
        """Folders that would be removed although something lies in them that is not the base's."""
        explained = self.by_path.keys()
        needed = {step.path for step in self.chosen if step.new_oid is not None}
        needed |= {above for path in leaving for above in parents(path)}
        for folder in sorted(self.doomed & needed):
            foreign = sorted(
                path
                for path in self._content(folder)
                if path not in explained and path not in self.doomed
            )
            if foreign:
                named = ", ".join(quote_path(path) for path in foreign[:_MAX_FOREIGN_NAMED])
                more = "" if len(foreign) <= _MAX_FOREIGN_NAMED else f" and {len(foreign)} in all"
                yield Conflict(
                    path=folder, kind="foreign", what=f"would be removed but holds {named}{more}"
                )

    def _content(self, folder: bytes) -> list[bytes]:
        with contextlib.suppress(BlockedError):
            return [folder + b"/" + name for name in self.target.names(folder)]
        return []

    def _case_conflicts(self, ready: Iterable[Ready]) -> Iterator[Conflict]:
        known: dict[bytes, bool] = {}
        for item in ready:
            if item.step.new_oid is None or not item.step.collides:
                continue
            if item.stage_in not in known:
                known[item.stage_in] = ignores_case(
                    self.target, item.stage_in, only_look=self.only_look
                )
            if known[item.stage_in]:
                yield Conflict(
                    path=item.step.path,
                    kind="case",
                    what="another name differs only in case, which this file system ignores",
                )


def _equals(found: Found, mode: int, oid: str | None) -> bool:
    if oid is None:
        return found.kind == "missing"
    return found.oid == oid and found.mode == _plain_mode(mode)


def _plain_mode(mode: int) -> int:
    if stat.S_ISREG(mode):
        return 0o100755 if mode & 0o100 else 0o100644
    return mode


def _difference(step: Step, found: Found) -> Conflict:
    def conflict(kind: ConflictKind, what: str) -> Conflict:
        return Conflict(path=step.path, kind=kind, what=what)

    if step.old_oid is None:
        return conflict("exists", f"new in the result, but the target has a {found.kind} there")
    if found.kind == "missing":
        return conflict("missing", "no longer in the target")
    if stat.S_IFMT(found.mode) != stat.S_IFMT(step.old_mode):
        return conflict("type", f"now a {found.kind} in the target")
    if found.oid != step.old_oid:
        return conflict("content", "edited in the target since the task began")
    return conflict("mode", "its executable bit was changed in the target")


def ignores_case(target: TargetFolder, folder: bytes, *, only_look: bool = False) -> bool:
    """Whether names in `folder` are compared without regard to case; asked of what is there, and
    of a file made for it where nothing there can tell, unless we `only_look`."""
    names = target.names(folder)
    with target.folder(folder) as descriptor:
        for name in names:
            other = name.swapcase()
            if other != name and other not in names:
                return lstat(descriptor, other) is not None
        return not only_look and _probe_case(descriptor)


def _probe_case(folder: int) -> bool:
    name = b".vmsandbox-probe-%d" % os.getpid()
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
    except OSError:
        return False  # the write itself will tell why
    try:
        return lstat(folder, name.swapcase()) is not None
    finally:
        os.unlink(name, dir_fd=folder)
