"""Owns the host facts that a launch depends on, put together from libvirt's and our own."""

import os
from collections.abc import Callable
from pathlib import Path

import psutil

from vmsandbox.host import accelerator
from vmsandbox.host.accelerator import Subject, Verdict
from vmsandbox.model import HostFacts, Image, LibvirtFacts

_ANSWER = "accelerator.json"


def facts(
    libvirt: LibvirtFacts, image: Image, cache: Path, note: Callable[[str], None]
) -> HostFacts:
    """What a launch of `image` depends on; `note` hears what a first probe finds.

    Boots the image's kernel once to see whether KVM works (at most 10 s), and keeps the answer in
    the folder `cache` until the host changes.
    """
    chosen = verdict(libvirt, image.kernel, image.digest, cache, note)
    return HostFacts(
        **libvirt.model_dump(exclude={"security_models", "answered_in_s"}),
        accelerator=chosen.accelerator,
        accelerator_reason=chosen.reason,
        cpus=os.cpu_count() or 1,
        cpu_model=_cpu_model(),
        memory_bytes=psutil.virtual_memory().total,
        kernel=os.uname().release,
    )


def verdict(
    libvirt: LibvirtFacts,
    kernel: Path,
    kernel_digest: str,
    cache: Path,
    note: Callable[[str], None],
    *,
    again: bool = False,
) -> Verdict:
    """Whether KVM works for QEMU's user, with this kernel; `again` asks anew."""
    subject = Subject(
        kernel=kernel,
        kernel_digest=kernel_digest,
        qemu_binary=libvirt.qemu_binary,
        qemu_uid=libvirt.qemu_uid,
        qemu_gid=libvirt.qemu_gid,
    )
    return accelerator.choose(subject, cache / _ANSWER, note, again=again)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return os.uname().machine
