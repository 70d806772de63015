"""Measures a cold boot to the first command: our image beside the same system booted plainly.

    python -m benchmarks.boot [--rounds 5] [--memory 1024] [--out FILE]

*plain* is the recipe ``debian-12-base``: stock kernel, initramfs-tools initrd, default units, DHCP,
sshd as Debian starts it. It has no way in, so keys are written into a copy of its root disk. *ours*
is ``debian-12`` started with ``--cold``. Both run on the same machine definition, in turns, and are
timed from the call of libvirt to the answer of the first command over SSH. Emits data, asserts
nothing.
"""

import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from benchmarks.series import Series, conditions, options
from vmsandbox import seed
from vmsandbox.domain import DomainSpec, Layer, domain_xml
from vmsandbox.guest import Deadline, Guest, wait_ready
from vmsandbox.images import builtin_recipes
from vmsandbox.model import Endpoint, Image, Limits
from vmsandbox.sandbox import Rooms, plan
from vmsandbox.sandbox.rooms import owner_uid
from vmsandbox.store import SandboxFolder

PLAIN = "debian-12-base"
_BOOT_S = 300.0


def image_of(rooms: Rooms, name: str) -> Image:
    """The image of that name, built now if there is none."""
    if name not in {image.name for image in rooms.images.list()}:
        rooms.images.build(builtin_recipes()[name], name=name)
    return rooms.images.resolve(name)


def with_a_way_in(image: Image, folder: Path) -> tuple[Path, seed.KeyPair, seed.KeyPair]:
    """A copy of the image's root disk in which root may log in with a fresh key."""
    disk = folder / "plain.ext4"
    subprocess.run(["cp", "--sparse=always", str(image.rootfs), str(disk)], check=True)
    disk.chmod(0o644)
    client, host = seed.new_key(), seed.new_key()
    written = {
        "/etc/ssh/ssh_host_ed25519_key": host.private,
        "/etc/ssh/ssh_host_ed25519_key.pub": f"{host.public}\n",
        "/root/.ssh/authorized_keys": f"{client.public}\n",
    }
    commands = ["mkdir /root/.ssh"]
    for number, (path, text) in enumerate(written.items()):
        source = folder / f"file{number}"
        source.write_text(text)
        commands += [f"write {source} {path}", f"set_inode_field {path} mode 0100600"]
    script = folder / "commands"
    script.write_text("\n".join(commands) + "\n")
    subprocess.run(["debugfs", "-w", "-f", str(script), str(disk)], check=True, capture_output=True)
    return disk, client, host


class Machine:
    """One boot of one image on the machine that a sandbox would get."""

    def __init__(self, rooms: Rooms, image: Image, base: Path, limits: Limits) -> None:
        self.rooms = rooms
        self.image = image
        self.id = uuid.uuid4().hex[:8]
        self.folder = SandboxFolder(Path(tempfile.mkdtemp(prefix="vms-boot-")))
        self.folder.path.chmod(0o711)
        self.host = rooms.host_facts(image)
        self.endpoint = rooms.store.propose(None)[2]
        self.spec = plan.domain_spec(
            folder=self.folder,
            state_root=rooms.store.path,
            endpoint=self.endpoint,
            domain_uuid=str(uuid.uuid4()),
            limits=limits,
            image=image,
            host=self.host,
            owner_uid=owner_uid(),
        ).model_copy(update={"name": f"vmsandbox-boot-{self.id}", "id": self.id})
        self.spec = self.spec.model_copy(update={"backing": (Layer(path=base, format="raw"),)})
        rooms.images.create_overlay_on(base, "raw", self.folder.overlay, limits.disk_mib)
        self._hand_over(self.folder.overlay)

    def _hand_over(self, path: Path) -> None:
        shutil.chown(path, self.host.qemu_uid, self.host.qemu_gid)

    def boot(self, spec: DomainSpec, guest: Guest) -> float:
        """Seconds from the call of libvirt to the answer of the first command."""
        started = time.monotonic()
        self.rooms.hypervisor.start(domain_xml(spec))
        try:
            with guest:
                wait_ready([guest.answers()], Deadline(_BOOT_S))
                answer = guest.run(["true"])
                seconds = time.monotonic() - started
            assert answer.code == 0, answer
            return seconds
        finally:
            self.rooms.hypervisor.destroy(spec.uuid)
            self.rooms.hypervisor.forget(spec.name)
            shutil.rmtree(self.folder.path, ignore_errors=True)

    def with_seed(self) -> tuple[DomainSpec, seed.KeyPair, seed.KeyPair]:
        """A NoCloud ISO with fresh keys, as a cold start has it."""
        client, host = seed.new_key(), seed.new_key()
        asked = seed.SeedSpec(
            id=self.id,
            hostname="boot",
            machine_id=uuid.uuid4().hex,
            host_key=host.private,  # type: ignore[arg-type]
            host_key_public=host.public,
            authorized_key=client.public,
            entropy=b"\0" * 64,  # type: ignore[arg-type]
            now=time.time(),
            scripts=seed.guest_scripts(),
        )
        self.folder.seed_iso.write_bytes(seed.nocloud_iso(asked, seed.seed_tar(asked)))
        self._hand_over(self.folder.seed_iso)
        return self.spec, client, host


def guest_at(endpoint: Endpoint, client: seed.KeyPair, host: seed.KeyPair) -> Guest:
    return Guest(endpoint, key=client.private, host_key=host.public)


def main() -> None:
    asked = options(__doc__, rounds=5, memory=1024).parse_args()
    limits = Limits(memory_mib=asked.memory)
    with Rooms.open() as rooms, tempfile.TemporaryDirectory(prefix="vms-plain-") as scratch:
        Path(scratch).chmod(0o711)
        plain, ours = image_of(rooms, PLAIN), image_of(rooms, asked.image)
        disk, client, host = with_a_way_in(plain, Path(scratch))
        facts = conditions(rooms, asked.image) | {"memory_mib": asked.memory, "plain": plain.digest}
        series = Series("boot", facts, asked.out)
        for _ in range(asked.rounds):
            machine = Machine(rooms, plain, disk, limits)
            spec = machine.spec.model_copy(update={"seed_iso": None})
            guest = guest_at(machine.endpoint, client, host)
            series.add("plain", "first_command_s", machine.boot(spec, guest))
            machine = Machine(rooms, ours, ours.rootfs, limits)
            spec, key, host_key = machine.with_seed()
            guest = guest_at(machine.endpoint, key, host_key)
            series.add("ours", "first_command_s", machine.boot(spec, guest))
        ratio = series.median("ours", "first_command_s") / series.median("plain", "first_command_s")
        series.add("ours/plain", "ratio", ratio)
        series.summary()


if __name__ == "__main__":
    main()
