"""A QMP connection of our own, to a real QEMU that has no machine."""

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmsandbox.errors import HostProblem
from vmsandbox.hypervisor.monitor import Monitor

NEVER = threading.Event()


@pytest.fixture
def qemu(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    socket = tmp_path / "monitor"
    argv = ["qemu-system-x86_64", "-machine", "none", "-nodefaults", "-display", "none", "-S"]
    argv += ["-chardev", f"socket,id=m,path={socket},server=on,wait=off"]
    argv += ["-mon", "chardev=m,mode=control"]
    with subprocess.Popen(argv) as process:
        try:
            yield process, socket
        finally:
            process.kill()


def test_answers_events_and_refusals(qemu: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, socket = qemu
    with Monitor(socket, unless=NEVER) as monitor:  # it waits until QEMU listens
        assert monitor.execute("query-status")["running"] is False
        monitor.execute("cont")  # announces an event before or after its answer
        assert monitor.execute("query-status")["running"] is True
        with pytest.raises(HostProblem, match="no-such-command") as refused:
            monitor.execute("no-such-command")
        assert refused.value.code == "qmp_failed"
    with Monitor(socket, unless=NEVER) as monitor:
        process.kill()
        process.wait()
        with pytest.raises(HostProblem) as gone:
            monitor.execute("query-status")
        assert gone.value.code == "qmp_failed"


def test_nobody_waits_for_a_qemu_that_does_not_come(tmp_path: Path) -> None:
    in_vain = threading.Event()
    threading.Timer(0.1, in_vain.set).start()
    began = time.monotonic()
    with pytest.raises(HostProblem, match="no QEMU listens") as failed:
        Monitor(tmp_path / "monitor", unless=in_vain)
    assert failed.value.code == "qmp_failed"
    assert time.monotonic() - began < 30
