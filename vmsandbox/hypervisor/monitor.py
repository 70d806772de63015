"""Owns a QMP connection of our own to a QEMU that is just starting: one command at a time.

Knows no libvirt. Everything that can wait until libvirt answers goes through
:meth:`vmsandbox.hypervisor.domains.Hypervisor.qmp`. Wire format: QEMU, "QEMU Machine Protocol
Specification": one JSON object a line, a greeting first, events in between.
"""

import json
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from vmsandbox.deadline import Deadline
from vmsandbox.errors import HostProblem

_POLL_S = 0.002
_TIMEOUT_S = 60.0


class Monitor:
    """A connection, as a context manager. Raises HostProblem ``qmp_failed``."""

    def __init__(self, path: Path, *, unless: threading.Event) -> None:
        """Wait until QEMU listens at `path`, up to a minute, or until `unless` is set."""
        self._socket = _connected(path, unless)
        self._lines = self._socket.makefile("rb")
        try:
            self._next()
            self.execute("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """QEMU goes on, and listens for the next one as long as the path is there."""
        with suppress(OSError):
            self._lines.close()
        self._socket.close()

    def execute(self, command: str, **arguments: object) -> Any:
        """One command's return value."""
        request = json.dumps({"execute": command, "arguments": arguments})
        try:
            self._socket.sendall(request.encode() + b"\n")
            answer = self._next()
            while "event" in answer:
                answer = self._next()
        except OSError as error:
            raise HostProblem("qmp_failed", f"{command}: {error}") from error
        if "error" in answer:
            raise HostProblem("qmp_failed", f"{command}: {answer['error'].get('desc')}")
        return answer["return"]

    def _next(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise HostProblem("qmp_failed", "QEMU hung up")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _connected(path: Path, unless: threading.Event) -> socket.socket:
    deadline = Deadline(_TIMEOUT_S)
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(str(path))
            return connection
        except (FileNotFoundError, ConnectionRefusedError) as error:
            connection.close()
            if unless.is_set() or deadline.passed():
                raise HostProblem("qmp_failed", f"no QEMU listens at {path}") from error
        except OSError as error:
            connection.close()
            raise HostProblem("qmp_failed", f"{path}: {error}") from error
        time.sleep(_POLL_S)
