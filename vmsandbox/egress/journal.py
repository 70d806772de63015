"""Owns the written record of what a guest wanted to reach, one JSON line per event, bounded; and
what it all came to.

A guest can fill it and must not gain by that: refusals may take an eighth, the rest are only
counted, so they cannot push out what was let through; and what cannot be written down is not let
through. Targets are the guest's own words until a rule has matched, so they are made safe here.
"""

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from heapq import nsmallest
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from vmsandbox.text import printable
from vmsandbox.values import Value, now

LOG_MOST_BYTES = 32 * 1024 * 1024
_REFUSALS_MOST_BYTES = LOG_MOST_BYTES // 8
_TARGET_CHARACTERS = 300
_TARGETS_MOST = 200

Verdict = Literal["allowed", "denied", "failed", "closed"]


class Entry(Value):
    """One line. What was let through has two: `allowed`, and at its end `closed` with the bytes of
    both directions; or one, `failed`, if the host could not reach it."""

    at: datetime = Field(default_factory=now)
    target: str = Field(description="host:port, or http://host/path")
    verdict: Verdict
    reason: str = Field(description="a word for programs")
    sent: int = Field(default=0, description="bytes, from the guest")
    received: int = Field(default=0, description="bytes, to the guest")
    seconds: float | None = None


class Journal:
    """The lines of one sandbox, appended by the one process that manages it, from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def write(self, entry: Entry) -> bool:
        """Append a line; False if it could not be: the file is full, or the disk."""
        target = printable(entry.target[:_TARGET_CHARACTERS], newlines=False)
        line = entry.model_copy(update={"target": target}).model_dump_json(exclude_none=True)
        limit = _REFUSALS_MOST_BYTES if entry.verdict == "denied" else LOG_MOST_BYTES
        with self._lock, contextlib.suppress(OSError), self._path.open("ab") as file:
            if file.tell() + len(line) < limit:
                file.write(line.encode() + b"\n")
                return True
        return False


def read_entries(path: Path, offset: int = 0) -> tuple[list[Entry], int]:
    """The entries that begin at a byte offset, and the offset behind them; a torn line is left for
    the next look."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(LOG_MOST_BYTES)
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    return list(_parsed(whole.splitlines())), offset + len(whole)


def _parsed(lines: Iterable[bytes]) -> Iterator[Entry]:
    for line in lines:
        with contextlib.suppress(ValidationError):
            yield Entry.model_validate_json(line)


class TargetSummary(Value):
    """What one host and port came to."""

    target: str
    verdict: Literal["allowed", "denied"]
    reason: str
    times: int = 0
    sent: int = 0
    received: int = 0
    last: datetime


class Summary(Value):
    """What a guest reached and wanted to reach; the busiest targets first, and of those at most
    200."""

    allowed: int = 0
    denied: int = 0
    sent: int = 0
    received: int = 0
    targets: tuple[TargetSummary, ...] = ()
    more: int = Field(default=0, description="targets that are not listed")
    full: bool = Field(default=False, description="refusals were no longer written down")


class _Sum:
    """What comes together under one target: a guest can make hundreds of thousands of them."""

    __slots__ = ("last", "received", "sent", "times")

    def __init__(self) -> None:
        self.times = self.sent = self.received = 0
        self.last: datetime | None = None

    def add(self, entry: Entry) -> None:
        self.times += entry.verdict != "closed"
        self.sent += entry.sent
        self.received += entry.received
        self.last = entry.at


_Key = tuple[str, Literal["allowed", "denied"], str]


def summary_of(path: Path) -> Summary:
    """What all of a journal comes to."""
    found: defaultdict[_Key, _Sum] = defaultdict(_Sum)
    size = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for entry in _parsed(file):
            denied = entry.verdict == "denied"
            reason = entry.reason if denied else ""
            found[_host_part(entry.target), "denied" if denied else "allowed", reason].add(entry)
        size = file.tell()
    return _summed(found, full=size >= _REFUSALS_MOST_BYTES - 1024)


def _summed(found: Mapping[_Key, _Sum], *, full: bool) -> Summary:
    shown = nsmallest(
        _TARGETS_MOST, found.items(), key=lambda one: (one[0][1], -one[1].times, one[0][0])
    )
    return Summary(
        allowed=sum(total.times for key, total in found.items() if key[1] == "allowed"),
        denied=sum(total.times for key, total in found.items() if key[1] == "denied"),
        sent=sum(total.sent for total in found.values()),
        received=sum(total.received for total in found.values()),
        targets=tuple(
            TargetSummary(
                target=target,
                verdict=verdict,
                reason=reason,
                times=total.times,
                sent=total.sent,
                received=total.received,
                last=total.last,
            )
            for (target, verdict, reason), total in shown
            if total.last
        ),
        more=max(0, len(found) - _TARGETS_MOST),
        full=full,
    )


def _host_part(target: str) -> str:
    """``host:port`` also of a URL."""
    _, scheme, rest = target.partition("://")
    if not scheme:
        return target
    host = rest.partition("/")[0]
    return host if ":" in host else f"{host}:80"
