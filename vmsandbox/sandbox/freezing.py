"""Owns the making of templates: a guest boots once, waits for its seed, and is frozen.

Whoever makes one holds its lock and works in a folder beside its place, which is renamed when all
is whole: one who is killed leaves nothing that a start would take for a template.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from vmsandbox.deadline import Deadline
from vmsandbox.domain import DomainSpec, domain_xml
from vmsandbox.errors import GuestProblem, HostProblem
from vmsandbox.hypervisor import migration
from vmsandbox.images import Progress
from vmsandbox.model import HostFacts, Image, Limits, Value
from vmsandbox.sandbox import plan, templates
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.sandbox.templates import Template, TemplateRecord, TemplateStatus
from vmsandbox.store import host_problem, is_locked, locked, write_value

_WAITING = b"vmsandbox: waiting for the seed"
_BOOT_S = 180.0
_POLL_S = 0.05
_IDLE_S = 60.0
_IDLE_WINDOW_S = 0.5
_IDLE_SHARE = 0.05
_MIB = 1024 * 1024
_LEAST_FREE_MIB = 384
"""More than any guest touches while it boots."""

_FULL_BELOW_BYTES = 8 * _MIB
"""QEMU dies of a page of RAM that the disk cannot take, and leaves no word of it."""


class Warmed(Value):
    """What :func:`warm` came to."""

    template: TemplateStatus
    made: bool


def _silent(text: str, share: float | None) -> None:
    """Progress that nobody watches."""


def warm(rooms: Rooms, image: Image, limits: Limits, progress: Progress = _silent) -> Warmed:
    """The template of an image at a size; made now, unless it is there.

    Raises UsageProblem ``memory_too_small``, and what :func:`ensure` raises.
    """
    plan.check_sizes(limits, image)
    host = rooms.host_facts(image)
    spec = templates.machine_of(rooms, image, host, limits)
    there = templates.template_at(rooms, spec, image, host).is_usable()
    template = ensure(rooms, spec, image, host, progress=progress)
    status = templates.status_of(rooms, template)
    if status is None:
        raise HostProblem("template_gone", f"template {template.name} was just removed")
    return Warmed(template=status, made=not there)


def ensure(
    rooms: Rooms,
    spec: DomainSpec,
    image: Image,
    host: HostFacts,
    check: Callable[[], object] = lambda: None,
    progress: Progress = _silent,
) -> Template:
    """The whole template of this machine, made now if there is none; parallel callers wait for one.

    `check` is called all the while, and ends the waiting by what it raises. Raises GuestProblem
    ``template_unsupported``, ``template_failed``; HostProblem ``template_spoilt``,
    ``host_disk_full`` and what else a start raises. Nothing half-made is left.
    """
    template = templates.template_at(rooms, spec, image, host)
    if template.is_usable():
        return template
    if image.cloud_init:
        raise GuestProblem(
            "template_unsupported",
            f"{image.name} takes its seed from a disk only: no template can be made of it",
            hint=f"vmsandbox run --image {image.name} …    (always boots it)",
        )
    if is_locked(template.lock):
        progress("waiting for another who makes it", None)
    with _turn(template.lock, check):
        if not template.is_usable():
            _clear_away(rooms, template)
            rooms.note(
                f"making a template of {image.name} ({spec.vcpus} CPU, {spec.memory_mib} MiB);"
                " later starts are clones of it"
            )
            _Order(rooms, template, spec, image, host, check, progress).carry_out()
    return template


@contextlib.contextmanager
def _turn(lock: Path, check: Callable[[], object]) -> Iterator[None]:
    """Wait for whoever makes it now. Who waits with us locks what is there then, see `locked`."""
    with contextlib.ExitStack() as stack:
        while True:
            check()
            with contextlib.suppress(BlockingIOError):
                stack.enter_context(locked(lock, wait=False))
                break
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _clear_away(rooms: Rooms, template: Template) -> None:
    """What is at its place and no good."""
    if template.path.exists() and templates.remove_locked(rooms, template) is None:
        raise HostProblem(
            "template_spoilt",
            f"template {template.name} is no good, and sandboxes still stand on it",
            hint=f"vmsandbox delete {' '.join(templates.users(rooms, template))}",
        )


@dataclass(frozen=True)
class _Order:
    """A template that is to be made, by whom and of what."""

    rooms: Rooms
    template: Template
    spec: DomainSpec
    image: Image
    host: HostFacts
    check: Callable[[], object]
    progress: Progress

    @property
    def making(self) -> Template:
        return self.template.making

    def carry_out(self) -> None:
        started = time.monotonic()
        machine = templates.making_spec(self.rooms, self.template, self.spec, self.image, self.host)
        self.rooms.hypervisor.destroy(machine.uuid)  # of a maker that was killed
        shutil.rmtree(self.making.path, ignore_errors=True)
        try:
            with self._telling_a_full_disk():
                self._check_space()
                self.making.path.mkdir(mode=0o711)
                self._freeze(machine)
                write_value(self.making.record, self._record(time.monotonic() - started))
                self.making.path.rename(self.template.path)
        finally:
            shutil.rmtree(self.making.path, ignore_errors=True)

    def _record(self, seconds: float) -> TemplateRecord:
        return TemplateRecord(
            fingerprint=templates.fingerprint(self.spec, self.image, self.host),
            image_name=self.image.name,
            image_digest=self.image.digest,
            cpus=self.spec.vcpus,
            memory_mib=self.spec.memory_mib,
            disk_mib=self.spec.disk_mib,
            qemu_version=self.host.qemu_version,
            accelerator=self.host.accelerator.value,
            made_in_s=round(seconds, 3),
        )

    # --- a disk that is full --------------------------------------------------------------------

    def _check_space(self) -> None:
        if self._free_bytes() < min(self.spec.memory_mib, _LEAST_FREE_MIB) * _MIB:
            raise self._disk_full()

    @contextlib.contextmanager
    def _telling_a_full_disk(self) -> Iterator[None]:
        """Whatever fails while the disk is full fails because of it."""
        try:
            yield
        except OSError as error:
            raise host_problem(error, self.template.path) from error
        except (GuestProblem, HostProblem) as problem:
            if self._free_bytes() < _FULL_BELOW_BYTES and problem.code != "host_disk_full":
                raise self._disk_full() from problem
            raise

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.template.path.parent).free

    def _disk_full(self) -> HostProblem:
        return HostProblem(
            "host_disk_full",
            f"{self._free_bytes() // _MIB} MiB are free below {self.template.path.parent},"
            " too little for a template",
            hint="vmsandbox cleanup --templates",
        )

    # --- the guest ------------------------------------------------------------------------------

    def _freeze(self, machine: DomainSpec) -> None:
        """Boot until the guest waits for its seed and is idle; keep its RAM, state and disk."""
        hypervisor, making = self.rooms.hypervisor, self.making
        self._lay_out(machine)
        self.progress("booting the guest", None)
        hypervisor.start(domain_xml(machine))
        try:
            self._wait_waiting(machine)
            self.progress("waiting until it is idle", None)
            self._wait_idle(machine)
            self.progress("freezing it", None)
            hypervisor.pause(machine.uuid)
            migration.save_state(hypervisor, machine.uuid, making.socket, making.state)
        finally:
            hypervisor.destroy(machine.uuid)
            hypervisor.forget(machine.name)
        making.console.unlink(missing_ok=True)

    def _lay_out(self, machine: DomainSpec) -> None:
        ram, disk = self.making.ram, self.making.disk
        with ram.open("wb") as file:
            file.truncate(machine.memory_mib * _MIB)
        self.rooms.images.create_overlay(self.image, disk, machine.disk_mib)
        if self.host.qemu_uid != os.geteuid():
            for path in (ram, disk):
                os.chown(path, self.host.qemu_uid, self.host.qemu_gid)
        ram.chmod(0o600)

    def _wait_waiting(self, machine: DomainSpec) -> None:
        deadline = Deadline(_BOOT_S)
        while _WAITING not in _read(self.making.console):
            self.check()
            seen = self.rooms.hypervisor.observe(machine.uuid)
            if seen.io_error:
                raise self._disk_full()
            if seen.alive is False:
                raise self._no_template(machine, "template_failed", "it went away while it booted")
            if deadline.passed():
                why = f"it took longer than {_BOOT_S:g} s"
                raise self._no_template(machine, "template_unsupported", why)
            time.sleep(_POLL_S)

    def _no_template(self, machine: DomainSpec, code: str, why: str) -> GuestProblem:
        found = self.rooms.hypervisor.evidence(machine.name, self.making.console)
        last = (*found.qemu_lines[-1:], *found.console_lines[-1:], "nothing")[0]
        return GuestProblem(
            code,
            f"the guest never waited for its seed ({why}); it said last: {last}",
            hint="vmsandbox run --cold …",
        )

    def _wait_idle(self, machine: DomainSpec) -> None:
        """What a boot still does after the seed unit waits would be done by every clone again."""
        pid = self.rooms.hypervisor.pid(machine.uuid)
        if pid is None:
            return
        deadline = Deadline(_IDLE_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while not deadline.passed():
                self.check()
                if process.cpu_percent(_IDLE_WINDOW_S) < 100 * _IDLE_SHARE:
                    return


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""
