"""What asks a server for an http check: the very command that runs in a guest, against real
servers here.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.adapter.loopback_guest import free_port
from vmsandbox.model import Check, HttpCheck
from vmsandbox.sandbox.checking import asking, wrong_answer

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl (guests have it)")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "index.html").write_text("<h1>It works</h1>\n")
    (tmp_path / "large").write_bytes(b"x" * 3_000_000)
    return tmp_path


@pytest.fixture
def port() -> int:
    return free_port()


def server(port: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "http.server", str(port))


@pytest.fixture
def running(folder: Path, port: int) -> Iterator[int]:
    """A server that somebody left running."""
    with subprocess.Popen(server(port), cwd=folder, stderr=subprocess.DEVNULL) as process:
        yield port
        process.kill()


def ask(folder: Path, check: Check) -> tuple[int, bytes, str]:
    """Exit code, what it printed, and what is wrong with the answer."""
    assert check.http
    proxied = os.environ | {"http_proxy": "http://127.0.0.1:1"}
    done = subprocess.run(asking(check, check.http), cwd=folder, capture_output=True, env=proxied)
    return done.returncode, done.stdout, wrong_answer(check.http, done.stdout)


def test_a_server_that_runs_is_asked_though_it_is_only_coming_up(
    folder: Path, running: int
) -> None:
    check = Check(http=HttpCheck(port=running, contains=("It works",), not_contains=("Error",)))
    assert ask(folder, check) == (0, b"200\n<h1>It works</h1>\n", "")


@pytest.mark.parametrize(
    ("expected", "wrong"),
    [
        ({"path": "/none", "status": 404}, ""),
        ({"path": "/none"}, "status 404, not 200"),
        ({"contains": ("works", "not there")}, "the answer does not contain 'not there'"),
        ({"not_contains": ("works",)}, "the answer contains 'works'"),
        ({"path": "/?a=[1]&b={x,y}'\"$(id)"}, ""),
    ],
)
def test_what_an_answer_must_be(
    folder: Path, running: int, expected: dict[str, object], wrong: str
) -> None:
    check = Check(http=HttpCheck.model_validate({"port": running, **expected}))
    assert ask(folder, check)[2] == wrong


def test_of_a_large_answer_no_more_than_is_looked_at(folder: Path, running: int) -> None:
    code, said, wrong = ask(folder, Check(http=HttpCheck(port=running, path="/large")))
    assert (code, len(said), wrong) == (0, 4 + 1024 * 1024, "")


def test_where_nobody_listens_it_ends_soon(folder: Path, port: int) -> None:
    code, said, wrong = ask(folder, Check(http=HttpCheck(port=port), timeout_s=1))
    assert (code, said, wrong) == (7, b"000\n", "status 000, not 200")


def test_the_server_to_ask_is_started_and_ended(folder: Path, port: int) -> None:
    inner = f"{sys.executable} -m http.server {port} & wait"
    check = Check(http=HttpCheck(port=port, contains=("works",)), serve=("/bin/sh", "-c", inner))
    assert ask(folder, check)[::2] == (0, "")
    serving = [
        p for p in psutil.process_iter(["cmdline"]) if str(port) in (p.info["cmdline"] or ())
    ]
    assert not psutil.wait_procs(serving, timeout=5)[1]


def test_a_server_that_listens_already_is_the_one_that_is_asked(folder: Path, running: int) -> None:
    http = HttpCheck(port=running)
    assert ask(folder, Check(http=http))[0] == 0
    check = Check(http=http, serve=("/bin/sh", "-c", "touch started"))
    assert ask(folder, check)[::2] == (0, "")
    assert not (folder / "started").exists()
