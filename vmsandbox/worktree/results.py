"""Owns the reading of a quarantined result: listing, differences, blobs, merges. Changes nothing.

The objects were made by a guest. They passed git's own check, and every process here has limits on
memory, processor time and output. No attribute, filter, external diff or text conversion is used.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from vmsandbox.errors import HostProblem
from vmsandbox.model import Change, TreeEntry, TreePath, Value
from vmsandbox.worktree.git import Completed, Git, GitFailed, Process
from vmsandbox.worktree.listing import (
    GITLINK,
    change_of,
    numstats,
    raw_differences,
    tree_entries,
)
from vmsandbox.worktree.objects import ObjectReader, sizes
from vmsandbox.worktree.repository import borrowing

_MAX_RENAME_CANDIDATES = 1000
_MAX_ARGUMENT_BYTES = 64 * 1024
_MEMORY_BYTES = 2 << 30
_CPU_S = 120
_TIMEOUT_S = 300.0
_MERGES_SINCE = (2, 38)
"""The git that merges trees without a worktree (git's release notes, "merge-tree --write-tree")."""


def bounded(git: Git, *, file_bytes: int = 0, timeout_s: float = _TIMEOUT_S) -> Git:
    """`git` with limits on what a guest's objects can make it use.

    Data, not address space, is limited: packs and their indexes of any size may be mapped.
    """
    limits = {"data": _MEMORY_BYTES, "cpu": _CPU_S, "fsize": file_bytes, "core": 0}
    words = (f"--{name}={value}" for name, value in limits.items())
    return git.but(prefix=("prlimit", *words, "--"), timeout_s=timeout_s)


class MergeOutcome(Value):
    """What merging two results of one base came to."""

    tree: str
    conflicts: tuple[TreePath, ...]


class ResultReader:
    """Reads one quarantine store; made by :meth:`Quarantine.reading`."""

    def __init__(self, git_dir: Path, stack: ExitStack) -> None:
        self._git = bounded(Git(git_dir=git_dir))
        self._stack = stack
        self._reader: ObjectReader | None = None

    def entries(self, tree: str) -> Iterator[TreeEntry]:
        """Every entry of a tree, recursively, folders included, with the modes as stored."""
        with self._git.process("ls-tree", "-r", "-t", "-z", "--full-tree", tree) as process:
            yield from tree_entries(records(process))

    def changes(self, base: str, result: str) -> tuple[Change, ...]:
        """The net difference of two trees, renames found, with line counts and sizes."""
        options = (f"-l{_MAX_RENAME_CANDIDATES}", "-M", "--raw", "--numstat")
        try:
            answer = self._difference(*options, base, result)
        except GitFailed:  # content that is too costly to compare line by line
            answer = self._difference("--raw", "--no-renames", base, result)
        raws, rest = raw_differences(answer)
        lines = numstats(rest)
        wanted = (raw.new_oid or raw.old_oid for raw in raws if GITLINK not in raw[:2])
        found = sizes(self._git, (oid for oid in wanted if oid))
        return tuple(change_of(raw, lines, found) for raw in raws)

    def _difference(self, *arguments: str) -> bytes:
        plain = ("-r", "-z", "--no-ext-diff", "--no-textconv", "--no-abbrev")
        return self._git.run("diff-tree", *plain, *arguments)

    @contextmanager
    def open_blob(self, oid: str) -> Iterator[BinaryIO]:
        """One blob's bytes, streamed; one at a time. Raises HostProblem ``object_missing``."""
        if self._reader is None:
            self._reader = self._stack.enter_context(ObjectReader.of(self._git))
        with self._reader.open(oid) as stream:
            yield stream

    def diff(self, base: str, result: str, paths: Sequence[bytes], max_bytes: int) -> bytes:
        """A unified diff of these exact paths (none: all), cut after `max_bytes`.

        One byte more than that says that there was more.
        """
        found = b""
        for group in _groups(paths):
            found += self._diff(base, result, group, max_bytes + 1 - len(found))
            if len(found) > max_bytes:
                break
        return found

    def _diff(self, base: str, result: str, paths: Sequence[bytes], max_bytes: int) -> bytes:
        git = self._git.but(variables={"GIT_LITERAL_PATHSPECS": "1"})
        options = ("-r", "-p", "-M", "--no-ext-diff", "--no-textconv", "--no-color")
        with git.process("diff-tree", *options, base, result, "--", *paths) as process:
            found = process.stdout.read(max_bytes)
            if len(found) < max_bytes:
                process.finish()
            return found

    def merge(self, base: str, ours: str, theirs: str, *stores: Path) -> MergeOutcome:
        """Merge two trees that come from `base`; `stores` are further quarantine stores to read.

        Nothing is kept. The names in conflict are as git found them. Content is merged where the
        same file is the same in both, renamed or not; no file is moved because its folder was.
        Raises HostProblem ``git_too_old``.
        """
        with tempfile.TemporaryDirectory(prefix="vmsandbox-merge-") as folder:
            assert self._git.git_dir
            borrow = [store / "objects" for store in (self._git.git_dir, *stores)]
            git = bounded(borrowing(self._git, Path(folder), borrow), file_bytes=1 << 30)
            git = git.but(settings={"merge.directoryRenames": "false"})
            before = _commit(git, base)
            sides = [_commit(git, tree, "-p", before) for tree in (ours, theirs)]
            done = git.attempt(
                "merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", *sides
            )
            if done.code not in (0, 1):
                raise _not_merged(git, done)
            tree, *names = done.out.removesuffix(b"\0").split(b"\0")
            return MergeOutcome(tree=tree.decode("ascii"), conflicts=tuple(dict.fromkeys(names)))


def _not_merged(git: Git, done: Completed) -> HostProblem:
    """Why git gave no verdict: an old one takes the option for a mistake."""
    version = git.word("version")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers >= _MERGES_SINCE:
        return GitFailed(("merge-tree",), done.code, done.err)
    return HostProblem(
        "git_too_old",
        f"{version} cannot merge two results without a worktree",
        hint="install git 2.38 or newer; until then results are compared by their paths",
    )


def records(process: Process) -> Iterator[bytes]:
    """The NUL-terminated records of a process's output, as they come."""
    rest = b""
    for chunk in process.chunks():
        *whole, rest = (rest + chunk).split(b"\0")
        yield from whole


def _groups(paths: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Paths in groups that fit on a command line; no paths are one empty group."""
    group: list[bytes] = []
    length = 0
    for path in paths:
        if length + len(path) > _MAX_ARGUMENT_BYTES:
            yield group
            group, length = [], 0
        group.append(path)
        length += len(path) + 1
    if group or not paths:
        yield group


def _commit(git: Git, tree: str, *parents: str) -> str:
    who = {"NAME": "vmsandbox", "EMAIL": "vmsandbox@localhost", "DATE": "2000-01-01T00:00:00Z"}
    named = {f"GIT_{r}_{part}": v for r in ("AUTHOR", "COMMITTER") for part, v in who.items()}
    return git.but(variables=named).word("commit-tree", tree, *parents, stdin=b"merge\n")
