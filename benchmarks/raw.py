"""Owns the floor that starts are measured against: QEMU by hand, without libvirt and without us.

A guest of our image is frozen while it waits for its seed, then continued: overlay, QEMU, seed,
one command of plain ``ssh``. Same machine, image and CPU model as a sandbox has.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys
import termios
import time
import uuid
from pathlib import Path
from typing import Any, Self

import psutil

from vmsandbox import seed
from vmsandbox.deadline import Deadline
from vmsandbox.domain import MAC, SEED_PORT
from vmsandbox.guest import known_hosts_line
from vmsandbox.model import Endpoint, HostFacts, Image
from vmsandbox.sandbox import Rooms

_BOOT_S = 60.0
_ANSWER_S = 30.0
_POLL_S = 0.002


class RawTemplate:
    """A frozen guest in `folder`, made when the block begins."""

    def __init__(
        self, rooms: Rooms, image: Image, folder: Path, memory_mib: int, tb_cache_mib: int = 32
    ) -> None:
        self._rooms = rooms
        self._image = image
        self._host: HostFacts = rooms.host_facts(image)
        self._folder = folder
        self._memory_mib = memory_mib
        self._tb_cache_mib = tb_cache_mib

    def __enter__(self) -> Self:
        self._folder.mkdir()
        with (self._folder / "ram").open("wb") as ram:
            ram.truncate(self._memory_mib << 20)
        self._rooms.images.create_overlay(
            self._image, self._folder / "disk.qcow2", -(-self._image.rootfs_bytes >> 20)
        )
        machine = _Process(self._argv("template", self._folder / "disk.qcow2", shared=True))
        with machine:
            _wait_line(self._console("template"), b"waiting for the seed", Deadline(_BOOT_S))
            machine.settle()
            with _Monitor(self._folder / "template.qmp") as monitor:
                monitor.ask("stop")
                monitor.migrate("migrate", f"exec:cat > {self._folder}/state")
        return self

    def __exit__(self, *_: object) -> None:
        """The folder is its owner's to remove."""

    def first_command(self) -> float:
        """Seconds from the overlay's making to the result of ``true`` over SSH."""
        name = uuid.uuid4().hex[:8]
        client, host = seed.new_key(), seed.new_key()
        endpoint = self._rooms.store.propose(None)[2]
        key, known = self._folder / f"{name}.key", self._folder / f"{name}.known"
        key.write_text(client.private)
        key.chmod(0o600)
        known.write_text(known_hosts_line(endpoint, host.public))
        started = time.monotonic()
        overlay = self._folder / f"{name}.qcow2"
        self._rooms.images.create_overlay_on(
            self._folder / "disk.qcow2", "qcow2", overlay, -(-self._image.rootfs_bytes >> 20)
        )
        argv = self._argv(name, overlay, shared=False, ssh=endpoint)
        with _Process([*argv, "-S", "-incoming", "defer"]):
            with _Monitor(self._folder / f"{name}.qmp") as monitor:
                monitor.migrate("migrate-incoming", f"exec:cat {self._folder}/state")
                monitor.ask("cont")
            _send(self._folder / f"{name}.seed", _message(name, client, host))
            while subprocess.run(_ssh(endpoint, key, known), capture_output=True).returncode:
                if time.monotonic() - started > _ANSWER_S:
                    raise TimeoutError("no answer over SSH")
            return time.monotonic() - started

    def _console(self, name: str) -> Path:
        return self._folder / f"{name}.console"

    def _argv(
        self, name: str, disk: Path, *, shared: bool, ssh: Endpoint | None = None
    ) -> list[str]:
        tcg = self._host.accelerator.value == "tcg"
        accelerator = f"tcg,tb-size={self._tb_cache_mib}" if tcg else "kvm"
        cpu = "max,la57=off" if tcg else "host"
        forward = f",hostfwd=tcp:{ssh.address}:{ssh.port}-:22" if ssh else ""
        ram = f"memory-backend-file,id=ram,size={self._memory_mib}M,mem-path={self._folder}/ram"
        qmp, port = self._folder / f"{name}.qmp", self._folder / f"{name}.seed"
        return [
            *(str(self._host.qemu_binary), "-nodefaults", "-no-user-config", "-display", "none"),
            *("-machine", f"{self._host.machine},memory-backend=ram,usb=off"),
            *("-accel", accelerator, "-cpu", cpu, "-smp", "1", "-m", str(self._memory_mib)),
            *("-object", f"{ram},share={'on' if shared else 'off'}"),
            *("-kernel", str(self._image.kernel), "-initrd", str(self._image.initramfs)),
            *("-append", self._image.cmdline),
            *("-drive", f"file={disk},format=qcow2,if=none,id=vda,cache=unsafe,discard=unmap"),
            *("-device", "virtio-blk-pci,drive=vda,addr=0x3"),
            *("-device", "virtio-serial-pci,id=serial,addr=0x5"),
            *("-chardev", f"socket,id=seed,path={port},server=on,wait=off"),
            *("-device", f"virtserialport,chardev=seed,name={SEED_PORT}"),
            *("-object", "rng-random,id=rng,filename=/dev/urandom"),
            *("-device", "virtio-rng-pci,rng=rng,addr=0x6"),
            *("-netdev", f"user,id=net,restrict=on{forward}"),
            *("-device", f"virtio-net-pci,netdev=net,mac={MAC},addr=0x10"),
            *("-serial", f"file:{self._console(name)}"),
            *("-qmp", f"unix:{qmp},server=on,wait=off"),
        ]


