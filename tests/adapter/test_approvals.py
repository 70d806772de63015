"""Questions of guests: put and answered over an outlet, by the very script that guests have."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.upstreams import outlet_port
from vmsandbox.approvals import AskServer, answer, find, pending, questions
from vmsandbox.approvals.record import EVER_MOST, PENDING_MOST, ask
from vmsandbox.asking import Answer
from vmsandbox.errors import NegativeAnswer, UsageProblem
from vmsandbox.outlet import Exchange
from vmsandbox.store import SandboxFolder

SCRIPT = Path(__file__).parents[2] / "vmsandbox/guest_scripts/vmsandbox-ask"


def nowhere(exchange: Exchange, /) -> None:
    exchange.refuse(403, "nowhere", "not asked for here")


class Asking(NamedTuple):
    folder: SandboxFolder
    port: int
    script: Path

    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"host": "ask.vmsandbox"},
            trust_env=False,
            timeout=60,
        )

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["/bin/sh", self.script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"]},
        )


@contextlib.contextmanager
def asking(tmp_path: Path, timeout_s: float = 60.0) -> Iterator[Asking]:
    """A sandbox that may ask, and the guest's script with the port that leads to us here."""
    folder = SandboxFolder(tmp_path / "2512f579")
    folder.path.mkdir(exist_ok=True)
    server = AskServer(folder, timeout_s)
    with outlet_port({"ask.vmsandbox": server}, nowhere) as port:
        script = tmp_path / "vmsandbox-ask"
        script.write_text(SCRIPT.read_text().replace("3128", str(port)))
        yield Asking(folder, port, script)


def await_question(folder: SandboxFolder) -> int:
    deadline = time.monotonic() + 20
    while not (found := pending(folder)):
        assert time.monotonic() < deadline, "nothing was asked"
        time.sleep(0.02)
    return int(found[0].id.rpartition("-")[2])


def test_what_is_allowed_runs_with_its_own_exit_code(tmp_path: Path) -> None:
    with asking(tmp_path) as there:
        process = there.start("deploy to staging?", "--", "sh", "-c", "echo did it; exit 7")
        number = await_question(there.folder)
        (asked,) = pending(there.folder)
        assert (asked.text, asked.command) == (
            "deploy to staging?",
            ("sh", "-c", "echo did it; exit 7"),
        )
        answer(there.folder, number, Answer.ALLOWED, who="ann")
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (7, "did it\n", "")
        (answered,) = questions(there.folder)
        assert (answered.answer, answered.who) == (Answer.ALLOWED, "ann")
        assert answered.answered_at is not None
        assert [event.phase for event in there.folder.read_events()] == ["ask", "ask"]


def test_what_is_denied_does_not_run(tmp_path: Path) -> None:
    with asking(tmp_path) as there:
        process = there.start("May I?", "--", "touch", str(tmp_path / "done"))
        number = await_question(there.folder)
        answer(there.folder, number, Answer.DENIED, who="ann", reason="not today")
        _, err = process.communicate(timeout=30)
        assert process.returncode == 126
        assert "denied by ann: not today" in err
        assert not (tmp_path / "done").exists()


def test_without_a_command_the_exit_code_is_the_answer(tmp_path: Path) -> None:
    with asking(tmp_path) as there:
        process = there.start("May I?")
        answer(there.folder, await_question(there.folder), Answer.ALLOWED, who="ann")
        assert process.wait(timeout=30) == 0


def test_what_nobody_answers_is_denied(tmp_path: Path) -> None:
    with asking(tmp_path, timeout_s=0.5) as there:
        process = there.start("May I?", "--", "touch", str(tmp_path / "done"))
        _, err = process.communicate(timeout=30)
        assert (process.returncode, "expired" in err) == (126, True)
        (asked,) = questions(there.folder)
        assert asked.answer is Answer.EXPIRED
        with pytest.raises(NegativeAnswer) as late:
            answer(there.folder, 1, Answer.ALLOWED, who="ann")
        assert late.value.code == "approval_over"
        assert not (tmp_path / "done").exists()


def test_whoever_is_ended_takes_the_question_back(tmp_path: Path) -> None:
    with asking(tmp_path) as there:
        process = there.start("May I?", "--", "true")
        await_question(there.folder)
        process.terminate()
        assert process.wait(timeout=70) == 126
        assert questions(there.folder)[0].answer is Answer.WITHDRAWN


def test_without_a_host_nothing_runs(tmp_path: Path) -> None:
    with asking(tmp_path) as there:
        pass
    process = there.start("May I?", "--", "touch", str(tmp_path / "done"))
    _, err = process.communicate(timeout=30)
    assert (process.returncode, "nobody can be asked" in err) == (126, True)
    assert not (tmp_path / "done").exists()


def test_a_question_outlives_the_manager_that_took_it(tmp_path: Path) -> None:
    with asking(tmp_path) as there:
        number = ask(there.folder, "May I?", (), "", 60.0).id.rpartition("-")[2]
    with asking(tmp_path) as there, there.client() as client:
        answer(there.folder, int(number), Answer.ALLOWED, who="ann")
        assert client.get(f"/ask/{number}").text == "allowed by ann\n"


def test_what_a_guest_asks_is_made_safe_to_show(tmp_path: Path) -> None:
    with asking(tmp_path) as there, there.client() as client:
        body = b"\0evil \x1b[31m\nred\0rm\0\xff\xe2\x80\xae"
        assert client.post("/ask", content=body).status_code == 201
        (asked,) = pending(there.folder)
        shown = " ".join((asked.text, *asked.command))
        assert "\x1b" not in shown
        assert "\n" not in shown
        assert "\u202e" not in shown
        assert asked.text.startswith("evil \\x1b")


