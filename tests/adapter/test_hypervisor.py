"""What needs a libvirt but no guest: libvirt's built-in test driver, and none at all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import libvirt
import pytest

from vmsandbox.domain import METADATA_NAMESPACE
from vmsandbox.errors import HostProblem
from vmsandbox.hypervisor import DomainState, Hypervisor, processes
from vmsandbox.hypervisor.facts import _version

TEST_URI = "test:///default"
ABSENT = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def hypervisor() -> Iterator[Hypervisor]:
    with Hypervisor.connect(TEST_URI) as hypervisor:
        yield hypervisor


@contextlib.contextmanager
def domain(name: str, metadata: str) -> Iterator[str]:
    """A domain of the test driver, whose domains all connections share."""
    connection = libvirt.open(TEST_URI)
    made = connection.createXML(
        f"<domain type='test'><name>{name}</name><memory>8192</memory><os><type>hvm</type></os>"
        f"<metadata>{metadata}</metadata></domain>"
    )
    try:
        yield made.UUIDString()
    finally:
        with contextlib.suppress(libvirt.libvirtError):
            made.destroy()
        connection.close()


def mark(id_: str, state: Path, namespace: str = METADATA_NAMESPACE) -> str:
    return f"<v:sandbox xmlns:v='{namespace}' id='{id_}' owner='1000' state='{state}'/>"


def test_only_domains_with_our_mark_and_state_folder_are_ours(
    hypervisor: Hypervisor, tmp_path: Path
) -> None:
    ours, link = tmp_path / "ours", tmp_path / "link"
    ours.mkdir()
    link.symlink_to(ours)
    with (
        domain("vmsandbox-a", mark("a", ours)) as uuid,
        domain("vmsandbox-b", mark("b", tmp_path / "other")),
        domain("vmsandbox-c", mark("c", ours, "urn:somebody:else")),
        domain("vmsandbox-d", ""),
    ):
        (found,) = hypervisor.list_owned(ours)
        assert (found.id, found.name, found.uuid) == ("a", "vmsandbox-a", uuid)
        assert (found.owner_uid, found.state_root) == (1000, ours)
        assert hypervisor.list_owned(link) == [found], "the same folder by another name"
    assert hypervisor.list_owned(ours) == []


def test_observe_tells_states_apart(hypervisor: Hypervisor) -> None:
    with domain("vmsandbox-e", "") as uuid:
        assert hypervisor.observe(uuid).state is DomainState.RUNNING
        hypervisor.pause(uuid)
        assert hypervisor.observe(uuid).state is DomainState.PAUSED
        hypervisor.resume(uuid)
        assert hypervisor.observe(uuid).alive is True
        assert hypervisor.destroy(uuid)
        assert hypervisor.observe(uuid).alive is False
    assert hypervisor.observe(ABSENT).state is DomainState.GONE


def test_destroy_says_whether_there_was_anything(hypervisor: Hypervisor) -> None:
    with domain("vmsandbox-f", "") as uuid:
        assert hypervisor.destroy(uuid)
        assert not hypervisor.destroy(uuid)


def test_a_domain_that_is_gone_is_an_error_with_a_code(hypervisor: Hypervisor) -> None:
    with pytest.raises(HostProblem) as problem:
        hypervisor.pause(ABSENT)
    assert problem.value.code == "domain_gone"
    assert ABSENT in problem.value.message


def test_what_libvirt_refuses_is_an_error_with_its_words(hypervisor: Hypervisor) -> None:
    with pytest.raises(HostProblem) as problem:
        hypervisor.start("<domain type='test'><name>nothing</name></domain>")
    assert problem.value.code == "libvirt_failed"
    assert "nothing" in problem.value.message


@pytest.mark.parametrize("socket", ["missing", "dead"])
def test_an_unreachable_daemon_has_a_hint(socket: str, short_path: Path) -> None:
    import socket as sockets

    path = short_path / "libvirt-sock"
    if socket == "dead":  # bound, but nobody listens: a daemon that was killed leaves that
        with sockets.socket(sockets.AF_UNIX) as left:
            left.bind(str(path))
    uri = f"qemu:///system?socket={path}"
    with pytest.raises(HostProblem) as problem:
        Hypervisor.connect(uri)
    assert problem.value.code == "libvirt_unreachable"
    assert problem.value.hint == "vmsandbox doctor --fix"
    unknown = Hypervisor(uri).observe(ABSENT)
    assert (unknown.state, unknown.alive) == (DomainState.UNKNOWN, None), "no proof of death"
    with pytest.raises(HostProblem):
        Hypervisor(uri).destroy(ABSENT)


def test_a_process_that_is_no_qemu_of_libvirts_is_none() -> None:
    import os

    assert processes._read(os.getpid()) is None
    assert processes.find(ABSENT) is None


def test_versions_are_unpacked() -> None:
    assert _version(9_000_000) == "9.0.0"
    assert _version(7_002_022) == "7.2.22"
