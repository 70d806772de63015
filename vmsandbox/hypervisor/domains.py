"""Owns the life of domains: start, observe, find, stop, measure. Knows no sandbox record.

What is asked of libvirt is asked by uuid, so that nothing here goes stale; what libvirt cannot tell
(it is down, or forgot the domain) is asked of the kernel.
"""

import contextlib
import json
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

import libvirt
import libvirt_qemu

from vmsandbox.deadline import Deadline
from vmsandbox.domain import METADATA_NAMESPACE
from vmsandbox.errors import HostProblem
from vmsandbox.hypervisor import evidence, facts, processes, shares
from vmsandbox.hypervisor.connection import Connection
from vmsandbox.hypervisor.problems import is_absent, is_lost, translate
from vmsandbox.hypervisor.processes import MemoryFigures, QemuProcess
from vmsandbox.model import LibvirtFacts, Value

_T = TypeVar("_T")
_POLL_S = 0.02


class DomainState(StrEnum):
    """What is true of a domain now."""

    RUNNING = "running"
    PAUSED = "paused"
    ENDING = "ending"
    GONE = "gone"
    STRAY = "stray"
    """QEMU runs, but libvirt has forgotten it."""
    UNKNOWN = "unknown"
    """libvirt cannot be asked and no process of it is seen: no proof of anything."""


_STATES = {
    libvirt.VIR_DOMAIN_NOSTATE: DomainState.RUNNING,
    libvirt.VIR_DOMAIN_RUNNING: DomainState.RUNNING,
    libvirt.VIR_DOMAIN_BLOCKED: DomainState.RUNNING,
    libvirt.VIR_DOMAIN_PAUSED: DomainState.PAUSED,
    libvirt.VIR_DOMAIN_PMSUSPENDED: DomainState.PAUSED,
    libvirt.VIR_DOMAIN_SHUTDOWN: DomainState.ENDING,
    libvirt.VIR_DOMAIN_SHUTOFF: DomainState.GONE,
    libvirt.VIR_DOMAIN_CRASHED: DomainState.GONE,
}


class Observation(Value):
    """A domain's state and what says so."""

    state: DomainState
    detail: str = ""
    io_error: bool = False
    """QEMU stopped the guest because it cannot write its disk: no space on the host."""

    @property
    def alive(self) -> bool | None:
        """None: unknown."""
        if self.state is DomainState.UNKNOWN:
            return None
        return self.state is not DomainState.GONE


class OwnedDomain(Value):
    """A domain that bears our mark."""

    id: str
    name: str
    uuid: str
    owner_uid: int
    state_root: Path


