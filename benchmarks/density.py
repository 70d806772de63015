"""Measures what one more guest costs while others are alive: clones and cold starts, in turns.

    python -m benchmarks.density [--guests 8] [--rounds 3] [--memory 512] [--out FILE]

Each round is the experiment of ``vmsandbox density --compare``: clones up to the number asked for,
all freed, then as many cold starts. Emits one series per figure over all guests of all rounds, and
the ratios of clone to cold; asserts nothing.
"""

from benchmarks.series import Series, conditions, options
from vmsandbox.density import Asked, Experiment, Outcome
from vmsandbox.model import Value
from vmsandbox.sandbox import Rooms

RATIOS = ("first_command_s", "pss_bytes", "private_bytes", "disk_bytes")


def unheard(kind: str, value: Value) -> None:
    """The outcome holds everything that the journal is told."""


def add(series: Series, outcome: Outcome) -> None:
    """Every guest of one round, and what its host gave."""
    for one in outcome.passes:
        for sample in one.samples:
            series.add(one.start, "first_command_s", sample.first_command_s)
            if held := sample.held:
                series.add(one.start, "pss_bytes", held.pss_bytes)
                series.add(one.start, "private_bytes", held.private_bytes)
                series.add(one.start, "disk_bytes", held.disk_bytes)
            if sample.idle_cpu_share is not None:
                series.add(one.start, "idle_cpu_share", sample.idle_cpu_share)
        if one.start in outcome.summary:
            available = outcome.summary[one.start].available_bytes
            series.add(one.start, "available_bytes_each", available or 0)
        series.add(one.start, "completed", one.completed)
    series.add("vmsandbox", "rss_bytes", outcome.manager_rss_bytes)


def main() -> None:
    chosen = options(__doc__, guests=8, rounds=3, hold=20.0, memory=512).parse_args()
    asked = Asked(
        max=chosen.guests,
        step=max(1, chosen.guests // 4),
        hold_s=chosen.hold,
        starts=("clone", "cold"),
        overrides={"image": chosen.image, "memory": chosen.memory},
    )
    with Rooms.open() as rooms:
        facts = conditions(rooms, chosen.image) | asked.model_dump(mode="json")
        series = Series("density", facts, chosen.out)
        for _ in range(chosen.rounds):
            add(series, Experiment(rooms, asked, lambda text: None).run(unheard))
        for figure in RATIOS:
            ratio = series.median("clone", figure) / series.median("cold", figure)
            series.add("clone/cold", f"{figure}_ratio", ratio)
        series.summary()


if __name__ == "__main__":
    main()
