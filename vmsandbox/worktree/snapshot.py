"""Owns how a worktree becomes a commit in the private store that belongs to it.

The user's repository lends its objects and is never written. One thing is git's own doing: it may
renew the time stamp of a pack, loose object or shared index that it finds in use, so that no gc
takes it for old. Knows no guest and no sandbox.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.model import Snapshot
from vmsandbox.worktree import include as including
from vmsandbox.worktree.git import Git
from vmsandbox.worktree.history import boundary
from vmsandbox.worktree.locate import WorktreeInfo, locate
from vmsandbox.worktree.repository import prepare
from vmsandbox.worktree.space import space_below
from vmsandbox.worktree.staging import Staged, Staging, unreadable
from vmsandbox.worktree.stores import locked, store_of

_NO_PARENT_DATE = "2000-01-01T00:00:00Z"
_COMMITTED = re.compile(rb"^committer .*> (\d+) ", re.MULTILINE)
_MESSAGE = "Worktree as it was when it went into the sandbox\n"


def snapshot(
    worktree: Path, stores: Path, *, include: Sequence[str] = (), history: str = "full"
) -> Snapshot:
    """Make a commit of the worktree exactly as it is; the store is a folder below `stores`.

    Dirty, staged and untracked files are in it, ignored ones if git tracks them or `include` (see
    :mod:`include`) names them. `history` is ``full``, ``none`` or how many commits a guest will
    see. The same content on the same HEAD gives the same commit; if it is HEAD's content, HEAD
    itself.

    Raises what :func:`locate` raises, UsageProblem ``include_invalid``, ``worktree_empty``, and
    HostProblem ``worktree_unreadable``, ``worktree_unstable``, ``worktree_busy``,
    ``host_disk_full``.
    """
    info = locate(worktree)
    specs = including.pathspecs(include)
    folder = store_of(stores, info.top)
    with space_below(folder), locked(folder):
        store = _open_store(folder, info)
        head = _Head.of(store, info)
        staged = _stage(store, folder, info, specs, head)
        if not staged.files and head is None:
            raise _empty(info.top)
        commit = _commit(store, staged, head)
        return _described(store, info, staged, commit, history)


def check_sendable(info: WorktreeInfo, include: Sequence[str] = ()) -> None:
    """Refuse what :func:`snapshot` would refuse, as far as that can be told without reading files.

    Raises UsageProblem ``include_invalid``, and ``worktree_empty`` where there is nothing at all.
    """
    including.pathspecs(include)
    if info.head is None and all(entry.name == ".git" for entry in info.top.iterdir()):
        raise _empty(info.top)


def _empty(top: Path) -> UsageProblem:
    return UsageProblem(
        "worktree_empty",
        f"there is nothing in {top}: no file and no commit",
        hint=f"git -C {top} commit --allow-empty -m start    (or make a first file)",
    )


def _open_store(folder: Path, info: WorktreeInfo) -> Git:
    borrow = [info.common_dir / "objects"] if info.common_dir else []
    name = f"{info.object_format}.git"
    return prepare(folder / name, info.object_format, borrow, info.shallow, durable=False)


class _Head(NamedTuple):
    """The commit that the worktree stands on."""

    oid: str
    tree: str
    date: str
    """When it was made, as git wants to be told."""

    @classmethod
    def of(cls, store: Git, info: WorktreeInfo) -> "_Head | None":
        if info.head is None:
            return None
        commit = store.run("cat-file", "commit", info.head)
        made = _COMMITTED.search(commit)
        date = f"@{int(made[1])} +0000" if made else _NO_PARENT_DATE
        return cls(info.head, commit[5:].partition(b"\n")[0].decode("ascii"), date)


def _stage(
    store: Git, folder: Path, info: WorktreeInfo, specs: tuple[str, ...], head: _Head | None
) -> Staged:
    indexes = folder / f"indexes-{info.object_format}"
    indexes.mkdir(exist_ok=True)
    staging = Staging(
        store=store,
        indexes=indexes,
        oid_bytes=20 if info.object_format == "sha1" else 32,
        excludes_file=info.excludes_file,
        specs=specs,
    )
    for last in (False, True):
        try:
            staged = staging.stage(info.top, info.common_dir, borrowed=info.head is not None)
            if head is None or staged.tree != head.tree:
                _check_complete(store, info, staged)
            return staged
        except PermissionError as error:
            raise unreadable(info.top, str(error.filename), "Permission denied") from error
        except _Incomplete:
            if last:
                raise
            for index in indexes.iterdir():
                index.unlink()
    raise AssertionError("unreachable")


class _Incomplete(HostProblem):
    """Objects are missing that were there once."""


def _check_complete(store: Git, info: WorktreeInfo, staged: Staged) -> None:
    """Every object of the tree that HEAD does not hold must be there.

    A blob that the user staged once is borrowed from their repository, whose gc may have removed it
    since, while our index still knows its name.
    """
    known = [f"^{info.head}"] if info.head else []
    done = store.attempt("rev-list", "--objects", "--quiet", staged.tree, *known)
    if done.code:
        raise _Incomplete(
            "worktree_objects_missing",
            f"objects of {info.top} cannot be read: {done.err.strip()}",
            hint=f"git -C {info.top} fsck",
            evidence=str(info.common_dir or store.git_dir),
        )


def _commit(store: Git, staged: Staged, head: _Head | None) -> str:
    if head is None:
        return _commit_tree(store, staged.tree, None, _NO_PARENT_DATE)
    if staged.tree == head.tree:
        return head.oid
    return _commit_tree(store, staged.tree, head.oid, head.date)


def _commit_tree(store: Git, tree: str, parent: str | None, date: str) -> str:
    """The date is the parent's, so that the same content has the same name whenever it is taken."""
    names = {
        f"GIT_{role}_{part}": value
        for role in ("AUTHOR", "COMMITTER")
        for part, value in (("NAME", "vmsandbox"), ("EMAIL", "vmsandbox@localhost"), ("DATE", date))
    }
    parents = ["-p", parent] if parent else []
    signed = store.but(variables=names)
    return signed.word("commit-tree", tree, *parents, stdin=_MESSAGE.encode())


