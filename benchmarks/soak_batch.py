"""Kills batches at random moments, resumes them, and says whether every task ran exactly once.

    python -m benchmarks.soak_batch [--rounds 20] [--seed N] [--out FILE]

Each round is a batch of four tasks, one after another's end, in a state folder of its own. Its
process is killed one to three times, a random while after it began or was resumed; then `--resume`
brings it to its end. Figures that should be 0: ``again`` (tasks that began twice), ``lost`` (tasks
without a whole result), ``doubled`` (sandboxes more than tasks), ``left`` (what `delete` and
`cleanup` leave). Emits data, asserts nothing.
"""

import json
import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.batch import borrowed_state, started, task_file
from benchmarks.series import Series, options

WORK = 'echo begun >> "$0"; sync; sleep 2; echo done >> "$0"'
NAMES = ("one", "two", "three", "four")
MOST_KILLS = 3
LONGEST_S = 15.0


def played(home: Path, chance: random.Random) -> dict[str, float]:
    """One round."""
    tasks: list[dict[str, object]] = [
        {"name": name, "command": ["sh", "-c", WORK, name]} for name in NAMES
    ]
    tasks[-1]["after"] = [NAMES[0]]
    batch = started(home, "batch", "--json", "-j", "2", task_file(home, tasks))
    kills = 0
    for _ in range(chance.randint(1, MOST_KILLS)):
        try:
            batch.communicate(timeout=chance.uniform(0.3, LONGEST_S))
            break
        except subprocess.TimeoutExpired:
            batch.kill()
            batch.communicate()
            kills += 1
        begun = any((home / "batches").glob("*/batch.json"))
        again = ("--resume",) if begun else ("-j", "2", str(task_file(home, tasks)))
        batch = started(home, "batch", "--json", *again)
    batch.communicate()
    return {"kills": kills, **judged(home)}


def judged(home: Path) -> dict[str, float]:
    """What came of it, by applying every result to the project."""
    sandboxes = len(list((home / "sandboxes").glob("*/record.json")))
    for name in NAMES:
        started(home, "apply", "--yes", name).communicate()
    texts = [home / "project" / name for name in NAMES]
    said = [text.read_text() if text.exists() else "" for text in texts]
    started(home, "delete", "--all", "--force").communicate()
    started(home, "cleanup").communicate()
    out, _ = started(home, "cleanup", "--json").communicate()
    return {
        "again": sum(max(0, text.count("begun") - 1) for text in said),
        "lost": sum("done" not in text for text in said),
        "doubled": sandboxes - len(NAMES),
        "left": len(json.loads(out)["data"]["items"]) + len(list((home / "sandboxes").iterdir())),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    asked = options(__doc__, rounds=20, seed=int(time.time())).parse_args(arguments)
    series = Series.of("soak_batch", asked, "seed")
    chance = random.Random(asked.seed)
    try:
        for _ in range(asked.rounds):
            with borrowed_state("vms-soak-") as home, series.timed("round", "seconds"):
                for figure, value in played(home, chance).items():
                    series.add("round", figure, value)
    finally:
        series.summary()


if __name__ == "__main__":
    main()
