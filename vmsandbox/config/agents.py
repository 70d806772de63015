"""Owns what an agent is: how it is installed, called, led to its model, and read. The presets, and
how a table ``[agents.NAME]`` builds on one.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from vmsandbox.config.forms import Words
from vmsandbox.errors import UsageProblem
from vmsandbox.values import Value

GATEWAY = "{gateway}"
"""In an agent's variables: the URL below which a guest finds its gateways by name."""

NO_KEY = "vmsandbox"
"""What agents are told is their key: most refuse to begin without one. The gateway drops it."""

BRIEF = "VMSANDBOX_BRIEF"


class AgentSection(Value):
    """One ``[agents.NAME]`` table; what it leaves out, the preset that it is like says."""

    like: str | None = Field(default=None, description="a preset; that of the same name by default")
    command: Words | None = Field(
        default=None, description="words, or one line for the guest's shell"
    )
    env: dict[str, str] = Field(default_factory=dict)
    image: str | None = Field(default=None, description="an image that has it installed")
    gateways: tuple[str, ...] | None = Field(default=None, description="that it needs, by name")
    report: Literal["file", "stdout"] | None = None
    interactive: bool | None = None


class Agent(Value):
    """A coding agent, as it is used."""

    name: str
    command: tuple[str, ...] = Field(description="finds its brief by $VMSANDBOX_BRIEF")
    env: dict[str, str] = Field(default_factory=dict)
    image: str | None = Field(default=None, description="None: the one that any task has")
    gateways: tuple[str, ...] = ()
    report: Literal["file", "stdout"] = Field(
        default="file",
        description="where its report is, unless it wrote $VMSANDBOX_REPORT: the end of its stdout",
    )
    interactive: bool = Field(
        default=False, description="it draws on a terminal: it gets one, for vmsandbox attach"
    )
    untested: str = Field(default="", description="why nobody knows that it works")

    @property
    def needs_brief(self) -> bool:
        return any(BRIEF in word for word in self.command)

    def environment(self, gateway_url: str) -> dict[str, str]:
        """Its variables in a guest whose gateways are below that URL."""
        return {name: value.replace(GATEWAY, gateway_url) for name, value in self.env.items()}


_CODEX = """\
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --color never \
-c 'model_provider="gateway"' -c "model_providers.gateway={name='gateway',\
base_url='$OPENAI_BASE_URL',env_key='OPENAI_API_KEY',wire_api='responses'}" \
${VMSANDBOX_MODEL:+-m "$VMSANDBOX_MODEL"} "$(cat "$VMSANDBOX_BRIEF")"
"""
_AIDER = """\
aider --yes-always --no-gitignore --no-check-update --no-show-model-warnings \
--no-analytics --no-pretty --no-show-release-notes --no-detect-urls --no-suggest-shell-commands \
--no-auto-commits --no-dirty-commits --chat-history-file /dev/null --input-history-file /dev/null \
${VMSANDBOX_MODEL:+--model "$VMSANDBOX_MODEL"} --message-file "$VMSANDBOX_BRIEF" $VMSANDBOX_FILES
code=$?
rm -rf .aider.tags.cache.v*
exit $code
"""
_CLAUDE = """\
exec claude -p --dangerously-skip-permissions --output-format text \
${VMSANDBOX_MODEL:+--model "$VMSANDBOX_MODEL"} "$(cat "$VMSANDBOX_BRIEF")"
"""


def _shell(line: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", line)


PRESETS: Mapping[str, Agent] = {
    agent.name: agent
    for agent in (
        Agent(
            name="codex",
            command=_shell(_CODEX),
            env={"OPENAI_BASE_URL": f"{GATEWAY}/openai/v1", "OPENAI_API_KEY": NO_KEY},
            image="agent-codex",
            gateways=("openai",),
            report="stdout",
        ),
        Agent(
            name="aider",
            command=_shell(_AIDER),
            env={
                "OPENAI_API_BASE": f"{GATEWAY}/openai/v1",
                "OPENAI_API_KEY": NO_KEY,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            image="agent-aider",
            gateways=("openai",),
            report="stdout",
        ),
        Agent(
            name="claude-code",
            command=_shell(_CLAUDE),
            env={
                "ANTHROPIC_BASE_URL": f"{GATEWAY}/anthropic",
                "ANTHROPIC_API_KEY": NO_KEY,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
            image="agent-claude-code",
            gateways=("anthropic",),
            report="stdout",
            untested="written from its documentation; it was never run here",
        ),
    )
}
"""What is known of agents without any setting."""


def agent_of(name: str, sections: Mapping[str, AgentSection]) -> Agent:
    """The agent that a name means. Raises UsageProblem ``agent_unknown``, ``agent_incomplete``."""
    section = sections.get(name)
    like = (section.like if section else None) or name
    base = PRESETS.get(like)
    if base is None and (section is None or section.like):
        raise _unknown(name, section, {*sections, *PRESETS})
    if section is None:
        assert base
        return base
    said = {
        key: getattr(section, key)
        for key in ("command", "image", "gateways", "report", "interactive")
        if getattr(section, key) is not None
    }
    if base is None:
        if section.command is None:
            raise UsageProblem(
                "agent_incomplete",
                f"agent {name} has no command, and there is no preset of that name",
                hint=f"[agents.{name}] command = …, or like = one of {_listed(PRESETS)}",
            )
        return Agent.model_validate({"name": name, "env": section.env, **said})
    if "command" in said:  # what is known of a preset's own call says nothing about another
        said = {"untested": ""} | said
    return base.model_copy(update={"name": name, "env": {**base.env, **section.env}, **said})


def _unknown(name: str, section: AgentSection | None, known: Iterable[str]) -> UsageProblem:
    if section is not None:
        return UsageProblem(
            "agent_unknown",
            f"agent {name} is like {section.like!r}, which is no preset",
            hint=f"presets: {_listed(PRESETS)}",
        )
    return UsageProblem(
        "agent_unknown", f"unknown agent {name!r}", hint=f"known here: {_listed(known)}"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
