"""Owns how a guest starts: a clone of a template where that works, else a cold start from the
image.

Works from a plan; what is there from an earlier start (keys, overlay) is used again, so a guest
that went away boots again from its own disk.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import SecretBytes, SecretStr

from vmsandbox import seed
from vmsandbox.deadline import Deadline
from vmsandbox.domain import MAC, DomainSpec, domain_xml
from vmsandbox.errors import HostProblem, VmsandboxError
from vmsandbox.guest import known_hosts_line, ssh_config
from vmsandbox.hypervisor import migration
from vmsandbox.hypervisor.monitor import Monitor
from vmsandbox.model import LaunchPlan, SandboxRecord
from vmsandbox.sandbox import freezing, templates
from vmsandbox.sandbox.plan import domain_spec
from vmsandbox.sandbox.rooms import Rooms, owner_uid
from vmsandbox.sandbox.templates import Template
from vmsandbox.store import SandboxFolder, write_atomic

_SEED_S = 30.0
_SEED_POLL_S = 0.002

# A host that is full or broken does not get better by a start that needs more of it.
_NO_FALLBACK = ("host_disk_full", "host_memory_full", "libvirt_unreachable", "address_in_use")


def start_guest(
    rooms: Rooms,
    record: SandboxRecord,
    plan: LaunchPlan,
    folder: SandboxFolder,
    *,
    cloned_from: Callable[[str | None], object],
    check: Callable[[], object] = lambda: None,
) -> None:
    """Start the domain of a sandbox, running and with its seed on the way.

    A disk that is there already is booted again. Otherwise the guest is cloned, unless the record
    says cold; `cloned_from` is told the template's name before anything depends on it, and None
    when nothing does any more. A template that cannot be made or used is only a note: then the
    start is cold. Raises HostProblem, and what `check` raises, which is called while it waits.
    """
    _write_keys(plan, folder)
    spec = _spec(rooms, plan, folder)
    if folder.overlay.exists():
        _boot(rooms, plan, folder, _with_backing(rooms, record, spec, plan))
        return
    _keep_console(folder)
    if not (record.cold or plan.image.cloud_init):
        try:
            template = freezing.ensure(rooms, spec, plan.image, plan.host, check)
            _clone(rooms, plan, folder, spec, template, cloned_from)
            return
        except VmsandboxError as error:
            _undo_clone(rooms, plan, folder)
            cloned_from(None)
            check()
            if error.code in _NO_FALLBACK:
                raise
            rooms.note(f"starting cold: no template could be used: {error.message}")
    rooms.images.create_overlay(plan.image, folder.overlay, plan.limits.disk_mib)
    _boot(rooms, plan, folder, spec)


def _spec(rooms: Rooms, plan: LaunchPlan, folder: SandboxFolder) -> DomainSpec:
    return domain_spec(
        folder=folder,
        state_root=rooms.store.path,
        endpoint=plan.endpoint,
        domain_uuid=plan.domain_uuid,
        limits=plan.limits,
        image=plan.image,
        host=plan.host,
        owner_uid=owner_uid(),
    )


# --- cold -----------------------------------------------------------------------------------------


def _with_backing(
    rooms: Rooms, record: SandboxRecord, spec: DomainSpec, plan: LaunchPlan
) -> DomainSpec:
    """The disk of a former clone still stands on its template's."""
    if record.template is None or _stands_on_image(plan, spec):
        return spec
    template = Template(rooms.store.templates / record.template)
    return spec.model_copy(update={"backing": template.layers(plan.image)})


def _stands_on_image(plan: LaunchPlan, spec: DomainSpec) -> bool:
    """Whether an overlay's header names the image itself: it fell back to a cold start."""
    with spec.disk.open("rb") as disk:
        return os.fsencode(plan.image.rootfs) in disk.read(64 * 1024)


def _boot(rooms: Rooms, plan: LaunchPlan, folder: SandboxFolder, spec: DomainSpec) -> None:
    seeded = _seed_spec(plan, folder)
    write_atomic(folder.seed_iso, seed.nocloud_iso(seeded, seed.seed_tar(seeded)))
    xml = domain_xml(spec)
    write_atomic(folder.domain_xml, xml.encode())
    _hand_to_qemu(plan, folder)
    rooms.end_guest(plan.domain_uuid)  # libvirt may still be busy with its end
    rooms.hypervisor.start(xml)
    _weigh(rooms, plan)


# --- clone ----------------------------------------------------------------------------------------


def _clone(
    rooms: Rooms,
    plan: LaunchPlan,
    folder: SandboxFolder,
    spec: DomainSpec,
    template: Template,
    cloned_from: Callable[[str], object],
) -> None:
    cloned_from(template.path.name)
    if not template.is_whole():  # removed before the record kept it
        raise HostProblem("template_gone", f"template {template.path.name} was just removed")
    rooms.images.create_overlay_on(template.disk, "qcow2", folder.overlay, spec.disk_mib)
    _hand_to_qemu(plan, folder)
    with _incoming(plan, folder) as incoming:
        monitor = incoming / "monitor"
        xml = domain_xml(templates.clone_spec(spec, template, plan.image, plan.host, monitor))
        write_atomic(folder.domain_xml, xml.encode())
        in_vain = threading.Event()
        with ThreadPoolExecutor(1, "continue") as aside:
            continuing = aside.submit(_continue, rooms, plan, folder, template, incoming, in_vain)
            try:
                rooms.hypervisor.start(xml, paused=True)
            except HostProblem as problem:
                in_vain.set()
                cause = continuing.exception()
                if isinstance(cause, HostProblem) and cause.code == "migration_failed":
                    raise cause from problem  # libvirt only saw QEMU end
                raise
            except BaseException:
                in_vain.set()
                raise
            continuing.result()
            _acknowledge(rooms, plan)
    _weigh(rooms, plan)


