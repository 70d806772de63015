"""A guest that uses a model with a key that it never has, asks a person, and runs out of budget."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.model_server import INPUT_TOKENS, KEY, OUTPUT_TOKENS, ModelServer
from tests.repositories import Repository
from tests.sandboxes import State
from tests.vm.lives import assert_refused, changes_of, kinds_of, status_of, wait_for

CANARY = "canary-that-the-guest-does-have-7d3a9809"
CONFIG = """\
[gateway.openai]
upstream = "{url}"
from_env = "KEY_OF_THE_TEST"
paths = ["/v1/responses", "/v1/chat/completions"]
[gateway.openai.prices]
"*" = {{ input = 2.0, output = 10.0 }}
[ask]
timeout = "5m"
commands = ["ship it"]
"""
ASK_MODEL = """\
curl -sN --data '{"input": [], "tools": []}' -H 'content-type: application/json' \
    -H 'authorization: Bearer of-the-guest' "http://gateway.vmsandbox:3128/openai/v1/$1"
"""
TASK = f"""\
mkdir -p ~/.local/bin
printf '#!/bin/sh\necho shipped\n' > ~/.local/bin/ship
chmod +x ~/.local/bin/ship
canary={CANARY}
sudo sh -c "echo $canary-memory > /run/canary; echo $canary-disk > /root/canary; sync"
sh ./ask-model responses > answer
sh ./ask-model files > denied
env | sort > environment
vmsandbox-ask "deploy $(printf '\\033[31mnow')?" -- touch deployed
echo "exit code $?" > asked
ship it > shipped
"""


@pytest.fixture(scope="module")
def model() -> Iterator[ModelServer]:
    with ModelServer(pause_s=0.02) as server:
        yield server


@pytest.fixture(scope="module")
def state(
    shared_state: State, model: ModelServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[State]:
    """A user who has set up a gateway."""
    home = tmp_path_factory.mktemp("config")
    (home / "vmsandbox").mkdir()
    (home / "vmsandbox/config.toml").write_text(CONFIG.format(url=model.url))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(home))
        patch.setenv("KEY_OF_THE_TEST", KEY)
        yield shared_state


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("gateway") / "project"
    return Repository.create(top, {"ask-model": ASK_MODEL}).path


def memory_holds(folder: Path, *needles: bytes) -> list[bool]:
    """Whether the process of a guest, and so the guest's memory, holds these."""
    (guest,) = (
        process
        for process in psutil.process_iter(["cmdline", "name"])
        if (process.info["name"] or "").startswith("qemu")
        and str(folder) in " ".join(process.info["cmdline"] or ())
    )
    found = [False] * len(needles)
    with (
        Path(f"/proc/{guest.pid}/maps").open() as maps,
        Path(f"/proc/{guest.pid}/mem").open("rb", 0) as memory,
    ):
        for line in maps:
            span, rights, *_ = line.split()
            if rights[0] == "r" and not line.rstrip().endswith(("[vvar]", "[vsyscall]")):
                start, end = (int(edge, 16) for edge in span.split("-"))
                found = [
                    before or now
                    for before, now in zip(
                        found, _span_holds(memory, start, end, needles), strict=True
                    )
                ]
    return found


def _span_holds(memory: Any, start: int, end: int, needles: tuple[bytes, ...]) -> list[bool]:
    found, rest = [False] * len(needles), b""
    memory.seek(start)
    while start < end:
        try:
            data = memory.read(min(16 * 1024 * 1024, end - start))
        except OSError:  # a device's memory
            return found
        if not data:
            return found
        start += len(data)
        text = rest + data
        found = [before or needle in text for before, needle in zip(found, needles, strict=True)]
        rest = text[-256:]
    return found


