"""Results as a guest could hand them back, made object by object with git's plumbing, and the host
folder they are meant for.
"""

import io
import os
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from tests.repositories import git
from vmsandbox import review
from vmsandbox.errors import ReviewRefused
from vmsandbox.model import ChangeSet, Limits, ResultRecord, SandboxRecord, Task
from vmsandbox.review import Applied, ApplyConflict, Selection
from vmsandbox.store import SandboxFolder, write_value
from vmsandbox.worktree import Quarantine, ResultReader

IMAGE = "sha256:" + "1" * 64


class Exe(NamedTuple):
    """An executable file."""

    content: bytes


class Link(NamedTuple):
    """A symbolic link."""

    target: bytes


Node = bytes | Exe | Link
Files = Mapping[bytes, Node]


BASE: Files = {
    b"README": b"hello\n",
    b"src/a.py": b"a = 1\n",
    b"src/b.py": b"b = 1\n",
    b"src/deep/c.py": b"c = 1\n",
    b"run.sh": Exe(b"#!/bin/sh\n"),
    b"link": Link(b"README"),
    b"old/gone.txt": b"going\n" * 10,
    b"move/me.txt": b"the same before and after\n" * 20,
}
RESULT: Files = {
    b"README": b"hello\nworld\n",
    b"src/a.py": b"a = 2\n",
    b"src/b.py": b"b = 1\n",
    b"src/deep/c.py": Exe(b"c = 1\n"),
    b"src/new.py": b"new = True\n",
    b"run.sh": Exe(b"#!/bin/sh\nexit 0\n"),
    b"tool": Exe(b"#!/bin/sh\n"),
    b"link": Link(b"src/a.py"),
    b"moved/me.txt": b"the same before and after\n" * 20,
}
"""What most tests start from, and a result with every kind of change in it."""


def mode_of(node: Node) -> int:
    if isinstance(node, Link):
        return 0o120000
    return 0o100755 if isinstance(node, Exe) else 0o100644


def bytes_of(node: Node) -> bytes:
    return node if isinstance(node, bytes) else node[0]


class Made(NamedTuple):
    """What git made of some files: a tree, a commit of it, and every file of their objects."""

    tree: str
    commit: str
    objects: Mapping[Path, bytes]


@cache
def made(object_format: str, files: tuple[tuple[bytes, Node], ...]) -> Made:
    """Files in an otherwise empty store, in one go through git's fast import; once per process."""
    stream = io.BytesIO()
    stream.write(b"commit refs/heads/made\ncommitter A <a@b> 1 +0000\ndata 0\n")
    for path, node in files:
        data = bytes_of(node)
        stream.write(b"M %o inline %s\ndata %d\n" % (mode_of(node), _quoted(path), len(data)))
        stream.write(data + b"\n")
    with TemporaryDirectory(prefix="vms-") as folder:
        store = Objects(Path(folder) / "store", object_format)
        git(store.path, "fast-import", "--quiet", "--force", stdin=stream.getvalue())
        tree = store.line("rev-parse", "refs/heads/made^{tree}")
        commit = store.line("commit-tree", "-m", "made", tree)
        kept = (file for file in (store.path / "objects").rglob("*") if file.is_file())
        return Made(tree, commit, {f.relative_to(store.path): f.read_bytes() for f in kept})


@cache
def empty_store(object_format: str) -> Mapping[Path, bytes]:
    """The files of a store that git just made."""
    with TemporaryDirectory(prefix="vms-") as folder:
        path = Path(folder)
        git(path, "init", "-q", "--bare", "--template=", f"--object-format={object_format}")
        return {f.relative_to(path): f.read_bytes() for f in path.rglob("*") if f.is_file()}


