"""Owns the meaning of vmsandbox.toml: text and overrides in, a Config or all its problems out.
Reads no file itself.

Later sources win: built-in defaults, the user's own config.toml, the project's vmsandbox.toml,
flags.
"""

import contextlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from vmsandbox.config.agents import PRESETS as PRESETS
from vmsandbox.config.agents import Agent as Agent
from vmsandbox.config.agents import AgentSection as AgentSection
from vmsandbox.config.agents import agent_of as agent_of
from vmsandbox.config.forms import DurationS as DurationS
from vmsandbox.config.forms import SizeMib as SizeMib
from vmsandbox.config.forms import Words as Words
from vmsandbox.config.forms import parse_duration_s as parse_duration_s
from vmsandbox.config.forms import parse_size_mib as parse_size_mib
from vmsandbox.config.net import NetSection, not_its_own
from vmsandbox.config.net import asked_in_vain as asked_in_vain
from vmsandbox.config.net import net_of as net_of
from vmsandbox.config.ports import PortsSection
from vmsandbox.config.providers import AskSection, Gateways, narrowed, spoken_out_of_turn
from vmsandbox.errors import UsageProblem
from vmsandbox.model import Check, HttpCheck, Limits, Value
from vmsandbox.provider import Budget

MOST_CHECKS = 100
"""Of one task: the end of what each said is kept with the result."""


class CheckEntry(Value):
    """A check as a file spells it; a text or list alone is its command."""

    name: str = ""
    command: Words | None = None
    http: HttpCheck | None = None
    serve: Words | None = Field(
        default=None, description="with http: the server to ask, if none listens"
    )
    timeout: DurationS = 600.0

    def wrong(self) -> str:
        """Why it is no check, or an empty text."""
        if bool(self.command) == (self.http is not None):
            return "a check is either a command or http"
        return "serve belongs to an http check" if self.serve and not self.http else ""

    def check(self) -> Check:
        """What it means; only of one that has nothing :meth:`wrong`."""
        return Check(
            name=self.name,
            command=self.command or (),
            http=self.http,
            serve=self.serve or (),
            timeout_s=self.timeout,
        )


def _spelled(value: object) -> object:
    return {"command": value} if isinstance(value, str | list | tuple) else value


def _right(entry: CheckEntry) -> CheckEntry:
    if wrong := entry.wrong():
        raise ValueError(wrong)
    return entry


CheckSpelled = Annotated[CheckEntry, BeforeValidator(_spelled)]


class SandboxSection(Value):
    """The ``[sandbox]`` table."""

    image: str = "debian-12"
    cpus: int = Field(default=1, ge=1, le=256)
    memory: SizeMib = Field(default=1024, ge=128, le=4 * 1024 * 1024, description="MiB, or 2G")
    disk: SizeMib = Field(default=20 * 1024, ge=512, le=64 * 1024 * 1024, description="MiB, or 40G")
    cpu_weight: int = Field(default=100, ge=1, le=100, description="beside other sandboxes")
    disk_mib_s: int = Field(default=300, ge=0, le=10**6, description="MiB a second; 0: no limit")
    disk_iops: int = Field(default=20_000, ge=0, le=10**8, description="a second; 0: no limit")
    timeout: DurationS | None = Field(default=None, description="seconds, or 90s, 5m, 1h30m")
    boot_timeout: DurationS = Field(default=180.0, description="until SSH answers")
    include: tuple[str, ...] = Field(default=(), description="globs of ignored files to bring in")
    history: str = Field(default="full", pattern=r"^(full|none|[1-9][0-9]{0,6})$")
    env: dict[str, str] = Field(default_factory=dict)
    gateways: tuple[str, ...] = Field(default=(), description="that every task has, by name")


class ResultSection(Value):
    """The ``[result]`` table: how much may come back."""

    max_paths: int = Field(default=50_000, ge=1)
    max_size: SizeMib = Field(default=1024, ge=1, description="MiB after inflation, or 2G")


class VerifySection(Value):
    """The ``[verify]`` table: what proves a result."""

    checks: tuple[Annotated[CheckSpelled, AfterValidator(_right)], ...] = Field(
        default=(), max_length=MOST_CHECKS
    )


class Config(Value):
    """Everything that vmsandbox.toml may say."""

    sandbox: SandboxSection = SandboxSection()
    result: ResultSection = ResultSection()
    verify: VerifySection = VerifySection()
    agents: dict[str, AgentSection] = Field(default_factory=dict)
    gateway: Gateways = Field(default_factory=dict)
    budget: Budget = Budget()
    ask: AskSection | None = None
    net: NetSection = Field(default=NetSection(), description="as written; see net_of")
    ports: PortsSection = PortsSection()

    def checks(self) -> tuple[Check, ...]:
        """What proves a result unless a task says otherwise."""
        return tuple(entry.check() for entry in self.verify.checks)

    def limits(self) -> Limits:
        """The sizes and times of a guest, as the rest of the program speaks of them."""
        box = self.sandbox
        return Limits(
            cpus=box.cpus,
            memory_mib=box.memory,
            disk_mib=box.disk,
            cpu_weight=box.cpu_weight,
            disk_mib_s=box.disk_mib_s,
            disk_iops=box.disk_iops,
            timeout_s=box.timeout,
            boot_timeout_s=box.boot_timeout,
            result_max_paths=self.result.max_paths,
            result_max_mib=self.result.max_size,
        )


class Source(NamedTuple):
    """A file of settings. One that comes with a repository is not the user's own word: it may
    narrow what a guest may do and name what the user has set up, and no more."""

    name: str
    text: str
    own: bool = True


def load(
    sources: Sequence[Source | tuple[str, str]],
    overrides: Mapping[str, Any] | None = None,
    net_flags: Mapping[str, Any] | None = None,
) -> Config:
    """Merge sources, then flags for ``[sandbox]``; None among the flags means not given. Those for
    ``[net]`` are only checked: :func:`net_of` makes sense of them.

    Raises UsageProblem ``config_invalid`` that lists every problem of every source.
    """
    merged: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for name, text, own in (Source(*source) for source in sources):
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            problems.append(f"{name}: {error}")
            continue
        problems.extend(_problems(name, document))
        foreign = [*not_its_own(document), *spoken_out_of_turn(document)]
        problems.extend(f"{name}: {wrong}" for wrong in foreign if not own)
        _merge(merged, document, own=own)
    flags = {key: value for key, value in (overrides or {}).items() if value is not None}
    problems.extend(_problems("command line", {"sandbox": flags, "net": net_flags or {}}))
    if problems:
        raise UsageProblem(
            "config_invalid",
            "\n  ".join([f"{len(problems)} problem(s) in the configuration:", *problems]),
            hint="vmsandbox run --help    (options of the same names; the README has every table)",
        )
    merged.setdefault("sandbox", {}).update(flags)
    return Config.model_validate(merged)


def _merge(merged: dict[str, dict[str, Any]], document: Mapping[str, Any], *, own: bool) -> None:
    for table, values in document.items():
        if isinstance(values, dict):
            before = merged.get(table, {})
            with contextlib.suppress(TypeError):  # of the wrong form, which was told already
                merged[table] = {**before, **values} if own else narrowed(table, before, values)


def _problems(source: str, document: Mapping[str, Any]) -> list[str]:
    try:
        Config.model_validate(document)
    except ValidationError as error:
        return [f"{source}: {_dotted(item['loc'])}: {_say(item)}" for item in error.errors()]
    return []


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "(whole file)"


def _say(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        return "unknown key"
    return str(item["msg"]).removeprefix("Value error, ")