def files_with(folder: Path, needle: bytes) -> list[str]:
    """Files of a sandbox that hold it; its disk among them."""
    done = subprocess.run(
        ["grep", "-rlaF", needle, str(folder)], capture_output=True, text=True, check=False
    )
    return sorted(Path(line).name for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def asked(state: State, project: Path) -> Iterator[Any]:
    """A task that has used the model, and waits for a person to answer."""
    arguments = ("--name", "asks", "--gateway", "openai", "--worktree", project)
    run = state.start("run", "--json", *arguments, "--", "sh", "-c", TASK)
    try:
        wait_for("a question", lambda: waiting(state), run)
        yield run
    finally:
        if run.poll() is None:
            state("stop", "--now", "asks")
        run.communicate()


def waiting(state: State) -> list[Any]:
    found: list[Any] = state.ok("approvals", "--json").data["approvals"]
    return found


def test_the_key_is_nowhere_in_the_guest(state: State, asked: Any, model: ModelServer) -> None:
    folder = state.path / "sandboxes" / status_of(state, "asks")["id"]
    state.ok("exec", "--root", "asks", "--", "sync")
    canaries = [f"{CANARY}-{where}".encode() for where in ("memory", "disk")]
    found = memory_holds(folder, canaries[0], KEY.encode())
    assert found == [True, False]
    assert "overlay.qcow2" in files_with(folder, canaries[1])
    assert files_with(folder, KEY.encode()) == []
    assert model.asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert len(model.asked) == 1  # the other path was not passed on


def test_a_person_answers(state: State, asked: Any) -> None:
    (question,) = waiting(state)
    assert question["text"] == "deploy \\x1b[31mnow?"
    assert question["command"] == ["touch", "deployed"]
    (pending,) = status_of(state, "asks")["asks"]
    assert pending["id"] == question["id"]
    assert question["id"] in state.ok("status").err
    assert_refused(state("approvals", "allow", "0-1"), "approval_unknown", 2, with_json=False)
    state.ok("approvals", "allow", question["id"])
    again = state("approvals", "deny", question["id"])
    assert_refused(again, "approval_over", 1, with_json=False)
    wait_for("the next question", lambda: waiting(state), asked)
    (rule,) = waiting(state)
    assert rule["rule"] == "ship it"
    assert rule["command"][1:] == ["it"]
    state.ok("approvals", "deny", rule["id"], "--reason", "not on a Friday")
    out, err = asked.communicate()
    assert asked.returncode == 126, err
    assert json.loads(out)["data"]["usage"].startswith("2 requests")
    assert (
        "not on a Friday" in (state.path / "sandboxes" / rule["id"][:8] / "stderr.log").read_text()
    )


def test_what_it_used_and_asked_is_for_the_reviewer_to_see(state: State, asked: Any) -> None:
    assert {"answer": "A", "asked": "A", "deployed": "A"}.items() <= kinds_of(state, "asks").items()
    shown = state.ok("review", "--json", "asks").data
    assert shown["usage"]["tokens"] == {"input": INPUT_TOKENS, "cached": 0, "output": OUTPUT_TOKENS}
    assert shown["usage"]["cost"] == pytest.approx(0.0025)
    assert shown["usage"]["failed"] == 1
    assert [one["answer"] for one in shown["approvals"]] == ["allowed", "denied"]
    assert all(one["who"] and one["answered_at"] for one in shown["approvals"])
    text = state.ok("review", "asks").out
    assert "cost 0.0025" in text
    assert "\x1b[31mnow" not in text
    log = (state.path / "sandboxes" / shown["id"] / "gateway.jsonl").read_text()
    calls = [json.loads(line) for line in log.splitlines()]
    assert [(call["path"], call["status"]) for call in calls] == [
        ("/v1/responses", 200),
        ("/v1/files", 403),
    ]
    assert KEY not in text + log + json.dumps(shown)


def test_a_task_that_has_used_up_its_budget_is_ended(state: State, project: Path) -> None:
    loop = "echo begun > begun; while sh ./ask-model responses > answer; do :; done"
    arguments = ("--name", "poor", "--gateway", "openai", "--worktree", project)
    ran = state("run", "--json", *arguments, "--max-tokens", "2000", "--", "sh", "-c", loop)
    assert ran.code == 125, ran
    assert ran.data["outcome"] == "budget_exhausted"
    assert "2100 of 2000 tokens are used" in ran.data["detail"]
    assert changes_of(state, "poor").keys() >= {"begun"}
    assert status_of(state, "poor")["usage"]["refused"] >= 1


def test_a_gateway_without_its_variable_begins_nothing(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state.ids()
    run = ("run", "--gateway", "openai", "--worktree", project)
    told = state(*run, "--", "echo", KEY)
    assert "[key_in_task]" in told.err
    assert KEY not in told.err
    monkeypatch.delenv("KEY_OF_THE_TEST")
    missing = state(*run, "--json", "--", "true")
    assert_refused(missing, "gateway_without_key", 125)
    assert "export KEY_OF_THE_TEST=" in missing.error["hint"]
    unknown = state("run", "--json", "--gateway", "x", "--worktree", project, "--", "true")
    assert_refused(unknown, "gateway_unknown", 125)
    agent = state("run", "--json", "--agent", "x", "--worktree", project)
    assert_refused(agent, "agent_unknown", 125)
    assert state.ids() == before
    assert "KEY_OF_THE_TEST" not in os.environ