class Hypervisor:
    """libvirt at one URI. A context manager; threads may share it.

    Methods raise HostProblem with the codes of :mod:`vmsandbox.hypervisor.problems`:
    ``libvirt_unreachable``, ``libvirt_denied``, ``domain_gone``, ``qemu_failed`` and so on.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._connection = Connection(uri)
        self._pids: dict[str, QemuProcess] = {}

    @classmethod
    def connect(cls, uri: str) -> Self:
        """Open now, so that a libvirt that is down is known before anything else is done."""
        hypervisor = cls(uri)
        hypervisor._connection.open()
        return hypervisor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Domains go on."""
        self._connection.close()

    def facts(self) -> LibvirtFacts:
        """What libvirt says about itself and its QEMU."""
        return facts.ask(self._connection)

    # --- life -----------------------------------------------------------------------------------

    def start(self, xml: str, *, paused: bool = False) -> None:
        """Start a transient domain. Whatever goes wrong, nothing of it is left running.

        Raises HostProblem, among others ``address_in_use`` (the SSH forward's), ``qemu_failed``,
        ``host_memory_full``, ``permission_denied``, ``domain_exists``; QEMU's log is the evidence.
        """
        root = ET.fromstring(xml)
        name, uuid = root.findtext("name", ""), root.findtext("uuid", "")
        flags = libvirt.VIR_DOMAIN_START_PAUSED if paused else 0
        try:
            self._connection.raw(lambda c: c.createXML(xml, flags), again=False)
        except libvirt.libvirtError as error:
            if is_lost(error):  # it may have been started all the same
                with contextlib.suppress(HostProblem):
                    self.destroy(uuid)
            log = evidence.log_folder(self.uri) / f"{name}.log"
            shown = str(log) if log.exists() else None
            raise translate(error, f"starting domain {name}", evidence=shown) from error

    def pause(self, uuid: str) -> None:
        """Stop the guest's CPUs."""
        self._with(uuid, "pausing", lambda domain: domain.suspend())

    def resume(self, uuid: str) -> None:
        """Let the guest's CPUs run."""
        self._with(uuid, "resuming", lambda domain: domain.resume())

    def weigh(self, uuid: str, weight: int, vcpus: int) -> None:
        """Give a guest its share of the host's CPU time, see :mod:`vmsandbox.hypervisor.shares`.

        Raises HostProblem, for one that has just gone ``domain_gone``.
        """
        if (pid := self.pid(uuid)) is not None:
            self._with(uuid, "weighing", lambda domain: shares.give(domain, pid, weight, vcpus))

    def shutdown(self, uuid: str, *, deadline_s: float) -> bool:
        """Press the power button and wait; after the deadline, destroy.

        True if the guest went by itself, or was gone already.
        """
        deadline = Deadline(deadline_s)
        try:
            self._with(uuid, "shutting down", lambda domain: domain.shutdown())
        except HostProblem as problem:
            if problem.code == "domain_gone":
                return not self.destroy(uuid)  # or libvirt forgot it
            raise
        while self.observe(uuid).state is not DomainState.GONE:
            if deadline.passed():
                return not self.destroy(uuid)
            time.sleep(_POLL_S)
        return True

    def destroy(self, uuid: str) -> bool:
        """End a domain at once; False if it was gone already. Safe to call again.

        Also ends a QEMU that libvirt has forgotten, or that libvirt cannot be asked about. Raises
        HostProblem ``libvirt_unreachable`` only if neither libvirt nor a process could be found.
        """
        try:
            self._with(uuid, "destroying", _destroy)
        except HostProblem as problem:
            process = processes.find(uuid)
            if process is not None:
                return processes.end(process)
            if problem.code == "domain_gone":
                return False
            raise
        return True

    # --- observing ------------------------------------------------------------------------------

    def observe(self, uuid: str) -> Observation:
        """What is true of a domain; never raises because libvirt cannot be asked."""
        try:
            code, why = self._with(uuid, "looking at", lambda domain: domain.state())
        except HostProblem as problem:
            return self._observe_process(uuid, problem)
        state = _STATES.get(code, DomainState.UNKNOWN)
        io_error = state is DomainState.PAUSED and why == libvirt.VIR_DOMAIN_PAUSED_IOERROR
        return Observation(state=state, io_error=io_error)

    @staticmethod
    def _observe_process(uuid: str, problem: HostProblem) -> Observation:
        process = processes.find(uuid)
        if process is None and problem.code == "domain_gone":
            return Observation(state=DomainState.GONE)
        if process is None:
            return Observation(state=DomainState.UNKNOWN, detail=problem.message)
        seen = f"QEMU {process.pid} runs"
        if problem.code == "domain_gone":
            return Observation(state=DomainState.STRAY, detail=f"{seen}; libvirt forgot it")
        return Observation(state=DomainState.RUNNING, detail=f"{seen}; {problem.message}")

    def list_owned(self, state_root: Path) -> list[OwnedDomain]:
        """The living domains whose mark names this state folder."""
        everything = self._connection.call("listing domains", lambda c: c.listAllDomains(0))
        marked = (_owned(domain) for domain in everything)
        root = state_root.resolve()
        return [domain for domain in marked if domain and domain.state_root.resolve() == root]

    def strays(self, folder: Path) -> list[QemuProcess]:
        """QEMU processes with disks below `folder` that libvirt has forgotten.

        It should hold no images: guests of others may use those.
        """
        known = self._connection.call("listing domains", lambda c: c.listAllDomains(0))
        uuids = {domain.UUIDString() for domain in known}
        return [p for p in processes.with_disks_below(folder) if p.uuid not in uuids]

    def pid(self, uuid: str) -> int | None:
        """The QEMU process; None if it is gone or not ours to see."""
        known = self._pids.get(uuid)
        if known is None or processes.still(known) is None:
            self._pids = {process.uuid: process for process in processes.running()}
            known = self._pids.get(uuid)
        return known.pid if known else None

    def memory(self, uuid: str) -> MemoryFigures | None:
        """What its QEMU holds; None if it is gone."""
        pid = self.pid(uuid)
        return None if pid is None else processes.measure(pid)

    def evidence(self, name: str, console: Path, *, lines: int = 20) -> evidence.Evidence:
        """The last words of a domain, dead or alive."""
        return evidence.gather(self.uri, name, console, lines=lines)

    def forget(self, name: str) -> None:
        """Delete the log that libvirt keeps of a domain that is gone for good."""
        evidence.remove(self.uri, name)

    def logged(self, folder: Path) -> list[str]:
        """Names of domains, dead or alive, of which libvirt keeps a log that names this folder."""
        return evidence.logged(self.uri, folder)

    # --- QEMU's monitor -------------------------------------------------------------------------

    def qmp(self, uuid: str, command: str, **arguments: object) -> Any:
        """One QMP command's return value; HostProblem ``qmp_failed`` with QEMU's description.

        An underscore in an argument's name stands for the dash that QMP has there.
        """
        named = {key.replace("_", "-"): value for key, value in arguments.items()}
        request = json.dumps({"execute": command, "arguments": named})
        answer = json.loads(
            self._with(
                uuid,
                "asking the monitor of",
                lambda domain: libvirt_qemu.qemuMonitorCommand(domain, request, 0),
                again=False,
            )
        )
        if "error" in answer:
            raise HostProblem("qmp_failed", f"{command}: {answer['error'].get('desc')}")
        return answer["return"]

    def _with(
        self, uuid: str, doing: str, ask: Callable[[libvirt.virDomain], _T], *, again: bool = True
    ) -> _T:
        what = f"{doing} domain {uuid}"
        return self._connection.call(what, lambda c: ask(c.lookupByUUIDString(uuid)), again=again)


def _destroy(domain: libvirt.virDomain) -> None:
    """A libvirtd that is just taking up its domains again may lose this one under our hands."""
    try:
        domain.destroy()
    except libvirt.libvirtError as error:
        if not is_absent(error):
            raise


def _owned(domain: libvirt.virDomain) -> OwnedDomain | None:
    """None for a domain of somebody else's, or one that ended just now."""
    try:
        text = domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, METADATA_NAMESPACE)
        mark = ET.fromstring(text)
        return OwnedDomain(
            id=mark.get("id", ""),
            name=domain.name(),
            uuid=domain.UUIDString(),
            owner_uid=int(mark.get("owner", "-1")),
            state_root=Path(mark.get("state", "")),
        )
    except libvirt.libvirtError as error:
        absent = error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN_METADATA or is_absent(error)
        if absent:
            return None
        raise translate(error, "reading a domain's metadata") from error
    except (ET.ParseError, ValueError):
        return None
