"""Owns the set of rooms that a sandbox's life needs, opened once per process and lazily.

Knows no sandbox. libvirt is connected when first asked for, the host's accelerator is probed when
first needed and remembered by the host room.
"""

import os
import resource
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Self

from vmsandbox import host
from vmsandbox.errors import HostProblem
from vmsandbox.hypervisor import Hypervisor, OwnedDomain, QemuProcess
from vmsandbox.images import ImageStore
from vmsandbox.model import HostFacts, Image, SandboxRecord
from vmsandbox.store import Store


class Rooms:
    """Store, images, libvirt and host facts for one state folder. A context manager."""

    def __init__(self, store: Store, note: Callable[[str], None]) -> None:
        self.store = store
        self.note = note
        # Disks name what they stand on by its path, which must outlive a link to a shared folder.
        self.images = ImageStore(store.images.resolve())
        self.uri = host.libvirt_uri()

    @classmethod
    def open(
        cls, root: Path | None = None, note: Callable[[str], None] = lambda text: None
    ) -> Self:
        """Open the state folder; `note` hears about waits and fallbacks."""
        _allow_files()
        return cls(Store(root), note)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.store.close()
        if "hypervisor" in self.__dict__:
            self.hypervisor.close()

    @cached_property
    def hypervisor(self) -> Hypervisor:
        """Raises HostProblem ``libvirt_unreachable`` if the daemon does not answer."""
        host.prepare(self.uri)
        return Hypervisor.connect(self.uri)

    def guest_alive(self, uuid: str) -> bool | None:
        """Whether a guest runs; None if libvirt does not answer and no process is seen."""
        return self._any_hypervisor().observe(uuid).alive

    def end_guest(self, uuid: str) -> None:
        """End a guest at once; one that is gone is no problem, nor is a libvirt that is down while
        no process of the guest is seen."""
        try:
            self._any_hypervisor().destroy(uuid)
        except HostProblem as problem:
            if problem.code not in ("libvirt_unreachable", "libvirt_denied"):
                raise

    def guest_runs(self, record: SandboxRecord) -> bool:
        """As :meth:`guest_alive` for decisions that must not be taken in the dark.

        Raises HostProblem ``libvirt_unreachable``.
        """
        alive = self.guest_alive(record.domain_uuid)
        if alive is None:
            raise HostProblem(
                "libvirt_unreachable",
                f"libvirt does not answer, whether the guest of {record.id} runs is unknown",
                hint="vmsandbox doctor --fix",
            )
        return alive

    def guests(self) -> list[OwnedDomain | QemuProcess]:
        """All guests of this state folder that run, whether libvirt knows them or not."""
        known = self.hypervisor.list_owned(self.store.path)
        return [*known, *self.hypervisor.strays(self.store.sandboxes)]

    def forget_logs(self, name: str) -> None:
        """Delete what libvirt logged of a guest that is gone for good."""
        self._any_hypervisor().forget(name)

    def _any_hypervisor(self) -> Hypervisor:
        """One that can at least look at processes."""
        try:
            return self.hypervisor
        except HostProblem:
            return Hypervisor(self.uri)

    def host_facts(self, image: Image) -> HostFacts:
        """What a launch depends on; boots the image's kernel once to see whether KVM works."""
        return host.facts(self.hypervisor.facts(), image, self.store.cache, self.note)


def _allow_files() -> None:
    """As many as the system lets us: each guest may make us hold some hundreds, and managers that
    share a process must not run out for one of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def owner_uid() -> int:
    """Whose sandboxes these are, for the mark in the domain's metadata."""
    return os.geteuid()
