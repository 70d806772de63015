"""Owns the names of what lies in the state folder, and what is read and told of one sandbox."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from vmsandbox.errors import HostProblem
from vmsandbox.model import Event, SandboxRecord
from vmsandbox.store.locks import is_locked
from vmsandbox.store.writing import read_value

_EVENTS_MAX_BYTES = 4 * 1024 * 1024


class _Folder(Protocol):
    @property
    def path(self) -> Path: ...


class File:
    """Descriptor: a fixed name below an object's `path`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: _Folder, kind: type | None = None) -> Path:
        return owner.path / self.name


@dataclass(frozen=True)
class SandboxFolder:
    """The files of one sandbox."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    record = File("record.json")  # intent; sandbox alone
    events = File("events.jsonl")
    maker_lock = File("maker.lock")  # held by who made the sandbox until a manager has it
    manager_lock = File("manager.lock")  # held by the manager
    record_lock = File("record.lock")  # held for one update
    overlay = File("overlay.qcow2")
    seed_iso = File("seed.iso")
    seed_socket = File("seed.sock")
    incoming = File("incoming")  # where QEMU takes a template's state, for a moment
    console = File("console.log")
    former_console = File("console.former.log")  # of a start that was given up
    stdout = File("stdout.log")
    stderr = File("stderr.log")
    brief = File("brief.md")  # as the agent reads it
    report = File("report.md")  # the agent's own words, bounded; escape to show
    agent_status = File("agent-status")  # likewise
    manager_log = File("manager.log")  # of a detached manager
    stop_request = File("stop.request")  # how another process asks the manager to end
    stop_now_request = File("stop.now")  # and to end at once
    client_key = File("id_ed25519")
    client_key_public = File("id_ed25519.pub")
    host_key_private = File("host_ed25519")  # only to make the seed again
    host_key = File("host_ed25519.pub")  # the pinned public key
    known_hosts = File("known_hosts")
    ssh_config = File("ssh_config")
    domain_xml = File("domain.xml")
    result_git = File("result.git")  # the quarantine store
    change_set = File("changeset.json")  # last collected
    result_record = File("result.json")  # review alone
    result_lock = File("result.lock")
    sync_lock = File("sync.lock")
    ports = File("ports.json")  # what is published, or was when somebody last did
    ports_lock = File("ports.lock")  # held by who publishes
    egress_log = File("egress.jsonl")  # egress alone
    egress_grants = File("egress-grants.json")  # rules that the user added meanwhile
    opinions = File("opinions.json")  # what other reviewers said of the result
    ledger = File("ledger.json")  # an apply on its way

    def manager_alive(self) -> bool:
        """Whether a process manages this sandbox now, or made it and is about to."""
        return is_locked(self.manager_lock) or is_locked(self.maker_lock)

    def read_record(self) -> SandboxRecord:
        """The record; HostProblem ``record_missing`` if a creation or deletion was cut short."""
        record = read_value(self.record, SandboxRecord)
        if record is None:
            raise HostProblem(
                "record_missing",
                f"sandbox {self.id} has no record: its creation or deletion was cut short",
                hint="vmsandbox cleanup",
                evidence=str(self.path),
            )
        return record

    def append_event(self, event: Event) -> None:
        """Add one line to events.jsonl, which never grows past 4 MiB.

        A full disk is no error here: the records are what counts, events only tell the story.
        """
        with contextlib.suppress(OSError), self.events.open("ab") as file:
            if file.tell() < _EVENTS_MAX_BYTES:
                file.write(event.model_dump_json(exclude_none=True).encode() + b"\n")

    def read_events(self) -> list[Event]:
        """All events; a torn last line is left out."""
        events: list[Event] = []
        with contextlib.suppress(FileNotFoundError):
            for line in self.events.read_bytes().splitlines():
                with contextlib.suppress(ValidationError):
                    events.append(Event.model_validate_json(line))
        return events

    def allocated_bytes(self) -> int:
        """What the folder takes on disk (``st_blocks``), not what its files claim to hold."""
        return allocated_bytes(self.path)


def allocated_bytes(folder: Path) -> int:
    """Bytes that the files below `folder` really take (``st_blocks`` × 512)."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(base) / name).lstat().st_blocks * 512
    return total
