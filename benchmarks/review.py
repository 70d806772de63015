"""Measures deciding, in process: review of 20 changed files, apply of 10, drop of 10; and with
``--collect`` what it costs to collect a one-file change from a small and from a large tree.

    python -m benchmarks.review [--rounds 30] [--collect] [--sizes 200 20000] [--out FILE]

The results are made by the guest's own scripts on this host, so deciding is measured without a
guest. A round reviews all (as text, as data, with differences), applies ten files and drops the
rest. ``--collect`` boots a guest for each size; CPU seconds are those of QEMU and of this side.
Emits data, asserts nothing.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.series import Series, conditions, options
from benchmarks.sync import make_tree
from tests.guestless import Guestless
from tests.repositories import Repository
from vmsandbox import review
from vmsandbox.cli import review_text
from vmsandbox.guest import Guest
from vmsandbox.model import Endpoint, Limits, SandboxRecord, Task
from vmsandbox.review import Selection
from vmsandbox.sandbox import (
    Manager,
    Quiet,
    Request,
    Rooms,
    create_sandbox,
    delete_sandbox,
    transfer,
)
from vmsandbox.sandbox.access import open_guest
from vmsandbox.store import SandboxFolder, write_value
from vmsandbox.worktree import Quarantine

_FILES = 200
_CHANGED = 20
_APPLIED = 10
_IMAGE = "sha256:" + "0" * 64


class Decided:
    """A worktree of 200 files, and a result that changed twenty of them."""

    def __init__(self, root: Path) -> None:
        self.names = [f"src/file-{number:03d}.py" for number in range(_FILES)]
        files: dict[str, str | bytes] = {name: _text(name, "before") for name in self.names}
        self.host = Repository.create(root / "project", files)
        self.folder = SandboxFolder(root / "sandbox")
        self.folder.path.mkdir()
        self.task = Task(command=("make",), worktree=self.host.path)
        self.record = _record(self.folder, self.task)
        write_value(self.folder.record, self.record)
        guest = Guestless(self.host.path, root)
        guest.quarantine = Quarantine(self.folder.result_git)
        guest.send()
        for name in self.names[:_CHANGED]:
            (guest.inside / name).write_text(_text(name, "after"))
        guest.collect()
        self.guest = guest

    def put_up(self) -> None:
        """As it was collected: nothing decided, nothing written."""
        self.folder.result_record.unlink(missing_ok=True)
        for name in self.names[:_CHANGED]:
            self.host.write(name, _text(name, "before"))
        base, result = self.guest.snapshot, self.guest.result
        with self.guest.quarantine.reading() as store:
            change_set = review.inspect_result(
                store,
                base=(base.commit, base.tree),
                result=(result.commit, result.tree),
                task_digest=self.task.digest(),
                image_digest=_IMAGE,
                limits=self.record.limits,
            )
        review.present(self.folder, change_set)

    def round(self, series: Series) -> None:
        """Review, apply ten, drop the rest."""
        self.put_up()
        subject = f"{_CHANGED} changed files"
        with series.timed(subject, "review_s"):
            shown = review.show(self.folder, live=False)
            str(review_text.whole(shown))
        with series.timed(subject, "review_data_s"):
            review_text.as_data(review.show(self.folder, live=False))
        change_set = shown.change_set
        assert change_set
        with series.timed(subject, "differences_s"), self.guest.quarantine.reading() as results:
            results.diff(change_set.base_tree, change_set.result_tree, (), 256 * 1024)
        chosen = Selection(paths=tuple(name.encode() for name in self.names[:_APPLIED]))
        with series.timed(f"{_APPLIED} files", "apply_s"), self.guest.quarantine.reading() as store:
            review.apply(
                self.folder,
                store,
                self.host.path,
                is_live=lambda: False,
                selection=chosen,
                yes=True,
            )
        with series.timed(f"{_CHANGED - _APPLIED} files", "drop_s"):
            review.drop(self.folder, is_live=lambda: False)


def _text(name: str, state: str) -> str:
    return "".join(f"{name} line {number}\n" for number in range(60)) + f"{state}\n"


def _record(folder: SandboxFolder, task: Task) -> SandboxRecord:
    return SandboxRecord(
        id=folder.id,
        name=folder.id,
        task=task,
        limits=Limits(),
        image_name="none",
        image_digest=_IMAGE,
        libvirt_uri="none",
        domain_uuid="none",
        endpoint=Endpoint(address="127.0.0.2", port=2222),
    )


# --- collecting -----------------------------------------------------------------------------------


def collect_from(rooms: Rooms, series: Series, tree: Path, files: int, rounds: int) -> None:
    """One guest with a tree of so many files: change one, collect; again and again."""
    make_tree(tree, files)
    # What was unpacked is flushed in the background; waited for, as any real task takes longer.
    command = ("sh", "-c", "echo changed > d000/f00000.txt; sync; sleep 2")
    request = Request(command=command, worktree=tree, keep=True, overrides={"memory": "2G"})
    folder = create_sandbox(rooms, request)
    try:
        with Manager.of(rooms, folder, Quiet()) as manager:
            manager.carry_out()
            record = folder.read_record()
            with open_guest(rooms, folder, record) as guest:
                series.add(f"{files} files", "first_collect_s", record.timings["collect"])
                pid = rooms.hypervisor.pid(record.domain_uuid)
                for number in range(rounds):
                    _change_one(guest, tree, number)
                    before = _cpu_s(pid)
                    with series.timed(f"{files} files", "collect_s"):
                        transfer.collect(guest, folder, record)
                    series.add(f"{files} files", "collect_cpu_s", _cpu_s(pid) - before)
    finally:
        delete_sandbox(rooms, folder, force=True)


def _change_one(guest: Guest, tree: Path, number: int) -> None:
    guest.run(["sh", "-c", f"echo changed {number} > {tree}/d000/f00000.txt"])


def _cpu_s(pid: int | None) -> float:
    """CPU seconds of QEMU, of this process and of the programs that it ran; a busy host hardly
    changes them."""
    own, qemu = psutil.Process().cpu_times(), psutil.Process(pid).cpu_times()
    ours = own.user + own.system + own.children_user + own.children_system
    return float(ours + qemu.user + qemu.system)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, rounds=30, collections=7)
    parser.add_argument("--collect", action="store_true", help="with guests, and only that")
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 20_000])
    asked = parser.parse_args(arguments)
    with Rooms.open() as rooms, tempfile.TemporaryDirectory(prefix="vms-review-") as scratch:
        facts = conditions(rooms, asked.image)
        series = Series("review", facts, asked.out)
        if asked.collect:
            for size in asked.sizes:
                collect_from(rooms, series, Path(scratch, f"tree{size}"), size, asked.collections)
            small, large = (f"{size} files" for size in (asked.sizes[0], asked.sizes[-1]))
            for figure in ("collect_s", "collect_cpu_s"):
                ratio = series.median(large, figure) / series.median(small, figure)
                series.add(f"{large} beside {small}", f"{figure} ratio", ratio)
        else:
            decided = Decided(Path(scratch))
            for _ in range(asked.rounds):
                decided.round(series)
        series.summary()


if __name__ == "__main__":
    main()
