"""Owns what host and agent tell each other beside the worktree: the brief in, the agent's report
and status out.

What comes out was written by a hostile guest: it is bounded, kept as it came, and escaped by
whoever shows it. A guest that does not answer here fails nothing.
"""

import contextlib
import os
from pathlib import Path

from vmsandbox import brief
from vmsandbox.errors import GuestProblem, UsageProblem
from vmsandbox.guest import Guest
from vmsandbox.guest.task import as_user
from vmsandbox.model import Brief, SandboxRecord, SandboxState
from vmsandbox.review.opinions import FINDINGS_MOST_BYTES
from vmsandbox.store import SandboxFolder, write_atomic

REPORT_MOST_BYTES = 256 * 1024
_STATUS_MOST_BYTES = 4096
_OUTPUT_MOST_BYTES = 16 * 1024
_ANSWER_S = 10.0
_FOLDER = "/var/lib/vmsandbox-agent"
_AGENT = "agent"

_DELIVER = f"""\
umask 022
install -d -m 755 -o {_AGENT} -g {_AGENT} {_FOLDER} && cd {_FOLDER} || exit
rm -rf brief.md report.md status findings.json
cat > brief.md
"""
_FETCH = f"""\
cd {_FOLDER} || exit 0
[ ! -f status ] || head -c {_STATUS_MOST_BYTES} status
printf '\\000'
[ ! -f report.md ] || head -c {REPORT_MOST_BYTES + 1} report.md
"""
_FETCH_FINDINGS = f"""\
cd {_FOLDER} || exit 0
[ ! -f findings.json ] || head -c {FINDINGS_MOST_BYTES + 1} findings.json
"""

REVIEWER = {
    "VMSANDBOX_BRIEF": f"{_FOLDER}/brief.md",
    "VMSANDBOX_REPORT": f"{_FOLDER}/report.md",
    "VMSANDBOX_FINDINGS": f"{_FOLDER}/findings.json",
}
"""What tells a reviewer where its brief is, and where to leave what it found."""


def read_brief(path: Path) -> Brief:
    """The brief in a file.

    Raises UsageProblem ``brief_invalid``, ``brief_empty`` or ``brief_unreadable``.
    """
    try:
        with path.open("rb") as file:
            data = file.read(brief.MOST_BYTES + 1)
    except OSError as error:
        raise UsageProblem(
            "brief_unreadable",
            f"cannot read the brief {path}: {error.strerror}",
            hint=f"ls -l {path}",
        ) from error
    return brief.read(str(path), data)


def environment(record: SandboxRecord) -> dict[str, str]:
    """What tells the agent where its brief is, and where to leave its report and status."""
    if not record.heard:
        return {}
    told = {"BRIEF": "brief.md"} if record.task.brief else {}
    names = told | {"REPORT": "report.md", "STATUS": "status"}
    return {f"VMSANDBOX_{name}": f"{_FOLDER}/{file}" for name, file in names.items()}


def deliver(guest: Guest, folder: SandboxFolder, record: SandboxRecord) -> None:
    """Put the brief into the guest. Safe to do again."""
    if not record.heard:
        return
    text = brief.markdown(record.task.brief).encode() if record.task.brief else b""
    if text:
        write_atomic(folder.brief, text)
    hand_over(guest, text)


def hand_over(guest: Guest, text: bytes) -> None:
    """Put a brief where an agent finds it, and nothing of what another one was told or said."""
    guest.stream_in(["/bin/sh", "-c", _DELIVER], [text], timeout_s=60.0)


def deliver_to_fork(guest: Guest, folder: SandboxFolder, record: SandboxRecord) -> None:
    """As :func:`deliver`, where a disk came with what another sandbox's agent was told and said."""
    if record.forked_from and not record.task_started:
        deliver(guest, folder, record)


def fetch(guest: Guest, folder: SandboxFolder, record: SandboxRecord) -> None:
    """Bring out what the agent said so far; what it said before stays if it says nothing now."""
    if not record.heard:
        return
    status, report = said(guest)
    if status:
        write_atomic(folder.agent_status, status)
    if not report and _speaks_by_output(folder, record):
        report = _end_of(folder.stdout)
    if report:
        write_atomic(folder.report, report)


def _speaks_by_output(folder: SandboxFolder, record: SandboxRecord) -> bool:
    """Whether the end of what an agent printed is its report: it ended, and left no other."""
    ended = record.state is SandboxState.COLLECTING and not folder.report.exists()
    return ended and record.equipment.report_from == "stdout"


def _end_of(output: Path) -> bytes:
    """The last lines of a log."""
    try:
        with output.open("rb") as file:
            file.seek(-min(_OUTPUT_MOST_BYTES, output.stat().st_size), os.SEEK_END)
            cut, data = file.tell() > 0, file.read()
    except FileNotFoundError:
        return b""
    return (data.partition(b"\n")[2] or data).strip() if cut else data.strip()


def said(guest: Guest) -> tuple[bytes, bytes]:
    """The agent's status and report, bounded; both empty if the guest does not answer."""
    most = _STATUS_MOST_BYTES + 1 + REPORT_MOST_BYTES + 1
    status, _, report = _as_agent(guest, _FETCH, most).partition(b"\0")
    return status, _bounded(report)


def findings(guest: Guest) -> bytes:
    """A reviewer's findings as it wrote them, bounded; empty if the guest does not answer."""
    return _as_agent(guest, _FETCH_FINDINGS, FINDINGS_MOST_BYTES + 1)


def _as_agent(guest: Guest, script: str, most_bytes: int) -> bytes:
    argv = [*as_user(_AGENT, _AGENT), "/bin/sh", "-c", script]
    with contextlib.suppress(GuestProblem):
        return guest.run(argv, timeout_s=_ANSWER_S, stdout_max_bytes=most_bytes).stdout
    return b""


def _bounded(report: bytes) -> bytes:
    if len(report) <= REPORT_MOST_BYTES:
        return report
    cut = f"\n[vmsandbox: dropped all beyond {REPORT_MOST_BYTES} bytes]\n".encode()
    return report[:REPORT_MOST_BYTES] + cut
