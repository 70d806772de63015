"""Owns the form of task files: plain values in, planned tasks or every problem with its line out.

Pure: reads no file and asks no host; :mod:`vmsandbox.batch.plan` does. A file holds ``tasks``,
``defaults`` for all of them, and ``agents``, which names commands.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from vmsandbox import brief
from vmsandbox.config import MOST_CHECKS, PRESETS, CheckSpelled, DurationS, SizeMib, Words
from vmsandbox.document import Document, Place, Problem
from vmsandbox.forwards import MappingSpelled, PortMapping
from vmsandbox.model import Brief, Check, Limits, Value
from vmsandbox.provider import Budget
from vmsandbox.reach import NetMode, RuleText

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_V = TypeVar("_V", bound=Value)
MOST_COPIES = 100


def _variables(value: Any) -> Any:
    """Numbers may stand for themselves; what YAML or TOML read as something else may not."""
    if not isinstance(value, dict):
        return value
    for name in value:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name for an environment variable")
    return {
        name: str(one) if isinstance(one, int) and not isinstance(one, bool) else one
        for name, one in value.items()
    }


def _brief(value: Any) -> Any:
    if value is None or isinstance(value, Brief):
        return value
    found, problems = brief.checked(value)
    if found is None:
        raise ValueError("; ".join(f"{'.'.join(map(str, at))}: {text}" for at, text in problems))
    if not found.goal.strip():
        raise ValueError("the goal is empty")
    return found


Name = Annotated[str, Field(pattern=_NAME)]


class Settings(Value):
    """What ``defaults`` may say, and each task for itself."""

    worktree: str | None = Field(default=None, description="relative to the task file")
    image: str | None = None
    cpus: int | None = Field(default=None, ge=1, le=256)
    memory: SizeMib | None = Field(default=None, description="MiB, or 2G")
    disk: SizeMib | None = Field(default=None, description="MiB, or 40G")
    timeout: DurationS | None = Field(default=None, description="seconds, or 90s, 5m, 1h30m")
    command: Words | None = Field(default=None, description="words, or one line for the shell")
    agent: Name | None = Field(
        default=None, description="among `agents`, the project's, or a preset"
    )
    agents: tuple[Name, ...] = Field(default=(), description="a sandbox for each of them")
    repeat: int | None = Field(default=None, ge=1, le=MOST_COPIES)
    brief: Annotated[Brief | None, BeforeValidator(_brief)] = None
    brief_file: str | None = Field(default=None, description="relative to the task file")
    env: Annotated[dict[str, str], BeforeValidator(_variables)] = Field(default_factory=dict)
    include: tuple[str, ...] | None = None
    history: str | None = Field(default=None, pattern=r"^(full|none|[1-9][0-9]{0,6})$")
    verify: tuple[CheckSpelled, ...] = Field(default=(), max_length=MOST_CHECKS)
    publish: tuple[MappingSpelled, ...] = Field(default=(), description="HOST:GUEST on 127.0.0.1")
    auto_publish: bool | None = Field(default=None, description="false: only what publish says")
    net: NetMode | None = Field(
        default=None, description="none, allow or public, within what you let every task reach"
    )
    allow: tuple[RuleText, ...] = Field(
        default=(), description="pypi.org, *.github.com:443, @npm, within the same"
    )
    max_cost: float | None = Field(default=None, gt=0, description="at most; yours counts as well")
    max_tokens: int | None = Field(default=None, gt=0, description="at most; yours counts as well")


class TaskEntry(Settings):
    """One task of a file."""

    name: Name
    after: tuple[Name, ...] = Field(default=(), description="tasks that must complete before")


class TaskFile(Value):
    """A whole file; what `batch --schema` prints."""

    defaults: Settings = Settings()
    agents: dict[Name, Words] = Field(
        default_factory=dict, description="commands by name; $VMSANDBOX_BRIEF names the brief"
    )
    tasks: tuple[TaskEntry, ...] = Field(min_length=1)


class Read(NamedTuple):
    """A file as far as it could be understood."""

    document: Document
    agents: Mapping[str, tuple[str, ...]]
    tasks: tuple[tuple[int, TaskEntry], ...]
    problems: tuple[Problem, ...]


def schema() -> dict[str, Any]:
    """JSON Schema of a task file."""
    return TaskFile.model_json_schema()


def understand(document: Document) -> Read:
    """The tasks of a file with its defaults, and all that is wrong with it.

    A task with a problem is left out of `tasks`; the others are there.
    """
    value = document.value
    if not isinstance(value, dict):
        text = "a task file is a table with `tasks`"
        return Read(document, {}, (), (document.problem((), text),))
    problems = [
        document.problem((key,), f"{key}: unknown key")
        for key in value
        if key not in TaskFile.model_fields
    ]
    defaults, wrong = _valid(document, Settings, value.get("defaults") or {}, ("defaults",))
    problems += wrong
    agents, wrong = _agents(document, value.get("agents") or {})
    problems += wrong
    tasks: list[tuple[int, TaskEntry]] = []
    entries = value.get("tasks")
    if not isinstance(entries, list) or not entries:
        problems.append(document.problem(("tasks",), "tasks: there must be a list of them"))
        entries = []
    for number, entry in enumerate(entries):
        task, wrong = _valid(document, TaskEntry, entry, ("tasks", number))
        problems += wrong
        if task is not None:
            tasks.append((number, _with_defaults(task, defaults or Settings())))
    return Read(document, agents, tuple(tasks), tuple(problems))


def _agents(document: Document, value: Any) -> tuple[dict[str, tuple[str, ...]], list[Problem]]:
    """Also those with a wrong command are known by name, so that naming them is no second
    problem."""
    probe, problems = _valid(
        document, TaskFile, {"agents": value, "tasks": [{"name": "probe"}]}, ()
    )
    if probe is not None:
        return dict(probe.agents), problems
    return {str(name): () for name in value} if isinstance(value, dict) else {}, problems


def _valid(
    document: Document, kind: type[_V], value: Any, place: Place
) -> tuple[_V | None, list[Problem]]:
    try:
        return kind.model_validate(value), []
    except ValidationError as error:
        return None, list(_told(document, error, place))


def _told(document: Document, error: ValidationError, place: Place) -> Iterator[Problem]:
    for item in error.errors():
        at: Place = (*place, *item["loc"])
        shown = ".".join(str(part) for part in at)
        yield document.problem(at, f"{shown}: {_say(item)}")


def _say(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        return "unknown key"
    if item["type"] == "missing":
        return "is missing"
    return str(item["msg"]).removeprefix("Value error, ")


def _with_defaults(task: TaskEntry, defaults: Settings) -> TaskEntry:
    """What a task does not say, the defaults say; variables are put together."""
    said = task.model_fields_set
    chosen = {"command", "agent", "agents"}
    inherited = {
        name: getattr(defaults, name)
        for name in defaults.model_fields_set - said - {"env"}
        if name not in chosen or not said & chosen
    }
    if {"brief", "brief_file"} & said:
        inherited.pop("brief", None)
        inherited.pop("brief_file", None)
    return task.model_copy(update={**inherited, "env": {**defaults.env, **task.env}})


# --- what a file alone can tell ------------------------------------------------------------------


def problems_of(
    read: Read, named_there: Callable[[TaskEntry], Collection[str]]
) -> Iterator[Problem]:
    """What is wrong with the tasks beyond their form: names, workers, checks.

    `named_there` says what agents a task's worktree knows beside those of the file.
    """
    known: dict[str, int] = {}
    for number, name in _names(read.document):
        at = read.document.line(("tasks", number, "name"))
        if name in known:
            text = f"tasks.{number}.name: {name!r} is the name of line {known[name]}, too"
            yield Problem(read.document.file, at, text)
        known.setdefault(name, at)
    for number, task in read.tasks:
        for key, text in _wrong_with(task, {*read.agents, *PRESETS, *named_there(task)}):
            yield problem_of(read.document, number, key, text)


def problem_of(document: Document, number: int, key: str, text: str) -> Problem:
    """`text` said of a key of a task."""
    return document.problem(("tasks", number, key), f"tasks.{number}.{key}: {text}")


def entries_of(document: Document) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The tasks as they are written, also those that have problems."""
    value = document.value
    entries = value.get("tasks") if isinstance(value, dict) else None
    for number, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, dict):
            yield number, entry


