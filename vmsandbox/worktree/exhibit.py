"""Owns how a result is put on its base again, as something that another guest can be sent.

Nothing of the author comes along but the result: no commits, no messages, no repository. The
objects are the quarantine's and, where the result left a file alone, the base's.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmsandbox.errors import HostProblem
from vmsandbox.model import ChangeSet, Snapshot
from vmsandbox.worktree.git import Git, GitFailed
from vmsandbox.worktree.packing import unreadable
from vmsandbox.worktree.repository import prepare
from vmsandbox.worktree.space import space_below

_WHO = {"NAME": "vmsandbox", "EMAIL": "vmsandbox@localhost", "DATE": "2000-01-01T00:00:00Z"}


@contextmanager
def exhibit(quarantine: Path, base: Snapshot, change_set: ChangeSet) -> Iterator[Snapshot]:
    """A snapshot whose files are the result and whose HEAD~1 is the base, while the block lasts.

    `quarantine` is the store that holds the change set. Raises HostProblem ``snapshot_missing``,
    ``snapshot_unreadable``, ``host_disk_full``.
    """
    if not base.git_dir.is_dir():
        raise HostProblem(
            "snapshot_missing",
            f"the snapshot that the result builds on is gone: {base.git_dir}",
            hint="the result itself is here: vmsandbox review --diff",
            evidence=str(quarantine),
        )
    with (
        space_below(quarantine),
        tempfile.TemporaryDirectory(prefix="exhibit-", dir=quarantine.parent) as folder,
    ):
        git_dir = Path(folder) / f"{base.object_format}.git"  # beside it lies its lock
        try:
            commit = _commits(_store(git_dir, quarantine, base), base, change_set)
        except GitFailed as error:
            raise unreadable(base, error) from error
        shown = {"git_dir": git_dir, "commit": commit, "tree": change_set.result_tree}
        yield base.model_copy(update={**shown, "parent": base.commit})


def _store(folder: Path, quarantine: Path, base: Snapshot) -> Git:
    shallow = base.git_dir / "shallow"
    known = shallow.read_text("ascii").split() if shallow.exists() else []
    borrow = [quarantine / "objects", base.git_dir / "objects"]
    store = prepare(folder, base.object_format, borrow, known, durable=False)
    roles = {f"GIT_{r}_{part}": v for r in ("AUTHOR", "COMMITTER") for part, v in _WHO.items()}
    return store.but(variables=roles)


def _commits(store: Git, base: Snapshot, change_set: ChangeSet) -> str:
    """The result on the base; what the host changed since and was held back is no part of it."""
    below = base.commit
    if store.word("rev-parse", f"{below}^{{tree}}") != change_set.base_tree:
        below = _commit(store, change_set.base_tree, below, b"The base\n")
    return _commit(store, change_set.result_tree, below, b"The result\n")


def _commit(store: Git, tree: str, parent: str, message: bytes) -> str:
    return store.word("commit-tree", tree, "-p", parent, stdin=message)
