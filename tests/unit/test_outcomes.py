"""What a task counts as: how it ended itself, unless what failed afterwards says otherwise."""

from pathlib import Path

import pytest

from vmsandbox.errors import GuestProblem, HostProblem, ReviewRefused, VmsandboxError
from vmsandbox.model import (
    BatchMark,
    Endpoint,
    ExecResult,
    Limits,
    Outcome,
    SandboxRecord,
    SandboxState,
    Task,
)
from vmsandbox.sandbox.setbacks import failed, taken_up, told_by_console

CONSOLE = Path("/console")
ENDED = ExecResult(exit_code=0, outcome=Outcome.COMPLETED)


def record(state: SandboxState, ended: ExecResult | None = None) -> SandboxRecord:
    return SandboxRecord(
        id="ab12cd34",
        name="a",
        state=state,
        task=Task(command=("true",), worktree=Path("/w")),
        batch=BatchMark(batch="b", task="a"),
        limits=Limits(),
        image_name="debian-12",
        image_digest=f"sha256:{'0' * 64}",
        libvirt_uri="qemu:///session",
        domain_uuid="u",
        endpoint=Endpoint(address="127.0.0.2", port=2222),
        task_started=ended is not None,
        exec_result=ended,
    )


@pytest.mark.parametrize(
    ("state", "ended", "error", "outcome"),
    [
        ("starting", None, GuestProblem("boot_timeout", "m"), "boot_timeout"),
        ("starting", None, HostProblem("host_memory_full", "m"), "host_full"),
        ("starting", None, HostProblem("qemu_failed", "m"), None),
        ("running", None, GuestProblem("guest_gone", "m"), "connection_lost"),
        ("collecting", ENDED, HostProblem("host_disk_full", "m"), "host_full"),
        ("collecting", ENDED, ReviewRefused("result_hostile", "m"), "collect_refused"),
        (
            "collecting",
            ENDED,
            GuestProblem("guest_command_failed", "tar: No space left on device"),
            "guest_disk_full",
        ),
        ("collecting", ENDED, GuestProblem("guest_command_failed", "m"), "completed"),
    ],
)
def test_what_failed_names_the_outcome(
    state: str, ended: ExecResult | None, error: VmsandboxError, outcome: str | None
) -> None:
    before = record(SandboxState(state), ended)
    after = before.model_copy(update=failed(before, error, CONSOLE))
    assert after.outcome == outcome
    assert after.failure
    assert after.failure.evidence == str(CONSOLE)
    if ended:  # a new attempt that goes well leaves what the task came to
        assert after.exec_result == ended
        assert after.model_copy(update=taken_up(after)).outcome == "completed"


KILLED = b"[ 12.3] Out of memory: Killed process 321 (py\x1bthon3) total-vm:1kB\r\n"


@pytest.mark.parametrize(
    ("outcome", "console", "told"),
    [
        (Outcome.FAILED, b"booted\n" + KILLED, Outcome.GUEST_OOM),
        (Outcome.FAILED, KILLED.replace(b"Out of", b"Memory cgroup out of"), Outcome.GUEST_OOM),
        (Outcome.FAILED, b"booted\n", Outcome.FAILED),
        (Outcome.COMPLETED, KILLED, Outcome.COMPLETED),
        (Outcome.TIMEOUT, KILLED, Outcome.TIMEOUT),
    ],
)
def test_the_console_tells_of_a_lack_of_memory(
    outcome: Outcome, console: bytes, told: Outcome
) -> None:
    ended = ExecResult(exit_code=1, outcome=outcome, detail="exit code 1")
    found = told_by_console(ended, console)
    assert found.outcome is told
    assert ("py\\x1bthon3" in found.detail) == (told is Outcome.GUEST_OOM)