def _acknowledge(rooms: Rooms, plan: LaunchPlan) -> None:
    """Let libvirt know that it runs. QEMU reports only changes: without one libvirt would call it
    paused for ever, and not see when it stands still because the host's disk is full."""
    rooms.hypervisor.qmp(plan.domain_uuid, "stop")
    rooms.hypervisor.resume(plan.domain_uuid)


def _continue(
    rooms: Rooms,
    plan: LaunchPlan,
    folder: SandboxFolder,
    template: Template,
    incoming: Path,
    in_vain: threading.Event,
) -> None:
    """Load the state, let the guest run and give it its identity, all while libvirt still asks
    QEMU what its CPU is like (docs/decisions/0017)."""
    with (
        Monitor(incoming / "monitor", unless=in_vain) as monitor,
        templates.blamed(rooms, template),
    ):
        migration.load_state(monitor, incoming / "state", template.state)
        monitor.execute("cont")
        _send_seed(plan, folder)


def _send_seed(plan: LaunchPlan, folder: SandboxFolder) -> None:
    """The guest reads its identity from the port; we write and never read."""
    message = seed.port_message(seed.seed_tar(_seed_spec(plan, folder)))
    try:
        with socket.socket(socket.AF_UNIX) as port:
            port.settimeout(_SEED_S)
            port.connect(str(folder.seed_socket))
            port.sendall(message)
            _wait_taken(port)
    except OSError as error:
        raise HostProblem("seed_not_taken", f"the guest did not take its seed: {error}") from error


def _wait_taken(port: socket.socket) -> None:
    """Wait until QEMU has read all: what it has not read when we hang up, it drops."""
    deadline = Deadline(_SEED_S)
    while int.from_bytes(fcntl.ioctl(port, termios.TIOCOUTQ, bytes(4)), sys.byteorder):
        if deadline.passed():
            raise TimeoutError("it does not read")
        time.sleep(_SEED_POLL_S)


@contextlib.contextmanager
def _incoming(plan: LaunchPlan, folder: SandboxFolder) -> Iterator[Path]:
    """A folder of QEMU's own for its sockets: it may write nowhere else in the sandbox's."""
    shutil.rmtree(folder.incoming, ignore_errors=True)
    folder.incoming.mkdir(mode=0o700)
    os.chown(folder.incoming, plan.host.qemu_uid, plan.host.qemu_gid)
    try:
        yield folder.incoming
    finally:
        shutil.rmtree(folder.incoming, ignore_errors=True)


def _undo_clone(rooms: Rooms, plan: LaunchPlan, folder: SandboxFolder) -> None:
    with contextlib.suppress(VmsandboxError):
        rooms.end_guest(plan.domain_uuid)
    folder.overlay.unlink(missing_ok=True)
    _keep_console(folder)


def _keep_console(folder: SandboxFolder) -> None:
    """What a start that was given up said is evidence, and libvirt writes the next one over it."""
    with contextlib.suppress(OSError):
        folder.console.replace(folder.former_console)


def _weigh(rooms: Rooms, plan: LaunchPlan) -> None:
    """A guest is no worse for a host that cannot weigh it."""
    try:
        rooms.hypervisor.weigh(plan.domain_uuid, plan.limits.cpu_weight, plan.limits.cpus)
    except HostProblem as problem:
        rooms.note(f"cpu_weight has no effect: {problem.message}")


# --- what both need -------------------------------------------------------------------------------


def _write_keys(plan: LaunchPlan, folder: SandboxFolder) -> None:
    """The host key's private half exists only in the seed; ours only in this folder."""
    if folder.client_key.exists() and folder.host_key_private.exists():
        return
    client, host = seed.new_key(), seed.new_key(f"vmsandbox-{plan.id}")
    write_atomic(folder.client_key_public, f"{client.public}\n".encode(), 0o644)
    write_atomic(folder.client_key, client.private.encode())
    write_atomic(folder.host_key, f"{host.public}\n".encode(), 0o644)
    write_atomic(folder.known_hosts, known_hosts_line(plan.endpoint, host.public).encode())
    config = ssh_config(
        plan.name, plan.endpoint, key=folder.client_key, known_hosts=folder.known_hosts
    )
    write_atomic(folder.ssh_config, config.encode())
    write_atomic(folder.host_key_private, host.private.encode())


def _seed_spec(plan: LaunchPlan, folder: SandboxFolder) -> seed.SeedSpec:
    return seed.SeedSpec(
        id=plan.id,
        hostname=seed.hostname_for(plan.name),
        machine_id=uuid.UUID(plan.domain_uuid).hex,
        host_key=SecretStr(folder.host_key_private.read_text()),
        host_key_public=folder.host_key.read_text().strip(),
        authorized_key=folder.client_key_public.read_text().strip(),
        entropy=SecretBytes(secrets.token_bytes(64)),
        now=time.time(),
        mac=MAC,
        scripts=seed.guest_scripts(),
    )


def _hand_to_qemu(plan: LaunchPlan, folder: SandboxFolder) -> None:
    """Under qemu:///system QEMU is another user; libvirt is told not to change owners itself."""
    if plan.host.qemu_uid != os.geteuid():
        for path in (folder.overlay, folder.seed_iso):
            with contextlib.suppress(FileNotFoundError):
                os.chown(path, plan.host.qemu_uid, plan.host.qemu_gid)