def _described(
    store: Git, info: WorktreeInfo, staged: Staged, commit: str, history: str
) -> Snapshot:
    assert store.git_dir
    return Snapshot(
        git_dir=store.git_dir,
        commit=commit,
        tree=staged.tree,
        parent=info.head,
        branch=info.branch,
        object_format=info.object_format,
        files=staged.files,
        content_bytes=staged.content_bytes,
        excludes=_excludes(info),
        shallow=boundary(
            store,
            commit,
            "none" if info.partial else history,
            own=commit != info.head,
            known=info.shallow,
        ),
        user_name=info.user_name,
        user_email=info.user_email,
    )


def _excludes(info: WorktreeInfo) -> tuple[bytes, ...]:
    """Ignore rules that live outside the tree; the repository's own come last, as they win."""
    own = info.common_dir and info.common_dir / "info" / "exclude"
    lines: list[bytes] = []
    for file in (info.excludes_file, own):
        try:
            lines += file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n") if file else []
        except FileNotFoundError:
            continue
    return tuple(line for line in lines if line.strip() and not line.startswith(b"#"))


def hold_back(snapshot: Snapshot, previous: Snapshot, paths: Sequence[bytes]) -> Snapshot:
    """`snapshot`, but compared with as if `paths` had not changed on the host since `previous`.

    For paths that both sides changed: the guest keeps its version, so the host's change must show
    as a conflict when the result is applied, instead of being undone. What `previous` held back
    stays held back.
    """
    store = Git(git_dir=snapshot.git_dir)
    earlier = _differing(store, f"{previous.commit}^{{tree}}", previous.tree)
    held = sorted({*paths, *earlier})
    if not held:
        return snapshot
    # Of its own: several sandboxes of one worktree may be brought up to date at once.
    with TemporaryDirectory(prefix="held-", dir=snapshot.git_dir.parent) as folder:
        staging = store.but(index=Path(folder) / "index")
        staging.run("read-tree", snapshot.tree)
        entries = _entries(store, previous.tree, held)
        gone = b"0 " + b"0" * len(snapshot.tree) + b"\t"
        lines = [entries.get(path, gone + path) for path in held]
        staging.run(
            "update-index",
            "--replace",
            "-z",
            "--index-info",
            stdin=b"".join(line + b"\0" for line in lines),
        )
        return snapshot.model_copy(update={"tree": staging.word("write-tree")})


def _differing(store: Git, one: str, other: str) -> list[bytes]:
    return store.names("diff-tree", "-r", "-z", "--name-only", "--no-renames", one, other)


def _entries(store: Git, tree: str, paths: Sequence[bytes]) -> dict[bytes, bytes]:
    found = {}
    for entry in store.names("ls-tree", "-r", "-z", "--full-tree", tree):
        path = entry.partition(b"\t")[2]
        found[path] = entry
    return {path: found[path] for path in paths if path in found}
