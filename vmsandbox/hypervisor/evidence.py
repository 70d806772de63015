"""Owns what a domain leaves behind to tell why it died: its console log and QEMU's own log.

Both are bounded by virtlogd, which starts a new file after 2 MiB and keeps three older ones as
``NAME.0`` to ``NAME.2``. The console's text is the guest's: it is made printable here.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from vmsandbox.model import Value
from vmsandbox.text import printable

_TAIL_BYTES = 16 * 1024
_PREFIX = "vmsandbox-"


class Evidence(Value):
    """The last words of a domain; safe to print."""

    console: Path
    console_lines: tuple[str, ...] = ()
    qemu_log: Path
    qemu_lines: tuple[str, ...] = ()


def log_folder(uri: str) -> Path:
    """Where libvirt keeps QEMU's logs: /var/log, or the cache folder of a session's user."""
    if uri.endswith("/session"):
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache, "libvirt/qemu/log")
    return Path("/var/log/libvirt/qemu")


def gather(uri: str, name: str, console: Path, *, lines: int = 20) -> Evidence:
    """The last lines of both logs; a missing file just has none."""
    qemu_log = log_folder(uri) / f"{name}.log"
    return Evidence(
        console=console,
        console_lines=tuple(tail(console, lines)),
        qemu_log=qemu_log,
        qemu_lines=tuple(tail(qemu_log, lines)),
    )


def tail(path: Path, lines: int) -> list[str]:
    """The last lines, also right after a new file was begun, printable."""
    text = _last_bytes(path)
    if text.count(b"\n") < lines:
        text = _last_bytes(path.with_name(f"{path.name}.0")) + text
    return [printable(line.rstrip("\r"), newlines=False) for line in _decoded(text)[-lines:]]


def _decoded(text: bytes) -> list[str]:
    return [line for line in text.decode("utf-8", "surrogateescape").split("\n") if line.strip()]


def _last_bytes(path: Path) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES)
    return b""


def remove(uri: str, name: str) -> None:
    """Delete QEMU's logs of a domain that is gone for good; libvirt itself never does."""
    for path in _logs(uri, name):
        with contextlib.suppress(OSError):
            path.unlink()


def logged(uri: str, folder: Path) -> list[str]:
    """Names of our domains whose log shows a QEMU with files below this folder."""
    below = {b'"' + os.fsencode(path) + b"/" for path in (folder, folder.resolve())}
    logs = sorted(log_folder(uri).glob(f"{_PREFIX}*.log"))
    return [log.stem for log in logs if any(path in _first_bytes(log) for path in below)]


def _first_bytes(path: Path) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(_TAIL_BYTES)
    return b""


def _logs(uri: str, name: str) -> Iterator[Path]:
    first = log_folder(uri) / f"{name}.log"
    yield first
    for number in range(10):
        yield first.with_name(f"{first.name}.{number}")
