"""The verbs that step into a running guest, on one that `--keep` left; then `stop` collects again.

The tests share that guest and leave nothing in its worktree but what the last ones look at.
"""

import contextlib
import itertools
import os
import pty
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repositories import Repository, fingerprint
from tests.sandboxes import Answer, State
from tests.vm.lives import Trace, assert_refused, changes_of, fed, kinds_of, status_of

NAME = "kept"


class Kept(NamedTuple):
    """A sandbox whose task has ended and whose guest runs on."""

    state: State
    project: Repository
    ended: Answer

    def exec(self, *command: str, options: tuple[str, ...] = ()) -> Answer:
        return self.state("exec", *options, NAME, "--", *command)


@pytest.fixture(scope="module")
def kept(shared_state: State, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Its command did not exist: also that is an end from which nothing is lost."""
    files: dict[str, str | bytes] = {"README": "hello\n", "both": "one\n", "theirs": "one\n"}
    project = Repository.create(tmp_path_factory.mktemp("kept") / "my project", files)
    project.commit("second")
    options = ("--keep", "--name", NAME, "--history", "none", "--env", "FROM=run")
    command = ("no-such-command", "--at-all")
    ended = shared_state("run", "--json", *options, "--", *command, cwd=project.path)
    return Kept(shared_state, project, ended)


def test_a_command_that_is_not_there(kept: Kept) -> None:
    assert kept.ended.code == 127, kept.ended.err
    data = kept.ended.data
    assert (data["outcome"], data["exit_code"]) == ("failed", 127)
    assert data["detail"] == "command not found"
    assert data["result"]["changes"] == 0
    assert "no-such-command" in kept.state.ok("logs", "--stderr", NAME).out
    found = status_of(kept.state, NAME)
    assert (found["state"], found["guest_alive"], found["problems"]) == ("ready", True, [])


# --- exec -----------------------------------------------------------------------------------------


def test_exec_runs_as_the_agent_in_the_worktree(kept: Kept) -> None:
    answer = kept.exec("sh", "-c", 'echo "$PWD $(id -un) $HOME $FROM $HERE"; echo no >&2; exit 7',
                       options=("--env", "HERE=exec"))  # fmt: skip
    assert answer.code == 7
    assert answer.out == f"{kept.project.path} agent /home/agent run exec\n"
    assert answer.err == "no\n"
    assert kept.exec("id", "-u", options=("--root",)).out == "0\n"
    assert kept.exec("no-such-command").code == 127
    assert kept.exec("sudo", "id", "-u").out == "0\n"


def test_exec_passes_arguments_and_stdin_as_they_are(kept: Kept) -> None:
    words = ("a b", "$HOME", "'", '"', "*", "", "ü\n")
    assert kept.exec("printf", "%s|", *words).out == "|".join(words) + "|"
    text = "".join(f"line {number}\n" for number in range(50_000))
    assert fed(kept.state, text, "exec", "-i", NAME, "--", "cat").out == text
    assert fed(kept.state, "unread", "exec", NAME, "--", "cat").out == ""


def test_exec_gives_a_terminal(kept: Kept) -> None:
    script = "test -t 0 && test -t 1 && stty size && echo $TERM"
    code, shown = in_terminal(kept.state, "exec", "-it", NAME, "--", "sh", "-c", script)
    assert (code, shown) == (0, "33 77\r\nvt100\r\n")


def in_terminal(state: State, *arguments: str) -> tuple[int, str]:
    """Exit code and what a terminal of 33 lines with 77 columns showed."""
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "rows", "33", "cols", "77"], stdin=theirs, check=True)
    with subprocess.Popen(
        state.argv(*arguments),
        env=state.environment() | {"TERM": "vt100"},
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.STDOUT,
    ) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says so when the last writer is gone
            while piece := os.read(ours, 4096):
                shown += piece
    os.close(ours)
    return process.returncode, shown.decode()


# --- the system's own SSH programs ----------------------------------------------------------------


@pytest.fixture
def config(kept: Kept, tmp_path: Path) -> Path:
    file = tmp_path / "config"
    file.write_text(kept.state.ok("ssh-config").out)
    return file


def call(*argv: str | Path, stdin: str = "") -> str:
    done = subprocess.run(list(map(str, argv)), input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}: {done.returncode}: {done.stderr}"
    return done.stdout


def test_ssh_uses_the_pinned_key(kept: Kept) -> None:
    answer = kept.state("ssh", NAME, "--", "pwd; id -un; exit 5")
    assert (answer.code, answer.out) == (5, f"{kept.project.path}\nagent\n")
    assert kept.state.ok("ssh", "--root", NAME, "--", "id", "-un").out == "root\n"


def test_openssh_scp_and_rsync_work_with_ssh_config(
    kept: Kept, config: Path, tmp_path: Path
) -> None:
    assert call("ssh", "-F", config, NAME, "cat", stdin="through\n") == "through\n"
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 400)
    call("scp", "-q", "-F", config, source, f"{NAME}:/tmp/copied")
    call("scp", "-q", "-F", config, f"{NAME}:/tmp/copied", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    if kept.exec("which", "rsync").code:
        pytest.skip("the image has no rsync")
    call("rsync", "-a", "-e", f"ssh -F {shlex.quote(str(config))}", source, f"{NAME}:/tmp/rsynced")
    assert kept.exec("cmp", "/tmp/copied", "/tmp/rsynced").code == 0


def test_another_host_key_is_not_accepted(kept: Kept, config: Path, tmp_path: Path) -> None:
    """Somebody else's guest on this address does not get our connection."""
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other")
    kind, key, *_ = (tmp_path / "other.pub").read_text().split()
    text = config.read_text()
    known = Path(re.findall(r'^  UserKnownHostsFile "(.*)"$', text, re.MULTILINE)[0])
    address = known.read_text().split()[0]
    (tmp_path / "known").write_text(f"{address} {kind} {key}\n")
    config.write_text(text.replace(str(known), str(tmp_path / "known")))
    done = subprocess.run(
        ["ssh", "-F", config, NAME, "true"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


# --- what it says ---------------------------------------------------------------------------------


def test_logs_tell_of_console_and_events(kept: Kept) -> None:
    console = kept.state.ok("logs", "--console", NAME).out
    assert "vmsandbox: seeded" in console
    assert "\x1b" not in console
    events = kept.state.ok("logs", "--events", NAME).out.splitlines()
    phases = [line.split()[2] for line in events]
    for earlier, later in itertools.pairwise(("starting", "boot", "sync", "run", "collect")):
        assert phases.index(earlier) < phases.index(later)


def test_status_shows_it_as_text_and_by_project(kept: Kept, tmp_path: Path) -> None:
    state = kept.state
    row = next(line for line in state.ok("status").out.splitlines() if NAME in line)
    for part in ("ready", "failed (127)", str(kept.project.path)):
        assert part in row
    here = state.ok("status", "--json", "--project", kept.project.path.parent).data["sandboxes"]
    assert [one["name"] for one in here] == [NAME]
    assert state.ok("status", "--json", "--project", tmp_path).data["sandboxes"] == []


# --- sync -----------------------------------------------------------------------------------------


def test_sync_brings_the_hosts_changes_and_keeps_the_guests(kept: Kept) -> None:
    state, project = kept.state, kept.project
    kept.exec("sh", "-c", "echo guest > both; echo guest > mine")
    project.write("both", "host\n")
    project.write("theirs", "two\n")
    project.write("fresh", b"dos\r\n")
    (project.path / "README").unlink()
    report = state("sync", "--json", NAME)
    assert report.code == 1, report.err
    assert report.data == {"updated": 3, "conflicts": ["both"]}
    shown = kept.exec("sh", "-c", "cat both theirs; tr '\\r' R < fresh").out
    assert shown == "guest\ntwo\ndosR\n"
    assert kept.exec("test", "-e", "README").code == 1
    again = state.ok("sync", "--json", NAME)
    assert (again.data["updated"], again.data["conflicts"]) == (0, [])


# --- the end: these two in this order -------------------------------------------------------------


def test_stop_collects_what_was_done_since(kept: Kept) -> None:
    state, project = kept.state, kept.project
    before = fingerprint(project.path, without=frozenset())
    trace = Trace.of(state, status_of(state, NAME)["id"])
    state.ok("stop", NAME)
    assert trace.guest() == []
    assert status_of(state, NAME)["state"] == "stopped"
    assert kinds_of(state, NAME) == {"both": "M", "mine": "A"}
    assert fingerprint(project.path, without=frozenset()) == before
    assert_refused(state("apply", "--json", "--yes", NAME), "apply_conflict", 1)  # both changed it
    assert fingerprint(project.path, without=frozenset()) == before
    state.ok("apply", "--yes", "--path", "mine", NAME)
    assert (project.path / "mine").read_text() == "guest\n"
    assert (project.path / "both").read_text() == "host\n"
    assert set(changes_of(state, NAME)) == {"both", "mine"}


def test_a_stopped_guest_cannot_be_stepped_into(kept: Kept) -> None:
    state = kept.state
    assert_refused(kept.exec("true"), "guest_not_running", 2, with_json=False)
    assert_refused(state("ssh", NAME, "--", "true"), "guest_not_running", 2, with_json=False)
    assert_refused(state("sync", "--json", NAME), "guest_not_running", 2)
    assert state.ok("ssh-config").out == ""