def _names(document: Document) -> Iterator[tuple[int, str]]:
    for number, entry in entries_of(document):
        if isinstance(entry.get("name"), str):
            yield number, entry["name"]


def _wrong_with(task: TaskEntry, agents: Collection[str]) -> Iterator[tuple[str, str]]:
    ways = [way for way in ("command", "agent", "agents") if getattr(task, way)]
    if not ways:
        yield "command", "a task needs a command, an agent or agents"
    elif len(ways) > 1:
        yield ways[1], f"there is a {ways[0]} already: only one of command, agent, agents"
    for name in (*((task.agent,) if task.agent else ()), *task.agents):
        if name not in agents:
            yield "agent" if task.agent else "agents", f"unknown agent {name!r}"
    if len(set(task.agents)) < len(task.agents):
        yield "agents", "an agent is named twice: use repeat"
    if task.publish and (len(task.agents) > 1 or (task.repeat or 1) > 1):
        yield "publish", "several sandboxes cannot have the same port of the host"
    if task.brief and task.brief_file:
        yield "brief_file", "there is a brief already"
    for number, entry in enumerate(task.verify):
        if wrong := entry.wrong():
            yield "verify", f"{number}: {wrong}"


# --- from entries to tasks ------------------------------------------------------------------------


class Grants(Value):
    """What the user lets every task of a batch do beyond its guest. A task file, which may be
    another's, can only narrow it."""

    net: dict[str, Any] = Field(
        default_factory=dict, description="flags of the ``[net]`` table: mode, allow"
    )
    gateways: tuple[str, ...] = Field(default=(), description="beside those that agents need")
    budget: Budget = Field(default=Budget(), description="of each task; else what settings say")
    ask: bool = Field(default=False, description="guests may ask a person")


