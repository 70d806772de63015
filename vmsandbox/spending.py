"""Owns what a sandbox used of its gateways as its folder keeps it: the sums in ``usage.json``, a
line for each request in ``gateway.jsonl``.
"""

import contextlib

from vmsandbox.provider import Call, Usage
from vmsandbox.store import SandboxFolder, read_value, write_value

_SUMS, _CALLS = "usage.json", "gateway.jsonl"
_CALLS_MOST_BYTES = 4 * 1024 * 1024


def used(folder: SandboxFolder) -> Usage:
    """The sums so far."""
    return read_value(folder.path / _SUMS, Usage) or Usage()


def write_down(folder: SandboxFolder, call: Call, usage: Usage) -> None:
    """Keep a call and the sums after it. A full disk only costs the log."""
    write_value(folder.path / _SUMS, usage)
    with contextlib.suppress(OSError), (folder.path / _CALLS).open("ab") as file:
        if file.tell() < _CALLS_MOST_BYTES:
            file.write(call.model_dump_json(exclude_defaults=True).encode() + b"\n")
