"""Owns what a guest is told about itself: a :class:`SeedSpec` becomes the seed tar and the NoCloud
ISO, and keys are made.

Pure but for the randomness of keys and for reading the guest scripts that ship with the package.
Knows no domain, no connection, no state folder. The same spec gives the same bytes.

One seed, two readers. Our own images unpack ``seed.tar`` to ``/``. Images with cloud-init read
``meta-data``, ``user-data`` and ``network-config``, which say the same; all three are JSON, which
is YAML. The layout is cloud-init's NoCloud: a volume labelled ``cidata`` with those names.
"""

import base64
import gzip
import io
import json
import re
import tarfile
import threading
import time
from collections.abc import Mapping
from importlib import resources
from types import SimpleNamespace
from typing import Any, NamedTuple

from pydantic import Field, SecretBytes, SecretStr, field_validator

from vmsandbox.model import Value
from vmsandbox.reach import ASK_HOST, GATEWAY_HOST

SCRIPTS_FOLDER = "usr/lib/vmsandbox"
AUTHORIZED_KEYS = "etc/ssh/vmsandbox_authorized_keys"
HOST_KEY = "etc/ssh/ssh_host_ed25519_key"
SEEDED = "run/vmsandbox/seeded"
"""Made last, by whoever applied the seed; holds the sandbox's id."""

ADDRESS = "10.0.2.15/24"
GATEWAY = "10.0.2.2"
NAME_SERVER = "10.0.2.3"
"""The addresses of QEMU's user network."""

_FIRST_TASK: Mapping[str, tuple[bytes, int]] = {
    "run/vmsandbox": (tarfile.DIRTYPE, 0o755),
    "run/vmsandbox/terminal": (tarfile.DIRTYPE, 0o1777),
    "run/vmsandbox/tasks": (tarfile.DIRTYPE, 0o700),
    "run/vmsandbox/tasks/first": (tarfile.DIRTYPE, 0o700),
    "run/vmsandbox/tasks/first/out.fifo": (tarfile.FIFOTYPE, 0o666),
    "run/vmsandbox/tasks/first/err.fifo": (tarfile.FIFOTYPE, 0o666),
    "var/lib/vmsandbox": (tarfile.DIRTYPE, 0o755),
    "var/lib/vmsandbox/tasks": (tarfile.DIRTYPE, 0o700),
    "var/lib/vmsandbox/tasks/first": (tarfile.DIRTYPE, 0o700),
    "sys/fs/cgroup/vmsandbox.supervisor": (tarfile.DIRTYPE, 0o755),
    "sys/fs/cgroup/vmsandbox.task.first": (tarfile.DIRTYPE, 0o755),
}
"""What the guest script `task` would otherwise spawn processes for, when every moment counts."""

_HOST_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class KeyPair(NamedTuple):
    """An Ed25519 key as OpenSSH writes it."""

    private: str
    public: str


class Mount(Value):
    """A line of the guest's fstab; cloud-init images only."""

    device: str
    folder: str
    type: str = "auto"
    options: str = "defaults,nofail"


class SeedSpec(Value):
    """All that makes one guest different from another."""

    id: str
    hostname: str
    machine_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    host_key: SecretStr = Field(description="OpenSSH private key")
    host_key_public: str
    authorized_key: str = Field(description="public key of the host's side")
    entropy: SecretBytes
    now: float = Field(description="seconds since the epoch; also the time of every file")
    mac: str = Field(default="", description="of the NIC; empty: any virtio NIC")
    mounts: tuple[Mount, ...] = ()
    scripts: Mapping[str, bytes] = Field(description="name → guest script")

    @field_validator("hostname")
    @classmethod
    def _hostname_is_a_label(cls, name: str) -> str:
        if not _HOST_LABEL.fullmatch(name):
            raise ValueError(f"{name!r} is no host name")
        return name


def new_key(comment: str = "vmsandbox") -> KeyPair:
    """A fresh Ed25519 key; made in process, so no private half ever is on a command line."""
    # Imported where used: nearly every command starts without making a key.
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return KeyPair(private.decode(), f"{public.decode()} {comment}")


