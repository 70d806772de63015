"""Results as a guest could hand them back, made object by object with git's plumbing, and the host
folder they are meant for.
"""

import contextlib
import io
import os
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tests.repositories import git
from vmsandbox import review
from vmsandbox.model import (
    Change,
    ChangeKind,
    ChangeSet,
    Limits,
    ResultRecord,
    SandboxRecord,
    Task,
    TreeEntry,
)
from vmsandbox.review import Applied, Selection
from vmsandbox.store import SandboxFolder, write_value

IMAGE = "sha256:" + "1" * 64


class Exe(NamedTuple):
    """An executable file."""

    content: bytes


class Link(NamedTuple):
    """A symbolic link."""

    target: bytes


Node = bytes | Exe | Link
Files = Mapping[bytes, Node]


def mode_of(node: Node) -> int:
    if isinstance(node, Link):
        return 0o120000
    return 0o100755 if isinstance(node, Exe) else 0o100644


def bytes_of(node: Node) -> bytes:
    return node if isinstance(node, bytes) else node[0]


class GitResults:
    """A bare repository read as a review reads it: plumbing on objects only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader: subprocess.Popen[bytes] | None = None

    @classmethod
    def create(cls, path: Path, object_format: str = "sha1") -> "GitResults":
        path.mkdir()
        git(path, "init", "--quiet", "--bare", f"--object-format={object_format}")
        return cls(path)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.communicate()
            self._reader = None

    # --- making objects

    def blob(self, content: bytes) -> str:
        return self._line("hash-object", "-w", "--stdin", stdin=content)

    def mktree(self, lines: Sequence[tuple[int, str, bytes]]) -> str:
        """A tree of exactly these (mode, oid, name), whatever they are."""
        listing = b"".join(
            b"%o %s %s\t%s\0" % (mode, _kind(mode), oid.encode(), name) for mode, oid, name in lines
        )
        return self._line("mktree", "-z", "--missing", stdin=listing)

    def raw_tree(self, entries: Sequence[tuple[bytes, bytes, str]]) -> str:
        """A tree object byte by byte, in the given order: (mode, name, oid)."""
        body = b"".join(
            mode + b" " + name + b"\0" + bytes.fromhex(oid) for mode, name, oid in entries
        )
        return self._line("hash-object", "-w", "-t", "tree", "--literally", "--stdin", stdin=body)

    def tree(self, files: Files) -> str:
        """A tree that holds these files, in one go through git's fast import."""
        stream = io.BytesIO()
        stream.write(b"commit refs/heads/made\ncommitter A <a@b> 1 +0000\ndata 0\n")
        for path, node in files.items():
            data = bytes_of(node)
            stream.write(b"M %o inline %s\ndata %d\n" % (mode_of(node), _quoted(path), len(data)))
            stream.write(data + b"\n")
        git(self.path, "fast-import", "--quiet", "--force", stdin=stream.getvalue())
        return self._line("rev-parse", "refs/heads/made^{tree}")

    def commit(self, tree: str) -> str:
        return self._line("commit-tree", "-m", "made", tree)

    def _line(self, *arguments: str, stdin: bytes = b"") -> str:
        return git(self.path, *arguments, stdin=stdin).decode().strip()

    # --- reading them, as vmsandbox.review.ResultStore

    def entries(self, tree: str) -> Iterator[TreeEntry]:
        for line in git(self.path, "ls-tree", "-r", "-t", "-z", tree).split(b"\0")[:-1]:
            facts, _, path = line.partition(b"\t")
            mode, _, oid = facts.split(b" ")
            yield TreeEntry(path, int(mode, 8), oid.decode())

    def changes(self, base: str, result: str) -> tuple[Change, ...]:
        options = ("-r", "-z", "-M", "--no-ext-diff", "--no-textconv", base, result)
        fields = iter(git(self.path, "diff-tree", "--raw", *options).split(b"\0")[:-1])
        counts = self._line_counts(git(self.path, "diff-tree", "--numstat", *options))
        return tuple(self._change(facts, fields, counts) for facts in fields)

    def _change(
        self, facts: bytes, fields: Iterator[bytes], counts: dict[bytes, tuple[bytes, bytes]]
    ) -> Change:
        old_mode, new_mode, old_oid, new_oid, letter = facts.lstrip(b":").split(b" ")
        kind = ChangeKind(chr(letter[0]))
        old_path = next(fields) if kind is ChangeKind.RENAMED else None
        path = next(fields)
        gone = kind is ChangeKind.DELETED
        added, removed = counts[path]
        is_text = added.isdigit() and b"120000" not in (old_mode, new_mode)
        return Change(
            kind=kind,
            path=path,
            old_path=old_path,
            old_mode=int(old_mode, 8),
            new_mode=int(new_mode, 8),
            old_oid=None if kind is ChangeKind.ADDED else old_oid.decode(),
            new_oid=None if gone else new_oid.decode(),
            added=int(added) if is_text else None,
            removed=int(removed) if is_text else None,
            size_bytes=self._size((old_oid if gone else new_oid).decode()),
        )

    @staticmethod
    def _line_counts(output: bytes) -> dict[bytes, tuple[bytes, bytes]]:
        counts = {}
        fields = iter(output.split(b"\0")[:-1])
        for field in fields:
            added, removed, path = field.split(b"\t")
            if not path:  # a rename: old and new follow
                next(fields)
                path = next(fields)
            counts[path] = (added, removed)
        return counts

    def _size(self, oid: str) -> int:
        with self.open_blob(oid) as blob:
            return len(blob.read())

    @contextlib.contextmanager
    def open_blob(self, oid: str) -> Iterator[BinaryIO]:
        if self._reader is None:
            self._reader = subprocess.Popen(
                ["git", "cat-file", "--batch"],
                cwd=self.path,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._reader.stdin
        assert self._reader.stdout
        self._reader.stdin.write(oid.encode() + b"\n")
        self._reader.stdin.flush()
        header = self._reader.stdout.readline().split()
        if header[-1] == b"missing":  # a gitlink's commit is elsewhere
            yield io.BytesIO()
            return
        content = self._reader.stdout.read(int(header[2]))
        self._reader.stdout.read(1)
        yield io.BytesIO(content)

    def diff(self, base: str, result: str, paths: Sequence[bytes], max_bytes: int) -> bytes:
        literal = [b":(top,literal)" + path for path in paths]
        whole = git(self.path, "diff-tree", "-r", "-p", "-M", base, result, "--", *literal)
        return whole[:max_bytes]


def _kind(mode: int) -> bytes:
    if mode == 0o160000:
        return b"commit"
    return b"tree" if stat.S_ISDIR(mode) else b"blob"


def _quoted(path: bytes) -> bytes:
    return b'"' + b"".join(b"\\%03o" % byte for byte in path) + b'"'


# --- the folder on the host -----------------------------------------------------------------------


def fill(folder: Path, files: Files) -> None:
    """Write files into a real folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, node in files.items():
        put(folder, path, node)


def put(folder: Path, path: bytes, node: Node) -> None:
    """Write one file or link, whatever is there now."""
    where = folder / os.fsdecode(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    where.unlink(missing_ok=True)
    if isinstance(node, Link):
        where.symlink_to(os.fsdecode(node.target))
    else:
        where.write_bytes(bytes_of(node))
        where.chmod(0o755 if isinstance(node, Exe) else 0o644)


def content(folder: Path) -> dict[bytes, Node]:
    """Everything in a folder that git would know of, and nothing of .git."""
    found: dict[bytes, Node] = {}
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != ".git"]
        links = [name for name in folders if Path(base, name).is_symlink()]
        for path in (Path(base, name) for name in names + links):
            key = os.fsencode(path.relative_to(folder))
            if path.is_symlink():
                found[key] = Link(os.readlink(os.fsencode(path)))  # noqa: PTH115  as it is, byte by byte
            elif path.lstat().st_mode & 0o100:
                found[key] = Exe(path.read_bytes())
            else:
                found[key] = path.read_bytes()
    return found


class Case:
    """A host folder that holds the base, and a sandbox that handed back `result`."""

    def __init__(
        self, root: Path, base: Files, result: Files, *, object_format: str = "sha1"
    ) -> None:
        self.target = root / "worktree"
        fill(self.target, base)
        self.folder = SandboxFolder(root / "sandbox")
        self.folder.path.mkdir()
        self.results = GitResults.create(self.folder.result_git, object_format)
        self.object_format = object_format
        self.live = False
        self.base_tree = self.results.tree(base)
        self.task = Task(command=("make",), worktree=self.target)
        self.write_sandbox_record()
        self.collect(result)

    def write_sandbox_record(self) -> None:
        record = SandboxRecord.model_validate(
            {
                "id": self.folder.id,
                "name": "crafted",
                "task": self.task,
                "limits": Limits(),
                "image_name": "debian-12",
                "image_digest": IMAGE,
                "libvirt_uri": "test:///default",
                "domain_uuid": "00000000-0000-0000-0000-000000000000",
                "endpoint": {"address": "127.0.0.1", "port": 2222},
            }
        )
        write_value(self.folder.record, record)

    def collect(self, result: Files) -> ChangeSet:
        """Hand back another result."""
        return self.collect_tree(self.results.tree(result))

    def collect_tree(self, tree: str, limits: Limits | None = None) -> ChangeSet:
        self.change_set = review.inspect_result(
            self.results,
            base=(self.results.commit(self.base_tree), self.base_tree),
            result=(self.results.commit(tree), tree),
            task_digest=self.task.digest(),
            image_digest=IMAGE,
            limits=limits or Limits(),
            object_format="sha256" if self.object_format == "sha256" else "sha1",
        )
        review.present(self.folder, self.change_set)
        return self.change_set

    def apply(
        self,
        *paths: bytes,
        include: tuple[str, ...] = (),
        exclude: tuple[str, ...] = (),
        yes: bool = True,
        target: Path | None = None,
        digest: str | None = None,
    ) -> Applied:
        chosen = Selection(paths=paths, include=include, exclude=exclude)
        return review.apply(
            self.folder,
            self.results,
            target or self.target,
            is_live=lambda: self.live,
            selection=None if chosen.is_all else chosen,
            yes=yes,
            digest=digest,
        )

    def drop(self) -> ResultRecord:
        return review.drop(self.folder, is_live=lambda: self.live)

    @property
    def record(self) -> ResultRecord:
        return review.read(self.folder)[1]

    def content(self) -> dict[bytes, Node]:
        return content(self.target)
