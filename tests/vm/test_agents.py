"""Two real agents, as a user runs them, change a file with a model that they reach through the
gateway alone.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_server import AFTER, BEFORE, DONE, FILE, KEY, OUTPUT_TOKENS, ModelServer
from tests.repositories import Repository
from tests.sandboxes import State
from tests.vm.lives import kinds_of

IMAGE = "test-agents"
RECIPE = Path(__file__).parents[1] / "agents"
CONFIG = """\
[gateway.openai]
upstream = "{url}"
from_env = "KEY_OF_THE_TEST"
paths = ["/v1/responses", "/v1/chat/completions", "/v1/models"]
"""


@pytest.fixture(scope="module")
def model() -> Iterator[ModelServer]:
    with ModelServer(pause_s=0.05) as server:
        yield server


@pytest.fixture(scope="module")
def state(
    shared_state: State, model: ModelServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[State]:
    """A user with a gateway, and an image that has both agents: built from the registries of npm,
    Python and Debian, by name and by hash."""
    home = tmp_path_factory.mktemp("config")
    (home / "vmsandbox").mkdir()
    (home / "vmsandbox/config.toml").write_text(CONFIG.format(url=model.url))
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, which brings the Codex CLI into an image")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(home))
        patch.setenv("KEY_OF_THE_TEST", KEY)
        shared_state.ok("image", "build", "--if-needed", RECIPE, "--name", IMAGE)
        yield shared_state


def ran(state: State, model: ModelServer, tmp_path: Path, agent: str, name: str) -> Any:
    """One run of an agent by its preset; its result is applied."""
    model.asked.clear()
    project = Repository.create(tmp_path / "project", {FILE: f"{BEFORE}\n"}).path
    (tmp_path / "brief.md").write_text("Greet everybody.\n")
    told = state.ok(
        *("run", "--json", "--name", agent, "--agent", agent, "--image", IMAGE),
        *("--brief", tmp_path / "brief.md", "--worktree", project, "--timeout", "10m"),
        *("-e", f"VMSANDBOX_MODEL={name}", "-e", f"VMSANDBOX_FILES={FILE}"),
    ).data
    assert told["outcome"] == "completed"
    assert kinds_of(state, agent) == {FILE: "M"}
    state.ok("apply", "--yes", agent)
    assert (project / FILE).read_text() == f"{AFTER}\n"
    assert all(asked.headers["authorization"] == f"Bearer {KEY}" for asked in model.asked)
    assert all(asked.body["stream"] for asked in model.asked if asked.body)
    return state.ok("review", "--json", agent).data


def test_codex_edits_a_file(state: State, model: ModelServer, tmp_path: Path) -> None:
    shown = ran(state, model, tmp_path, "codex", "stand-in")
    assert [asked.path for asked in model.asked if asked.body] == ["/v1/responses"] * 2
    assert shown["usage"]["tokens"]["output"] == 2 * OUTPUT_TOKENS
    assert (shown["agent"], shown["report"].strip()) == ("codex", DONE)


def test_aider_edits_a_file(state: State, model: ModelServer, tmp_path: Path) -> None:
    shown = ran(state, model, tmp_path, "aider", "openai/stand-in")
    assert {asked.path for asked in model.asked} == {"/v1/chat/completions"}
    assert shown["usage"]["estimated"] == len(model.asked)
    assert f"Applied edit to {FILE}" in shown["report"]
