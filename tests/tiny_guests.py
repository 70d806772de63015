"""Guests of a few hundred bytes, for tests of everything around a guest: they start in half a
second and need no image.

Each is a Multiboot kernel, which QEMU's ``-kernel`` loads as it loads Linux: a header, a text and
some 32-bit code that prints the text on the serial port and then does one thing.
"""

import itertools
import os
import secrets
import struct
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vmsandbox.domain import DomainSpec, Layer, domain_xml
from vmsandbox.model import Accelerator, Endpoint, LibvirtFacts

_BASE = 0x100000  # where the file is loaded, and linked to
_HEADER_BYTES = 32
_HALT = bytes.fromhex("f4 eb fd")  # hlt; jmp back to it
# Ports of the q35's power management, where the firmware puts them: 0x600 status, 0x602 enable,
# 0x604 control (0x2000 there means off); 0xcf9 resets.
_POWER_OFF = bytes.fromhex("66 ba 04 06  66 b8 00 20  66 ef")  # mov dx; mov ax; out dx, ax
_AWAIT_BUTTON = bytes.fromhex(
    "66 ba 02 06  66 b8 00 01  66 ef"  # enable the power button event (bit 8)
    "66 ba 00 06  66 ed  f6 c4 01  74 f5"  # mov dx; in ax, dx; test ah, 1; jz to the mov
)
_RESET = bytes.fromhex("66 ba f9 0c  b0 06  ee")  # mov dx; mov al, 6; out dx, al

_HOSTS = itertools.cycle(range(1, 251))

THEN: Mapping[str, bytes] = {
    "halt": _HALT,
    "power off": _POWER_OFF + _HALT,
    "obey the button": _AWAIT_BUTTON + _POWER_OFF + _HALT,
    "reset": _RESET + _HALT,
    "again": b"",
    "spin": bytes.fromhex("eb fe"),  # jmp to itself
}


def kernel(text: bytes, then: str) -> bytes:
    """A Multiboot kernel (header fields as in the Multiboot specification 0.6.96, 3.1)."""
    magic, flags = 0x1BADB002, 0x10000  # bit 16: the addresses follow
    start = _BASE + _HEADER_BYTES + len(text)
    code = _print(_BASE + _HEADER_BYTES, len(text)) + THEN[then]
    if then == "again":
        code += b"\xe9" + struct.pack("<i", -len(code) - 5)  # jmp to the start
    end = start + len(code)
    checksum = -(magic + flags) & 0xFFFFFFFF
    header = struct.pack("<8I", magic, flags, checksum, _BASE, _BASE, end, end, start)
    return header + text + code


def _print(address: int, length: int) -> bytes:
    setup = b"\xbe" + struct.pack("<I", address) + b"\xb9" + struct.pack("<I", length)
    loop = bytes.fromhex(
        "ba fd 03 00 00  ec  a8 20  74 fb"  # until in(0x3fd) & 0x20: the line takes a byte
        "ba f8 03 00 00  ac  ee"  # lodsb; out(0x3f8)
        "e2 ed"  # loop
    )
    return setup + loop


@dataclass(frozen=True)
class TinyGuest:
    """A state folder with one domain in it that is described but not started."""

    spec: DomainSpec

    @property
    def xml(self) -> str:
        return domain_xml(self.spec)

    @property
    def uuid(self) -> str:
        return self.spec.uuid


def tiny_guest(
    root: Path,
    facts: LibvirtFacts,
    *,
    text: bytes = b"hello\n",
    then: str = "halt",
    address: str | None = None,
    id_: str = "tiny",
) -> TinyGuest:
    """Everything that a domain needs below `root`, with the modes that a sandbox has.

    Without `address`, one that no other test uses, whatever runs at the same time.
    """
    address = address or f"127.{secrets.randbelow(64) + 128}.{os.getpid() % 250}.{next(_HOSTS)}"
    folder = root / "sandboxes" / id_
    folder.mkdir(parents=True)
    for path in (root, root / "sandboxes", folder):
        path.chmod(0o711)
    (root / "kernel").write_bytes(kernel(text, then))
    (root / "initramfs").write_bytes(bytes(16))
    (root / "rootfs").write_bytes(bytes(65536))
    for name in ("kernel", "initramfs", "rootfs"):
        (root / name).chmod(0o444)
    _overlay(folder / "overlay.qcow2", root / "rootfs", facts)
    (folder / "seed.iso").write_bytes(bytes(65536))
    (folder / "seed.iso").chmod(0o444)
    return TinyGuest(_spec(root, folder, facts, Endpoint(address=address, port=2222)))


def _overlay(path: Path, backing: Path, facts: LibvirtFacts) -> None:
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(backing), "-F", "raw", str(path)]
    subprocess.run(argv, check=True)
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, facts.qemu_uid, facts.qemu_gid)


def _spec(root: Path, folder: Path, facts: LibvirtFacts, ssh: Endpoint) -> DomainSpec:
    system = facts.libvirt_uri == "qemu:///system"
    return DomainSpec(
        id=folder.name,
        name=f"vmsandbox-{folder.name}-{root.name}",
        uuid=str(uuid.uuid4()),
        owner_uid=os.geteuid(),
        state_root=root,
        accelerator=Accelerator.TCG,
        machine=facts.machine,
        emulator=facts.qemu_binary,
        vcpus=1,
        memory_mib=64,
        tb_cache_mib=16,
        kernel=root / "kernel",
        initramfs=root / "initramfs",
        cmdline="",
        disk_mib=64,
        disk=folder / "overlay.qcow2",
        backing=(Layer(path=root / "rootfs", format="raw"),),
        seed_iso=folder / "seed.iso",
        seed_socket=folder / "seed.sock",
        console=folder / "console.log",
        ssh=ssh,
        dac_label=f"+{facts.qemu_uid}:+{facts.qemu_gid}" if system else None,
    )