@pytest.mark.parametrize(
    "words",
    [b"x" * 60_000, b"\x80" * 15_000, b"\0".join([b"w"] * 30_000), b"a\0" + b"b" * 9000],
    ids=["long", "escaped", "many", "last"],
)
def test_a_long_question_is_cut_so_that_one_sees_it(tmp_path: Path, words: bytes) -> None:
    with asking(tmp_path) as there, there.client() as client:
        assert client.post("/ask", content=b"\0May I?\0" + words).status_code == 201
        assert client.post("/ask", content=b"\0" + words.replace(b"\0", b" ")).status_code == 201
        command, text = questions(there.folder)
        assert command.command[-1].endswith("[…]")
        assert text.text.endswith("[…]")
        files = (there.folder.path / "approvals").glob("*.json")
        assert all(file.stat().st_size < 24 * 1024 for file in files)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/ask", b"", 400),
        ("POST", "/ask", b"only a rule", 400),
        ("POST", "/ask", b"x\0" + b"y" * 100_000, 400),
        ("GET", "/ask/7", b"", 404),
        ("GET", "/ask/../../record", b"", 404),
        ("GET", "/ask/99999", b"", 404),
        ("POST", "/ask/1", b"", 404),
        ("POST", "/ask/7/withdraw", b"", 409),
        ("DELETE", "/ask/1", b"", 404),
        ("GET", "/", b"", 404),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, method: str, path: str, body: bytes, status: int
) -> None:
    with asking(tmp_path) as there, there.client() as client:
        target = {"target": path.encode()}
        response = client.request(method, "/", content=body, extensions=target)
        assert response.status_code == status
        assert not questions(there.folder)


def test_a_guest_cannot_fill_the_disk_with_questions(tmp_path: Path) -> None:
    with asking(tmp_path) as there, there.client() as client:
        for _ in range(PENDING_MOST):
            assert client.post("/ask", content=b"\0x\0").status_code == 201
        refused = client.post("/ask", content=b"\0x\0")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "ask_too_often")
        (there.folder.path / "approvals" / f"{EVER_MOST}.json").write_text(
            (there.folder.path / "approvals" / "1.json").read_text()
        )
        for number in range(1, PENDING_MOST + 1):
            answer(there.folder, number, Answer.DENIED, who="ann")
        assert client.post("/ask", content=b"\0x\0").status_code == 429


def test_only_one_of_two_answers_counts(tmp_path: Path) -> None:
    with asking(tmp_path) as there:
        ask(there.folder, "May I?", (), "", 60.0)
        given: list[str] = []

        def give(one: Answer) -> None:
            with contextlib.suppress(NegativeAnswer):
                given.append(answer(there.folder, 1, one, who=one.value).who)

        both = (Answer.ALLOWED, Answer.DENIED)
        threads = [threading.Thread(target=give, args=(one,)) for one in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert given == [questions(there.folder)[0].who]


def test_an_id_is_found_by_a_unique_beginning(tmp_path: Path) -> None:
    folders = [SandboxFolder(tmp_path / name) for name in ("2512f579", "25aaaaaa")]
    for folder in folders:
        folder.path.mkdir()
        ask(folder, "May I?", (), "", 60.0)
    assert find(folders, "2512f579-1") == (folders[0], 1)
    assert find(folders, "25a-1") == (folders[1], 1)
    for wrong in ("25-1", "2512f579-2", "2512f579", "nonsense", "2512f579-1/../x", ""):
        with pytest.raises(UsageProblem) as caught:
            find(folders, wrong)
        assert caught.value.code == "approval_unknown"


@pytest.mark.parametrize(
    ("command", "asks"),
    [
        (["git", "push"], True),
        (["git", "push", "--force"], True),
        (["git", "pull"], False),
        (["git", "pushing"], False),
        (["terraform", "apply", "-auto"], True),
        (["terraform", "plan"], False),
    ],
)
def test_rules_demand_it_for_chosen_commands(
    tmp_path: Path, command: list[str], asks: bool
) -> None:
    tools, rules = tmp_path / "tools", tmp_path / "rules"
    (rules / "bin").mkdir(parents=True)
    tools.mkdir()
    for name, says in (("git", "git"), ("terraform", "terraform"), ("vmsandbox-ask", "asked")):
        (tools / name).write_text(f'#!/bin/sh\necho {says} "$@"\n')
        (tools / name).chmod(0o755)
    (rules / "list").write_text("git push\nterraform apply*\n")
    source = SCRIPT.with_name("ask-rule").read_text()
    (rules / "rule").write_text(source.replace("/usr/lib/vmsandbox-rules", str(rules)))
    (rules / "rule").chmod(0o755)
    for name in ("git", "terraform"):
        (rules / "bin" / name).symlink_to("../rule")
    path = f"{rules}/bin:{tools}:{os.environ['PATH']}"
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True)
    real = f"{tools}/{command[0]} {' '.join(command[1:])}"
    rule = "git push" if command[0] == "git" else "terraform apply*"
    wanted = f"asked --rule {rule} May {command[0]} run? -- {real}" if asks else " ".join(command)
    assert (done.stdout.strip(), done.returncode) == (wanted, 0), done.stderr
