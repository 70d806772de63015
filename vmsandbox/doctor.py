"""Owns the examination of this host as a whole: asks libvirt, the image store and the host, and
puts their answers together. Knows no sandbox.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from vmsandbox import host
from vmsandbox.errors import VmsandboxError
from vmsandbox.host.accelerator import Verdict
from vmsandbox.hypervisor import Hypervisor
from vmsandbox.images import ImageStore
from vmsandbox.model import LibvirtFacts
from vmsandbox.sandbox.templates import maps_readonly
from vmsandbox.store import state_root

Note = Callable[[str], None]


def examine(note: Note, *, again: bool = False) -> list[host.Check]:
    """Every check's answer; `again` probes the accelerator anew even if its answer is known."""
    uri, root = host.libvirt_uri(), state_root()
    problem, libvirt, verdict = None, None, None
    try:
        host.prepare(uri)
        with Hypervisor.connect(uri) as hypervisor:
            libvirt = hypervisor.facts()
    except VmsandboxError as error:
        problem = error
    if libvirt is not None:
        verdict = _verdict(libvirt, root, note, again)
    return host.examine(host.Subject(uri, root, libvirt, problem, verdict))


def _verdict(libvirt: LibvirtFacts, root: Path, note: Note, again: bool) -> Verdict | None:
    kernel = _kernel(root)
    if kernel is None:
        return None
    path, digest = kernel
    return host.verdict(libvirt, path, digest, root / "cache", note, again=again)


def _kernel(root: Path) -> tuple[Path, str] | None:
    """An image's kernel, else the host's own where it may be read, and what it is."""
    if (root / "images").is_dir() and (images := ImageStore(root / "images").list()):
        return images[0].kernel, images[0].digest
    own = Path("/boot", f"vmlinuz-{os.uname().release}")
    if os.access(own, os.R_OK):
        return own, hashlib.sha256(own.read_bytes()).hexdigest()
    return None


def mend() -> list[str]:
    """Mend what may be mended; returns what was done, in words."""
    uri = host.libvirt_uri()
    done = host.mend(uri)
    with contextlib.suppress(VmsandboxError), Hypervisor.connect(uri) as hypervisor:
        libvirt = hypervisor.facts()
        readonly = maps_readonly(libvirt.qemu_version)
        done += host.admit_templates(libvirt, state_root(), readonly=readonly)
    return done


def stop() -> list[str]:
    """End the daemons that :func:`mend` started and nobody else's; guests go on."""
    return host.stop(host.libvirt_uri())
