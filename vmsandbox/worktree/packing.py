"""Owns how a snapshot's objects become a pack: whole and kept, or only what is new.

The whole pack stays in the store, beside its index. So the guest need not index it again, which is
most of what unpacking costs; several sandboxes of one worktree share it; and the store holds
whatever the user's repository may lose. Knows no guest.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

from vmsandbox.errors import HostProblem
from vmsandbox.model import Snapshot
from vmsandbox.worktree.git import Git, GitFailed
from vmsandbox.worktree.space import space_below
from vmsandbox.worktree.stores import locked

_KEPT = 2


class Pack(NamedTuple):
    """A pack's index and the pack, open for reading, and what both are called."""

    name: str
    index_file: BinaryIO
    pack_file: BinaryIO

    @classmethod
    def opened(cls, path: Path, stack: ExitStack) -> "Pack":
        """The pack at `path`, until `stack` ends."""
        index = stack.enter_context(path.with_suffix(".idx").open("rb"))
        return cls(path.stem, index, stack.enter_context(path.open("rb")))


@contextmanager
def whole_pack(snapshot: Snapshot) -> Iterator[Pack]:
    """The pack of everything that a guest with nothing needs; made if it is not there yet.

    Raises HostProblem ``snapshot_unreadable``, ``snapshot_missing``, ``host_disk_full``.
    """
    if not snapshot.git_dir.is_dir():
        raise HostProblem(
            "snapshot_missing",
            f"the snapshot is gone: {snapshot.git_dir}",
            hint="vmsandbox run …    (takes a new one)",
        )
    with ExitStack() as stack:
        with locked(snapshot.git_dir.parent):
            pack = Pack.opened(_find(snapshot) or _make(snapshot), stack)
        yield pack


def _note(snapshot: Snapshot) -> Path:
    """The file that names the pack; it is named after what the pack must hold."""
    key = hashlib.sha256(" ".join([snapshot.commit, *sorted(snapshot.shallow)]).encode())
    return snapshot.git_dir / "packs" / key.hexdigest()[:32]


def _packs(snapshot: Snapshot) -> Path:
    return snapshot.git_dir / "objects" / "pack"


def _find(snapshot: Snapshot) -> Path | None:
    try:
        name = _note(snapshot).read_text("ascii")
    except FileNotFoundError:
        return None
    found = _packs(snapshot) / name
    return found if found.exists() and found.with_suffix(".idx").exists() else None


def _make(snapshot: Snapshot) -> Path:
    store = Git(git_dir=snapshot.git_dir)
    arguments = pack_arguments(snapshot, None, str(_packs(snapshot) / "pack"))
    wanted = wanted_objects(snapshot, None)
    try:
        with space_below(snapshot.git_dir):
            name = f"pack-{store.word(*arguments, stdin=wanted)}.pack"
    except GitFailed as error:
        raise unreadable(snapshot, error) from error
    note = _note(snapshot)
    note.parent.mkdir(exist_ok=True)
    note.write_text(name, "ascii")
    _forget_old(note.parent, _packs(snapshot))
    return _packs(snapshot) / name


def _forget_old(notes: Path, packs: Path) -> None:
    """Whole packs are large, and an old one is hardly asked for again."""
    newest_first = sorted(notes.iterdir(), key=lambda note: note.stat().st_mtime_ns, reverse=True)
    kept = {note.read_text("ascii") for note in newest_first[:_KEPT]}
    for note in newest_first[_KEPT:]:
        name = note.read_text("ascii")
        note.unlink()
        if name not in kept:
            for suffix in (".idx", ".rev", ".pack"):
                (packs / name).with_suffix(suffix).unlink(missing_ok=True)


@contextmanager
def new_pack(snapshot: Snapshot, previous: Snapshot) -> Iterator[Pack]:
    """What a guest lacks that has `previous`; raises as :func:`whole_pack`.

    No delta leaves it: a guest then has to resolve none, and gets the index as well.
    """
    with ExitStack() as stack:
        stack.enter_context(space_below(snapshot.git_dir))
        folder = Path(stack.enter_context(TemporaryDirectory(dir=snapshot.git_dir)))
        known = previous if _holds(snapshot, previous) else None
        arguments = pack_arguments(snapshot, known, str(folder / "pack"))
        try:
            store = Git(git_dir=snapshot.git_dir)
            name = store.word(*arguments, stdin=wanted_objects(snapshot, known))
        except GitFailed as error:
            raise unreadable(snapshot, error) from error
        yield Pack.opened(folder / f"pack-{name}.pack", stack)


class Changed(NamedTuple):
    """What differs between two snapshots: paths, one a line as git quotes them. `before` is what
    ``git ls-files -v -s`` prints of them, if all are plain files that were edited, else empty."""

    names: bytes = b""
    before: bytes = b""


_EDITED = re.compile(
    rb":(100644|100755) (?:100644|100755) ([0-9a-f]+) [0-9a-f]+ M\t([^\"].*)", re.ASCII
)
_MANY = 100
"""More names than this are not a few edits."""


def changed(snapshot: Snapshot, previous: Snapshot) -> Changed:
    """What differs between two snapshots; nothing if the store has lost the former."""
    if not _holds(snapshot, previous):
        return Changed()
    words = ("diff-tree", "-r", "--no-renames", "--no-abbrev", previous.commit, snapshot.commit)
    lines = Git(git_dir=snapshot.git_dir).run(*words).splitlines(keepends=True)
    names = b"".join(line.partition(b"\t")[2] for line in lines)
    edits = [_EDITED.fullmatch(line.removesuffix(b"\n")) for line in lines[: _MANY + 1]]
    if len(edits) > _MANY or None in edits:
        return Changed(names)
    return Changed(names, b"".join(b"H %b %b 0\t%b\n" % edit.groups() for edit in edits if edit))


def _holds(snapshot: Snapshot, previous: Snapshot) -> bool:
    """What was removed from the store since cannot be built on: then all is sent."""
    store = Git(git_dir=snapshot.git_dir)
    return store.attempt("cat-file", "-e", previous.commit).code == 0


def pack_arguments(
    snapshot: Snapshot, previous: Snapshot | None, *destination: str
) -> tuple[str, ...]:
    """The command line of `git pack-objects`.

    Deltas that the user's packs have are kept, no others are looked for: for twenty thousand loose
    objects that takes seventy times as long as all the rest, and saves next to nothing on loopback.
    """
    shallow = ["--shallow"] if snapshot.shallow or (previous and previous.shallow) else []
    fixed = ("pack-objects", "--revs", "--quiet", "--delta-base-offset", "--window=0")
    return (*fixed, *shallow, *destination)


def wanted_objects(snapshot: Snapshot, previous: Snapshot | None) -> bytes:
    """What `git pack-objects --revs` reads: where history ends, what is wanted, what is known."""
    ends: Sequence[str] = (*snapshot.shallow, *(previous.shallow if previous else ()))
    lines = [f"--shallow {oid}" for oid in dict.fromkeys(ends)]
    lines += [snapshot.commit, *([f"^{previous.commit}"] if previous else [])]
    return "".join(f"{line}\n" for line in lines).encode()


def unreadable(snapshot: Snapshot, error: Exception) -> HostProblem:
    """Objects of the snapshot, or of its history, cannot be read."""
    return HostProblem(
        "snapshot_unreadable",
        f"the snapshot cannot be packed: {getattr(error, 'complaint', error)}",
        hint="git fsck in the worktree; or leave history out: vmsandbox run --history none …",
        evidence=str(snapshot.git_dir),
    )