class _Process:
    """A QEMU that ends with the block."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv

    def __enter__(self) -> Self:
        self._qemu = subprocess.Popen(self._argv, stdin=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self._qemu.kill()
        self._qemu.wait()

    def settle(self) -> None:
        """Until the guest has nothing left to do."""
        process, deadline = psutil.Process(self._qemu.pid), Deadline(_BOOT_S)
        while process.cpu_percent(0.5) > 5 and not deadline.passed():
            pass


class _Monitor:
    """QMP, one question at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        with _connected(self._path) as peer:
            self._file = peer.makefile("rw")
        self._file.readline()
        self.ask("qmp_capabilities")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        print(json.dumps({"execute": command, "arguments": arguments}), file=self._file, flush=True)
        while True:
            answer = json.loads(self._file.readline())
            if "error" in answer:
                raise RuntimeError(answer["error"])
            if "return" in answer:
                return dict(answer["return"])

    def migrate(self, command: str, uri: str) -> None:
        """Move the state, without the memory, to or from `uri`."""
        capability = {"capability": "x-ignore-shared", "state": True}
        self.ask("migrate-set-capabilities", capabilities=[capability])
        self.ask(command, uri=uri)
        deadline = Deadline(_BOOT_S)
        while self.ask("query-migrate").get("status") != "completed":
            if deadline.passed():
                raise TimeoutError(uri)
            time.sleep(_POLL_S)


def _connected(path: Path) -> socket.socket:
    """Connected to a socket that a starting QEMU makes."""
    deadline = Deadline(_BOOT_S)
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(str(path))
            return peer
        except OSError:
            peer.close()
            if deadline.passed():
                raise
            time.sleep(_POLL_S)


def _message(name: str, client: seed.KeyPair, host: seed.KeyPair) -> bytes:
    asked = seed.SeedSpec(
        id=name,
        hostname=name,
        machine_id=uuid.uuid4().hex,
        host_key=host.private,  # type: ignore[arg-type]
        host_key_public=host.public,
        authorized_key=client.public,
        entropy=os.urandom(64),  # type: ignore[arg-type]
        now=time.time(),
        scripts=seed.guest_scripts(),
    )
    return seed.port_message(seed.seed_tar(asked))


def _send(path: Path, message: bytes) -> None:
    with _connected(path) as port:
        deadline = Deadline(_BOOT_S)
        port.sendall(message)
        while not deadline.passed() and int.from_bytes(
            fcntl.ioctl(port, termios.TIOCOUTQ, bytes(4)), sys.byteorder
        ):
            time.sleep(_POLL_S)


def _wait_line(console: Path, line: bytes, deadline: Deadline) -> None:
    while not (console.exists() and line in console.read_bytes()):
        if deadline.passed():
            raise TimeoutError(f"{console}: no {line!r}")
        time.sleep(_POLL_S)


def _ssh(endpoint: Endpoint, key: Path, known: Path) -> list[str]:
    options = ("StrictHostKeyChecking=yes", f"UserKnownHostsFile={known}", "BatchMode=yes")
    return [
        *("ssh", "-F", "none", "-i", str(key), "-p", str(endpoint.port)),
        *(word for option in options for word in ("-o", option)),
        *(f"root@{endpoint.address}", "true"),
    ]
