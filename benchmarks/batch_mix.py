"""Carries out a batch of twelve tasks of all kinds, perhaps beside a second batch, and says whether
each came to what it is while the host kept its reserve.

    python -m benchmarks.batch_mix [--second 0] [--sample 0.2] [--out FILE]

Six tasks are fine, two fail, one runs out of time, one fills its memory, one its disk, one leaves a
hostile result. Figures that should be 12: ``outcomes right`` and ``reviews right`` (changes as they
were made; of the hostile one none, and its path named). ``available_mib`` is MemAvailable, a line
for each sample; ``reserve_left_mib`` the least of them less the reserve: below 0, and admission has
failed. ``at_once`` are guests of all batches. Figures that should be 0, after `delete` and
`cleanup`: ``left``. `second` so many short tasks are a batch of their own, begun at once, of which
``completed`` counts those. Emits data, asserts nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.batch import borrowed_state, running, started, task_file
from benchmarks.series import Series, options
from vmsandbox.deadline import Deadline
from vmsandbox.density.figures import MIB, reserve_bytes
from vmsandbox.sandbox import Rooms

EAT_MEMORY = "kept = []\nwhile True: kept.append(bytearray(b'x' * (1 << 20)))"
FILL_DISK = 'echo begun > fills; exec dd if=/dev/zero of="$HOME/full" bs=1M'
HOSTILE = "echo work > work; ln -s /etc/passwd hostile-link"


class Mixed(NamedTuple):
    """A task and what it has to come to; `names` is what a refused result is refused for."""

    task: dict[str, object]
    outcome: str
    exit_code: int | None
    changes: tuple[str, ...] = ()
    names: str = ""


def fine(number: int) -> Mixed:
    name = f"fine-{number}"
    task: dict[str, object] = {"name": name, "command": f"sleep 2; echo {number} > {name}"}
    return Mixed(task, "completed", 0, (name,))


MIX = (
    fine(1),
    Mixed({"name": "fails", "command": "echo half > half; exit 3"}, "failed", 3, ("half",)),
    Mixed({"name": "eats", "command": ["python3", "-c", EAT_MEMORY]}, "guest_oom", 137),
    fine(2),
    Mixed({"name": "hostile", "command": HOSTILE}, "collect_refused", 0, names="hostile-link"),
    fine(3),
    Mixed(
        {"name": "slow", "command": "echo begun > slow; exec sleep 1000", "timeout": "5s"},
        "timeout",
        None,
        ("slow",),
    ),
    fine(4),
    Mixed({"name": "fills", "command": FILL_DISK, "disk": "2G"}, "guest_disk_full", 1, ("fills",)),
    Mixed({"name": "fails-at-once", "command": "false"}, "failed", 1),
    fine(5),
    fine(6),
)


def carried_out(home: Path, asked: argparse.Namespace, series: Series) -> None:
    """Both batches to their end, the host sampled meanwhile."""
    with series.timed("batch", "wall_s"):
        file = task_file(home, [mixed.task for mixed in MIX])
        batches = [started(home, "batch", "--json", file)]
        if asked.second:
            other = [{**fine(n).task, "name": f"second-{n}"} for n in range(asked.second)]
            batches.append(started(home, "batch", "--json", second_file(home, other)))
        series.add("guests", "at_once", sampled(batches, home, asked.sample, series))
    answers = [json.loads(batch.communicate()[0])["data"] for batch in batches]
    series.add("batch", "outcomes right", sum(is_right(answers[0], mixed) for mixed in MIX))
    for answer in answers[1:]:
        outcomes = [task["outcome"] for task in answer["tasks"]]
        series.add("second", "completed", outcomes.count("completed"))


def second_file(home: Path, tasks: Sequence[dict[str, object]]) -> Path:
    (home / "second").mkdir()
    (home / "second" / "project").symlink_to(home / "project")
    return task_file(home / "second", tasks)


def sampled(batches: Sequence[Any], home: Path, every_s: float, series: Series) -> int:
    """Look at the host until all have ended; the most guests that ran at once."""
    most, least = 0, psutil.virtual_memory().available
    deadline = Deadline(None)
    while any(batch.poll() is None for batch in batches) and not deadline.passed():
        available = psutil.virtual_memory().available
        series.add("host", "available_mib", available / MIB)
        least, most = min(least, available), max(most, running(home))
        time.sleep(every_s)
    reserve = reserve_bytes(psutil.virtual_memory().total)
    series.add("host", "reserve_left_mib", (least - reserve) / MIB)
    return most


def is_right(answer: Any, mixed: Mixed) -> bool:
    """Whether the batch says of a task what it has to; who reads along is told what it says."""
    (task,) = (one for one in answer["tasks"] if one["name"] == mixed.task["name"])
    found = task["outcome"], task["exit_code"], bool(task["evidence"])
    return told(mixed, found == (mixed.outcome, mixed.exit_code, True), task)


def is_reviewed(home: Path, mixed: Mixed) -> bool:
    """Whether a review shows what the task changed, or why nothing of it came in."""
    out, _ = started(home, "review", "--json", str(mixed.task["name"])).communicate()
    shown = json.loads(out)["data"]
    if mixed.names:
        failure = shown["failure"] or {}
        right = not shown["changes"] and mixed.names in failure.get("message", "")
        return told(mixed, right, shown)
    changes = tuple(sorted(change["path"] for change in shown["changes"]))
    return told(mixed, changes == mixed.changes, shown)


def told(mixed: Mixed, right: bool, found: object) -> bool:
    if not right:
        print(f"{mixed.task['name']}: {json.dumps(found, default=str)}", file=sys.stderr)
    return right


def left(home: Path) -> int:
    """What is to be seen of any task once all is deleted and cleaned up."""
    started(home, "delete", "--all", "--force").communicate()
    started(home, "cleanup").communicate()
    out, _ = started(home, "cleanup", "--json").communicate()
    lines = (
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    )
    with Rooms.open(home) as rooms:
        guests = len(rooms.guests())
    folders = [
        *(home / "sandboxes").iterdir(),
        *(p for p in (home / "batches").iterdir() if p.is_dir()),
    ]
    items = json.loads(out)["data"]["items"]
    return guests + len(items) + len(folders) + sum(str(home / "sandboxes") in one for one in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = options(__doc__, second=0, sample=0.2).parse_args(arguments)
    series = Series.of("batch_mix", asked, "second", "sample")
    with borrowed_state("vms-mix-") as home:
        carried_out(home, asked, series)
        reviewed = sum(is_reviewed(home, mixed) for mixed in MIX)
        series.add("batch", "reviews right", reviewed)
        series.add("after cleanup", "left", left(home))
    series.summary()


if __name__ == "__main__":
    main()
