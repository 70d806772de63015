"""Owns what host and agent tell each other beside the worktree: the brief in, the agent's report
and status out.

What comes out was written by a hostile guest: it is bounded, kept as it came, and escaped by
whoever shows it. A guest that does not answer here fails nothing.
"""

import contextlib
from pathlib import Path

from vmsandbox import brief
from vmsandbox.errors import GuestProblem, UsageProblem
from vmsandbox.guest import Guest
from vmsandbox.guest.task import as_user
from vmsandbox.model import Brief, SandboxRecord
from vmsandbox.store import SandboxFolder, write_atomic

REPORT_MOST_BYTES = 256 * 1024
_STATUS_MOST_BYTES = 4096
_ANSWER_S = 10.0
_FOLDER = "/var/lib/vmsandbox-agent"
_AGENT = "agent"

_DELIVER = f"""\
umask 022
install -d -m 755 -o {_AGENT} -g {_AGENT} {_FOLDER} && cd {_FOLDER} || exit
rm -rf brief.md report.md status
cat > brief.md
"""
_FETCH = f"""\
cd {_FOLDER} || exit 0
[ ! -f status ] || head -c {_STATUS_MOST_BYTES} status
printf '\\000'
[ ! -f report.md ] || head -c {REPORT_MOST_BYTES + 1} report.md
"""


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
    guest.stream_in(["/bin/sh", "-c", _DELIVER], [text], timeout_s=60.0)


def deliver_to_fork(guest: Guest, folder: SandboxFolder, record: SandboxRecord) -> None:
    """As :func:`deliver`, where a disk came with what another sandbox's agent was told and said."""
    if record.forked_from and not record.task_started:
        deliver(guest, folder, record)


def fetch(guest: Guest, folder: SandboxFolder, record: SandboxRecord) -> None:
    """Bring out what the agent said so far; what it said before stays if it says nothing now."""
    if not record.heard:
        return
    argv = [*as_user(_AGENT, _AGENT), "/bin/sh", "-c", _FETCH]
    most = _STATUS_MOST_BYTES + 1 + REPORT_MOST_BYTES + 1
    with contextlib.suppress(GuestProblem):
        answer = guest.run(argv, timeout_s=_ANSWER_S, stdout_max_bytes=most)
        status, _, report = answer.stdout.partition(b"\0")
        if status:
            write_atomic(folder.agent_status, status)
        if report:
            write_atomic(folder.report, _bounded(report))


def _bounded(report: bytes) -> bytes:
    if len(report) <= REPORT_MOST_BYTES:
        return report
    cut = f"\n[vmsandbox: dropped all beyond {REPORT_MOST_BYTES} bytes]\n".encode()
    return report[:REPORT_MOST_BYTES] + cut
