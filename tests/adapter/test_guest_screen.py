"""A command on a screen of its own: it outlives who watches it, is the same for whoever comes, and
ends with the exit code of its command and all that it wrote."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.screens import Screens, screens
from tests.sources import ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not shutil.which("tmux"), reason="screens need tmux")

SCRIPT = str(ROOT / "vmsandbox/guest_scripts/terminal")


class Stage:
    """One command's screen, and people who come to see it."""

    def __init__(self, folder: Path, people: Screens, lifetime: contextlib.ExitStack) -> None:
        self.folder = folder
        self.people = people
        self.env = {"VMSANDBOX_TERMINAL": str(folder)}
        self._lifetime = lifetime

    def run(self, *command: str, await_s: int = 0) -> "subprocess.Popen[bytes]":
        argv = ["sh", SCRIPT, "run", str(await_s), *command]
        process = subprocess.Popen(argv, env=os.environ | self.env, stdout=subprocess.PIPE)
        self._lifetime.callback(self._end, process, self.folder)
        return process

    def show(self, name: str, *, columns: int = 80, lines: int = 24) -> None:
        argv = ["sh", SCRIPT, "show"]
        self.people.open(name, argv, env=self.env, columns=columns, lines=lines)

    @staticmethod
    def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
        """Whatever became of the test: no screen stays."""
        subprocess.run(["tmux", "-S", folder / "socket", "kill-server"], capture_output=True)
        process.communicate(timeout=60)

    def asked(self, name: str, word: str) -> str:
        self.people.types(name, word, "Enter")
        return self.people.text(name)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with screens() as people, contextlib.ExitStack() as lifetime:
        yield Stage(tmp_path, people, lifetime)


def ended(process: "subprocess.Popen[bytes]") -> tuple[int, bytes]:
    output, _ = process.communicate(timeout=60)
    return process.returncode, output.removesuffix(b"\x1b[5n").replace(b"\r\n", b"\n")


def test_all_that_was_written_and_the_exit_code_are_kept(stage: Stage) -> None:
    code, output = ended(stage.run("sh", "-c", "test -t 0 && test -t 2 && seq 1 20000; exit 7"))
    assert code == 7
    assert output.split() == [b"%d" % number for number in range(1, 20001)]


def test_no_word_is_lost_at_the_end_however_often(stage: Stage, tmp_path: Path) -> None:
    for number in range(20):
        stage.folder = tmp_path / str(number)
        stage.folder.mkdir()
        stage.env["VMSANDBOX_TERMINAL"] = str(stage.folder)
        assert ended(stage.run("seq", "1", "20000"))[1].endswith(b"19999\n20000\n")


def test_words_arrive_as_they_are(stage: Stage) -> None:
    words = ["a b", "", "#{pid}", "$HOME", "ends;", ";", "\\;", "'q\"", "-x", "ü"]
    _, output = ended(stage.run(sys.executable, "-c", "import sys; print(sys.argv[1:])", *words))
    assert output.decode().strip() == str(words)


def test_it_begins_when_somebody_watches_with_their_size(stage: Stage) -> None:
    process = stage.run("sh", "-c", "stty size; read line", await_s=60)
    wait_until((stage.folder / "ready").exists)
    stage.show("first", columns=101, lines=31)
    stage.people.sees("first", "31 101")
    stage.people.types("first", "Enter")
    assert ended(process)[0] == 0
    assert stage.people.exit_code("first") == 0


def test_who_comes_back_finds_the_same_screen_in_their_own_size(stage: Stage) -> None:
    prompt = 'seq 1 300; while read line; do echo "<$line> $(stty size)"; done; echo over; exit 4'
    process = stage.run("sh", "-c", prompt)
    stage.show("first")
    stage.people.sees("first", "300")
    stage.people.types("first", "hello", "Enter")
    before = stage.people.sees("first", "<hello> 24 80").splitlines()

    stage.people.kill("first")  # as a lost connection would
    stage.people.exit_code("first")
    stage.show("second", columns=120, lines=40)
    after = stage.people.sees("second", "<hello> 24 80").splitlines()
    assert [line for line in before if line] == [line for line in after if line][-len(before) + 1 :]
    stage.people.types("second", "again", "Enter")
    stage.people.sees("second", "<again> 40 120")
    stage.people.resize("second", 100, 30)
    wait_until(lambda: "<more> 30 100" in stage.asked("second", "more"))

    for _ in range(30):  # one by one: many at once would count as pasted
        stage.people.types("second", "S-PPage")
    stage.people.sees("second", "\n2\n3\n")  # what has scrolled away is still there
    stage.people.types("second", "q")
    stage.people.sees("second", "<more> 30 100")  # a key that comes too soon counts as pasted
    stage.people.types("second", "C-d")
    assert ended(process)[0] == 4
    assert stage.people.exit_code("second") == 0


def test_keys_are_the_commands_own(stage: Stage) -> None:
    loop = "trap 'echo caught; exit 9' INT; echo go; while :; do sleep 1; done"
    process = stage.run("sh", "-c", loop)
    stage.show("first")
    stage.people.sees("first", "go")
    stage.people.types("first", "C-b", "d")
    stage.people.sees("first", "^Bd")
    stage.people.types("first", "C-c")
    code, output = ended(process)
    assert (code, output.split()[-1]) == (9, b"^Bd^Ccaught")


def test_a_terminal_that_nobody_here_knows_will_do(stage: Stage) -> None:
    process = stage.run("sh", "-c", "echo seen; read line")
    stage.env["TERM"] = "nobody-has-this"
    stage.show("first")
    stage.people.sees("first", "seen")
    stage.people.types("first", "Enter")
    assert ended(process)[0] == 0


def test_a_screen_that_is_killed_is_an_end_as_well(stage: Stage) -> None:
    process = stage.run("sleep", "60")
    wait_until((stage.folder / "ready").exists)
    subprocess.run(["tmux", "-S", stage.folder / "socket", "kill-server"], check=True)
    assert ended(process)[0] == 129