def hostname_for(name: str) -> str:
    """The nearest host name to a sandbox's name: lower case, hyphens, at most 63 characters."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower())[:63].strip("-")
    return label or "sandbox"


def guest_scripts() -> dict[str, bytes]:
    """The scripts of this vmsandbox for the guest: name → content."""
    folder = resources.files("vmsandbox") / "guest_scripts"
    return {
        file.name: file.read_bytes()
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.is_file() and "." not in file.name
    }


def seed_tar(spec: SeedSpec) -> bytes:
    """The seed as our own images read it: a tar of files relative to ``/``, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, (kind, mode) in _FIRST_TASK.items():
            member = tarfile.TarInfo(path)
            member.type, member.mode, member.mtime = kind, mode, int(spec.now)
            archive.addfile(member)
        for path, (content, mode) in sorted(_files(spec).items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode, member.mtime = len(content), mode, int(spec.now)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def port_message(tar: bytes) -> bytes:
    """What is written to the seed port of a frozen guest: 8 bytes of big-endian length, the tar."""
    return len(tar).to_bytes(8, "big") + tar


def _files(spec: SeedSpec) -> dict[str, tuple[bytes, int]]:
    return {
        "etc/hostname": (f"{spec.hostname}\n".encode(), 0o644),
        "etc/hosts": (_hosts(spec).encode(), 0o644),
        "etc/machine-id": (f"{spec.machine_id}\n".encode(), 0o444),
        "etc/vmsandbox/id": (f"{spec.id}\n".encode(), 0o644),
        "etc/vmsandbox/now": (f"{spec.now:.6f}\n".encode(), 0o644),
        "etc/vmsandbox/entropy": (spec.entropy.get_secret_value(), 0o600),
        HOST_KEY: (spec.host_key.get_secret_value().encode(), 0o600),
        f"{HOST_KEY}.pub": (f"{spec.host_key_public}\n".encode(), 0o644),
        AUTHORIZED_KEYS: (f"{spec.authorized_key}\n".encode(), 0o644),
    } | {_script(name): (content, 0o755) for name, content in spec.scripts.items()}


def _script(name: str) -> str:
    """Where a script lies: what people and agents call is found by its name alone."""
    return f"{'usr/bin' if name.startswith('vmsandbox-') else SCRIPTS_FOLDER}/{name}"


def _hosts(spec: SeedSpec) -> str:
    return (
        f"127.0.0.1\tlocalhost\n127.0.1.1\t{spec.hostname}\n"
        "::1\tlocalhost ip6-localhost ip6-loopback\n"
        f"127.0.0.1\t{GATEWAY_HOST} {ASK_HOST}\n"
    )


# --- NoCloud --------------------------------------------------------------------------------------


def meta_data(spec: SeedSpec) -> bytes:
    """NoCloud ``meta-data``. A new instance-id makes cloud-init run again on an old disk."""
    return _json({"instance-id": spec.id, "local-hostname": spec.hostname})


def network_config(spec: SeedSpec) -> bytes:
    """NoCloud ``network-config``, version 2: the static address, so that no DHCP is waited for."""
    match = {"macaddress": spec.mac} if spec.mac else {"driver": "virtio_net"}
    return _json(
        {
            "version": 2,
            "ethernets": {
                "sandbox": {
                    "match": match,
                    "dhcp4": False,
                    "addresses": [ADDRESS],
                    "gateway4": GATEWAY,
                    "nameservers": {"addresses": [NAME_SERVER]},
                }
            },
        }
    )


def user_data(spec: SeedSpec) -> bytes:
    """NoCloud ``user-data``: the same keys, names, users and scripts in cloud-init's words."""
    config: dict[str, Any] = {
        "hostname": spec.hostname,
        "preserve_hostname": False,
        "manage_etc_hosts": False,
        "users": [
            {"name": "root", "ssh_authorized_keys": [spec.authorized_key]},
            {
                "name": "agent",
                "shell": "/bin/bash",
                "lock_passwd": True,
                "sudo": "ALL=(ALL) NOPASSWD:ALL",
                "ssh_authorized_keys": [spec.authorized_key],
            },
        ],
        "disable_root": False,
        "ssh_pwauth": False,
        "ssh_deletekeys": False,
        "ssh_keys": {
            "ed25519_private": spec.host_key.get_secret_value(),
            "ed25519_public": spec.host_key_public,
        },
        "random_seed": {
            "file": "/dev/urandom",
            "encoding": "base64",
            "data": base64.b64encode(spec.entropy.get_secret_value()).decode(),
        },
        "write_files": _write_files(spec),
        "runcmd": [
            ["mkdir", "-p", f"/{SEEDED.rpartition('/')[0]}"],
            ["cp", "/etc/vmsandbox/id", f"/{SEEDED}"],
            ["sh", "-c", "echo vmsandbox: seeded > /dev/console"],
        ],
    }
    if spec.mounts:
        config["mounts"] = [[m.device, m.folder, m.type, m.options] for m in spec.mounts]
    return b"#cloud-config\n" + _json(config)


def _write_files(spec: SeedSpec) -> list[dict[str, str]]:
    """What cloud-init has no words for. The clock is left out: a machine that booted has the right
    one."""
    wanted = ("etc/hosts", "etc/vmsandbox/id", f"{SCRIPTS_FOLDER}/", "usr/bin/")
    return [
        {
            "path": f"/{path}",
            "permissions": f"{mode:04o}",
            "encoding": "gz+b64",
            "content": base64.b64encode(gzip.compress(content, mtime=0)).decode(),
        }
        for path, (content, mode) in sorted(_files(spec).items())
        if path.startswith(wanted)
    ]


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


# --- the disk -------------------------------------------------------------------------------------

_pycdlib_clock = threading.Lock()


def nocloud_iso(spec: SeedSpec, tar: bytes) -> bytes:
    """The seed as a disk: ISO 9660 with Rock Ridge and Joliet names, labelled ``cidata``."""
    contents = {
        "seed.tar": tar,
        "meta-data": meta_data(spec),
        "user-data": user_data(spec),
        "network-config": network_config(spec),
    }
    with _pycdlib_clock:
        return _iso(contents, spec.now)


def _iso(contents: Mapping[str, bytes], moment: float) -> bytes:
    import pycdlib
    from pycdlib import dates, headervd

    # pycdlib stamps the time of day into every record and has no way to be told another one; its
    # modules get a clock that stands still, in UTC, while they work.
    still = SimpleNamespace(
        time=lambda: moment, localtime=time.gmtime, gmtime=time.gmtime, strftime=time.strftime
    )
    modules = (pycdlib.pycdlib, dates, headervd)
    iso = pycdlib.PyCdlib()
    out = io.BytesIO()
    for module in modules:
        vars(module)["time"] = still
    try:
        iso.new(interchange_level=3, vol_ident="cidata", joliet=3, rock_ridge="1.09")
        for name, content in contents.items():
            plain = re.sub(r"[^A-Z0-9.]", "_", name.upper())
            iso.add_fp(
                io.BytesIO(content),
                len(content),
                f"/{plain if '.' in plain else plain + '.'};1",
                rr_name=name,
                joliet_path=f"/{name}",
                file_mode=0o100400,
            )
        iso.write_fp(out)
    finally:
        for module in modules:
            vars(module)["time"] = time
        iso.close()
    return out.getvalue()
