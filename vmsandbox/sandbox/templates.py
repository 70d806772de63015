"""Owns templates: guests frozen while they wait for their seed, from which later starts are cloned.

A template is a folder below ``templates/``, named by its fingerprint: RAM in a file, device state,
a disk, and template.json, whose presence says that it is whole. Everything that a frozen guest
depends on is in the fingerprint, so a stale template is simply never found. It holds no identity:
the guest was frozen before it got one.
"""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
from pydantic import Field

from vmsandbox.deadline import Deadline
from vmsandbox.domain import DomainSpec, Layer, SharedMemory, domain_xml
from vmsandbox.errors import GuestProblem, HostProblem, VmsandboxError
from vmsandbox.hypervisor import migration
from vmsandbox.model import Digest, HostFacts, Image, Value, digest_of, now
from vmsandbox.sandbox.rooms import Rooms, owner_uid
from vmsandbox.store import allocated_bytes, is_locked, locked, read_value, write_value

_WAITING = b"vmsandbox: waiting for the seed"
_BOOT_S = 180.0
_IDLE_S = 60.0
_IDLE_WINDOW_S = 0.5
_IDLE_SHARE = 0.05
_NAMESPACE = uuid.UUID("0d9a6f43-3c9c-4d0c-8a8e-5a1f6d6b7c11")
_MIB = 1024 * 1024
_MAKING = ".making-"
_ID = "template-"
DOMAIN_PREFIX = f"vmsandbox-{_ID}"
"""Names of domains that live only while a template is made of them."""


class TemplateRecord(Value):
    """template.json: what was frozen."""

    version: int = 1
    fingerprint: Digest
    image_name: str
    image_digest: Digest
    cpus: int
    memory_mib: int
    qemu_version: str
    accelerator: str
    made_in_s: float
    created_at: datetime = Field(default_factory=now)


@dataclass(frozen=True)
class Template:
    """The files of one template."""

    path: Path

    @property
    def record(self) -> Path:
        return self.path / "template.json"

    @property
    def ram(self) -> Path:
        return self.path / "ram"

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def disk(self) -> Path:
        return self.path / "disk.qcow2"

    @property
    def console(self) -> Path:
        return self.path / "console.log"

    @property
    def socket(self) -> Path:
        return self.path / "sock"

    @property
    def lock(self) -> Path:
        return self.path.with_name(f"{self.path.name}.lock")

    def is_whole(self) -> bool:
        return self.record.exists()

    def read(self) -> TemplateRecord | None:
        return read_value(self.record, TemplateRecord)

    def layers(self, image: Image) -> tuple[Layer, ...]:
        """The backing chain of a clone's overlay."""
        return (
            Layer(path=self.disk, format="qcow2"),
            Layer(path=image.rootfs, format=image.rootfs_format),
        )

    def memory(self, host: HostFacts, *, shared: bool) -> SharedMemory:
        """How QEMU maps the RAM: shared while the template is made, private in clones."""
        readonly = not shared and maps_readonly(host.qemu_version)
        return SharedMemory(path=self.ram, shared=shared, readonly=readonly)


def maps_readonly(qemu_version: str) -> bool:
    """From 8.2 on, QEMU's ``memory-backend-file`` has ``rom=off``: a file opened read-only as
    private writable memory (QEMU documentation, "memory-backend-file", since 8.2)."""
    major, minor = (int(part) for part in qemu_version.split(".")[:2])
    return (major, minor) >= (8, 2)


# --- what a template is of ------------------------------------------------------------------------


def fingerprint(spec: DomainSpec, image: Image, host: HostFacts) -> Digest:
    """Over everything that a frozen guest depends on, by content: the machine, the image, QEMU
    itself, and the host's CPU as a guest sees it."""
    neutral = Path("/t")
    machine = spec.model_copy(
        update={
            "id": "template",
            "name": "template",
            "uuid": str(uuid.UUID(int=0)),
            "state_root": neutral,
            "disk": neutral,
            "seed_iso": None,
            "seed_socket": neutral,
            "console": neutral,
            "kernel": neutral,
            "initramfs": neutral,
            "backing": (),
            "ssh": None,
            "dac_label": None,
        }
    )
    binary = host.qemu_binary.stat()
    return digest_of(
        {
            "machine": domain_xml(machine),
            "image": image.digest,
            "qemu": [str(host.qemu_binary), host.qemu_version, binary.st_size, binary.st_mtime_ns],
            "libvirt": host.libvirt_version,
            "cpu": _cpu_identity(),
            "kernel": host.kernel,
        }
    )


