"""Owns what templates are and which there are: guests frozen while they wait for their seed, from
which later starts are cloned. :mod:`vmsandbox.sandbox.freezing` makes them.

A template is a folder below ``templates/``, named by its fingerprint: RAM in a file, device state,
a disk, and template.json, whose presence says that it is whole. Everything that a frozen guest
depends on is in the fingerprint, so a stale template is simply never found. It holds no identity:
the guest was frozen before it got one.

A sandbox uses the template that its record names. Whoever clones writes that down before it looks
whether the template is whole; whoever removes takes template.json away before it looks at records.
So one of both sees the other.
"""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import Field

from vmsandbox.domain import DomainSpec, Layer, SharedMemory, domain_xml
from vmsandbox.errors import HostProblem, VmsandboxError
from vmsandbox.model import Digest, Endpoint, HostFacts, Image, Limits, Value, digest_of, now
from vmsandbox.sandbox.plan import domain_spec
from vmsandbox.sandbox.rooms import Rooms, owner_uid
from vmsandbox.store import (
    SSH_PORT,
    SandboxFolder,
    allocated_bytes,
    is_locked,
    locked,
    read_value,
)

_NAMESPACE = uuid.UUID("0d9a6f43-3c9c-4d0c-8a8e-5a1f6d6b7c11")
_MAKING = ".making-"
_ID = "template-"
_HEADER_BYTES = 64 * 1024  # of a qcow2: names what it stands on
_STRIKES = 2
"""Clones in a row that may not get ready before a template is thrown away."""

