"""Owns how files on disk become a tree: a private index per folder, refreshed by git's stat cache.

Knows nothing of commits. A repository inside the folder is staged with an index of its own, by its
own ignore rules, and grafted in as plain files. The user's repositories are only asked which
ignored files they track.

git compares whole seconds only, and trusts an entry whose file is older than the index. So the
index is dated back to the moment before the first file was looked at: whatever changed since then
is read again next time, and a file that changes while it is read never stays with a wrong blob.
"""

import hashlib
import os
import re
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from vmsandbox.errors import HostProblem, VmsandboxError
from vmsandbox.text import printable
from vmsandbox.worktree import include
from vmsandbox.worktree.git import Completed, Git, GitFailed
from vmsandbox.worktree.listing import read_index
from vmsandbox.worktree.locate import common_dir_of
from vmsandbox.worktree.space import disk_full, says_full

_ATTEMPTS = 5
_COARSE_CLOCK_S = 0.05  # the kernel stamps files with a clock that may lag this much behind
_UPDATE = ("update-index", "--add", "--remove", "--replace", "-z", "--stdin")
_REFUSED = re.compile(
    r"^(?:error: |warning: |fatal: )?(.*): (Permission denied|Input/output error)$", re.MULTILINE
)
_QUOTED = re.compile(r"""["'](.*)["']""")

# Straight into one pack instead of a file per object, and not deflated: the pack goes on as it is
# through loopback to a guest that would have to inflate it twice.
_BULK = {"core.bigFileThreshold": "1", "core.compression": "0"}


@dataclass(frozen=True)
class Staged:
    """A folder as a tree in the store."""

    tree: str
    files: int
    content_bytes: int


@dataclass(frozen=True)
class Staging:
    """How to stage: into which store, what the user ignores everywhere, what comes along anyway."""

    store: Git
    indexes: Path
    oid_bytes: int
    excludes_file: Path | None
    specs: tuple[str, ...]

    def stage(self, top: Path, common_dir: Path | None, *, borrowed: bool) -> Staged:
        """Stage `top`; `borrowed` says that most blobs will be found in the user's repository.

        Raises HostProblem ``worktree_unreadable`` naming the path, ``worktree_unstable``,
        ``host_disk_full``.
        """
        index = self.indexes / hashlib.sha256(os.fsencode(top)).hexdigest()[:16]
        folder = _Folder(self, top, common_dir, index, bulk=not borrowed)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return folder.stage()
            except (_Unstable, GitFailed) as error:
                if says_full(str(error)):
                    raise disk_full(self.indexes.parent) from error
                if attempt == _ATTEMPTS:
                    raise _gave_up(top, error) from error
                if attempt > 1:  # an index that git cannot work with is worth nothing
                    index.unlink(missing_ok=True)
        raise AssertionError("unreachable")


class _Unstable(Exception):
    """The folder changed in a way that needs another look."""


def _gave_up(top: Path, error: Exception) -> HostProblem:
    return HostProblem(
        "worktree_unstable",
        f"no snapshot of {top} after {_ATTEMPTS} attempts: {error}",
        hint="stop what is writing there, then try again",
        evidence=str(top),
    )


