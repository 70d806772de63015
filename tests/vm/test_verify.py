"""Results proven in real guests: checks that cannot change what they prove, new guests that hold
base and result alone, and another agent's opinion.
"""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.repositories import Repository
from tests.sandboxes import State
from tests.vm.lives import (
    PATIENCE_S,
    assert_refused,
    kinds_of,
    read_until,
    status_of,
    wait_for,
)

AUTHOR = """\
echo made > made
echo 'left in my home' > ~/left
echo 'I AM SURE OF IT' > "$VMSANDBOX_REPORT"
git commit -qam 'I AM SURE OF IT' --allow-empty
python3 serve 3000 > /dev/null 2>&1 &
"""
SERVE = """\
import socket, sys
server = socket.create_server(("localhost", int(sys.argv[1])))
while True:
    connection, _ = server.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nhello\\n")
    connection.close()
"""
FIRST = "printf 'junk\\033[31m' | tee junk && rm kept && echo changed > made"
PROJECT = """\
[verify]
checks = [
    '''%s''',
    { name = "second", command = "test -e junk && test ! -e kept && id -un && test -e ~/left" },
    { http = { port = 3000, contains = ["hello"], not_contains = ["junk"] } },
    { http = { port = 3001, path = "/x", contains = ["hello"] }, serve = "python3 serve 3001" },
]

[agents.critic]
command = 'sh ./critic'
env = { TONE = "harsh" }
"""
CRITIC = """\
{
    echo "# $TONE"
    git diff --name-only HEAD~1
    echo "brief: $(grep -c 'Make made.' "$VMSANDBOX_BRIEF")"
    echo "author: $(cat "$VMSANDBOX_BRIEF" ~/left /var/lib/vmsandbox-agent/report.md 2> /dev/null |
        grep -c SURE) $(git log --all --format=%B | grep -c SURE)"
    printf 'red \\033[31m herring\\n'
} > "$VMSANDBOX_REPORT.new"
mv "$VMSANDBOX_REPORT.new" "$VMSANDBOX_REPORT"
printf "%s" '[{"path": "made", "line": 1, "severity": "high",
    "text": "It is \\u001b[31m wrong."}]' \
    > "$VMSANDBOX_FINDINGS"
echo nothing of this stays > made
"""
BRIEF = "goal: Make made.\ntried: I AM SURE OF IT\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files: dict[str, str | bytes] = {
        "kept": "k\n",
        "vmsandbox.toml": PROJECT % FIRST,
        "critic": CRITIC,
        "serve": SERVE,
    }
    top = tmp_path_factory.mktemp("verify")
    (top / "brief.yaml").write_text(BRIEF)
    return Repository.create(top / "project", files).path


@pytest.fixture(scope="module")
def author(shared_state: State, project: Path) -> State:
    """A task that ended and was proven in its own guest, which still runs."""
    arguments = ("--name", "author", "--keep", "--worktree", project)
    brief = ("--brief", project.parent / "brief.yaml")
    ran = shared_state("run", "--json", *arguments, *brief, "--", "sh", "-c", AUTHOR)
    assert ran.code == 0, ran
    assert (ran.data["result"]["checks"], ran.data["result"]["unproven"]) == (4, [])
    assert ran.data["timings"]["verify"] > 0
    return shared_state


def result_of(state: State) -> Any:
    return state.ok("review", "--json", "author").data["result"]


def alone(state: State) -> bool:
    """Whether the author's sandbox is the only one."""
    return state.ids() == [status_of(state, "author")["id"]]


def test_checks_see_each_other_and_nothing_of_them_flows_back(author: State) -> None:
    (run,) = result_of(author)["checks"]
    assert [(one["name"], one["ok"], one["exit_code"]) for one in run["results"]] == [
        (FIRST, True, 0),
        ("second", True, 0),
        ("http :3000/", True, 0),
        ("http :3001/x", True, 0),
    ]
    assert run["results"][0]["tail"] == "junk\\x1b[31m"
    assert run["results"][1]["tail"] == "agent\n"
    assert kinds_of(author, "author") == {"made": "A"}
    there = author.ok("exec", "author", "--", "sh", "-c", "ls; cat made").out.split()
    assert there == ["critic", "kept", "made", "serve", "vmsandbox.toml", "made"]
    apart = author.ok("exec", "--root", "author", "--", "ls", "/var/lib/vmsandbox-checks").out
    assert apart == "", "what they wrote is thrown away"
    text = author.ok("review", "author").out
    assert "in the guest of the task" in text
    assert "ok     second" in text