_SMALL_TB_CACHE_MIB, _LARGE_TB_CACHE_MIB, _LARGE_MIB = 32, 128, 2048
"""Decides a clone's memory without KVM. Measured with raw QEMU: PSS 107 MiB instead of 143 with 64,
1.8 s to the first command instead of 1.4. Large programs (Docker, compilers) do not fit into it and
are translated again and again; a guest of 2 GiB, as they need it, has a cache to match."""
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
    disk_mib: int
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
    def strikes(self) -> Path:
        """As many bytes as clones, the last ones in a row, did not get ready."""
        return self.path / "strikes"

    @property
    def name(self) -> str:
        """The same for one that is being made."""
        return self.path.name.removeprefix(_MAKING)

    @property
    def lock(self) -> Path:
        """Held while it is made or removed."""
        return self.path.with_name(f"{self.name}.lock")

    @property
    def making(self) -> "Template":
        """Where it is until it is whole."""
        return Template(self.path.with_name(f"{_MAKING}{self.name}"))

    @property
    def withdrawn(self) -> Path:
        """Its record, while it is decided whether it may be removed."""
        return self.path / ".template.json"

    def is_making(self) -> bool:
        return self.path.name.startswith(_MAKING)

    def is_whole(self) -> bool:
        return self.record.exists()

    def is_usable(self) -> bool:
        """Whether a start may be cloned from it."""
        return self.is_whole() and not self.is_spoilt()

    def is_spoilt(self) -> bool:
        """Whether its clones do not get ready."""
        with contextlib.suppress(FileNotFoundError):
            return self.strikes.stat().st_size >= _STRIKES
        return False

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
            "disk_mib_s": 0,
            "disk_iops": 0,
            "backing": (),
            "ssh": None,
            "dac_label": None,
        }
    )
    binary = host.qemu_binary.stat()
    return digest_of(
        {
            "machine": domain_xml(machine),
            "disk_mib": machine.disk_mib,
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


def machine_of(rooms: Rooms, image: Image, host: HostFacts, limits: Limits) -> DomainSpec:
    """The machine that a start of this size would boot, whoever's it is."""
    return domain_spec(
        folder=rooms.store.folder("template"),
        state_root=rooms.store.path,
        endpoint=Endpoint(address="127.0.0.1", port=SSH_PORT),
        domain_uuid=str(uuid.UUID(int=0)),
        limits=limits,
        image=image,
        host=host,
        owner_uid=owner_uid(),
    )


def template_at(rooms: Rooms, spec: DomainSpec, image: Image, host: HostFacts) -> Template:
    """Where the template of this machine is, whole or not."""
    digest = fingerprint(spec, image, host)
    return Template(rooms.store.templates / digest.removeprefix("sha256:")[:16])


def clone_spec(
    spec: DomainSpec, template: Template, image: Image, host: HostFacts, monitor: Path
) -> DomainSpec:
    """The machine of a cold start, continued from a template instead of booted."""
    return spec.model_copy(
        update={
            "seed_iso": None,
            "backing": template.layers(image),
            "memory_file": template.memory(host, shared=False),
            "incoming_monitor": monitor,
            "tb_cache_mib": _tb_cache_mib(spec.memory_mib),
        }
    )


def _tb_cache_mib(memory_mib: int) -> int:
    return _LARGE_TB_CACHE_MIB if memory_mib >= _LARGE_MIB else _SMALL_TB_CACHE_MIB


def making_spec(
    rooms: Rooms, template: Template, spec: DomainSpec, image: Image, host: HostFacts
) -> DomainSpec:
    """The machine that boots to be frozen, its files where the template is made."""
    making = template.making
    uuid_ = domain_uuid(rooms, template)
    return spec.model_copy(
        update={
            "id": f"{_ID}{template.name}",
            "name": domain_name(uuid_),
            "uuid": uuid_,
            "owner_uid": owner_uid(),
            "disk": making.disk,
            "disk_mib_s": 0,
            "disk_iops": 0,
            "backing": (Layer(path=image.rootfs, format=image.rootfs_format),),
            "seed_iso": None,
            "seed_socket": making.path / "seed.sock",
            "console": making.console,
            "ssh": None,
            "memory_file": making.memory(host, shared=True),
        }
    )


def domain_uuid(rooms: Rooms, template: Template) -> str:
    """The same for every attempt, so that what a killed maker left is found; another one for
    another state folder, because libvirt is shared."""
    return str(uuid.uuid5(_NAMESPACE, f"{rooms.store.path}\0{template.name}"))


def domain_name(uuid_: str) -> str:
    """Of the domain that a template is made of."""
    return f"{DOMAIN_PREFIX}{uuid_[:8]}"


# --- clones that do not get ready -----------------------------------------------------------------


def strike(rooms: Rooms, name: str) -> None:
    """A clone did not get ready. Twice in a row, and the template is thrown away."""
    template = Template(rooms.store.templates / name)
    with contextlib.suppress(OSError), template.strikes.open("ab") as strikes:
        strikes.write(b"x")
    if template.is_spoilt():
        rooms.note(f"template {name} is thrown away: {_STRIKES} clones in a row did not get ready")


@contextlib.contextmanager
def blamed(rooms: Rooms, template: Template) -> Iterator[None]:
    """What fails inside counts as a clone that did not get ready."""
    try:
        yield
    except HostProblem:
        strike(rooms, template.name)
        raise


def absolve(rooms: Rooms, name: str) -> None:
    """A clone got ready: what went wrong before was not the template's fault."""
    with contextlib.suppress(OSError):
        Template(rooms.store.templates / name).strikes.unlink(missing_ok=True)


# --- looking after them ---------------------------------------------------------------------------


class TemplateStatus(Value):
    """A template as `image list` shows it."""

    name: str
    path: Path
    record: TemplateRecord
    disk_bytes: int
    used_by: tuple[str, ...] = Field(default=(), description="ids of sandboxes that stand on it")


def all_templates(rooms: Rooms) -> list[TemplateStatus]:
    """Every whole template, oldest first."""
    found = (status_of(rooms, template) for template in _folders(rooms))
    return sorted((one for one in found if one), key=lambda one: one.record.created_at)


def status_of(rooms: Rooms, template: Template) -> TemplateStatus | None:
    """None if it is not whole."""
    with contextlib.suppress(VmsandboxError):
        if (record := template.read()) and not template.is_making():
            return TemplateStatus(
                name=template.name,
                path=template.path,
                record=record,
                disk_bytes=allocated_bytes(template.path),
                used_by=users(rooms, template),
            )
    return None


def _folders(rooms: Rooms) -> Iterator[Template]:
    for path in sorted(rooms.store.templates.iterdir()):
        if path.is_dir():
            yield Template(path)


def users(rooms: Rooms, template: Template) -> tuple[str, ...]:
    """The sandboxes whose disk stands on it."""
    return tuple(one.id for one in rooms.store.folders() if _stands_on(one, template))


def _stands_on(folder: SandboxFolder, template: Template) -> bool:
    """As its record says; where that cannot be read, as its disk's header does."""
    try:
        return folder.read_record().template == template.name
    except VmsandboxError:
        with contextlib.suppress(OSError), folder.overlay.open("rb") as disk:
            return template.name.encode() in disk.read(_HEADER_BYTES)
        return False


def disposable(rooms: Rooms, *, whole: bool) -> list[tuple[Template, str]]:
    """What may go, and why: what is half made and not being made now, and templates that no sandbox
    uses and no start would; with `whole` also those that starts would use."""
    found = [(one, "half made") for one in _half_made(rooms)]
    for template in _folders(rooms):
        if template.is_whole() and not (template.is_making() or users(rooms, template)):
            reason = _why_useless(rooms, template) or ("not used now" if whole else "")
            found += [(template, reason)] if reason else []
    return found


def _half_made(rooms: Rooms) -> list[Template]:
    """Of makers and removers that were killed: files, or a guest."""
    owned = rooms.hypervisor.list_owned(rooms.store.path)
    names = {guest.id.removeprefix(_ID) for guest in owned if guest.id.startswith(_ID)}
    folders = list(_folders(rooms))
    names |= {one.name for one in folders if one.is_making()}
    found = [Template(rooms.store.templates / name).making for name in sorted(names)]
    found += [
        one for one in folders if not (one.is_making() or one.is_whole() or users(rooms, one))
    ]
    return [one for one in found if not is_locked(one.lock)]


def _why_useless(rooms: Rooms, template: Template) -> str:
    """Why no start would be cloned from it; empty if one would."""
    if template.is_spoilt():
        return "its clones did not get ready"
    try:
        record = template.read()
    except VmsandboxError:
        return "its record cannot be read"
    if record is None:
        return ""  # just removed
    try:
        image = rooms.images.resolve(record.image_digest)
    except VmsandboxError:
        return "its image is gone"
    host = rooms.host_facts(image)
    limits = Limits(cpus=record.cpus, memory_mib=record.memory_mib, disk_mib=record.disk_mib)
    same = fingerprint(machine_of(rooms, image, host, limits), image, host) == record.fingerprint
    return "" if same else "made on another host, QEMU, kernel or vmsandbox"


def remove(rooms: Rooms, template: Template) -> int | None:
    """Remove a template and return the bytes that it took; None if it is kept, because a sandbox
    uses it or somebody makes it now."""
    try:
        with locked(template.lock, wait=False):
            freed = remove_locked(rooms, template)
            template.lock.unlink(missing_ok=True)
            return freed
    except BlockingIOError:
        return None


def remove_locked(rooms: Rooms, template: Template) -> int | None:
    """As :func:`remove`, for who holds the template's lock."""
    if not _withdraw(rooms, template):
        return None
    freed = allocated_bytes(template.path)
    if template.is_making():
        uuid_ = domain_uuid(rooms, template)
        with contextlib.suppress(VmsandboxError):
            rooms.end_guest(uuid_)
        rooms.forget_logs(domain_name(uuid_))
    shutil.rmtree(template.path, ignore_errors=True)
    return freed


def _withdraw(rooms: Rooms, template: Template) -> bool:
    """From here on it is found no more; False, and all is as before, if a sandbox has it."""
    with contextlib.suppress(FileNotFoundError):
        template.record.rename(template.withdrawn)
    if template.is_making() or not users(rooms, template):
        return True
    with contextlib.suppress(FileNotFoundError):
        template.withdrawn.rename(template.record)
    return False
