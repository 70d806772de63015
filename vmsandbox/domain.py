"""Owns what a sandbox's virtual machine looks like: a :class:`DomainSpec` becomes libvirt domain
XML.

Pure: knows no connection, no file contents and no guest. All text goes through ``xml.etree``, so
nothing is ever left unescaped.

Every domain has the same devices at the same PCI addresses, whether it boots or continues a frozen
template: device state can only be loaded into an identical machine, and block device names must
never depend on what else is attached.
"""

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from vmsandbox.errors import HostProblem
from vmsandbox.model import Accelerator, Endpoint, Value

METADATA_NAMESPACE = "urn:vmsandbox:domain:1"
"""Marks a domain as ours; the element below it says whose and where its folder is."""

SEED_PORT = "org.vmsandbox.seed"
"""Name of the virtio-serial port on which a guest can wait for its seed."""

NETDEV = "sandbox"
"""Id of QEMU's user network, as ``hostfwd_add`` wants it."""

MAC = "52:54:00:76:6d:01"
"""The same for all: each guest is alone on its network, and clones of one template must agree."""

_QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
_SLOTS = {"disk": 0x03, "seed": 0x04, "serial": 0x05, "rng": 0x06, "nic": 0x10}
_SOCKET_PATH_MAX_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1, see unix(7)
_NOT_XML = re.compile("[^\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

ET.register_namespace("qemu", _QEMU_NAMESPACE)
ET.register_namespace("vmsandbox", METADATA_NAMESPACE)


class Layer(Value):
    """One file of a disk's backing chain."""

    path: Path
    format: Literal["raw", "qcow2"]


class SharedMemory(Value):
    """Guest RAM in a file: a template writes it (`shared`), its clones map it privately and never
    change it."""

    path: Path
    shared: bool
    readonly: bool = Field(
        default=False,
        description="map a file opened read-only as writable private memory; QEMU >= 8.2 has it",
    )


class DomainSpec(Value):
    """All that decides what a domain looks like. Paths are absolute."""

    id: str = Field(description="the sandbox's id, in the metadata")
    name: str = Field(description="the domain's name in libvirt and in QEMU's argv")
    uuid: str
    owner_uid: int
    state_root: Path
    accelerator: Accelerator
    machine: str = Field(description="with its version, e.g. pc-q35-7.2")
    emulator: Path
    vcpus: int
    memory_mib: int
    tb_cache_mib: int = Field(default=64, description="translation cache, TCG only")
    kernel: Path
    initramfs: Path
    cmdline: str
    disk: Path = Field(description="the qcow2 overlay; the guest's vda")
    disk_mib: int = Field(description="its virtual size, which only the file itself says")
    disk_mib_s: int = Field(default=0, description="the most read and written a second; 0: all")
    disk_iops: int = Field(default=0, description="the most reads and writes a second; 0: all")
    backing: tuple[Layer, ...] = Field(description="below the overlay, nearest first")
    seed_iso: Path | None = Field(default=None, description="the guest's vdb")
    seed_socket: Path
    console: Path
    ssh: Endpoint | None = Field(
        default=None, description="None: the forward is added to the running domain"
    )
    dac_label: str | None = Field(
        default=None, description="+uid:+gid that QEMU runs as under qemu:///system"
    )
    memory_file: SharedMemory | None = None
    incoming_monitor: Path | None = Field(
        default=None,
        description="wait for a template's device state; the socket where QEMU takes commands "
        "before libvirt lets anybody through",
    )


def domain_xml(spec: DomainSpec) -> str:
    """The domain as libvirt's ``createXML`` takes it.

    Raises HostProblem ``path_unsuitable`` for a path that XML or a socket address cannot hold.
    """
    _check_paths(spec)
    root = ET.Element("domain", type="kvm" if spec.accelerator is Accelerator.KVM else "qemu")
    root.extend(_identity(spec))
    root.append(_os(spec))
    root.extend(_machine(spec))
    root.append(_devices(spec))
    root.extend(_security(spec))
    root.append(_commandline(spec))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _check_paths(spec: DomainSpec) -> None:
    values: Iterator[Path] = (value for _, value in spec if isinstance(value, Path))
    for path in (*values, *(layer.path for layer in spec.backing)):
        if _NOT_XML.search(str(path)):
            raise HostProblem(
                "path_unsuitable",
                f"a domain cannot name {str(path)!r}: control characters, or not UTF-8",
                hint="set VMSANDBOX_HOME to a plain path",
            )
    for socket in (spec.seed_socket, spec.incoming_monitor):
        if socket and len(os.fsencode(socket)) > _SOCKET_PATH_MAX_BYTES:
            raise HostProblem(
                "path_unsuitable",
                f"{socket} is too long for a socket ({_SOCKET_PATH_MAX_BYTES} bytes)",
                hint="set VMSANDBOX_HOME to a shorter path",
            )


def _element(tag: str, text: object = None, /, **attributes: object) -> ET.Element:
    """An element; attribute names may end in ``_`` to avoid Python's keywords, None leaves one
    out."""
    present = {k.rstrip("_"): str(v) for k, v in attributes.items() if v is not None}
    element = ET.Element(tag, present)
    element.text = None if text is None else str(text)
    return element


def _nest(tag: str, *children: ET.Element, **attributes: object) -> ET.Element:
    element = _element(tag, **attributes)
    element.extend(children)
    return element


def _pci(device: str) -> ET.Element:
    """A fixed slot on the root bus: virtio needs no root port, and a bus fewer is scanned at
    boot."""
    slot = f"{_SLOTS[device]:#04x}"
    return _element("address", type="pci", domain="0", bus="0", slot=slot, function="0")


def _identity(spec: DomainSpec) -> list[ET.Element]:
    mark = _nest(
        f"{{{METADATA_NAMESPACE}}}sandbox",
        id=spec.id,
        owner=spec.owner_uid,
        state=spec.state_root,
    )
    return [
        _element("name", spec.name),
        _element("uuid", spec.uuid),
        _nest("metadata", mark),
        _element("memory", spec.memory_mib, unit="MiB"),
        _element("vcpu", spec.vcpus),
    ]


def _os(spec: DomainSpec) -> ET.Element:
    return _nest(
        "os",
        _element("type", "hvm", arch="x86_64", machine=spec.machine),
        _element("kernel", spec.kernel),
        _element("initrd", spec.initramfs),
        _element("cmdline", spec.cmdline),
    )


def _machine(spec: DomainSpec) -> list[ET.Element]:
    """CPU, features and what ends the domain: a guest that reboots or panics is over, with its
    console as evidence."""
    features = _nest("features", _element("acpi"), _element("apic"))
    if spec.accelerator is Accelerator.KVM:
        cpu = _element("cpu", mode="host-passthrough")
    else:
        cpu = _nest("cpu", *_slow_features(), mode="maximum")
        # Left alone the cache grows past 500 MiB in each guest.
        features.append(_nest("tcg", _element("tb-cache", spec.tb_cache_mib, unit="MiB")))
    return [
        features,
        cpu,
        _element("clock", offset="utc"),
        _element("on_poweroff", "destroy"),
        _element("on_reboot", "destroy"),
        _element("on_crash", "destroy"),
    ]


def _slow_features() -> Iterator[ET.Element]:
    """What TCG has and guests are better off without: five-level page tables cost about a sixth of
    a boot, and a kernel that sees fast string moves uses what TCG does byte by byte."""
    for name in ("la57", "erms", "fsrm"):
        yield _element("feature", policy="disable", name=name)


def _devices(spec: DomainSpec) -> ET.Element:
    devices = _nest("devices", _element("emulator", spec.emulator), _overlay(spec))
    if spec.seed_iso is not None:
        devices.append(_seed_disk(spec.seed_iso))
    channel = _nest(
        "channel",
        _element("source", mode="bind", path=spec.seed_socket),
        _element("target", type="virtio", name=SEED_PORT),
        _element("address", type="virtio-serial", controller="0", bus="0", port="1"),
        type="unix",
    )
    # virtlogd writes this file (2 MiB, then console.log.0 to .2): bounded, and no process of ours
    # need live.
    console = _nest(
        "serial", _element("source", path=spec.console), _element("target", port="0"), type="file"
    )
    rng = _nest(
        "rng", _element("backend", "/dev/urandom", model="random"), _pci("rng"), model="virtio"
    )
    devices.extend(
        [
            _nest("controller", _pci("serial"), type="virtio-serial", index="0"),
            _element("controller", type="usb", model="none"),
            console,
            channel,
            # A balloon on a clone would punch holes into its template's memory.
            _element("memballoon", model="none"),
            rng,
        ]
    )
    return devices


def _overlay(spec: DomainSpec) -> ET.Element:
    """The root disk with its whole chain: libvirt then needs to open no image to learn what lies
    below.

    cache=unsafe: the overlay dies with the sandbox, so nothing is gained by waiting for the host's
    disk.
    """
    disk = _nest(
        "disk",
        _element("driver", name="qemu", type="qcow2", cache="unsafe", discard="unmap"),
        _element("source", file=spec.disk),
        type="file",
        device="disk",
    )
    above = disk
    for layer in spec.backing:
        below = _nest(
            "backingStore",
            _element("format", type=layer.format),
            _element("source", file=layer.path),
            type="file",
        )
        above.append(below)
        above = below
    above.append(_element("backingStore"))
    disk.extend([_element("target", dev="vda", bus="virtio"), *_throttle(spec), _pci("disk")])
    return disk


def _throttle(spec: DomainSpec) -> Iterator[ET.Element]:
    """QEMU's own throttling, which needs no cgroups."""
    bounds = {
        "total_bytes_sec": spec.disk_mib_s * 1024 * 1024,
        "total_iops_sec": spec.disk_iops,
    }
    if any(bounds.values()):
        yield _nest("iotune", *(_element(name, most) for name, most in bounds.items() if most))


def _seed_disk(iso: Path) -> ET.Element:
    return _nest(
        "disk",
        _element("driver", name="qemu", type="raw"),
        _element("source", file=iso),
        _element("target", dev="vdb", bus="virtio"),
        _element("readonly"),
        _pci("seed"),
        type="file",
        device="disk",
    )


def _security(spec: DomainSpec) -> list[ET.Element]:
    """Under qemu:///system: QEMU's usual user, but no file changes hands; images are shared and
    immutable.

    Other security models (AppArmor, SELinux) stay as libvirt sets them.
    """
    if spec.dac_label is None:
        return []
    label = _element("label", spec.dac_label)
    return [_nest("seclabel", label, type="static", model="dac", relabel="no")]


def _commandline(spec: DomainSpec) -> ET.Element:
    """What libvirt's own elements cannot say: a network without a way out, and memory in a file of
    our choice."""
    arguments = [*_memory_arguments(spec), *_network_arguments(spec)]
    if spec.incoming_monitor is not None:
        arguments += ["-incoming", "defer", *_monitor_arguments(spec.incoming_monitor)]
    arg = f"{{{_QEMU_NAMESPACE}}}arg"
    return _nest(
        f"{{{_QEMU_NAMESPACE}}}commandline", *(_element(arg, value=value) for value in arguments)
    )


def _monitor_arguments(path: Path) -> list[str]:
    listen = f"socket,id=incoming-monitor,path={_option(path)},server=on,wait=off"
    return ["-chardev", listen, "-mon", "chardev=incoming-monitor,mode=control"]


def _network_arguments(spec: DomainSpec) -> list[str]:
    netdev = f"user,id={NETDEV},restrict=on"
    if spec.ssh is not None:
        netdev += f",hostfwd={forward(spec.ssh, 22)}"
    device = f"virtio-net-pci,netdev={NETDEV},mac={MAC},addr={_SLOTS['nic']:#x}"
    return ["-netdev", netdev, "-device", device]


def _memory_arguments(spec: DomainSpec) -> list[str]:
    if (file := spec.memory_file) is None:
        return []
    options = f"memory-backend-file,id=template-ram,size={spec.memory_mib}M"
    options += f",mem-path={_option(file.path)},share={'on' if file.shared else 'off'}"
    if file.readonly:
        options += ",readonly=on,rom=off"
    # libvirt gave a backend of its own on -machine; the later one counts.
    return ["-object", options, "-machine", "memory-backend=template-ram"]


def _option(value: object) -> str:
    """A value inside a comma separated QEMU option; see "comma" in qemu(1)."""
    return str(value).replace(",", ",,")


def forward(host: Endpoint, guest_port: int) -> str:
    """A host forward in QEMU's words."""
    return f"tcp:{host.address}:{host.port}-:{guest_port}"
