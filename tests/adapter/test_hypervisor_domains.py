"""Real domains: QEMU started by this user's libvirt, with guests of a few hundred bytes."""

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import libvirt
import psutil
import pytest

from tests.tiny_guests import TinyGuest, tiny_guest
from vmsandbox.errors import HostProblem
from vmsandbox.host import daemons
from vmsandbox.hypervisor import DomainState, Hypervisor
from vmsandbox.model import LibvirtFacts

URI = daemons.default_uri()
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="qemu:///system is root's")
Make = Callable[..., TinyGuest]


@pytest.fixture(scope="module")
def hypervisor(host: None) -> Iterator[Hypervisor]:
    daemons.prepare(URI)
    with Hypervisor.connect(URI) as hypervisor:
        yield hypervisor


@pytest.fixture(scope="module")
def facts(hypervisor: Hypervisor) -> LibvirtFacts:
    return hypervisor.facts()


@pytest.fixture
def make(hypervisor: Hypervisor, facts: LibvirtFacts, short_path: Path) -> Iterator[Make]:
    """Describes guests below one state folder; none of them outlives the test."""
    made: list[TinyGuest] = []

    def make(**wanted: Any) -> TinyGuest:
        guest = tiny_guest(short_path / f"{short_path.name}-{len(made)}", facts, **wanted)
        made.append(guest)
        return guest

    short_path.chmod(0o711)
    yield make
    for guest in made:
        hypervisor.destroy(guest.uuid)
        hypervisor.forget(guest.spec.name)


def wait_until(true: Callable[[], object], deadline_s: float = 20) -> None:
    deadline = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def says(guest: TinyGuest, text: bytes) -> Callable[[], bool]:
    console = guest.spec.console
    return lambda: console.exists() and text in console.read_bytes()


def test_a_domain_lives_and_ends(hypervisor: Hypervisor, make: Make) -> None:
    guest = make()
    root = guest.spec.state_root
    assert hypervisor.observe(guest.uuid).state is DomainState.GONE
    hypervisor.start(guest.xml, paused=True)
    assert hypervisor.observe(guest.uuid).state is DomainState.PAUSED
    assert guest.spec.console.stat().st_size == 0
    hypervisor.resume(guest.uuid)
    wait_until(says(guest, b"hello"))
    (owned,) = hypervisor.list_owned(root)
    assert (owned.id, owned.uuid, owned.owner_uid) == ("tiny", guest.uuid, os.geteuid())
    assert hypervisor.strays(root) == []
    pid = hypervisor.pid(guest.uuid)
    assert pid is not None
    assert guest.uuid in psutil.Process(pid).cmdline()
    figures = hypervisor.memory(guest.uuid)
    assert figures is not None
    assert 2**20 < figures.private_bytes <= figures.pss_bytes <= figures.rss_bytes
    assert hypervisor.destroy(guest.uuid)
    assert not hypervisor.destroy(guest.uuid)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
    assert (hypervisor.pid(guest.uuid), hypervisor.memory(guest.uuid)) == (None, None)
    assert hypervisor.list_owned(root) == []


def test_the_xml_fits_libvirts_schema(make: Make) -> None:
    connection = libvirt.open(URI)
    flags = libvirt.VIR_DOMAIN_START_VALIDATE | libvirt.VIR_DOMAIN_START_PAUSED
    domain = connection.createXML(make().xml, flags)
    domain.destroy()
    connection.close()


@AS_ROOT
def test_qemu_is_another_user_and_no_file_changes_hands(
    hypervisor: Hypervisor, facts: LibvirtFacts, make: Make
) -> None:
    guest = make()
    spec = guest.spec
    files = [spec.kernel, spec.initramfs, spec.backing[0].path, spec.seed_iso, spec.disk]
    before = [path.stat() for path in files if path]
    hypervisor.start(guest.xml)
    pid = hypervisor.pid(guest.uuid)
    assert pid is not None
    assert psutil.Process(pid).uids().real == facts.qemu_uid != 0
    during = [path.stat() for path in files if path]
    hypervisor.destroy(guest.uuid)
    after = [path.stat() for path in files if path]
    kept = [(s.st_uid, s.st_gid, stat.S_IMODE(s.st_mode)) for s in before]
    assert kept == [(s.st_uid, s.st_gid, stat.S_IMODE(s.st_mode)) for s in during]
    assert kept == [(s.st_uid, s.st_gid, stat.S_IMODE(s.st_mode)) for s in after]
    assert not [path for path in files if path and "trusted.libvirt" in str(os.listxattr(path))]


@pytest.mark.parametrize("then", ["power off", "reset"])
def test_a_guest_that_ends_itself_is_gone(hypervisor: Hypervisor, make: Make, then: str) -> None:
    guest = make(then=then)
    hypervisor.start(guest.xml)
    wait_until(lambda: hypervisor.observe(guest.uuid).state is DomainState.GONE)
    assert b"hello" in guest.spec.console.read_bytes()


