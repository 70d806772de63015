"""Owns the way of a guest's result into the host: a bare store that takes it in, or refuses it.

Everything that arrives was chosen by the guest. Objects are checked by ``git index-pack --strict``
in a folder of their own, under limits, and only then move into the store, together with what a
review needs of the base, so that the store answers even when the user's repository has been
repacked or is gone. Path names are judged elsewhere.
"""

import hashlib
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from vmsandbox.errors import GuestProblem, HostProblem, ReviewRefused
from vmsandbox.model import AgentCommit, Limits, Oid, Snapshot, Value
from vmsandbox.text import printable
from vmsandbox.worktree.git import Completed, Git, GitFailed, Process
from vmsandbox.worktree.history import parents_of
from vmsandbox.worktree.listing import GITLINK, raw_differences, tree_entries
from vmsandbox.worktree.objects import sizes
from vmsandbox.worktree.repository import borrowing, prepare
from vmsandbox.worktree.results import ResultReader, bounded, records
from vmsandbox.worktree.space import says_full, space_below

_HEADER = re.compile(rb"vmsandbox-result 1 ([0-9a-f]{40,64}) ([0-9a-f]{40,64})\n")
_MAX_HEADER_BYTES = 160
_CHUNK = 1 << 16
_INCOMING = "incoming-"
_MAX_AGENT_COMMITS = 1000
_LONG_PATH_BYTES = 1024
_FEW_PATHS = 10_000

# Names that git's own check refuses without saying where: the review names the path.
_LENIENT = ",".join(
    f"{name}=ignore" for name in ("hasDot", "hasDotdot", "hasDotgit", "fullPathname")
)

_TOO_LARGE = ("exceeds maximum allowed size", "out of memory", "cannot allocate", "too large")
_TOO_LARGE_SIGNALS = frozenset({-9, -24, -25})  # SIGKILL by our timer, SIGXCPU, SIGXFSZ
_INCOMPLETE = ("did not receive expected object", "unresolved delta", "cannot read existing")


class ResultLimits(Value):
    """How much may come back."""

    pack_bytes: int = 1 << 30
    inflated_bytes: int = 1 << 30
    objects: int = 500_000
    added_paths: int = 50_000
    timeout_s: float = 600.0

    @classmethod
    def of(cls, limits: Limits) -> "ResultLimits":
        """From the limits of a sandbox. The agent's own commits may hold as much again."""
        size = limits.result_max_mib << 20
        return cls(
            pack_bytes=2 * size,
            inflated_bytes=2 * size,
            objects=max(10_000, 10 * limits.result_max_paths),
            added_paths=limits.result_max_paths,
        )


class Result(Value):
    """A result that was taken in."""

    commit: Oid
    tree: Oid
    agent_commits: tuple[AgentCommit, ...] = ()
    pack_bytes: int = 0


