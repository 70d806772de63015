"""Owns the host's half of a detached task: what the guest's `task` script is told, and what its
answers mean.

Pure: no connection is made here. The script's head describes the conversation. Everything that
comes back is hostile until it has matched a pattern.
"""

import math
import re
import signal
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, field_validator

from vmsandbox.errors import GuestProblem, UsageProblem
from vmsandbox.guest.capture import CAPTURE_BYTES
from vmsandbox.guest.marks import overlap
from vmsandbox.model import ExecResult, Outcome, Value

SCRIPT = ("/usr/lib/vmsandbox/task",)
ON_SCREEN = "/usr/lib/vmsandbox/terminal"
"""The script that runs a task's command on a screen, and shows it."""

_WATCHED_WITHIN_S = 30
"""A command that waits for its first watcher begins by then all the same."""

POLLS_PER_S = 20
"""How often the script looks whether processes are gone while it ends them."""

_BLOCK_BYTES = 512  # of POSIX `ulimit -f`
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECONDS = rb"([0-9]{1,9}\.[0-9]{1,9})"
_FOLLOWING = re.compile(rb"following ([a-z0-9-]{1,64}) " + _SECONDS + rb" ([0-9a-f-]{36})\n")
_REFUSED = re.compile(rb"refused ([a-z-]{1,64})(?: ([a-z0-9-]{1,64}))?\n")
_REPORT = re.compile(
    rb"([a-z_]{1,20}) ([0-9]{1,3}) " + _SECONDS + b" " + _SECONDS + rb" ([0-9]{1,9})"
)
_STATUS = re.compile(
    rb"task ([a-z0-9-]{1,64}) (running|ended|lost|none) " + _SECONDS + rb" (?:(.{1,100}) )?\.\n"
)
LINE_MAX_BYTES = 300
"""The longest line that the script ever answers with."""

_ENDS = frozenset(
    {
        Outcome.COMPLETED,
        Outcome.FAILED,
        Outcome.TIMEOUT,
        Outcome.GUEST_OOM,
        Outcome.GUEST_DISK_FULL,
        Outcome.CANCELLED,
    }
)


class TaskSpec(Value):
    """One command for the guest. `folder` exists there; `env` goes on top of the user's own."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    command: tuple[str, ...] = Field(min_length=1)
    folder: Path
    env: Mapping[str, str] = Field(default_factory=dict)
    user: str = "agent"
    group: str = "agent"
    timeout_s: float | None = Field(default=None, gt=0, description="enforced in the guest")
    grace_s: float = Field(default=10, ge=0, description="between SIGTERM and SIGKILL")
    capture_bytes: int = Field(default=CAPTURE_BYTES, gt=0, description="of each stream")

    @field_validator("env")
    @classmethod
    def _names_are_names(cls, env: Mapping[str, str]) -> Mapping[str, str]:
        check_env(env)
        return env


def check_env(env: Mapping[str, str]) -> None:
    """UsageProblem ``env_name_invalid`` for a name that no shell can export."""
    for name in env:
        if not _ENV_NAME.fullmatch(name):
            raise UsageProblem(
                "env_name_invalid",
                f"{name!r} is no name for an environment variable",
                hint="letters, digits and _ only, not starting with a digit",
            )


def user_environment(user: str) -> dict[str, str]:
    """What a login would set for `user` in the guest."""
    home = "/root" if user == "root" else f"/home/{user}"
    return {
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "PATH": f"{home}/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
    }


def as_user(user: str, group: str) -> tuple[str, ...]:
    """The prefix that makes root's command the user's: no PAM, one exec, no process more."""
    return ("/usr/bin/setpriv", f"--reuid={user}", f"--regid={group}", "--init-groups", "--")


def start_argv(spec: TaskSpec, script: tuple[str, ...] = SCRIPT) -> list[str]:
    """argv of the script that starts and follows `spec`."""
    environment = user_environment(spec.user) | dict(spec.env)
    return [
        *script,
        "start",
        spec.id,
        f"{max(spec.timeout_s, 0.001):.3f}" if spec.timeout_s else "0",
        str(polls(spec.grace_s)),
        # A little more than the host keeps, so that the host sees that there was more.
        str(spec.capture_bytes // _BLOCK_BYTES + 2),
        str(spec.folder),
        *(f"{name}={value}" for name, value in sorted(environment.items())),
        "--",
        *as_user(spec.user, spec.group),
        *spec.command,
    ]


def on_screen(command: tuple[str, ...], *, watched: bool) -> tuple[str, ...]:
    """`command` on a screen that stays when connections end; it begins at once, or when somebody
    watches."""
    return (ON_SCREEN, "run", str(_WATCHED_WITHIN_S if watched else 0), *command)


def polls(grace_s: float) -> int:
    return math.ceil(grace_s * POLLS_PER_S)


class Following(NamedTuple):
    """The script's answer to start and follow."""

    id: str
    uptime_s: float
    end_mark: bytes