def _cpu_identity() -> list[str]:
    """The lines of /proc/cpuinfo that say what the CPU can do, of the first CPU."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "microcode", "flags")
    first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    lines = (line.partition(":") for line in first.splitlines())
    return [f"{key.strip()}={value.strip()}" for key, _, value in lines if key.strip() in wanted]


def template_at(rooms: Rooms, spec: DomainSpec, image: Image, host: HostFacts) -> Template:
    """Where the template of this machine is, whole or not."""
    digest = fingerprint(spec, image, host)
    return Template(rooms.store.templates / digest.removeprefix("sha256:")[:16])


def clone_spec(spec: DomainSpec, template: Template, image: Image, host: HostFacts) -> DomainSpec:
    """The machine of a cold start, continued from a template instead of booted."""
    return spec.model_copy(
        update={
            "seed_iso": None,
            "backing": template.layers(image),
            "memory_file": template.memory(host, shared=False),
            "incoming": True,
        }
    )


# --- making one -----------------------------------------------------------------------------------


def ensure(
    rooms: Rooms,
    spec: DomainSpec,
    image: Image,
    host: HostFacts,
    check: Callable[[], object] = lambda: None,
) -> Template:
    """The whole template of this machine, made now if there is none; parallel callers wait for one.

    `check` is called all the while, and ends the waiting by what it raises. Raises GuestProblem
    ``template_unsupported``, ``boot_timeout``; HostProblem ``host_disk_full``, ``qemu_failed`` and
    what else a start raises. Nothing half-made is left.
    """
    template = template_at(rooms, spec, image, host)
    if template.is_whole():
        return template
    if image.cloud_init:
        raise GuestProblem(
            "template_unsupported",
            f"{image.name} takes its seed from a disk only: no template can be made of it",
            hint="vmsandbox run --cold …",
        )
    with _turn(template.lock, check):
        if not template.is_whole():
            rooms.note(
                f"making a template of {image.name} ({spec.vcpus} CPU, {spec.memory_mib} MiB);"
                " later starts are clones of it"
            )
            _make(rooms, template, spec, image, host, check)
    return template


@contextlib.contextmanager
def _turn(lock: Path, check: Callable[[], object]) -> Iterator[None]:
    """Wait for whoever makes it now."""
    with contextlib.ExitStack() as stack:
        while True:
            check()
            with contextlib.suppress(BlockingIOError):
                stack.enter_context(locked(lock, wait=False))
                break
        yield


def _make(
    rooms: Rooms,
    template: Template,
    spec: DomainSpec,
    image: Image,
    host: HostFacts,
    check: Callable[[], object],
) -> None:
    started = time.monotonic()
    making = Template(template.path.with_name(f"{_MAKING}{template.path.name}"))
    machine = _template_spec(rooms, making, spec, image, host)
    rooms.hypervisor.destroy(machine.uuid)  # of a maker that was killed
    shutil.rmtree(making.path, ignore_errors=True)
    making.path.mkdir(mode=0o711)
    try:
        _freeze(rooms, making, machine, image, host, check)
        record = TemplateRecord(
            fingerprint=fingerprint(spec, image, host),
            image_name=image.name,
            image_digest=image.digest,
            cpus=spec.vcpus,
            memory_mib=spec.memory_mib,
            qemu_version=host.qemu_version,
            accelerator=host.accelerator.value,
            made_in_s=round(time.monotonic() - started, 3),
        )
        write_value(making.record, record)
        making.path.rename(template.path)
    except OSError as error:
        full = error.errno in (28, 122)
        raise HostProblem(
            "host_disk_full" if full else "template_failed",
            f"cannot make a template below {template.path.parent}: {error.strerror}",
            hint="vmsandbox cleanup",
        ) from error
    finally:
        shutil.rmtree(making.path, ignore_errors=True)


def _template_spec(
    rooms: Rooms, making: Template, spec: DomainSpec, image: Image, host: HostFacts
) -> DomainSpec:
    name = making.path.name.removeprefix(_MAKING)
    uuid_ = _domain_uuid(rooms, name)
    return spec.model_copy(
        update={
            "id": f"{_ID}{name}",
            "name": _domain_name(uuid_),
            "uuid": uuid_,
            "owner_uid": owner_uid(),
            "disk": making.disk,
            "backing": (Layer(path=image.rootfs, format=image.rootfs_format),),
            "seed_iso": None,
            "seed_socket": making.path / "seed.sock",
            "console": making.console,
            "ssh": None,
            "memory_file": making.memory(host, shared=True),
        }
    )


def _domain_uuid(rooms: Rooms, name: str) -> str:
    """The same for every attempt, so that what a killed maker left is found; another one for
    another state folder, because libvirt is shared."""
    return str(uuid.uuid5(_NAMESPACE, f"{rooms.store.path}\0{name}"))


def _domain_name(uuid_: str) -> str:
    return f"{DOMAIN_PREFIX}{uuid_[:8]}"


def _freeze(
    rooms: Rooms,
    making: Template,
    machine: DomainSpec,
    image: Image,
    host: HostFacts,
    check: Callable[[], object],
) -> None:
    """Boot until the guest waits for its seed and is idle; keep its RAM, state and disk."""
    with making.ram.open("wb") as ram:
        ram.truncate(machine.memory_mib * _MIB)
    rooms.images.create_overlay(image, making.disk, -(-image.rootfs_bytes // _MIB))
    if host.qemu_uid != os.geteuid():
        for path in (making.ram, making.disk):
            os.chown(path, host.qemu_uid, host.qemu_gid)
    making.ram.chmod(0o600)
    rooms.hypervisor.start(domain_xml(machine))
    try:
        _wait_waiting(rooms, making, machine, check)
        _wait_idle(rooms, machine)
        rooms.hypervisor.pause(machine.uuid)
        migration.save_state(rooms.hypervisor, machine.uuid, making.socket, making.state)
    finally:
        rooms.hypervisor.destroy(machine.uuid)
        rooms.hypervisor.forget(machine.name)
    making.console.unlink(missing_ok=True)


def _wait_waiting(
    rooms: Rooms, making: Template, machine: DomainSpec, check: Callable[[], object]
) -> None:
    deadline = Deadline(_BOOT_S)
    while _WAITING not in _read(making.console):
        check()
        if rooms.guest_alive(machine.uuid) is False:
            raise _no_template(rooms, making, machine, "it went away while it booted")
        if deadline.passed():
            raise _no_template(rooms, making, machine, f"it took longer than {_BOOT_S:g} s")
        time.sleep(0.05)


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def _no_template(rooms: Rooms, making: Template, machine: DomainSpec, why: str) -> GuestProblem:
    found = rooms.hypervisor.evidence(machine.name, making.console)
    last = (*found.qemu_lines[-1:], *found.console_lines[-1:], "nothing")[0]
    return GuestProblem(
        "template_unsupported",
        f"the guest never waited for its seed ({why}); it said last: {last}",
        hint="vmsandbox run --cold …",
    )


def _wait_idle(rooms: Rooms, machine: DomainSpec) -> None:
    """What a boot still does after the seed unit waits would be done by every clone again."""
    pid = rooms.hypervisor.pid(machine.uuid)
    if pid is None:
        return
    deadline = Deadline(_IDLE_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while not deadline.passed():
            if process.cpu_percent(_IDLE_WINDOW_S) < 100 * _IDLE_SHARE:
                return


# --- looking after them ---------------------------------------------------------------------------


class TemplateStatus(Value):
    """A template as `image list` shows it."""

    name: str
    record: TemplateRecord
    disk_bytes: int


def all_templates(rooms: Rooms) -> list[TemplateStatus]:
    """Every whole template, oldest first."""
    found = []
    for template in _folders(rooms):
        with contextlib.suppress(HostProblem):
            if record := template.read():
                size = allocated_bytes(template.path)
                found.append(
                    TemplateStatus(name=template.path.name, record=record, disk_bytes=size)
                )
    return sorted(found, key=lambda one: one.record.created_at)


def _folders(rooms: Rooms) -> Iterator[Template]:
    for path in sorted(rooms.store.templates.iterdir()):
        if path.is_dir():
            yield Template(path)


def unused(rooms: Rooms) -> list[Template]:
    """Templates, whole or half-made, that no sandbox was cloned from."""
    used = {record.template for record in rooms.store.records()}
    return [template for template in _folders(rooms) if template.path.name not in used]


def abandoned(rooms: Rooms) -> list[Template]:
    """What makers that were killed left half-made, files or a guest; not what is made now."""
    owned = rooms.hypervisor.list_owned(rooms.store.path)
    names = {guest.id.removeprefix(_ID) for guest in owned if guest.id.startswith(_ID)}
    found = (template.path.name for template in _folders(rooms))
    names |= {name.removeprefix(_MAKING) for name in found if name.startswith(_MAKING)}
    half_made = [Template(rooms.store.templates / f"{_MAKING}{name}") for name in sorted(names)]
    return [making for making in half_made if not is_locked(_lock_of(making))]


def _lock_of(template: Template) -> Path:
    """Also of one that is being made."""
    return template.path.with_name(f"{template.path.name.removeprefix(_MAKING)}.lock")


def remove(rooms: Rooms, template: Template) -> int:
    """Remove a template that nobody uses; returns the bytes it took, 0 if it is being made now."""
    lock = _lock_of(template)
    try:
        with locked(lock, wait=False):
            freed = allocated_bytes(template.path)
            template.record.unlink(missing_ok=True)  # from here on it is found no more
            uuid_ = _domain_uuid(rooms, template.path.name.removeprefix(_MAKING))
            with contextlib.suppress(VmsandboxError):
                rooms.end_guest(uuid_)
            rooms.forget_logs(_domain_name(uuid_))
            shutil.rmtree(template.path, ignore_errors=True)
            lock.unlink(missing_ok=True)
            return freed
    except BlockingIOError:
        return 0
