"""Owns the values that prove a result, or speak against it: checks, what they came to, what other
reviewers found.

Must know no file, process or guest. Texts of a guest are made safe before they get in here.
Everybody takes these from :mod:`vmsandbox.model`.
"""

from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from pydantic import Field, model_validator

from vmsandbox.states import Outcome
from vmsandbox.values import Digest, Value, now

_TITLE_CHARACTERS = 80


class HttpCheck(Value):
    """A request to a server in the guest, and what its answer must be."""

    port: int = Field(ge=1, le=65535)
    path: str = Field(default="/", pattern=r"^/[^\s\x00]*$")
    status: int = Field(default=200, ge=100, le=599)
    contains: tuple[str, ...] = Field(default=(), description="texts that the body must hold")
    not_contains: tuple[str, ...] = ()


class Check(Value):
    """What proves a result, in a guest: a command that must succeed, or a request."""

    name: str = ""
    command: tuple[str, ...] = ()
    http: HttpCheck | None = None
    serve: tuple[str, ...] = Field(
        default=(), description="the server to ask, for as long as it takes, if none listens"
    )
    timeout_s: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if bool(self.command) == (self.http is not None):
            raise ValueError("a check is either a command or http")
        if self.serve and self.http is None:
            raise ValueError("serve belongs to an http check")
        return self

    @property
    def title(self) -> str:
        """Its name, or what it does, on one line."""
        return self.name or self._does()[:_TITLE_CHARACTERS]

    def _does(self) -> str:
        if self.http:
            return f"http :{self.http.port}{self.http.path}"
        line = self.command[2:] if self.command[:2] == ("/bin/sh", "-c") else self.command
        return " ".join(" ".join(line).split())


class CheckResult(Value):
    """What one check came to."""

    name: str
    ok: bool
    exit_code: int | None = Field(description="None if it never ended by itself, or was not run")
    detail: str = Field(default="", description="why it is not ok")
    tail: str = Field(default="", description="the end of what it said, made safe to show")
    seconds: float = 0.0


class CheckRun(Value):
    """All checks of a task, once through, on one result."""

    fresh: bool = Field(description="in a new guest that held only base and result")
    when: datetime = Field(default_factory=now)
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether all of them are ok."""
        return all(result.ok for result in self.results)

    def named(self) -> dict[str, Any]:
        """What an approval names of it: all but the times."""
        results = [result.model_dump(mode="json", exclude={"seconds"}) for result in self.results]
        return {"fresh": self.fresh, "results": results}


class Severity(StrEnum):
    """How much a finding weighs; the last two speak against a result."""

    INFO = "info"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    BLOCKER = "blocker"

    @property
    def grave(self) -> bool:
        """Whether it speaks against accepting the result."""
        return self in (Severity.HIGH, Severity.BLOCKER)


class Finding(Value):
    """One thing that a reviewer found, in words that are safe to show."""

    path: str = ""
    line: int | None = None
    severity: Severity
    text: str


class Opinion(Value):
    """What one reviewer said of one result, having seen base, result and goal alone."""

    by: str
    command: tuple[str, ...]
    digest: Digest = Field(description="of the change set that was reviewed")
    when: datetime = Field(default_factory=now)
    outcome: Outcome
    exit_code: int | None
    detail: str = ""
    report: str = Field(default="", description="Markdown, made safe to show")
    findings: tuple[Finding, ...] = ()
    problem: str = Field(default="", description="why its findings could not be read")

    @property
    def grave(self) -> tuple[Finding, ...]:
        """The findings that speak against the result."""
        return tuple(finding for finding in self.findings if finding.severity.grave)