class _Folder:
    """One folder with its private index."""

    def __init__(
        self, staging: Staging, top: Path, common_dir: Path | None, index: Path, *, bulk: bool
    ) -> None:
        self.staging = staging
        self.top = top
        self.common_dir = common_dir
        self.index = index
        self.git = staging.store.but(work_tree=top, index=index)
        self.fast = self.git.but(settings=_BULK) if bulk and not index.exists() else self.git
        self.ignoring = self._ignoring()

    def _ignoring(self) -> list[str]:
        """What ``--exclude-standard`` stands for, with the user's files; later ones win."""
        exclude = self.common_dir and self.common_dir / "info" / "exclude"
        files = [file for file in (self.staging.excludes_file, exclude) if file and file.is_file()]
        return ["--exclude-per-directory=.gitignore", *(f"--exclude-from={file}" for file in files)]

    def stage(self) -> Staged:
        began = int(time.time() - _COARSE_CLOCK_S)
        known = _identity(self.index)
        Path(f"{self.index}.lock").unlink(missing_ok=True)  # the store's lock is ours
        nested = self._list_and_update()
        self._read_until_quiet(began, known)
        return self._tree(nested)

    # --- what belongs to the snapshot -------------------------------------------------------------

    def _list_and_update(self) -> list[bytes]:
        """Bring new names in and unwanted ones out; returns the repositories found inside."""
        with ThreadPoolExecutor(3, thread_name_prefix="git") as pool:
            listing = pool.submit(self._list, "--others", "--killed", *self.ignoring)
            holding = pool.submit(self._list, "--cached", "--ignored", *self.ignoring)
            tracking = pool.submit(self._tracked_though_ignored)
            others, held, tracked = listing.result(), holding.result(), tracking.result()
        included = self._included()
        inside = {name[:-1] for name in (*others, *included) if name.endswith(b"/")}
        inside |= {name for name in tracked if self._is_folder(name)}
        wanted = {name for name in (*tracked, *included) if not name.endswith(b"/")} - inside
        self._remove(sorted((set(held) - wanted) | inside))
        new = [name for name in others if not name.endswith(b"/")]
        self._add([*new, *sorted(wanted - set(held))])
        return sorted(inside)

    def _list(self, *arguments: str) -> list[bytes]:
        done = self.git.attempt("ls-files", "-z", *arguments)
        _raise_unreadable(self.top, done)
        if done.code:
            raise GitFailed(("ls-files",), done.code, done.err)
        return [name for name in done.out.split(b"\0") if name]

    def _tracked_though_ignored(self) -> list[bytes]:
        if self.common_dir is None:
            return []
        return Git.of_user(self.top).names(
            "ls-files", "-z", "--cached", "--ignored", "--exclude-standard"
        )

    def _included(self) -> list[bytes]:
        if not self.staging.specs:
            return []
        both = ("--others", "--cached", "--ignored", *self.ignoring, "--", *self.staging.specs)
        return self._list(*both)

    def _is_folder(self, name: bytes) -> bool:
        path = self._path(name)
        return path.is_dir() and not path.is_symlink()

    def _path(self, name: bytes) -> Path:
        return self.top / os.fsdecode(name)

    def _remove(self, names: Sequence[bytes]) -> None:
        if names:
            self.git.run(
                "update-index", "--force-remove", "-z", "--stdin", stdin=_terminated(names)
            )

    def _add(self, names: Sequence[bytes]) -> None:
        if names:
            self._checked(self.fast.attempt(*_UPDATE, stdin=_terminated(names)))

    # --- what the files hold now ------------------------------------------------------------------

    def _read_until_quiet(self, began: int, known: "_Identity") -> None:
        """Read what changed, until nothing changed while it was read."""
        known = self._date_back(began, known)
        for _ in range(_ATTEMPTS):
            self._read_changed()
            if _identity(self.index) == known:
                return
            known = self._date_back(began, known)
            if self.git.attempt("diff-files", "--quiet").code == 0:
                return

    def _date_back(self, began: int, known: "_Identity") -> "_Identity":
        """If git has written the index, give it the time before the first look at a file."""
        if _identity(self.index) != known:
            os.utime(self.index, (began, began))
        return _identity(self.index)

    def _read_changed(self) -> None:
        done = self.fast.attempt("add", "--update", "--ignore-errors")
        if done.code and "can only add regular files" in done.err:
            self._remove([name for name in self.git.names("ls-files", "-z") if self._special(name)])
            done = self.fast.attempt("add", "--update")
        self._checked(done)

    def _special(self, name: bytes) -> bool:
        try:
            mode = self._path(name).lstat().st_mode
        except OSError:
            return False
        return not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode))

    def _checked(self, done: Completed) -> None:
        _raise_unreadable(self.top, done)
        if says_full(done.err):
            raise disk_full(self.staging.indexes.parent)
        if done.code:
            raise GitFailed(("add",), done.code, done.err)

    # --- the tree ---------------------------------------------------------------------------------

    def _tree(self, nested: Sequence[bytes]) -> Staged:
        if not self.index.exists():
            self.git.run("read-tree", "--empty")
        held = read_index(self.index.read_bytes(), self.staging.oid_bytes)
        if held.gitlinks:  # a file became a repository a moment ago
            self._remove(held.gitlinks)
            raise _Unstable("repositories appear in it")
        inner = [(name, self._stage_nested(name)) for name in nested]
        git = self.git
        if inner:
            git = git.but(index=self.index.with_name(self.index.name + ".whole"))
            git.run("read-tree", self.git.word("write-tree"))
        for name, staged in inner:
            git.run("read-tree", b"--prefix=" + name + b"/", staged.tree)
        return Staged(
            tree=git.word("write-tree"),
            files=held.files + sum(staged.files for _, staged in inner),
            content_bytes=held.content_bytes + sum(staged.content_bytes for _, staged in inner),
        )

    def _stage_nested(self, name: bytes) -> Staged:
        folder = os.fsdecode(name)
        specs = include.below(self.staging.specs, folder)
        top = self.top / folder
        return replace(self.staging, specs=specs).stage(top, common_dir_of(top), borrowed=False)


def _terminated(names: Sequence[bytes]) -> bytes:
    return b"".join(name + b"\0" for name in names)


_Identity = tuple[int, int, int] | None


def _identity(file: Path) -> _Identity:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _raise_unreadable(top: Path, done: Completed) -> None:
    match = _REFUSED.search(done.err)
    if match is None:
        return
    quoted = _QUOTED.search(match[1])
    raise unreadable(top, quoted[1] if quoted else match[1], match[2])


def unreadable(top: Path, name: str, reason: str) -> VmsandboxError:
    """A file or folder of the worktree that the host may not read."""
    return HostProblem(
        "worktree_unreadable",
        f"cannot read {printable(name, newlines=False)} in {top}: {reason}",
        hint=f"ls -l {top}    (make it readable, or have git ignore it)",
        evidence=str(top),
    )
