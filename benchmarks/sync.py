"""Measures moving a worktree: our snapshot and pack beside ``rsync -a`` over the same guest's SSH.

    python -m benchmarks.sync [--files 20000] [--rounds 3] [--out FILE]

Each round uses a fresh guest and a fresh state of the caches that are ours: cold send, an edit of
one file, sending again, collecting a change of one file. rsync gets the same tree in another folder
of the same guest. Emits data, asserts nothing.
"""

import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.series import Series, conditions, options
from vmsandbox import worktree
from vmsandbox.guest import Guest
from vmsandbox.sandbox import Manager, Request, Rooms, create_sandbox, delete_sandbox, transfer
from vmsandbox.sandbox.access import open_guest
from vmsandbox.sandbox.listening import Quiet
from vmsandbox.store import SandboxFolder


def make_tree(folder: Path, files: int) -> None:
    """A committed repository of small text files, about 2 KiB each, a hundred to a folder."""
    words = random.Random(1)
    for number in range(files):
        path = folder / f"d{number // 100:03d}" / f"f{number:05d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(str(words.randrange(10**6)) for _ in range(290)) + "\n")
    for argv in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "tree"]):
        subprocess.run(["git", "-C", str(folder), *argv], check=True)


def rsync(folder: SandboxFolder, name: str, tree: Path) -> None:
    """``rsync -a`` with the sandbox's own ssh configuration, .git left out."""
    subprocess.run(
        [
            "rsync",
            "-a",
            "--delete",
            "--exclude=.git",
            "-e",
            f"ssh -F {folder.ssh_config}",
            f"{tree}/",
            f"{name}:/home/agent/rsynced/",
        ],
        check=True,
    )


def one_round(rooms: Rooms, series: Series, tree: Path, number: int) -> None:
    """One guest: everything once, rsync first in odd rounds and second in even ones."""
    request = Request(command=("true",), worktree=tree, keep=True, overrides={"memory": "2G"})
    folder = create_sandbox(rooms, request)
    try:
        with Manager.of(rooms, folder, Quiet()) as manager:
            manager.ensure_guest()
            record = folder.read_record()
            with open_guest(rooms, folder, record) as guest:
                guest.run(["true"])
                steps: list[Callable[[], None]] = [
                    lambda: rsync_steps(series, folder, record.name, tree),
                    lambda: our_steps(rooms, series, folder, guest, tree),
                ]
                for step in steps if number % 2 else reversed(steps):
                    step()
    finally:
        delete_sandbox(rooms, folder, force=True)


def rsync_steps(series: Series, folder: SandboxFolder, name: str, tree: Path) -> None:
    """Cold, and again after an edit of one file."""
    with series.timed("rsync -a", "cold_s"):
        rsync(folder, name, tree)
    (tree / "d000/f00000.txt").write_text(f"edited for rsync {random.random()}\n")
    with series.timed("rsync -a", "again_s"):
        rsync(folder, name, tree)


def our_steps(
    rooms: Rooms, series: Series, folder: SandboxFolder, guest: Guest, tree: Path
) -> None:
    """Snapshot and send, again after an edit, then collect a change of one file."""
    stores = rooms.store.worktrees
    shutil.rmtree(worktree.store_of(stores, tree), ignore_errors=True)
    task = folder.read_record().task
    with series.timed("vmsandbox", "cold_s"):
        with series.timed("vmsandbox", "cold_snapshot_s"):
            taken = worktree.snapshot(tree, stores)
        transfer.send(guest, task, taken)
    rooms.store.update(
        folder, lambda r: r.model_copy(update={"snapshot": taken, "base_in_guest": True})
    )
    (tree / "d000/f00000.txt").write_text(f"edited for us {random.random()}\n")
    with series.timed("vmsandbox", "again_s"):
        transfer.sync_worktree(rooms, folder, guest=guest)
    guest.run(["sh", "-c", f"echo changed > {tree}/d001/f00100.txt"])
    with series.timed("vmsandbox", "collect_s"):
        transfer.collect(guest, folder, folder.read_record())


def main() -> None:
    asked = options(__doc__, files=20_000, rounds=3).parse_args()
    with Rooms.open() as rooms, tempfile.TemporaryDirectory(prefix="vms-sync-") as scratch:
        tree = Path(scratch, "tree")
        make_tree(tree, asked.files)
        facts = conditions(rooms, asked.image) | {"files": asked.files}
        series = Series("sync", facts, asked.out)
        for number in range(asked.rounds):
            one_round(rooms, series, tree, number)
        series.summary()


if __name__ == "__main__":
    main()
