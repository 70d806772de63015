"""What an agent is by its table and its preset, what a repository may say, and what a task gets."""

from typing import Any

import pytest

from vmsandbox.config import PRESETS, Config, agent_of, load
from vmsandbox.config.agents import AgentSection
from vmsandbox.errors import UsageProblem
from vmsandbox.model import Brief, Budget
from vmsandbox.sandbox.equipping import GATEWAY_URL, check_keys, equipped

USER = """
[gateway.openai]
upstream = "https://api.example.com"
from_env = "OPENAI_KEY_OF_THE_TEST"
[budget]
max_tokens = 1000
"""
GOAL = Brief(goal="x")


def settings(*texts: tuple[str, bool]) -> Config:
    return load([(f"{number}.toml", text, own) for number, (text, own) in enumerate(texts)])  # type: ignore[misc]


def given(found: Config, **asked: Any) -> Any:
    plain: dict[str, Any] = {
        "command": (),
        "agent": None,
        "gateways": (),
        "budget": Budget(),
        "ask": False,
        "brief": None,
    }
    return equipped(found, **(plain | asked))


def refused(text: str) -> str:
    with pytest.raises(UsageProblem) as caught:
        settings((USER, True), (text, False))
    assert caught.value.code == "config_invalid"
    return caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        '[gateway.openai]\nupstream = "https://evil.example"\nfrom_env = "PATH"',
        '[gateway.mine]\nupstream = "https://evil.example"\nfrom_env = "OPENAI_API_KEY"',
        "[gateway]",
        "gateway.openai.prices = {}",
    ],
)
def test_a_repository_does_not_say_where_a_key_goes(text: str) -> None:
    assert "gateway: only your own config.toml may say where a key goes" in refused(text)


def test_a_repository_does_not_open_gateways_for_every_task() -> None:
    assert "sandbox.gateways: only your own" in refused('[sandbox]\ngateways = ["openai"]')


def test_a_repository_only_narrows_a_budget_and_adds_rules() -> None:
    user = USER + '[ask]\ntimeout = "1m"\ncommands = ["git push"]\n'
    found = settings(
        (user, True),
        (
            "[budget]\nmax_tokens = 5000\nmax_cost = 2\n[ask]\ntimeout = 999\ncommands = ['x y']",
            False,
        ),
    )
    assert found.budget == Budget(max_tokens=1000, max_cost=2)
    assert found.ask is not None
    assert found.ask.rules().commands == ("git push", "x y")
    assert found.ask.timeout == 60
    assert settings((USER, True), ("[budget]\nmax_tokens = 10", False)).budget.max_tokens == 10


def test_every_preset_is_called_with_a_brief_and_never_with_a_key() -> None:
    assert set(PRESETS) == {"codex", "aider", "claude-code"}
    for agent in PRESETS.values():
        assert agent.needs_brief
        assert agent.gateways
        assert agent.image == f"agent-{agent.name}"
        variables = agent.environment("http://g")
        assert [value for value in variables.values() if value.startswith("http://g/")]
        assert [v for n, v in variables.items() if n.endswith("_KEY")] == ["vmsandbox"]
    assert PRESETS["claude-code"].untested
    assert not PRESETS["codex"].untested


def test_a_table_builds_on_a_preset() -> None:
    sections = {
        "codex": AgentSection(env={"VMSANDBOX_MODEL": "m"}),
        "mine": AgentSection(like="claude-code", image="own"),
        "plain": AgentSection(command=("run", "me")),
        "odd": AgentSection(like="nobody"),
        "empty": AgentSection(),
    }
    codex = agent_of("codex", sections)
    assert codex.command == PRESETS["codex"].command
    assert codex.env["VMSANDBOX_MODEL"] == "m"
    assert codex.env["OPENAI_API_KEY"] == "vmsandbox"
    mine = agent_of("mine", sections)
    assert (mine.name, mine.image, mine.gateways) == ("mine", "own", ("anthropic",))
    plain = agent_of("plain", sections)
    assert (plain.command, plain.image, plain.gateways) == (("run", "me"), None, ())
    for name, code in (
        ("odd", "agent_unknown"),
        ("empty", "agent_incomplete"),
        ("x", "agent_unknown"),
    ):
        with pytest.raises(UsageProblem) as caught:
            agent_of(name, sections)
        assert caught.value.code == code
        assert caught.value.hint


def test_an_agent_brings_its_gateways_variables_and_image() -> None:
    found = given(settings((USER, True)), agent="codex", brief=GOAL)
    assert found.image == "agent-codex"
    assert found.env["OPENAI_BASE_URL"] == f"{GATEWAY_URL}/openai/v1"
    assert [gateway.name for gateway in found.equipment.gateways] == ["openai"]
    assert found.equipment.budget == Budget(max_tokens=1000)
    within = given(settings((USER, True)), command=("x",), within=Budget(max_tokens=7))
    assert within.equipment.budget.max_tokens == 7
    assert found.equipment.asks is not None
    assert found.equipment.report_from == "stdout"


def test_a_plain_command_gets_nothing_that_it_was_not_given() -> None:
    found = given(settings((USER, True)), command=("make",))
    assert (found.command, found.env, found.image) == (("make",), {}, None)
    assert not found.equipment.gateways
    assert found.equipment.asks is None
    opened = given(settings((USER, True)), command=("make",), gateways=("openai",), ask=True)
    assert [one.name for one in opened.equipment.gateways] == ["openai"]
    assert opened.equipment.asks is not None


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({}, "nothing_to_run"),
        ({"agent": "codex"}, "agent_without_brief"),
        ({"agent": "codex", "brief": GOAL, "command": ("x",)}, "agent_and_command"),
        ({"agent": "claude-code", "brief": GOAL}, "gateway_unknown"),
        ({"command": ("x",), "gateways": ("nobody",)}, "gateway_unknown"),
        (
            {"command": ("x",), "gateways": ("openai",), "budget": Budget(max_cost=1)},
            "budget_without_prices",
        ),
    ],
)
def test_what_cannot_be_meant(asked: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        given(settings((USER, True)), **asked)
    assert caught.value.code == code
    assert caught.value.hint


def test_a_task_is_not_told_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-the-key-of-the-test"
    equipment = given(settings((USER, True)), command=("x",), gateways=("openai",)).equipment
    with pytest.raises(UsageProblem) as missing:
        check_keys(equipment, ())
    assert missing.value.code == "gateway_without_key"
    monkeypatch.setenv("OPENAI_KEY_OF_THE_TEST", key)
    check_keys(equipment, ("fine", "sk-another"))
    with pytest.raises(UsageProblem) as told:
        check_keys(equipment, (f"curl -H 'Authorization: Bearer {key}'",))
    assert told.value.code == "key_in_task"
    assert key not in f"{told.value.message}{told.value.hint}"
