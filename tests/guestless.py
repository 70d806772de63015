"""A guest without a machine: the guest's own scripts, run on this host in a temporary folder.

`host` is the worktree that goes in, `inside` the one that an agent works on.
"""

import io
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tests.repositories import git
from vmsandbox import worktree
from vmsandbox.model import Change, Snapshot
from vmsandbox.worktree import Quarantine, Result, ResultLimits, UpdateReport

SCRIPTS = Path(__file__).parents[1] / "vmsandbox" / "guest_scripts"


class Guestless:
    """One worktree on its way in and out."""

    def __init__(
        self, host: Path, folder: Path, *, include: Sequence[str] = (), history: str = "full"
    ) -> None:
        self.host = host
        self.folder = folder
        self.stores = folder / "stores"
        self.inside = folder / "guest" / host.name
        self.state = folder / "guest" / "state"
        self.include = tuple(include)
        self.history = history
        self.quarantine = Quarantine(folder / "result.git")
        self.snapshot: Snapshot
        self.result: Result

    def take(self) -> Snapshot:
        return worktree.snapshot(self.host, self.stores, include=self.include, history=self.history)

    def send(self) -> Snapshot:
        """Snapshot and receive."""
        self.snapshot = self.take()
        command = worktree.receive_command(
            self.inside,
            self.snapshot,
            scripts=SCRIPTS,
            state=self.state,
            owner="root",
            gitconfig=self.folder / "guest" / "gitconfig",
        )
        run(command, b"".join(worktree.base_stream(self.snapshot)))
        return self.snapshot

    def update(self) -> UpdateReport:
        """Send what the host changed since, and hold back what both sides changed."""
        previous, fresh = self.snapshot, self.take()
        command = worktree.receive_command(
            self.inside, fresh, previous, scripts=SCRIPTS, state=self.state, owner="root"
        )
        answer = run(command, b"".join(worktree.base_stream(fresh, previous)))
        report = worktree.parse_update(answer)
        self.snapshot = worktree.hold_back(fresh, previous, report.conflicts)
        return report

    def collected(self, *, agent_commits: bool = True) -> bytes:
        """What the script `collect` writes."""
        return run(
            worktree.collect_command(
                self.inside,
                self.snapshot,
                include=self.include,
                agent_commits=agent_commits,
                scripts=SCRIPTS,
                state=self.state,
                owner="root",
            )
        )

    @contextmanager
    def open_collect(self, agent_commits: bool) -> Iterator[BinaryIO]:
        yield io.BytesIO(self.collected(agent_commits=agent_commits))

    def collect(self, limits: ResultLimits | None = None) -> Result:
        self.result = worktree.collect_result(
            self.quarantine, self.snapshot, self.open_collect, limits
        )
        return self.result

    def changes(self) -> dict[bytes, Change]:
        """Collect, and say what differs from the base."""
        result = self.collect()
        with self.quarantine.reading() as results:
            return {c.path: c for c in results.changes(self.snapshot.tree, result.tree)}

    def content(self, oid: str | None) -> bytes:
        assert oid
        with self.quarantine.reading() as results, results.open_blob(oid) as blob:
            return blob.read()

    def git(self, *arguments: str | bytes) -> str:
        """The agent's git."""
        return git(self.inside, *arguments).decode().strip()


def run(argv: Sequence[str], stdin: bytes = b"") -> bytes:
    done = subprocess.run(argv, input=stdin, capture_output=True)
    assert done.returncode == 0, f"{argv}: {done.returncode}: {done.stderr.decode()}"
    return done.stdout


def files(top: Path) -> dict[bytes, tuple[str, bytes]]:
    """Every file and link below `top` outside `.git`: kind and content."""
    found = {}
    for path in sorted(top.rglob("*")):
        name = path.relative_to(top)
        if ".git" in name.parts:
            continue
        if path.is_symlink():
            found[bytes(name)] = ("link", bytes(path.readlink()))
        elif path.is_file():
            kind = "executable" if path.stat().st_mode & 0o100 else "file"
            found[bytes(name)] = (kind, path.read_bytes())
    return found