def test_another_agent_judges_without_having_heard_the_author(author: State) -> None:
    text = author.ok("review", "author", "--by", "critic").out
    shown = author.ok("review", "--json", "author").data
    (opinion,) = shown["opinions"]
    assert (opinion["by"], opinion["outcome"], opinion["problem"]) == ("critic", "completed", "")
    assert opinion["report"].splitlines() == [
        "# harsh",
        "made",
        "brief: 1",
        "author: 0 0",
        "red \\x1b[31m herring",
    ]
    (finding,) = opinion["findings"]
    assert finding == {
        "path": "made",
        "line": 1,
        "severity": "high",
        "text": "It is \\x1b[31m wrong.",
    }
    sentence = "the author completed and all checks passed, but critic has 1 grave finding"
    assert shown["disagreements"][0].startswith(sentence)
    assert f"DISAGREE   {sentence}" in text
    assert "high    made:1: It is \\x1b[31m wrong." in text
    assert "\x1b" not in text
    assert shown["report"] == "I AM SURE OF IT\n"
    assert kinds_of(author, "author") == {"made": "A"}
    assert alone(author)


def test_findings_that_cannot_be_read_are_told(author: State) -> None:
    line = 'echo "[{\\"severity\\": \\"awful\\"}]" > "$VMSANDBOX_FINDINGS"; exit 3'
    text = author.ok("review", "author", "--by", line).out
    assert "failed, exit code 3, 0 finding(s)" in text
    assert "its findings cannot be read: 0.severity" in text
    assert alone(author)


def test_a_command_on_the_result_in_a_guest_that_is_gone_afterwards(author: State) -> None:
    before = result_of(author)
    script = "ls; cat made; git log --format=%s; test -e ~/left || echo alone; echo x > x; exit 7"
    answer = author("inspect", "author", "--", "sh", "-c", script)
    assert answer.code == 7, answer
    words = answer.out.split("\n")
    assert words[:6] == ["critic", "kept", "made", "serve", "vmsandbox.toml", "made"]
    assert words[6:] == ["The result", "first", "alone", ""]
    assert "a new guest with base and result alone: the guest of" in answer.err, "it runs"
    assert alone(author)
    assert result_of(author) == before


def test_a_look_at_the_disk_as_the_task_left_it(state: State, make_repository: Any) -> None:
    """Only while that holds the result: what changed since it was collected is no part of it."""
    project = make_repository("project", {"a": "b\n"}).path
    task = ("--", "sh", "-c", "echo made > made; echo left > ~/left")
    look = ("--json", "last", "--", "sh", "-c", "cat made ~/left; echo x > made; exit 7")
    state.ok("run", "--worktree", project, *task)
    ids, kept = state.ids(), state.ok("review", "--json", "last").data["result"]
    disk = (state.path / "sandboxes" / ids[0] / "overlay.qcow2").stat()
    answer = state("inspect", *look)
    assert (answer.code, answer.data["fresh"]) == (7, False), answer
    assert "\nleft\n" in answer.err
    assert (state.ids(), state.ok("review", "--json", "last").data["result"]) == (ids, kept)
    assert (state.path / "sandboxes" / ids[0] / "overlay.qcow2").stat().st_mtime == disk.st_mtime
    fresh = state("inspect", "--fresh", *look)
    assert (fresh.code, fresh.data["fresh"], "\nleft\n" in fresh.err) == (7, True, False), fresh

    state.ok("run", "--keep", "--worktree", project, *task)
    state.ok("exec", "last", "--", "sh", "-c", "echo drift >> made; sync")
    state.ok("stop", "--now", "last")
    drifted = state("inspect", *look)
    assert (drifted.code, drifted.data["fresh"], "drift" in drifted.err) == (7, True, False)
    assert "is not as it was collected" in drifted.err
    assert len(state.ids()) == 2


def begun(state: State) -> "tuple[subprocess.Popen[str], str]":
    """A look that lasts, once its command runs; and the id of its guest."""
    (known,) = state.ids()
    look = state.start("inspect", "author", "--", "sh", "-c", "echo begun; sleep 1000")
    read_until(look, "stdout", "begun")
    (scratch,) = set(state.ids()) - {known}
    return look, scratch


def test_ctrl_c_leaves_nothing_of_a_look(author: State) -> None:
    look, scratch = begun(author)
    assert status_of(author, scratch)["scratch_of"] == status_of(author, "author")["id"]
    assert status_of(author, "last")["name"] == "author"
    look.send_signal(signal.SIGINT)
    look.communicate(timeout=PATIENCE_S)
    assert look.returncode == 130
    assert alone(author)


def test_a_killed_look_is_cleaned_up(author: State) -> None:
    look, scratch = begun(author)
    look.send_signal(signal.SIGKILL)
    look.communicate(timeout=PATIENCE_S)
    cleaned = author.ok("cleanup", "--json").data["items"]
    (item,) = [one for one in cleaned if one["what"] == scratch]
    assert "nobody looks any more" in item["detail"]
    assert alone(author)


def recorded(state: State, id_: str) -> Any:
    return json.loads((state.path / "sandboxes" / id_ / "record.json").read_text())


