"""A person at the terminal of a task: leaves, loses the connection, comes back from elsewhere, and
finds the same screen; then OpenSSH's own programs on the same guest. One guest for all of it.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repositories import Repository
from tests.sandboxes import State
from tests.screens import Screens, screens
from tests.vm.lives import PATIENCE_S, assert_refused, kinds_of, status_of

NAME = "draw"
PROMPT = """\
echo 'what now?'
while read line; do echo "<$line> $(stty size)"; done
echo done > made
exit 4
"""


class Task(NamedTuple):
    """A task that waits for what somebody types, and people who come to its terminal."""

    state: State
    project: Repository
    people: Screens

    def sits_down(self, name: str, *arguments: str, columns: int = 80, lines: int = 24) -> None:
        self.people.open(
            name,
            self.state.argv(*arguments),
            env={"VMSANDBOX_HOME": str(self.state.path)},
            columns=columns,
            lines=lines,
        )


@pytest.fixture(scope="module")
def task(shared_state: State, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Task]:
    files: dict[str, str | bytes] = {"README": "hello\n", "prompt": PROMPT}
    project = Repository.create(tmp_path_factory.mktemp("attach") / "project", files)
    with screens(PATIENCE_S) as people:
        yield Task(shared_state, project, people)


def lines_of(screen: str) -> list[str]:
    return [line for line in screen.splitlines() if line]


def test_who_comes_back_finds_the_same_screen(task: Task) -> None:
    people = task.people
    begin = ("run", "-it", "--keep", "--name", NAME, "--worktree", str(task.project.path))
    task.sits_down("first", *begin, "--", "sh", "prompt", columns=90, lines=28)
    people.sees("first", "what now?")
    people.types("first", "one", "Enter")
    before = people.sees("first", "<one> 28 90")

    people.types("first", "C-p")
    people.types("first", "C-q")
    assert people.exit_code("first") == 0
    assert f"vmsandbox attach {status_of(task.state, NAME)['id']}" in people.text("first")
    assert people.modes("first") == "0 0", "the terminal is not as it was"
    assert status_of(task.state, NAME)["state"] == "running"

    task.sits_down("second", "attach", NAME, columns=100, lines=30)
    people.sees("second", "<one> 28 90")
    people.types("second", "two", "Enter")
    people.sees("second", "<two> 30 100")
    people.kill("second")

    task.sits_down("third", "attach", NAME, columns=90, lines=28)
    after = lines_of(people.sees("third", "<two> 30 100"))
    assert after[: len(lines_of(before))] == lines_of(before)
    people.types("third", "C-d")
    people.sees("third", "exit code 4, 1 change(s)")
    assert people.exit_code("third") == 4
    assert people.modes("third") == "0 0"


def test_the_task_is_one_like_any_other(task: Task) -> None:
    found = status_of(task.state, NAME)
    assert (found["state"], found["outcome"], found["exec_result"]["exit_code"]) == (
        "ready",
        "failed",
        4,
    )
    assert kinds_of(task.state, NAME) == {"made": "A"}
    logged = task.state.ok("logs", "--stdout", "--raw", NAME).out
    assert "what now?\n" in logged
    assert "<one> 28 90\n" in logged


def test_what_cannot_be_attached_to(task: Task, tmp_path: Path) -> None:
    said = task.state("attach", NAME)
    assert_refused(said, "not_a_terminal", 125, with_json=False)
    said = task.state("attach", "--detach-keys", "alt-f4", NAME)
    assert_refused(said, "detach_keys_invalid", 125, with_json=False)
    for flags, code in ((["-i"], "flags_contradict"), (["-it"], "not_a_terminal")):
        said = task.state("run", *flags, "--", "sh", cwd=task.project.path)
        assert_refused(said, code, 125, with_json=False)
    said = task.state("run", "-it", "--json", "--", "sh", cwd=task.project.path)
    assert_refused(said, "flags_contradict", 125)
    task.sits_down("late", "attach", NAME)
    task.people.sees("late", "[task_ended]")
    assert task.people.exit_code("late") == 125


# --- OpenSSH's own programs -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ssh") / "config"
    path.write_text(task.state.ok("ssh-config", NAME).out)
    return path


def called(*argv: str | Path, stdin: str = "", **env: str) -> str:
    done = subprocess.run(
        argv, input=stdin, capture_output=True, text=True, env=os.environ | env, timeout=120
    )
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


def test_ssh_scp_and_sftp(config: Path, tmp_path: Path) -> None:
    assert called("ssh", "-F", config, NAME, "id -un; pwd") == "agent\n/home/agent\n"
    sent = tmp_path / "sent file"
    sent.write_bytes(bytes(range(256)) * 4096)
    called("scp", "-q", "-F", config, sent, f"{NAME}:copy")
    called("scp", "-q", "-F", config, f"{NAME}:copy", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == sent.read_bytes()
    batch = f"put '{sent}' folder/inside\nls -l folder\nget folder/inside '{tmp_path}/again'\n"
    shown = called("sftp", "-q", "-F", config, "-b", "-", NAME, stdin=f"mkdir folder\n{batch}")
    assert f"{len(sent.read_bytes())}" in shown
    assert (tmp_path / "again").read_bytes() == sent.read_bytes()


def test_rsync(config: Path, task: Task, tmp_path: Path) -> None:
    remote = f"ssh -F {config}"
    called("rsync", "-a", "-e", remote, f"{task.project.path}/", f"{NAME}:mirror/")
    called("rsync", "-a", "--delete", "-e", remote, f"{NAME}:mirror/", tmp_path / "mirror")
    assert (tmp_path / "mirror/prompt").read_text() == PROMPT


def test_git_over_ssh(config: Path, task: Task, tmp_path: Path) -> None:
    env = {"GIT_SSH_COMMAND": f"ssh -F {config}"}
    called("ssh", "-F", config, NAME, "git init --quiet --bare shared.git")
    here = ("git", "-C", task.project.path)
    called(*here, "push", "--quiet", f"{NAME}:shared.git", "HEAD:refs/heads/main", **env)
    called("git", "clone", "--quiet", "-b", "main", f"{NAME}:shared.git", tmp_path / "c", **env)
    assert (tmp_path / "c/README").read_text() == "hello\n"
