"""The density experiment with real guests: what it says, what it leaves, and what it refuses."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes import State
from tests.vm.lives import assert_refused, read_until
from tests.vm.test_bad_input import owned_domains

MIB = 1024 * 1024


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "figures.jsonl").read_text().splitlines()]


def assert_nothing_left(state: State) -> None:
    assert state.ids() == []
    assert owned_domains(state) == []
    assert list((state.path / "worktrees").iterdir()) == []


def test_two_guests(state: State, tmp_path: Path) -> None:
    out = tmp_path / "report"
    asked = ["--max", "2", "--step", "2", "--memory", "1G", "--hold", "2s", "--json"]
    data = state.ok(
        "density", *asked, "--workload", "test $(id -un) = agent && echo done", "--out", out
    ).data
    assert (data["attempted"], data["completed"], data["stopped_by"]) == (2, 2, "max")
    assert data["failures"] == []
    clone = data["summary"]["clone"]
    assert 10 * MIB < clone["private_bytes"] <= clone["pss_bytes"] < 1024 * MIB
    assert 0 < clone["disk_bytes"] < 64 * MIB
    assert 0 < clone["first_command_s"] <= clone["first_command_p95_s"]
    assert clone["fits"] > 0
    assert data["conditions"]["guest_memory_mib"] == 1024
    assert data["conditions"]["image_digest"].startswith("sha256:")

    kinds = [line["kind"] for line in lines_of(out)]
    assert kinds == ["conditions", "guest", "guest", "step", "end", "end", "outcome"]
    ends = [line for line in lines_of(out) if line["kind"] == "end"]
    assert all(line["answered"] and line["workload_s"] > 0 for line in ends)
    assert {Path(file).name for file in data["files"]} == {file.name for file in out.iterdir()}
    assert "<html" in (out / "report.html").read_text()

    (cost,) = json.loads((state.path / "cache" / "costs.json").read_text())["costs"]
    assert (cost["cpus"], cost["memory_mib"], cost["start"]) == (1, 1024, "clone")
    assert cost["private_bytes"] == clone["private_bytes"]
    assert_nothing_left(state)


def test_an_interrupted_experiment_reports_and_frees(state: State, tmp_path: Path) -> None:
    out = tmp_path / "report"
    asked = ("--max", "2", "--step", "1", "--hold", "9m", "--out", out)
    with state.start("density", *asked) as process:
        read_until(process, "stderr", "settling")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "stopped by interrupted" in output
    (ended,) = [line for line in lines_of(out) if line["kind"] == "outcome"]
    (one,) = ended["passes"]
    assert (one["attempted"], one["stopped_by"]) == (1, "interrupted")
    assert_nothing_left(state)


BAD = {
    "no guest": (["--max", "0"], "max_invalid"),
    "no step": (["--step", "0"], "step_invalid"),
    "no rest": (["--hold", "0"], "hold_invalid"),
    "too little memory": (["--memory", "128M"], "memory_too_small"),
    "no CPUs": (["--cpus", "0"], "config_invalid"),
    "no such image": (["--image", "debian-99"], "image_unknown"),
    "both and one": (["--cold", "--compare"], "flags_contradict"),
}


@pytest.mark.parametrize(("options", "code"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_meant(
    options: list[str], code: str, shared_state: State, tmp_path: Path
) -> None:
    answer = shared_state("density", "--json", *options, cwd=tmp_path)
    assert_refused(answer, code, 2)
    assert list(tmp_path.iterdir()) == []
    assert_nothing_left(shared_state)