def test_checks_that_were_cut_short_prove_nothing(state: State, make_repository: Any) -> None:
    """Killed, then taken up again, then Ctrl-C: the result is there each time, its proof is not."""
    project = make_repository("project", {"a": "b\n"}).path
    check = "echo begun >> /tmp/begun; sleep 1000"
    arguments = ("run", "--name", "cut", "--worktree", project, "--verify", check)
    run = state.start(*arguments, "--", "sh", "-c", "echo made > made")

    def begun(times: int) -> Callable[[], bool]:
        count = ("exec", "cut", "--", "sh", "-c", "wc -l < /tmp/begun")
        return lambda: state(*count).out.strip() == str(times)

    wait_for("its sandbox", state.ids, run)
    (id_,) = state.ids()
    wait_for("a result", lambda: recorded(state, id_)["collected"], run)
    wait_for("the check", begun(1), run)
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=PATIENCE_S)
    assert state.ok("review", "--json", "cut").data["unproven"] == [f"{check} (not run)"]
    assert_refused(state("approve", "--json", "cut"), "checks_failed", 5)

    resumed = state.start("resume", "--json", "cut")
    wait_for("the check once more", begun(2), resumed)
    resumed.send_signal(signal.SIGINT)
    out, err = resumed.communicate(timeout=PATIENCE_S)
    assert resumed.returncode == 1, (out, err)
    assert json.loads(out)["data"]["result"]["unproven"] == [check]
    shown = state.ok("review", "--json", "cut").data
    assert shown["result"]["checks"][0]["results"][0]["detail"] == "not run: stopped"
    assert status_of(state, "cut")["state"] == "stopped"
    assert kinds_of(state, "cut") == {"made": "A"}


def test_ctrl_c_of_a_verify_keeps_what_is_known_and_a_kept_guest(
    state: State, make_repository: Any
) -> None:
    project = make_repository("project", {"a": "b\n"}).path
    arguments = ("--name", "kept", "--keep", "--worktree", project)
    check = ("--verify", "test -e /tmp/quick || sleep 1000")
    state.ok("run", *arguments, *check, "--", "sh", "-c", "echo made > made; touch /tmp/quick")
    known = state.ok("review", "--json", "kept").data["result"]["checks"]
    assert known[0]["results"][0]["ok"]

    def interrupted() -> None:
        verify = state.start("verify", "kept")
        sleeps = ("exec", "kept", "--", "pgrep", "-f", "^sleep 1000")
        wait_for("the check", lambda: state(*sleeps).code == 0, verify)
        verify.send_signal(signal.SIGINT)
        verify.communicate(timeout=PATIENCE_S)
        assert verify.returncode == 130
        assert state.ok("review", "--json", "kept").data["result"]["checks"] == known

    state.ok("exec", "kept", "--", "rm", "/tmp/quick")
    interrupted()
    assert status_of(state, "kept")["state"] == "ready"
    state.ok("exec", "kept", "--", "touch", "/tmp/quick")
    state.ok("verify", "kept")
    known = state.ok("review", "--json", "kept").data["result"]["checks"]
    state.ok("exec", "kept", "--", "rm", "/tmp/quick")
    state.ok("stop", "kept")
    interrupted()
    assert status_of(state, "kept")["state"] == "stopped", "as it was before"


def test_a_proof_that_rests_on_what_the_author_left_behind(author: State) -> None:
    """Last: it decides, and applies."""
    state = author
    state.ok("approve", "author")
    fresh = state("verify", "--fresh", "--json", "author")
    assert fresh.code == 1, fresh
    assert [one["ok"] for one in fresh.data["results"]] == [True, False, False, True]
    assert fresh.data["results"][2]["detail"] == "nothing listens on port 3000"
    assert alone(state)
    assert_refused(state("apply", "--json", "author"), "approval_stale", 5)
    assert_refused(state("approve", "--json", "author"), "checks_failed", 5)
    text = state.ok("review", "author").out
    assert "FAILED second" in text
    assert "stale: it names other check results" in text

    again = state("verify", "--json", "author")
    assert again.code == 0, again
    assert status_of(state, "author")["state"] == "ready", "it was kept, and still is"
    state.ok("stop", "author")
    booted = state("verify", "--json", "author")
    assert booted.code == 1, booted
    assert [one["ok"] for one in booted.data["results"]] == [True, True, False, True]
    assert status_of(state, "author")["state"] == "stopped"

    approved = state.ok("approve", "--json", "--despite-checks", "author").data["result"]
    assert approved["decisions"][-1]["despite"] == [
        "http :3000/",
        "second (fresh)",
        "http :3000/ (fresh)",
    ]
    state.ok("apply", "author")
    worktree = Path(status_of(state, "author")["worktree"])
    assert (worktree / "made").read_text() == "made\n"
    assert not (worktree / "junk").exists()
    assert (worktree / "kept").exists()