class Quarantine:
    """The store of one sandbox's results, ``result.git``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._packs = folder / "objects" / "pack"
        self._fresh: frozenset[str] = frozenset()

    @contextmanager
    def reading(self) -> Iterator[ResultReader]:
        """A reader for as long as the block lasts."""
        with ExitStack() as stack:
            yield ResultReader(self.folder, stack)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """What is accepted inside takes the place of the former result when the block ends well.

        Until then both are here, so the block must end with a record that names the new one: a
        process that is killed before leaves the former record with all that it names.
        """
        before = self._present()
        try:
            yield
        except BaseException:
            self._drop(self._fresh - before)
            raise
        if self._fresh:
            self._drop(self._present() - self._fresh)

    def _present(self) -> frozenset[str]:
        return frozenset(path.name for path in self._packs.glob("*"))

    def _drop(self, names: frozenset[str]) -> None:
        for name in names:
            (self._packs / name).unlink(missing_ok=True)

    def accept(
        self, stream: BinaryIO, snapshot: Snapshot, limits: ResultLimits | None = None
    ) -> Result:
        """Take in what the script `collect` wrote, made from `snapshot` in the guest.

        Raises GuestProblem ``result_not_announced``; ReviewRefused ``result_refused_malformed``,
        ``result_refused_incomplete``, ``result_refused_too_large``, ``result_refused_base``;
        HostProblem ``snapshot_missing``, ``host_disk_full``. After any of them the store is as it
        was before. Results that were taken in earlier stay, see :meth:`replacing`.
        """
        limits = limits or ResultLimits()
        commit, tree = _announced(stream)
        if not snapshot.git_dir.is_dir():
            raise HostProblem(
                "snapshot_missing",
                f"the snapshot that the result builds on is gone: {snapshot.git_dir}",
                hint="the guest's disk still has the work: vmsandbox ssh",
            )
        shallow = snapshot.git_dir / "shallow"
        known = shallow.read_text("ascii").split() if shallow.exists() else []
        objects = snapshot.git_dir / "objects"
        with space_below(self.folder):
            git = prepare(self.folder, snapshot.object_format, [objects], known)
            with self._incoming() as folder:
                incoming = _Incoming(git, folder, snapshot, limits)
                pack_bytes = incoming.receive(stream)
                result = incoming.judge(commit, tree).model_copy(update={"pack_bytes": pack_bytes})
                incoming.add_base(result.tree)
                self._install(folder / "pack")
        return result

    @contextmanager
    def _incoming(self) -> Iterator[Path]:
        """A folder for what arrives; those of processes that were killed are gone."""
        for stale in self.folder.glob(f"{_INCOMING}*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_INCOMING, dir=self.folder) as folder:
            yield Path(folder)

    def _install(self, incoming: Path) -> None:
        """Move the packs in, each index after its pack."""
        packs = sorted(incoming.iterdir(), key=lambda path: path.suffix == ".idx")
        self._fresh = frozenset(path.name for path in packs)
        for path in packs:
            path.replace(self._packs / path.name)


def collect_result(
    quarantine: Quarantine,
    snapshot: Snapshot,
    open_collect: Callable[[bool], AbstractContextManager[BinaryIO]],
    limits: ResultLimits | None = None,
) -> Result:
    """Collect, and once more without the agent's own commits if those are malformed.

    `open_collect` runs :func:`collect_command` with or without them and gives its stdout.
    """
    try:
        with open_collect(True) as stream:
            return quarantine.accept(stream, snapshot, limits)
    except ReviewRefused:
        with open_collect(False) as stream:
            return quarantine.accept(stream, snapshot, limits)


def _announced(stream: BinaryIO) -> tuple[str, str]:
    line = stream.readline(_MAX_HEADER_BYTES)
    match = _HEADER.fullmatch(line)
    if match is None:
        shown = printable(line, newlines=False) or "nothing"
        raise GuestProblem(
            "result_not_announced",
            f"the guest did not collect a result, it said {shown!r}",
            hint="vmsandbox ssh    (the work is still there)",
        )
    return match[1].decode("ascii"), match[2].decode("ascii")


class _Incoming:
    """Objects on their way in: written to `folder`, reading the base's as well."""

    def __init__(self, git: Git, folder: Path, snapshot: Snapshot, limits: ResultLimits) -> None:
        self.folder = folder
        self.snapshot = snapshot
        self.limits = limits
        self.base = Git(git_dir=snapshot.git_dir)
        (folder / "pack").mkdir()
        self.git = bounded(
            borrowing(git, folder, [snapshot.git_dir / "objects"]),
            file_bytes=limits.pack_bytes + limits.inflated_bytes + snapshot.content_bytes,
            timeout_s=limits.timeout_s,
        )

    # --- bytes become objects ---------------------------------------------------------------------

    def receive(self, stream: BinaryIO) -> int:
        """Index the pack; returns how many bytes came."""
        head = self._pack_head(stream)
        arguments = ("index-pack", f"--strict={_LENIENT}", "--fix-thin", "--stdin")
        size = f"--max-input-size={self.limits.pack_bytes}"
        with self.git.process(*arguments, size) as process:
            received = _feed(process, head, stream)
            process.stdout.read()
            done = process.wait()
        if process.timed_out:
            raise _too_large(f"it was not here and unpacked within {self.limits.timeout_s:g} s")
        if says_full(done.err):  # our own disk: no fault of the guest's
            raise GitFailed(arguments, done.code, done.err)
        if done.code:
            raise refusal(done)
        self._check_inflated()
        return received

    def _pack_head(self, stream: BinaryIO) -> bytes:
        """The first twelve bytes: a signature, a version, and the number of objects."""
        head = _read_exactly(stream, 12)
        if len(head) < 12 or not head.startswith(b"PACK"):
            raise _malformed("what the guest sent is not a pack")
        count = int.from_bytes(head[8:], "big")
        if count > self.limits.objects:
            raise _too_large(f"{count} objects, more than {self.limits.objects}")
        return head

    def _check_inflated(self) -> None:
        """What the guest sent, inflated; objects of the base that complete the pack not counted."""
        (index,) = (self.folder / "pack").glob("*.idx")
        listed = self.git.run(
            "show-index",
            f"--object-format={self.snapshot.object_format}",
            stdin=index.read_bytes(),
        )
        oids = [line.split()[1] for line in listed.decode("ascii").splitlines()]
        known = sizes(self.base, oids)
        total = sum(sizes(self.git, (oid for oid in oids if oid not in known)).values())
        if total > self.limits.inflated_bytes:
            raise _too_large(f"{total} bytes, more than {self.limits.inflated_bytes}")

    # --- objects become a result ------------------------------------------------------------------

    def judge(self, commit: str, tree: str) -> Result:
        """Check that the announced commit is there, is what was said, and stands on the base."""
        done = self.git.attempt("cat-file", "commit", commit)
        if done.code or commit != self._name_of(done.out):  # git follows tags and short names
            raise _malformed("the announced commit is not among the objects")
        first, *others = parents_of(done.out) or [""]
        if not done.out.startswith(f"tree {tree}\n".encode()):
            raise _malformed("the announced tree is not the commit's")
        if first != self.snapshot.commit or len(others) > 1:
            raise _wrong_base()
        self._check_paths(tree)
        return Result(commit=commit, tree=tree, agent_commits=self._agent_commits(others))

    def _name_of(self, commit: bytes) -> str:
        whole = b"commit %d\0" % len(commit) + commit
        kind = self.snapshot.object_format
        return hashlib.new(kind, whole, usedforsecurity=False).hexdigest()

    def _check_paths(self, tree: str) -> None:
        """Count before anything recurses: trees that repeat themselves grow exponentially.

        Folders count by their names alone, but those are what grows with the square of the depth,
        here as in whatever reads the result.
        """
        most = self.snapshot.files + self.limits.added_paths
        left = max(most, _FEW_PATHS) * _LONG_PATH_BYTES
        files = 0
        with self.git.process("ls-tree", "-r", "-t", "-z", "--full-tree", tree) as process:
            for path, mode, _ in tree_entries(_refusing(records(process))):
                files += not stat.S_ISDIR(mode)
                left -= len(path)
                if files > most:
                    raise _too_large(f"more than {self.limits.added_paths} paths added")
                if left < 0:
                    raise _too_large("the names of its files and folders are too long in sum")

    def _agent_commits(self, heads: Sequence[str]) -> tuple[AgentCommit, ...]:
        if not heads:
            return ()
        base = self.snapshot.commit
        if self.git.attempt("merge-base", "--is-ancestor", base, heads[0]).code:
            raise _wrong_base()
        answer = self.git.run(
            "rev-list", f"--max-count={_MAX_AGENT_COMMITS}", "--format=%s", heads[0], f"^{base}"
        )
        lines = answer.decode("utf-8", "replace").split("\n")
        return tuple(
            AgentCommit(oid=line.removeprefix("commit "), subject=subject)
            for line, subject in zip(lines[::2], lines[1::2], strict=False)
        )

    # --- what a review needs of the base ----------------------------------------------------------

    def add_base(self, tree: str) -> None:
        """Copy the base's commit, its trees, and the blobs of paths that differ."""
        wanted = [self.snapshot.commit, *self._trees(tree), *self._blobs(tree)]
        lines = "".join(f"{oid}\n" for oid in sizes(self.base, wanted))
        prefix = str(self.folder / "pack" / "pack")
        self.git.run("pack-objects", "--quiet", "--window=0", prefix, stdin=lines.encode())

    def _trees(self, tree: str) -> list[str]:
        wanted = ("--objects", "--filter=blob:none", "--no-object-names")
        answer = self.git.run("rev-list", *wanted, self.snapshot.tree, tree)
        return answer.decode("ascii").split()

    def _blobs(self, tree: str) -> Iterator[str]:
        plain = ("-r", "-z", "--raw", "--no-renames", "--no-abbrev")
        answer = self.git.run("diff-tree", *plain, self.snapshot.tree, tree)
        for one in raw_differences(answer)[0]:
            for oid, mode in ((one.old_oid, one.old_mode), (one.new_oid, one.new_mode)):
                if oid and mode != GITLINK:
                    yield oid


