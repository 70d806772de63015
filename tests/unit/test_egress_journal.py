"""What a journal comes to, however a guest filled it."""

import tracemalloc
from pathlib import Path

from vmsandbox.egress import summary_of
from vmsandbox.egress.journal import Entry


def test_a_summary_does_not_hold_all_that_a_guest_asked_for(tmp_path: Path) -> None:
    log, many = tmp_path / "egress.jsonl", 10_000
    entry = Entry(target="http://a.test/", verdict="failed", reason="name_unknown")
    line = entry.model_dump_json(exclude_none=True)
    lines = [line.replace("a.test", f"{number}.test") for number in range(many)]
    log.write_text("\n".join([*lines, lines[-1], line[:-9]]))  # the last was torn by a crash
    tracemalloc.start()
    try:
        summary = summary_of(log)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1000 * many
    assert (summary.allowed, len(summary.targets), summary.more) == (many + 1, 200, many - 200)
    assert (summary.targets[0].target, summary.targets[0].times) == (f"{many - 1}.test:80", 2)
