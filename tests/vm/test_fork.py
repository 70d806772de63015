"""Forks in real guests: they go on from where a task stopped, are somebody else, and neither they
nor their source need the other.
"""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.repositories import Repository, fingerprint
from tests.sandboxes import State
from tests.vm.lives import assert_refused, kinds_of, read_until, status_of

MakeRepository = Callable[..., Repository]

WORK = """\
echo first > shared; echo first > mine; echo secret > ~/note
cat /etc/machine-id /etc/hostname /etc/ssh/ssh_host_ed25519_key.pub > ~/identity
printf 'waiting: for a fork\\n' > "$VMSANDBOX_STATUS"
printf 'the report of the source\\n' > "$VMSANDBOX_REPORT"
"""
GO_ON = """\
cat ~/note > found; echo second > shared
cat /etc/machine-id /etc/hostname /etc/ssh/ssh_host_ed25519_key.pub > now
cat ~/identity > before
cat "$VMSANDBOX_BRIEF" > brief
cat "$VMSANDBOX_REPORT" 2> /dev/null || :
"""


def disk_of(state: State, id_: str) -> Path:
    return state.path / "sandboxes" / id_ / "overlay.qcow2"


def checksum(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def record_of(state: State, id_: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((state.path / "sandboxes" / id_ / "record.json").read_text())
    return found


class Pair(NamedTuple):
    """A source and a fork of it that has ended, and the source's disk before there was a fork."""

    state: State
    project: Path
    source: str
    fork: str
    disk: str
    said: str


@pytest.fixture(scope="module")
def pair(shared_state: State, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    state = shared_state
    files: dict[str, str | bytes] = {"kept": "1\n", "shared": "base\n"}
    project = Repository.create(tmp_path_factory.mktemp("fork") / "project", files).path
    brief = project.parent / "brief.yaml"
    brief.write_text("goal: Go on.\n")
    here = ("--worktree", project, "--brief", brief)
    run = state.ok("run", "--json", "--name", "source", *here, "--", "sh", "-c", WORK)
    source = run.data["id"]
    disk = checksum(disk_of(state, source))
    answer = state("fork", "--json", "source", "--name", "fork", "--", "sh", "-c", GO_ON)
    assert answer.code == 0, answer
    said = (state.path / "sandboxes" / answer.data["id"] / "stdout.log").read_text()
    return Pair(state, project, source, answer.data["id"], disk, said)


def written(pair: Pair, path: str) -> str:
    """What the fork's result has at a path, as an apply elsewhere would write it."""
    lines = pair.state.ok("review", "fork", "--diff", "--path", path).out.splitlines()
    return "\n".join(line[1:] for line in lines if line.startswith("+") and line[:3] != "+++")


def test_a_fork_goes_on_from_the_disk_and_the_base(pair: Pair) -> None:
    assert kinds_of(pair.state, "source") == {"mine": "A", "shared": "M"}
    assert kinds_of(pair.state, "fork") == {
        "before": "A",
        "brief": "A",
        "found": "A",
        "mine": "A",
        "now": "A",
        "shared": "M",
    }
    assert written(pair, "found") == "secret"
    assert "Go on." in written(pair, "brief")
    records = [record_of(pair.state, id_) for id_ in (pair.source, pair.fork)]
    assert records[0]["snapshot"] == records[1]["snapshot"]


def test_a_fork_is_somebody_else(pair: Pair) -> None:
    before, now = written(pair, "before").split("\n"), written(pair, "now").split("\n")
    assert len(now) == len(before) == 3
    assert not set(before) & set(now), "machine id, host name and host key"
    assert now[1] == "fork"
    source, fork = (pair.state.path / "sandboxes" / id_ for id_ in (pair.source, pair.fork))
    for name in ("id_ed25519", "host_ed25519.pub", "known_hosts"):
        assert (source / name).read_bytes() != (fork / name).read_bytes()
    told = [record_of(pair.state, id_) for id_ in (pair.source, pair.fork)]
    assert told[0]["domain_uuid"] != told[1]["domain_uuid"]
    assert told[0]["endpoint"] != told[1]["endpoint"]


def test_what_the_source_said_is_not_what_the_fork_says(pair: Pair) -> None:
    assert "the report of the source" in pair.state.ok("review", "--json", "source").data["report"]
    assert pair.state.ok("review", "--json", "fork").data["report"] == ""
    assert status_of(pair.state, "fork")["agent_status"] == ""
    assert pair.said == ""


def test_the_source_was_not_touched(pair: Pair) -> None:
    assert checksum(disk_of(pair.state, pair.source)) == pair.disk
    assert status_of(pair.state, "source")["problems"] == []


def test_lineage_is_shown(pair: Pair) -> None:
    digest = pair.state.ok("review", "--json", "source").data["result"]["digest"]
    origin = {"id": pair.source, "name": "source", "digest": digest}
    assert status_of(pair.state, "fork")["forked_from"] == origin
    assert pair.state.ok("review", "--json", "fork").data["forked_from"] == origin
    assert f"forked from source ({pair.source})" in " ".join(
        pair.state.ok("review", "fork").out.split()
    )
    assert "forked from" in pair.state.ok("status").out
    assert status_of(pair.state, "source")["forked_from"] is None


def test_both_are_compared_and_get_in_each_others_way(pair: Pair) -> None:
    met = pair.state.ok("compare", "--json", "source", "fork").data["meeting"]
    assert (met["fit"], met["clashes"]) == ("conflict", ["shared"])
    assert met["alike"] == ["mine"]
    answer = pair.state("conflicts", "--json", "source", "fork")
    assert answer.code == 1
    assert all(one["applies"] for one in answer.data["results"])


def test_a_kept_name_and_a_half_copied_disk_are_refused(pair: Pair) -> None:
    state = pair.state
    before = state.ids()
    assert_refused(state("fork", "--json", "source", "--name", "fork"), "name_taken", 125)
    record = record_of(state, pair.fork)
    file = state.path / "sandboxes" / pair.fork / "record.json"
    whole = file.read_text()
    try:
        cut = {"base_in_guest": False, "task_started": False, "collected": False}
        file.write_text(json.dumps(record | cut | {"state": "queued", "exec_result": None}))
        assert_refused(state("resume", "--json", pair.fork), "fork_incomplete", 125)
    finally:
        file.write_text(whole)
    assert state.ids() == before


def test_both_apply_with_refusal_of_what_contradicts(pair: Pair) -> None:
    """Last but one: from here on the worktree is another one."""
    state, project = pair.state, pair.project
    state.ok("apply", "--yes", "source")
    assert (project / "shared").read_text() == "first\n"
    before = fingerprint(project)
    refused = state("apply", "--yes", "--json", "fork")
    assert refused.error["code"] == "apply_conflict"
    assert "shared" in refused.error["message"]
    assert fingerprint(project) == before
    done = state.ok("apply", "--yes", "--json", "--exclude", "shared", "fork").data
    assert "mine" in done["already"]
    assert (project / "found").read_text() == "secret\n"


def test_neither_needs_the_other(pair: Pair) -> None:
    """Last: the source goes, and the fork is forked once more."""
    state = pair.state
    state.ok("delete", "source")
    again = state("fork", "--json", "fork", "--name", "again", "--", "cat", "found", "shared")
    assert again.code == 0, again
    assert again.data["result"]["changes"] == 6
    stdout = state.path / "sandboxes" / again.data["id"] / "stdout.log"
    assert stdout.read_text() == "secret\nsecond\n"
    assert status_of(state, "again")["forked_from"]["id"] == pair.fork
    state.ok("delete", "fork")
    assert state("resume", "--json", "again").data["outcome"] == "completed"


def test_what_runs_or_never_ran_is_not_forked(
    state: State, make_repository: MakeRepository
) -> None:
    project = make_repository("project", {"kept": "1\n"}).path
    run = state.start(
        "run", "--worktree", project, "--name", "runs", "--", "sh", "-c", "echo begun; sleep 600"
    )
    read_until(run, "stdout", "begun")
    refused = assert_refused(state("fork", "--json", "runs"), "sandbox_live", 125)
    assert "vmsandbox stop" in refused
    assert len(state.ids()) == 1
    state.ok("stop", "--now", "runs")
    run.communicate()
    forked = state("fork", "--json", "runs", "--name", "after", "--", "cat", "kept")
    assert forked.code == 0, "what was stopped at once is on its disk"
    assert forked.data["result"]["changes"] == 0
    file = state.path / "sandboxes" / forked.data["id"] / "record.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_in_guest": False}))
    assert_refused(state("fork", "--json", "after"), "nothing_to_fork", 125)
    assert len(state.ids()) == 2