class Planned(Value):
    """One sandbox to be made, with nothing left to look up."""

    name: Name
    origin: str = Field(description="the entry that it came of; the same as the name for most")
    where: str = Field(default="", description="file and line, for messages")
    command: tuple[str, ...] = Field(default=(), description="empty: that of the agent")
    agent: str | None = Field(default=None, description="a preset, or one of the project's")
    worktree: Path
    env: dict[str, str] = Field(default_factory=dict)
    image: str | None = None
    cpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    timeout_s: float | None = None
    include: tuple[str, ...] | None = None
    history: str | None = None
    brief: Brief | None = None
    verify: tuple[Check, ...] = ()
    publish: tuple[PortMapping, ...] = ()
    auto_publish: bool | None = None
    within_net: dict[str, Any] = Field(default_factory=dict)
    within_budget: Budget = Budget()
    grants: Grants = Grants()
    after: tuple[str, ...] = Field(default=(), description="origins that must complete before")
    limits: Limits = Limits()
    image_digest: str = Field(default="", description="known once a host has been asked")


def expanded(
    task: TaskEntry, agents: Mapping[str, tuple[str, ...]], folder: Path, where: str
) -> Iterator[Planned]:
    """The sandboxes of an entry without problems: one, or one for each agent and repetition."""
    workers: list[tuple[str, tuple[str, ...], str | None]] = [
        (f"-{name}" if task.agents else "", agents.get(name, ()), None if name in agents else name)
        for name in (task.agents or ((task.agent,) if task.agent else ()))
    ] or [("", task.command or (), None)]
    copies = [f"-{n}" for n in range(1, task.repeat + 1)] if task.repeat else [""]
    for suffix, command, agent in workers:
        for copy in copies:
            yield Planned(
                name=f"{task.name}{suffix}{copy}",
                origin=task.name,
                where=where,
                command=command,
                agent=agent,
                worktree=folder / (task.worktree or "."),
                env=task.env,
                image=task.image,
                cpus=task.cpus,
                memory_mib=task.memory,
                disk_mib=task.disk,
                timeout_s=task.timeout,
                include=task.include,
                history=task.history,
                brief=task.brief,
                verify=tuple(entry.check() for entry in task.verify),
                publish=task.publish,
                auto_publish=task.auto_publish,
                within_net=_within_net(task),
                within_budget=Budget(max_cost=task.max_cost, max_tokens=task.max_tokens),
                after=task.after,
            )


def _within_net(task: TaskEntry) -> dict[str, Any]:
    said = {"mode": task.net, "allow": task.allow}
    return {key: value for key, value in said.items() if value}
