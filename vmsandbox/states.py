"""Owns the two state machines, of a sandbox and of its result, and the names of how a task ended.

Must know nothing else. Everybody takes them from :mod:`vmsandbox.model`.
"""

from collections.abc import Mapping
from enum import StrEnum


class SandboxState(StrEnum):
    """Where a sandbox is in its life, as intended; libvirt says what is true."""

    QUEUED = "queued"
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    COLLECTING = "collecting"
    STOPPED = "stopped"
    FAILED = "failed"


_SANDBOX_STEPS: Mapping[SandboxState, frozenset[SandboxState]] = {
    SandboxState.QUEUED: frozenset({SandboxState.STARTING, SandboxState.STOPPED}),
    SandboxState.STARTING: frozenset({SandboxState.READY, SandboxState.STOPPED}),
    SandboxState.READY: frozenset(
        {SandboxState.RUNNING, SandboxState.COLLECTING, SandboxState.STOPPED}
    ),
    SandboxState.RUNNING: frozenset(
        {SandboxState.READY, SandboxState.COLLECTING, SandboxState.STOPPED}
    ),
    SandboxState.COLLECTING: frozenset(
        {SandboxState.READY, SandboxState.RUNNING, SandboxState.STOPPED}
    ),
    SandboxState.STOPPED: frozenset({SandboxState.STARTING, SandboxState.QUEUED}),
    SandboxState.FAILED: frozenset({SandboxState.STARTING, SandboxState.STOPPED}),
}


class ResultState(StrEnum):
    """Where a sandbox's change set is on its way to the host worktree."""

    NONE = "none"
    PENDING = "pending"
    APPROVED = "approved"
    APPLIED = "applied"
    CONFLICTED = "conflicted"
    DROPPED = "dropped"


_ANY_DECISION = frozenset(ResultState) - {ResultState.NONE}

_RESULT_STEPS: Mapping[ResultState, frozenset[ResultState]] = {
    ResultState.NONE: frozenset({ResultState.PENDING}),
    ResultState.PENDING: _ANY_DECISION,
    ResultState.APPROVED: _ANY_DECISION,
    ResultState.CONFLICTED: _ANY_DECISION,
    ResultState.APPLIED: frozenset({ResultState.APPLIED, ResultState.PENDING}),
    ResultState.DROPPED: frozenset({ResultState.DROPPED, ResultState.PENDING}),
}


def sandbox_may_become(current: SandboxState, following: SandboxState) -> bool:
    """Whether a sandbox may go from `current` to `following`; any may fail, staying is no step."""
    return following in (current, SandboxState.FAILED) or following in _SANDBOX_STEPS[current]


def result_may_become(current: ResultState, following: ResultState) -> bool:
    """Whether a result may go from `current` to `following`; a new collection starts at pending."""
    return following is current or following in _RESULT_STEPS[current]


class Outcome(StrEnum):
    """How a task ended, typed; the evidence is in the sandbox folder."""

    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    GUEST_OOM = "guest_oom"
    GUEST_DISK_FULL = "guest_disk_full"
    BOOT_TIMEOUT = "boot_timeout"
    CONNECTION_LOST = "connection_lost"
    CANCELLED = "cancelled"
    HOST_FULL = "host_full"
    COLLECT_REFUSED = "collect_refused"
    BUDGET_EXHAUSTED = "budget_exhausted"
