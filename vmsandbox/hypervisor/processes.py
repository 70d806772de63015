"""Owns QEMU processes as the kernel shows them: found by what their command line says, measured,
ended by pid. Knows no libvirt.

A guest's process is the last word on whether the guest lives: libvirt forgets its domains when its
runtime folder is deleted, and cannot be asked while its daemon is down. The command line that
libvirt composed names the domain (``-uuid``, ``-name guest=``) and its disks.
"""

import contextlib
import itertools
import json
import os
import select
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from vmsandbox.errors import HostProblem
from vmsandbox.model import Value

TERM_DEADLINE_S = 5.0
KILL_DEADLINE_S = 30.0


class QemuProcess(Value):
    """A running QEMU that libvirt started."""

    pid: int
    uuid: str
    name: str
    files: tuple[Path, ...]


class MemoryFigures(Value):
    """What one QEMU holds. PSS counts a shared page by its share; private is freed when it ends."""

    pss_bytes: int
    private_bytes: int
    rss_bytes: int


def running() -> Iterator[QemuProcess]:
    """Every QEMU of libvirt's whose command line we may read."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (process := _read(int(entry.name))):
            yield process


def _read(pid: int) -> QemuProcess | None:
    """A zombie has an empty command line, so it counts as gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    if b"qemu" not in raw.partition(b"\0")[0]:
        return None
    return _parse(pid, [os.fsdecode(word) for word in raw.split(b"\0")])


def _parse(pid: int, argv: Sequence[str]) -> QemuProcess | None:
    options = list(itertools.pairwise(argv))
    uuid = next((value for key, value in options if key == "-uuid"), None)
    if uuid is None:
        return None
    guest = next((value for key, value in options if key == "-name"), "")
    return QemuProcess(
        pid=pid,
        uuid=uuid,
        name=guest.removeprefix("guest=").partition(",")[0],
        files=tuple(_files(value for key, value in options if key == "-blockdev")),
    )


def _files(devices: Iterator[str]) -> Iterator[Path]:
    for device in devices:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            if name := json.loads(device).get("filename"):
                yield Path(name)


def find(uuid: str) -> QemuProcess | None:
    """The QEMU of this domain, if it runs and we may see it."""
    return next((process for process in running() if process.uuid == uuid), None)


def still(process: QemuProcess) -> QemuProcess | None:
    """The same process as it is now; None if it is gone or its pid is another's."""
    now = _read(process.pid)
    return now if now is not None and now.uuid == process.uuid else None


def with_disks_below(folder: Path) -> list[QemuProcess]:
    """Every QEMU with a disk below this folder, by whatever path either is named."""
    root = folder.resolve()
    return [
        process
        for process in running()
        if any(file.resolve().is_relative_to(root) for file in process.files)
    ]


def measure(pid: int) -> MemoryFigures | None:
    """None if the process is gone.

    Raises HostProblem ``memory_unreadable`` if it is another user's.
    """
    try:
        full = psutil.Process(pid).memory_full_info()
    except psutil.AccessDenied as error:
        raise HostProblem("memory_unreadable", f"may not read the memory of pid {pid}") from error
    except psutil.Error:
        return None
    return MemoryFigures(pss_bytes=full.pss, private_bytes=full.uss, rss_bytes=full.rss)


def end(process: QemuProcess) -> bool:
    """End this very process and nothing that got its pid since; False if it was gone already.

    First politely, so that QEMU removes its sockets. Raises HostProblem ``qemu_stays`` if the
    kernel does not let it go within 35 s (a stuck disk), ``permission_denied`` if it is another's.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor stands for whoever has the pid now: is that still our QEMU?
        if still(process) is None:
            return False
        return _end(descriptor, process)
    finally:
        os.close(descriptor)


def _end(descriptor: int, process: QemuProcess) -> bool:
    patience = ((signal.SIGTERM, TERM_DEADLINE_S), (signal.SIGKILL, KILL_DEADLINE_S))
    for number, deadline_s in patience:
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return True
        except PermissionError as error:
            raise HostProblem(
                "permission_denied", f"may not end QEMU {process.pid} of domain {process.name}"
            ) from error
        if _ended(descriptor, deadline_s):
            return True
    raise HostProblem("qemu_stays", f"QEMU {process.pid} of domain {process.name} does not end")


def _ended(descriptor: int, deadline_s: float) -> bool:
    """A pidfd is readable once its process has ended, reaped or not."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(deadline_s * 1000))
