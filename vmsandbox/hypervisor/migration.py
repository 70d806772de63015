"""Owns moving a paused guest's device state out of and into QEMU, without its memory.

Knows no template and no sandbox. The memory is a file that both sides map (capability
``x-ignore-shared``), so the state is under a megabyte. A unix socket is the one way that works in
every supported QEMU under libvirt: ``exec:`` is denied by libvirt's sandbox, ``file:`` needs QEMU
8.2.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vmsandbox.errors import HostProblem
from vmsandbox.hypervisor.domains import Hypervisor
from vmsandbox.hypervisor.monitor import Monitor

_Ask = Callable[..., Any]
"""A QMP command with its arguments, as :meth:`Monitor.execute` takes them."""

_POLL_S = 0.002
_TIMEOUT_S = 60.0
_CHUNK_BYTES = 1 << 20


def save_state(hypervisor: Hypervisor, uuid: str, via: Path, file: Path) -> None:
    """Write the device state of a paused guest to `file`; its QEMU is of no further use.

    `via` is a socket path that QEMU can reach; it is gone afterwards. Raises HostProblem
    ``migration_failed``, ``host_disk_full``.
    """
    ask = partial(hypervisor.qmp, uuid)
    _ignore_shared_memory(ask)
    with _listening(via) as listener, _receiving(listener, file):
        ask("migrate", uri=f"unix:{via}")
        _wait_completed(ask)


def load_state(monitor: Monitor, via: Path, file: Path) -> None:
    """Give a guest that was started with ``-incoming defer`` its state; it stays paused.

    `via` is a socket path in a folder that QEMU can write to; QEMU makes it and we remove it.
    Raises HostProblem ``migration_failed``.
    """
    try:
        _ignore_shared_memory(monitor.execute)
        monitor.execute("migrate-incoming", uri=f"unix:{via}")
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(via))
            peer.sendall(file.read_bytes())
        _wait_completed(monitor.execute)
    except (OSError, HostProblem) as error:  # it ends where the state is not of this machine
        raise HostProblem("migration_failed", f"QEMU did not take the state: {error}") from error
    finally:
        via.unlink(missing_ok=True)


def _ignore_shared_memory(ask: _Ask) -> None:
    capability = {"capability": "x-ignore-shared", "state": True}
    ask("migrate-set-capabilities", capabilities=[capability])


def _wait_completed(ask: _Ask) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        answer = ask("query-migrate")
        if answer.get("status") == "completed":
            return
        if answer.get("status") in ("failed", "cancelled") or time.monotonic() > deadline:
            detail = answer.get("error-desc") or answer.get("status") or "no answer"
            raise HostProblem("migration_failed", f"moving a guest's state: {detail}")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(_TIMEOUT_S)
        listener.bind(str(path))
        try:
            path.chmod(
                0o777
            )  # QEMU of qemu:///system is another user; the folder decides who comes
            listener.listen(1)
            yield listener
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _receiving(listener: socket.socket, file: Path) -> Iterator[None]:
    """Write what comes in to `file`, aside; the end of the block waits for the last byte."""
    failures: list[OSError] = []

    def receive() -> None:
        try:
            peer, _ = listener.accept()
            with peer, file.open("wb") as out:
                while chunk := peer.recv(_CHUNK_BYTES):
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            failures.append(error)

    receiver = threading.Thread(target=receive, name="state", daemon=True)
    receiver.start()
    try:
        yield
    except BaseException:
        listener.close()
        raise
    receiver.join()
    for error in failures:
        code = "host_disk_full" if error.errno in (28, 122) else "migration_failed"
        raise HostProblem(code, f"cannot write {file}: {error.strerror}") from error