class Objects:
    """A quarantine store, filled by hand."""

    def __init__(self, path: Path, object_format: str = "sha1") -> None:
        self.path = path
        self._format = object_format
        self._commits: dict[str, str] = {}
        for folder in ("objects/info", "objects/pack", "refs/heads", "refs/tags"):
            (path / folder).mkdir(parents=True)
        for name, data in empty_store(object_format).items():
            (path / name).write_bytes(data)

    def blob(self, content: bytes) -> str:
        return self.line("hash-object", "-w", "--stdin", stdin=content)

    def mktree(self, lines: Sequence[tuple[int, str, bytes]]) -> str:
        """A tree of exactly these (mode, oid, name), whatever they are."""
        listing = b"".join(
            b"%o %s %s\t%s\0" % (mode, _kind(mode), oid.encode(), name) for mode, oid, name in lines
        )
        return self.line("mktree", "-z", "--missing", stdin=listing)

    def raw_tree(self, entries: Sequence[tuple[bytes, bytes, str]]) -> str:
        """A tree object byte by byte, in the given order: (mode, name, oid)."""
        body = b"".join(
            mode + b" " + name + b"\0" + bytes.fromhex(oid) for mode, name, oid in entries
        )
        return self.line("hash-object", "-w", "-t", "tree", "--literally", "--stdin", stdin=body)

    def tree(self, files: Files) -> str:
        """A tree that holds these files."""
        found = made(self._format, tuple(files.items()))
        for name, data in found.objects.items():
            file = self.path / name
            if not file.exists():
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(data)
                file.chmod(0o444)
        self._commits[found.tree] = found.commit
        return found.tree

    def commit(self, tree: str) -> str:
        return self._commits.get(tree) or self.line("commit-tree", "-m", "made", tree)

    def replace(self, oid: str, content: bytes) -> None:
        """Put other content where an object lies, as a failing disk or a meddler might."""
        for pack in (self.path / "objects/pack").glob("*.pack"):
            moved = self.path / pack.name
            pack.rename(moved)
            git(self.path, "unpack-objects", "-q", stdin=moved.read_bytes())
        loose = self.path / "objects" / oid[:2] / oid[2:]
        loose.chmod(0o644)
        loose.write_bytes(zlib.compress(b"blob %d\0" % len(content) + content))

    def line(self, *arguments: str, stdin: bytes = b"") -> str:
        return git(self.path, *arguments, stdin=stdin).decode().strip()


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
        self,
        root: Path,
        base: Files,
        result: Files,
        *,
        object_format: str = "sha1",
        sandbox: Path | None = None,
    ) -> None:
        self.target = root / "worktree"
        fill(self.target, base)
        self.folder = SandboxFolder(sandbox or root / "sandbox")
        self.folder.path.mkdir(parents=True)
        self.objects = Objects(self.folder.result_git, object_format)
        self.object_format = object_format
        self.live = False
        self.base_tree = self.objects.tree(base)
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
        return self.collect_tree(self.objects.tree(result))

    def collect_tree(self, tree: str, limits: Limits | None = None) -> ChangeSet:
        with self.reading() as results:
            self.change_set = review.inspect_result(
                results,
                base=(self.objects.commit(self.base_tree), self.base_tree),
                result=(self.objects.commit(tree), tree),
                task_digest=self.task.digest(),
                image_digest=IMAGE,
                limits=limits or Limits(),
                object_format="sha256" if self.object_format == "sha256" else "sha1",
            )
        review.present(self.folder, self.change_set)
        return self.change_set

    def reading(self) -> AbstractContextManager[ResultReader]:
        return Quarantine(self.folder.result_git).reading()

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
        with self.reading() as results:
            return review.apply(
                self.folder,
                results,
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


Make = Callable[..., Case]
"""Makes a case, by default from BASE and RESULT."""


# --- how a call ends ------------------------------------------------------------------------------


def refused(code: str, call: Callable[[], object]) -> None:
    """The call must be refused with this code, and say how to go on."""
    with pytest.raises(ReviewRefused) as caught:
        call()
    assert caught.value.code == code
    assert caught.value.hint


def conflict(call: Callable[[], object]) -> dict[bytes, str]:
    """The conflicts that a call is refused for: path → kind."""
    with pytest.raises(ApplyConflict) as caught:
        call()
    assert caught.value.code == "apply_conflict"
    return {item.path: item.kind for item in caught.value.conflicts}
