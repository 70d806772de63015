"""What happens to domains when libvirt is killed or loses its memory.

Not collected by itself: :mod:`tests.adapter.test_hypervisor_restart` runs it as an ordinary user
whose qemu:///session nobody else uses.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.tiny_guests import TinyGuest, tiny_guest
from vmsandbox.errors import HostProblem
from vmsandbox.host import daemons
from vmsandbox.hypervisor import DomainState, Hypervisor, connection, processes

URI = daemons.SESSION_URI
CONSOLE_MAX_BYTES = 16 * 1024
ABSENT = "00000000-0000-4000-8000-000000000000"


def wait_until(true: Callable[[], object], deadline_s: float = 20) -> None:
    deadline = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def libvirtd_pid() -> int:
    """The daemon itself, below its tini and its shell."""
    (ours,) = daemons.started_by_us(URI)
    names = {p.pid: p.name() for p in psutil.Process(ours.pid).children(recursive=True)}
    return next(pid for pid, name in names.items() if name in ("libvirtd", "virtqemud"))


def kill_libvirtd() -> None:
    pid = libvirtd_pid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


@pytest.fixture
def hypervisor() -> Iterator[Hypervisor]:
    daemons.prepare(URI)
    daemons.start(URI)  # also under an init that reaps: these tests need one that comes back
    with Hypervisor.connect(URI) as hypervisor:
        yield hypervisor


@pytest.fixture
def guest(hypervisor: Hypervisor, short_path: Path) -> Iterator[TinyGuest]:
    guest = tiny_guest(short_path, hypervisor.facts())
    hypervisor.start(guest.xml)
    yield guest
    hypervisor.destroy(guest.uuid)


def test_a_guest_runs_as_its_user(hypervisor: Hypervisor, guest: TinyGuest) -> None:
    wait_until(lambda: b"hello" in guest.spec.console.read_bytes())
    pid = hypervisor.pid(guest.uuid)
    assert pid is not None
    assert psutil.Process(pid).uids().real == os.geteuid() != 0
    figures = hypervisor.memory(guest.uuid)
    assert figures is not None
    assert 0 < figures.private_bytes <= figures.pss_bytes <= figures.rss_bytes
    started = time.monotonic()
    assert hypervisor.destroy(guest.uuid)
    assert time.monotonic() - started < 5, "nobody reaped QEMU"
    with guest.spec.disk.open("rb") as overlay:  # still ours
        assert overlay.read(4) == b"QFI\xfb"


def test_a_guest_outlives_libvirtd(hypervisor: Hypervisor, guest: TinyGuest) -> None:
    pid = hypervisor.pid(guest.uuid)
    kill_libvirtd()
    assert hypervisor.observe(guest.uuid).state is DomainState.RUNNING
    wait_until(lambda: hypervisor.list_owned(guest.spec.state_root))
    assert hypervisor.pid(guest.uuid) == pid
    started = time.monotonic()
    assert hypervisor.destroy(guest.uuid)
    assert time.monotonic() - started < 5, "QEMU was left to another reaper"
    assert hypervisor.observe(guest.uuid).state is DomainState.GONE


def test_what_libvirt_cannot_tell_the_process_does(
    hypervisor: Hypervisor, guest: TinyGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down, and then without memory: a power cycle that took the runtime folder only."""
    monkeypatch.setattr(connection, "RECONNECT_DEADLINE_S", 0.2)
    root = guest.spec.state_root
    daemons.stop(URI)
    seen, unseen = hypervisor.observe(guest.uuid), hypervisor.observe(ABSENT)
    assert (seen.state, seen.alive) == (DomainState.RUNNING, True)
    assert "QEMU" in seen.detail
    assert (unseen.state, unseen.alive) == (DomainState.UNKNOWN, None)
    with pytest.raises(HostProblem) as problem:
        hypervisor.list_owned(root)
    assert problem.value.code == "libvirt_unreachable"
    assert problem.value.hint == "vmsandbox doctor --fix"

    shutil.rmtree(daemons.session_runtime_dir() / "libvirt/qemu")
    daemons.start(URI)
    assert hypervisor.observe(guest.uuid).state is DomainState.STRAY
    (stray,) = hypervisor.strays(root)
    assert (stray.uuid, stray.name) == (guest.uuid, guest.spec.name)
    assert hypervisor.strays(root.parent / "other") == []
    assert hypervisor.destroy(guest.uuid)
    assert hypervisor.observe(guest.uuid).state is DomainState.GONE
    assert not hypervisor.destroy(guest.uuid), "already gone is an answer of its own"
    hypervisor.start(guest.xml)  # its name is free again


def test_a_guest_can_be_ended_without_libvirt(
    hypervisor: Hypervisor, guest: TinyGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RECONNECT_DEADLINE_S", 0.2)
    daemons.stop(URI)
    assert hypervisor.destroy(guest.uuid)
    assert processes.find(guest.uuid) is None
    daemons.start(URI)  # which believes its own notes until it has looked for the process
    wait_until(lambda: hypervisor.observe(guest.uuid).state is DomainState.GONE)


def test_the_console_is_bounded_while_we_are_away(hypervisor: Hypervisor, short_path: Path) -> None:
    guest = tiny_guest(short_path, hypervisor.facts(), text=b"x" * 1023 + b"\n", then="again")
    hypervisor.start(guest.xml)
    hypervisor.close()
    files = guest.spec.console.parent
    wait_until(lambda: (files / "console.log.2").exists(), 40)
    total = sum(file.stat().st_size for file in files.glob("console.log*"))
    assert total <= 4 * CONSOLE_MAX_BYTES
    assert hypervisor.destroy(guest.uuid)
    assert len(list(files.glob("console.log*"))) == 4
    last = hypervisor.evidence(guest.spec.name, guest.spec.console)
    assert "x" * 1023 in last.console_lines
    assert last.qemu_log.exists()
    hypervisor.forget(guest.spec.name)
    assert not last.qemu_log.exists()


def test_a_start_is_not_left_half_done(hypervisor: Hypervisor, short_path: Path) -> None:
    guest = tiny_guest(short_path, hypervisor.facts())
    daemon = libvirtd_pid()
    os.kill(daemon, signal.SIGSTOP)
    killer = threading.Timer(0.3, os.kill, (daemon, signal.SIGKILL))
    killer.start()
    with pytest.raises(HostProblem) as problem:
        hypervisor.start(guest.xml)
    assert problem.value.code == "libvirt_unreachable"
    assert hypervisor.observe(guest.uuid).state is DomainState.GONE
