"""Owns what libvirt says about itself and its QEMU. Knows no domain."""

import os
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import libvirt

from vmsandbox.errors import HostProblem
from vmsandbox.hypervisor.connection import Connection
from vmsandbox.model import LibvirtFacts

_ARCH = "x86_64"
_MACHINE = "q35"


def ask(connection: Connection) -> LibvirtFacts:
    """Raises HostProblem ``qemu_missing`` if libvirt knows no QEMU for x86_64."""
    started = time.monotonic()
    domain = ET.fromstring(_domain_capabilities(connection))
    host = ET.fromstring(connection.call("asking libvirt", lambda c: c.getCapabilities()))
    answered_in_s = time.monotonic() - started
    uid, gid = _qemu_user(host)
    return LibvirtFacts(
        libvirt_uri=connection.uri,
        libvirt_version=_version(connection.call("asking libvirt", lambda c: c.getLibVersion())),
        qemu_version=_version(connection.call("asking libvirt", lambda c: c.getVersion())),
        qemu_binary=Path(domain.findtext("path", "")),
        machine=domain.findtext("machine", _MACHINE),
        qemu_uid=uid,
        qemu_gid=gid,
        security_models=tuple(
            model.text for model in host.iterfind("host/secmodel/model") if model.text
        ),
        answered_in_s=answered_in_s,
    )


def _domain_capabilities(connection: Connection) -> str:
    """Asked for emulation, which every host has."""
    try:
        answer: str = connection.raw(
            lambda c: c.getDomainCapabilities(None, _ARCH, _MACHINE, "qemu", 0)
        )
    except libvirt.libvirtError as error:
        raise HostProblem(
            "qemu_missing",
            f"libvirt finds no QEMU for {_ARCH}: {error}",
            hint="vmsandbox doctor    (names the package)",
        ) from error
    return answer


def _qemu_user(capabilities: ET.Element) -> tuple[int, int]:
    """From the security model "dac", whose base label is "+64055:+64055"; else it is us."""
    for model in capabilities.iterfind("host/secmodel"):
        if model.findtext("model") == "dac":
            label = model.findtext("baselabel[@type='qemu']") or model.findtext("baselabel") or ""
            uid, _, gid = label.replace("+", "").partition(":")
            if uid.isdigit() and gid.isdigit():
                return int(uid), int(gid)
    return os.geteuid(), os.getegid()


def _version(number: int) -> str:
    """libvirt packs versions as major × 1000000 + minor × 1000 + release."""
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"
