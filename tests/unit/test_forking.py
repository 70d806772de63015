"""What a fork is before it has a disk, and what makes its guest another one."""

from pathlib import Path

import pytest

from tests.unit.test_outcomes import record
from vmsandbox.errors import UsageProblem
from vmsandbox.model import Accelerator, Endpoint, HostFacts, Image, Limits, Origin, SandboxState
from vmsandbox.sandbox.plan import domain_spec
from vmsandbox.sandbox.setbacks import taken_up
from vmsandbox.store import SandboxFolder

DIGEST = "sha256:" + "1" * 64
UUID = "01234567-89ab-cdef-0123-456789abcdef"
ORIGIN = Origin(id="12ab34cd", name="source", digest=DIGEST)


def test_a_fork_without_its_disk_is_never_begun() -> None:
    """Its command would run on a fresh worktree, as if nothing had been there before."""
    half = record(SandboxState.QUEUED).model_copy(update={"forked_from": ORIGIN})
    with pytest.raises(UsageProblem) as caught:
        taken_up(half)
    assert caught.value.code == "fork_incomplete"
    assert caught.value.hint == "vmsandbox delete ab12cd34 && vmsandbox fork 12ab34cd"
    assert taken_up(half.model_copy(update={"base_in_guest": True}))["failure"] is None


def test_a_fork_is_told_where_to_leave_its_report() -> None:
    plain = record(SandboxState.QUEUED).model_copy(update={"batch": None})
    assert not plain.heard
    assert plain.model_copy(update={"forked_from": ORIGIN}).heard


@pytest.mark.parametrize("cloud_init", [True, False])
def test_a_stock_system_is_told_its_machine_id(cloud_init: bool) -> None:
    """Our own images take it from the seed, at every boot."""
    folder = Path("/state/sandboxes/ab12cd34")
    image = Image(
        name="i",
        digest=DIGEST,
        folder=folder,
        kernel=folder,
        initramfs=folder,
        rootfs=folder,
        rootfs_bytes=1,
        cmdline="root=/dev/vda rw",
        cloud_init=cloud_init,
    )
    host = HostFacts(
        libvirt_uri="qemu:///session",
        accelerator=Accelerator.TCG,
        accelerator_reason="",
        libvirt_version="9.0.0",
        qemu_version="7.2.0",
        qemu_binary=Path("/usr/bin/qemu-system-x86_64"),
        machine="pc-q35-7.2",
        qemu_uid=0,
        qemu_gid=0,
        cpus=1,
        cpu_model="c",
        memory_bytes=1,
        kernel="6",
    )
    spec = domain_spec(
        folder=SandboxFolder(folder),
        state_root=Path("/state"),
        endpoint=Endpoint(address="127.0.0.2", port=2222),
        domain_uuid=UUID,
        limits=Limits(),
        image=image,
        host=host,
        owner_uid=0,
    )
    told = " systemd.machine_id=0123456789abcdef0123456789abcdef" if cloud_init else ""
    assert spec.cmdline == f"root=/dev/vda rw{told}"