class Report(NamedTuple):
    """How the command ended; times are seconds since the guest's boot."""

    outcome: Outcome
    code: int
    started_s: float
    ended_s: float
    oom_kills: int


class Status(NamedTuple):
    """The latest task of a guest. `state` is running, ended, lost, or none."""

    id: str
    state: str
    uptime_s: float
    report: Report | None


class Refused(Exception):
    """The script said no, with a word why: busy, exists, none, no-folder…"""

    def __init__(self, why: str, other: str) -> None:
        super().__init__(why)
        self.why = why
        self.other = other


def parse_following(line: bytes) -> Following:
    """Raises Refused, or GuestProblem ``guest_answer_invalid``."""
    if match := _FOLLOWING.fullmatch(line):
        return Following(match[1].decode(), float(match[2]), b"\0\x1e" + match[3] + b" ")
    raise _refusal(line)


def parse_status(line: bytes) -> Status | None:
    """None if no task was ever started. Raises GuestProblem ``guest_answer_invalid``."""
    if match := _STATUS.fullmatch(line):
        report = parse_report(match[4]) if match[4] else None
        return Status(match[1].decode(), match[2].decode(), float(match[3]), report)
    refused = _refusal(line)
    if isinstance(refused, Refused) and refused.why == "none":
        return None
    raise refused


def parse_report(text: bytes) -> Report:
    """Raises GuestProblem ``guest_answer_invalid``."""
    match = _REPORT.fullmatch(text)
    if not match or match[1].decode() not in _ENDS or int(match[2]) > 255:
        raise invalid_answer(text)
    return Report(
        Outcome(match[1].decode()), int(match[2]), float(match[3]), float(match[4]), int(match[5])
    )


def _refusal(line: bytes) -> Refused | GuestProblem:
    if match := _REFUSED.fullmatch(line):
        return Refused(match[1].decode(), (match[2] or b"").decode())
    return invalid_answer(line)


def invalid_answer(answer: bytes) -> GuestProblem:
    return GuestProblem(
        "guest_answer_invalid",
        f"the guest's task script answered {answer[:80]!r}",
        hint="vmsandbox logs --console; the guest may be broken or hostile",
    )


class EndMark:
    """Finds the end mark in a stream that comes in pieces; what it may be part of is held back."""

    _REPORT_MAX_BYTES = 128

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._held = b""
        self.report: Report | None = None

    def feed(self, data: bytes) -> bytes:
        """What belongs to the command's output. After the mark, nothing does."""
        if self.report:
            return b""
        data = self._held + data
        start = data.find(self._mark)
        if start < 0:
            start = len(data) - overlap(data, self._mark)
        elif self._report_at(data[start + len(self._mark) :]):
            self._held = b""
            return data[:start]
        self._held = data[start:]
        return data[:start]

    def _report_at(self, rest: bytes) -> bool:
        text, newline, _ = rest.partition(b"\n")
        if len(text) > self._REPORT_MAX_BYTES:
            raise invalid_answer(text)
        if newline:
            self.report = parse_report(text)
        return bool(newline)


def exec_result(report: Report, booted_at: float) -> ExecResult:
    """`booted_at` is the guest's boot in seconds since the epoch, by the host's clock."""
    ended_itself = report.outcome not in (Outcome.TIMEOUT, Outcome.CANCELLED)
    return ExecResult(
        exit_code=report.code if ended_itself else None,
        outcome=report.outcome,
        detail=_detail(report),
        started_at=datetime.fromtimestamp(booted_at + report.started_s, UTC),
        ended_at=datetime.fromtimestamp(booted_at + report.ended_s, UTC),
    )


def _detail(report: Report) -> str:
    if report.outcome is Outcome.TIMEOUT:
        return f"ended with all its processes after {report.ended_s - report.started_s:.1f} s"
    if report.outcome is Outcome.GUEST_DISK_FULL:
        cut = "" if report.code else ": what was written last may be cut short"
        return f"exit code {report.code}, and no space is left in the guest{cut}"
    if report.oom_kills:
        return f"the guest's kernel killed {report.oom_kills} of its processes for lack of memory"
    if report.outcome is Outcome.FAILED:
        return _exit_detail(report.code)
    return ""


def _exit_detail(code: int) -> str:
    if code == 127:
        return "command not found"
    if code == 126:
        return "the command cannot be executed"
    if code > 128:
        with_name = {number.value: number.name for number in signal.Signals}
        return f"ended by {with_name.get(code - 128, f'signal {code - 128}')}"
    return f"exit code {code}"
