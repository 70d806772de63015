"""Measures batches: their wall time beside as many single runs, and the memory of the one process.

    python -m benchmarks.batch [--tasks 8] [--jobs 2] [--seconds 0] [--out FILE]

The tasks are short, their template is warm. `batch wall_s` is one batch, `single wall_s` the same
tasks as `run`s one after another. `manager rss_mib` is the largest resident memory of the batch's
process while so many sandboxes of it ran at once. `host reserve_left_mib` is the least MemAvailable
that was seen, less the reserve. Emits data, asserts nothing.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.series import Series, options
from vmsandbox.deadline import Deadline
from vmsandbox.density.figures import MIB, reserve_bytes
from vmsandbox.store import SandboxFolder, state_root

_SAMPLE_S = 0.1


@contextlib.contextmanager
def borrowed_state(prefix: str) -> Iterator[Path]:
    """A state folder with the images and templates of this machine; its sandboxes are deleted."""
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        home = Path(folder)
        home.chmod(0o711)
        for shared in ("images", "templates", "cache"):
            (home / shared).symlink_to(state_root() / shared)
        (home / "project").mkdir()
        (home / "project" / "kept").write_text("1\n")
        try:
            yield home
        finally:
            started(home, "delete", "--all", "--force").communicate()


def started(home: Path, *arguments: str | Path) -> "subprocess.Popen[str]":
    """A verb in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "vmsandbox", *map(str, arguments)],
        env=os.environ | {"VMSANDBOX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def task_file(home: Path, tasks: Sequence[dict[str, object]]) -> Path:
    """A task file about the project of a borrowed state."""
    file = home / "tasks.yaml"
    defaults = {"worktree": str(home / "project")}
    file.write_text(json.dumps({"defaults": defaults, "tasks": list(tasks)}))
    return file


def running(home: Path) -> int:
    """Sandboxes whose guest is meant to run."""
    folders = map(SandboxFolder, (home / "sandboxes").glob("*"))
    states = [folder.read_record().state for folder in folders if folder.record.exists()]
    return sum(state in ("starting", "ready", "running", "collecting") for state in states)


def watched(process: "subprocess.Popen[str]", home: Path, series: Series) -> None:
    """Sample until it ends: its memory by the number of running sandboxes, the host's memory."""
    rss: dict[int, int] = {}
    available: list[int] = []
    deadline = Deadline(None)
    while process.poll() is None and not deadline.passed():
        with contextlib.suppress(psutil.NoSuchProcess):
            count, held = running(home), psutil.Process(process.pid).memory_info().rss
            rss[count] = max(rss.get(count, 0), held)
        available.append(psutil.virtual_memory().available)
        time.sleep(_SAMPLE_S)
    for count, held in sorted(rss.items()):
        series.add(f"manager of {count}", "rss_mib", held / MIB)
    reserve = reserve_bytes(psutil.virtual_memory().total)
    series.add("host", "reserve_left_mib", (min(available) - reserve) / MIB)


def measure(asked: argparse.Namespace, series: Series) -> None:
    command = f"sleep {asked.seconds}; echo done > done"
    tasks: list[dict[str, object]] = [
        {"name": f"task-{number}", "command": command} for number in range(asked.tasks)
    ]
    with borrowed_state("vms-batch-") as home:
        with series.timed("batch", "wall_s"):
            batch = started(home, "batch", "--json", "-j", str(asked.jobs), task_file(home, tasks))
            watched(batch, home, series)
        out, _ = batch.communicate()
        outcomes = [task["outcome"] for task in json.loads(out)["data"]["tasks"]]
        series.add("batch", "completed", outcomes.count("completed"))
    with borrowed_state("vms-batch-") as home, series.timed("single", "wall_s"):
        for _ in tasks:
            run = ("run", "--worktree", home / "project", "--", "sh", "-c", command)
            started(home, *run).communicate()


def main(arguments: Sequence[str] | None = None) -> None:
    """`seconds` is how long each task sleeps."""
    asked = options(__doc__, tasks=8, jobs=2, seconds=0.0).parse_args(arguments)
    series = Series.of("batch", asked, "tasks", "jobs", "seconds")
    measure(asked, series)
    series.summary()


if __name__ == "__main__":
    main()
