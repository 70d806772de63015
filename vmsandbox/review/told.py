"""Owns what an agent said beside its work, as a reviewer reads it: its status and its report.

Both are a hostile guest's own words; what leaves here is safe to show and has no other meaning.
"""

import contextlib
from pathlib import Path

from vmsandbox.model import Value
from vmsandbox.store import SandboxFolder
from vmsandbox.text import printable

_STATUS_SHOWN = 300


class Told(Value):
    """Text of the guest, made safe."""

    status: str = ""
    report: str = ""


def told(folder: SandboxFolder) -> Told:
    """What the agent of a sandbox said, as far as it was fetched."""
    lines = _read(folder.agent_status).strip().splitlines()
    return Told(
        status=printable(lines[0], newlines=False)[:_STATUS_SHOWN] if lines else "",
        report=printable(_read(folder.report)),
    )


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""