def test_shutdown_is_asked_for_first(hypervisor: Hypervisor, make: Make) -> None:
    guest = make(then="obey the button")
    hypervisor.start(guest.xml)
    wait_until(says(guest, b"hello"))
    assert hypervisor.shutdown(guest.uuid, deadline_s=20)
    assert hypervisor.observe(guest.uuid).state is DomainState.GONE
    assert hypervisor.shutdown(guest.uuid, deadline_s=1), "gone already"


def test_shutdown_is_forced_in_the_end(hypervisor: Hypervisor, make: Make) -> None:
    guest = make(then="halt")
    hypervisor.start(guest.xml)
    assert not hypervisor.shutdown(guest.uuid, deadline_s=0.2)
    assert hypervisor.observe(guest.uuid).state is DomainState.GONE


def listening(pid: int | None) -> set[tuple[str, int]]:
    assert pid is not None
    sockets = psutil.Process(pid).net_connections("inet")
    return {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}


def test_the_host_reaches_the_guest_at_its_own_address_only(
    hypervisor: Hypervisor, make: Make
) -> None:
    guest = make(address="127.77.1.2")
    hypervisor.start(guest.xml)
    pid = hypervisor.pid(guest.uuid)
    assert listening(pid) == {("127.77.1.2", 2222)}
    with socket.create_connection(("127.77.1.2", 2222), timeout=5):
        assert listening(pid) == {("127.77.1.2", 2222)}


def test_the_monitor_answers(hypervisor: Hypervisor, make: Make) -> None:
    guest = make()
    hypervisor.start(guest.xml, paused=True)
    assert hypervisor.qmp(guest.uuid, "query-status")["running"] is False
    with pytest.raises(HostProblem) as problem:
        hypervisor.qmp(guest.uuid, "device_del", id="nothing")
    assert problem.value.code == "qmp_failed"
    assert "nothing" in problem.value.message


def test_a_seed_can_be_written_to_its_port(hypervisor: Hypervisor, make: Make) -> None:
    guest = make()
    hypervisor.start(guest.xml, paused=True)
    with socket.socket(socket.AF_UNIX) as port:
        port.connect(str(guest.spec.seed_socket))
        port.sendall(b"seed")


# --- what can go wrong ----------------------------------------------------------------------------


def refused(hypervisor: Hypervisor, guest: TinyGuest) -> HostProblem:
    """The problem of a start that must fail and leave nothing."""
    with pytest.raises(HostProblem) as problem:
        hypervisor.start(guest.xml)
    assert hypervisor.observe(guest.uuid).state is DomainState.GONE
    assert hypervisor.pid(guest.uuid) is None
    return problem.value


def test_an_address_that_is_taken(hypervisor: Hypervisor, make: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.77.1.3", 2222))
        taken.listen()
        problem = refused(hypervisor, make(address="127.77.1.3"))
    assert problem.code == "address_in_use"
    assert problem.hint
    assert problem.evidence
    assert Path(problem.evidence).exists()


def test_more_memory_than_there_is(hypervisor: Hypervisor, make: Make) -> None:
    guest = make()
    greedy = guest.spec.model_copy(update={"memory_mib": 512 * 1024 * 1024})
    assert refused(hypervisor, TinyGuest(greedy)).code == "host_memory_full"


def test_a_kernel_that_is_none(hypervisor: Hypervisor, make: Make) -> None:
    guest = make()
    guest.spec.kernel.chmod(0o644)
    guest.spec.kernel.write_bytes(b"no kernel")
    problem = refused(hypervisor, guest)
    assert problem.code == "qemu_failed"
    assert "kernel" in problem.message


@AS_ROOT
def test_a_disk_that_qemu_may_not_open(hypervisor: Hypervisor, make: Make) -> None:
    guest = make()
    os.chown(guest.spec.disk, 0, 0)
    problem = refused(hypervisor, guest)
    assert problem.code == "permission_denied"
    assert problem.hint == "vmsandbox doctor --fix"


def test_a_domain_is_not_started_twice(hypervisor: Hypervisor, make: Make) -> None:
    guest = make()
    hypervisor.start(guest.xml, paused=True)
    with pytest.raises(HostProblem) as problem:
        hypervisor.start(guest.xml)
    assert problem.value.code == "domain_exists"
    assert hypervisor.observe(guest.uuid).state is DomainState.PAUSED


def test_last_words(hypervisor: Hypervisor, make: Make) -> None:
    guest = make(text=b"fine\r\n\x1b[31mpanic\r\n", then="power off")
    hypervisor.start(guest.xml)
    wait_until(lambda: hypervisor.observe(guest.uuid).state is DomainState.GONE)
    last = hypervisor.evidence(guest.spec.name, guest.spec.console)
    assert last.console_lines == ("fine", "\\x1b[31mpanic"), "guest text is made printable"
    assert any("shutting down" in line for line in last.qemu_lines)
    hypervisor.forget(guest.spec.name)
    assert not last.qemu_log.exists()