def _feed(process: Process, head: bytes, stream: BinaryIO) -> int:
    """Copy the stream into a process until it ends, or the process does."""
    received, chunk = 0, head
    try:
        while chunk:
            process.stdin.write(chunk)
            received += len(chunk)
            chunk = stream.read(_CHUNK)
        process.stdin.close()
    except BrokenPipeError:
        pass  # why it ended is asked by the caller
    return received


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    found = b""
    while len(found) < size and (chunk := stream.read(size - len(found))):
        found += chunk
    return found


def _refusing(names: Iterator[bytes]) -> Iterator[bytes]:
    """A listing that git cannot make is a tree that nobody wants."""
    try:
        yield from names
    except GitFailed as error:
        raise _malformed(error.complaint) from error


# --- refusals -------------------------------------------------------------------------------------


def refusal(done: Completed) -> ReviewRefused:
    """What it means that `git index-pack` gave up."""
    complaint = "; ".join(done.err.split("\n")[:2])
    if done.code in _TOO_LARGE_SIGNALS or any(word in done.err.lower() for word in _TOO_LARGE):
        return _too_large(complaint or "memory, time or disk for unpacking it ran out")
    if any(word in done.err for word in _INCOMPLETE):
        return _refused("incomplete", f"objects are missing: {complaint}")
    return _malformed(complaint)


def _malformed(why: str) -> ReviewRefused:
    return _refused("malformed", f"it is malformed: {why}")


def _too_large(why: str) -> ReviewRefused:
    return _refused("too_large", f"it is too large: {why}")


def _wrong_base() -> ReviewRefused:
    return _refused("base", "it does not stand on the snapshot that the guest was given")


def _refused(kind: str, why: str) -> ReviewRefused:
    return ReviewRefused(
        f"result_refused_{kind}",
        f"the guest's result is refused: {why}",
        hint="vmsandbox ssh    (have the task put it right, then collect again)",
    )
