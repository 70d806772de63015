"""Owns every path and file name of the state folder, its locks, atomic records and events.

Knows no libvirt, no guest and no git; it stores what others decide. docs/layout.md lists every
file named here.

Locks are ``flock`` on files in the folder they guard: the kernel frees them however their holder
dies, so there is nothing to clean up and a held lock proves a living manager.
"""

import contextlib
import fcntl
import math
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import platformdirs
from pydantic import BaseModel, ValidationError

from vmsandbox.addresses import VARIABLE, Pool
from vmsandbox.deadline import Deadline
from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.model import Endpoint, Event, SandboxRecord

SSH_PORT = 2222
"""The same for all, as each has a loopback address of its own; above 1024: no privilege."""

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
_V = TypeVar("_V", bound=BaseModel)
_EVENTS_MAX_BYTES = 4 * 1024 * 1024
_PROBE_S = 0.25
_GONE = ".gone-"


def state_root() -> Path:
    """``$VMSANDBOX_HOME``, else ``/var/lib/vmsandbox`` for root, else the user's XDG state."""
    if home := os.environ.get("VMSANDBOX_HOME"):
        return Path(home).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/vmsandbox")
    return Path(platformdirs.user_state_dir("vmsandbox"))


def user_config() -> Path:
    """The user's own settings, below ``$XDG_CONFIG_HOME``."""
    return Path(platformdirs.user_config_dir("vmsandbox")) / "config.toml"


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` by `data`: a reader, or a crash, sees all of the old or all of the new."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise host_problem(error, path) from error


def write_value(path: Path, value: BaseModel) -> None:
    """Write a pydantic value as JSON, atomically."""
    write_atomic(path, value.model_dump_json(indent=1).encode() + b"\n")


def read_value(path: Path, kind: type[_V]) -> _V | None:
    """Read what :func:`write_value` wrote; None if there is no such file.

    Raises HostProblem ``record_broken`` if it does not parse.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise HostProblem(
            "record_broken",
            f"{path.name} cannot be read: {error.error_count()} problems",
            hint="move the file away, or delete the sandbox",
            evidence=str(path),
        ) from error


def host_problem(error: OSError, path: Path) -> HostProblem:
    """What it means that writing at `path` failed: ``host_disk_full`` or ``state_unwritable``."""
    if error.errno in (28, 122):  # ENOSPC, EDQUOT
        return HostProblem(
            "host_disk_full",
            f"no space left while writing {path}",
            hint="vmsandbox cleanup",
            evidence=str(path),
        )
    return HostProblem("state_unwritable", f"cannot write {path}: {error.strerror}")


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive ``flock`` on `path` (made if missing, but never its folder).

    With ``wait=False`` raises BlockingIOError if another holds it. Raises UsageProblem
    ``sandbox_unknown`` if the folder is gone.
    """
    descriptor = _lock(path, None if wait else _PROBE_S)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(path: Path, patience_s: float | None) -> int:
    """The descriptor that holds the lock."""
    deadline = Deadline(patience_s)
    while True:
        descriptor = _open_lock(path)
        try:
            _flock(descriptor, deadline)
            # The folder may have been deleted while we waited: lock what is there now.
            if _same_file(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise UsageProblem(
            "sandbox_unknown", f"sandbox {path.parent.name} is gone", hint="vmsandbox status"
        ) from None
    except OSError as error:
        raise host_problem(error, path) from error


def _flock(descriptor: int, deadline: Deadline) -> None:
    """A short patience lets those pass who only ask whether it is held, see :func:`is_locked`."""
    if math.isinf(deadline.seconds):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if deadline.passed():
                raise
        time.sleep(_PROBE_S / 50)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether some process holds :func:`locked` on `path` now."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:  # shared, so that those who ask do not take each other for a holder
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class _File:
    """Descriptor: a fixed name below an object's `path`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: "SandboxFolder | Store", kind: type | None = None) -> Path:
        return owner.path / self.name


@dataclass(frozen=True)
class SandboxFolder:
    """The files of one sandbox."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    record = _File("record.json")  # intent; sandbox.py alone
    events = _File("events.jsonl")
    maker_lock = _File("maker.lock")  # held by who made the sandbox until a manager has it
    manager_lock = _File("manager.lock")  # held by the manager
    record_lock = _File("record.lock")  # held for one update
    overlay = _File("overlay.qcow2")
    seed_iso = _File("seed.iso")
    seed_socket = _File("seed.sock")
    incoming = _File("incoming")  # where QEMU takes a template's state, for a moment
    console = _File("console.log")
    former_console = _File("console.former.log")  # of a start that was given up
    stdout = _File("stdout.log")
    stderr = _File("stderr.log")
    brief = _File("brief.md")  # as the agent reads it
    report = _File("report.md")  # the agent's own words, bounded; escape to show
    agent_status = _File("agent-status")  # likewise
    manager_log = _File("manager.log")  # of a detached manager
    stop_request = _File("stop.request")  # how another process asks the manager to end
    stop_now_request = _File("stop.now")  # and to end at once
    client_key = _File("id_ed25519")
    client_key_public = _File("id_ed25519.pub")
    host_key_private = _File("host_ed25519")  # only to make the seed again
    host_key = _File("host_ed25519.pub")  # the pinned public key
    known_hosts = _File("known_hosts")
    ssh_config = _File("ssh_config")
    domain_xml = _File("domain.xml")
    result_git = _File("result.git")  # the quarantine store
    change_set = _File("changeset.json")  # last collected
    result_record = _File("result.json")  # review.py alone
    result_lock = _File("result.lock")
    sync_lock = _File("sync.lock")
    ports = _File("ports.json")  # what is published, or was when somebody last did
    ports_lock = _File("ports.lock")  # held by who publishes
    egress_log = _File("egress.jsonl")  # egress alone
    egress_grants = _File("egress-grants.json")  # rules that the user added meanwhile
    opinions = _File("opinions.json")  # what other reviewers said of the result
    ledger = _File("ledger.json")  # an apply on its way

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


class Store:
    """The state folder. Making one creates the folder (0711: QEMU of qemu:///system must get
    through)."""

    def __init__(self, root: Path | None = None) -> None:
        self.path = root or state_root()
        self._made: dict[str, int] = {}
        try:
            for folder in (self.path, self.images, self.sandboxes, self.templates):
                folder.mkdir(parents=True, exist_ok=True)
                if folder.stat().st_uid == os.geteuid() and folder.stat().st_mode & 0o777 != 0o711:
                    folder.chmod(0o711)
            self.worktrees.mkdir(mode=0o700, exist_ok=True)
            self.cache.mkdir(mode=0o711, exist_ok=True)
        except OSError as error:
            raise host_problem(error, Path(error.filename or self.path)) from error

    images = _File("images")
    templates = _File("templates")
    sandboxes = _File("sandboxes")
    worktrees = _File("worktrees")  # private snapshot stores
    cache = _File("cache")  # host facts; safe to delete
    batches = _File("batches")  # batch/record.py alone, and what is below it
    budget = _File("batches/budget.json")  # what batches have reserved; batch/budget.py alone
    costs = _File("cache/costs.json")  # what guests took of this host; density/costs.py alone
    lock = _File("lock")  # names and addresses are given under it

    def folder(self, id_: str) -> SandboxFolder:
        return SandboxFolder(self.sandboxes / id_)

    def folders(self) -> list[SandboxFolder]:
        """Every sandbox folder, oldest id first; ids begin with the time of their making."""
        return sorted(
            (
                SandboxFolder(path)
                for path in self.sandboxes.iterdir()
                if path.is_dir() and not path.name.startswith(".")
            ),
            key=lambda folder: folder.id,
        )

    def records(self) -> list[SandboxRecord]:
        """All readable records, oldest first."""
        found = []
        for folder in self.folders():
            with contextlib.suppress(HostProblem):
                found.append(folder.read_record())
        return sorted(found, key=lambda record: record.created_at)

    def create(
        self, name: str | None, make: Callable[[str, str, Endpoint], SandboxRecord]
    ) -> SandboxFolder:
        """Give out an id, a name and an address under the store's lock and write the first record.

        `make` gets (id, name, endpoint). The sandbox counts as managed until :meth:`hand_over` or
        :meth:`close`, so that nobody takes it for abandoned before its manager has begun. Raises
        UsageProblem ``name_invalid`` or ``name_taken``, HostProblem ``host_disk_full``.
        """
        with locked(self.lock):
            id_, name, endpoint = self.propose(name)
            folder = self.folder(id_)
            record = make(id_, name, endpoint)
            try:
                self._make(folder, record)
            except BaseException:
                self.hand_over(folder)
                shutil.rmtree(folder.path, ignore_errors=True)
                raise
        return folder

    def _make(self, folder: SandboxFolder, record: SandboxRecord) -> None:
        try:
            folder.path.mkdir(mode=0o711)
        except OSError as error:
            raise host_problem(error, folder.path) from error
        self._made[folder.id] = _lock(folder.maker_lock, None)
        write_value(folder.record, record)

    def hand_over(self, folder: SandboxFolder) -> None:
        """Its manager has the sandbox now; does nothing unless it was made here."""
        if (descriptor := self._made.pop(folder.id, None)) is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Sandboxes that were made here and have no manager are abandoned."""
        while self._made:
            os.close(self._made.popitem()[1])

    def propose(self, name: str | None) -> tuple[str, str, Endpoint]:
        """An id, name and address that are free now; only :meth:`create` makes them taken."""
        if name is not None and not _NAME.fullmatch(name):
            raise UsageProblem(
                "name_invalid",
                f"not a sandbox name: {name!r}",
                hint="letters, digits, '.', '_', '-'; at most 63; the first a letter or digit",
            )
        known = self.records()
        taken = {record.name for record in known} | {record.id for record in known}
        if name in taken or name == "last":
            raise UsageProblem(
                "name_taken",
                f"there is a sandbox named {name!r}",
                hint=f"vmsandbox delete {name}    (or choose another --name)",
            )
        id_ = self._new_id(taken)
        return id_, name or id_, self._free_endpoint(known)

    def _new_id(self, taken: set[str]) -> str:
        while (
            (id_ := secrets.token_hex(4)) in taken
            or id_.isdigit()
            or self.folder(id_).path.exists()
        ):
            continue
        return id_

    def _free_endpoint(self, known: list[SandboxRecord]) -> Endpoint:
        """A loopback address that no sandbox of ours has and where nobody's anything listens."""
        used = {record.endpoint.address for record in known}
        address = Pool(os.environ.get(VARIABLE)).choose(used, can_listen)
        return Endpoint(address=address, port=SSH_PORT)

    def resolve(self, selector: str) -> SandboxFolder:
        """Find a sandbox by id, name, unique prefix of an id, or ``last``.

        Raises UsageProblem ``sandbox_unknown`` or ``sandbox_ambiguous``.
        """
        records = self.records()
        lasting = [record for record in records if not record.scratch_of]
        if selector == "last" and lasting:
            return self.folder(lasting[-1].id)
        exact = [r for r in records if selector in (r.id, r.name)]
        found = exact or [r for r in records if selector and r.id.startswith(selector)]
        if len(found) == 1:
            return self.folder(found[0].id)
        broken = self.sandboxes / selector
        if (
            not found
            and selector
            and "/" not in selector
            and not selector.startswith(".")
            and broken.is_dir()
        ):
            return SandboxFolder(broken)
        if found:
            raise UsageProblem(
                "sandbox_ambiguous",
                f"{selector!r} fits {len(found)} sandboxes: {', '.join(r.id for r in found[:8])}",
                hint="use more of the id, or the name",
            )
        raise UsageProblem("sandbox_unknown", f"no sandbox {selector!r}", hint="vmsandbox status")

    def update(
        self, folder: SandboxFolder, change: Callable[[SandboxRecord], SandboxRecord]
    ) -> SandboxRecord:
        """Read, change and write a record under its lock; returns what was written."""
        with locked(folder.record_lock):
            record = change(folder.read_record())
            write_value(folder.record, record)
            return record

    def remove(self, folder: SandboxFolder) -> int:
        """Delete a sandbox's folder; returns the bytes it really took. Safe to call again."""
        freed = folder.allocated_bytes()
        with contextlib.suppress(FileNotFoundError):
            folder.record.unlink()  # from here on it is a leftover and no longer a sandbox
        self.empty(_out_of_sight(folder.path))
        return freed

    def leaving(self) -> list[Path]:
        """Folders of sandboxes that are being deleted, or whose deletion was cut short."""
        return sorted(self.sandboxes.glob(f"{_GONE}*"))

    @staticmethod
    def empty(leaving: Path) -> None:
        """Bring a deletion to its end; two who do so at once do not disturb each other.

        Raises HostProblem ``delete_failed``.
        """
        shutil.rmtree(leaving, ignore_errors=True)
        if leaving.exists():
            raise HostProblem("delete_failed", f"cannot delete {leaving}", evidence=str(leaving))


def _out_of_sight(path: Path) -> Path:
    """Renamed, so that nobody makes a lock anew in a folder that is just being emptied."""
    leaving = path.with_name(f"{_GONE}{path.name}")
    try:
        return path.rename(leaving)
    except FileNotFoundError:
        return leaving
    except OSError as error:
        raise HostProblem(
            "delete_failed", f"cannot delete {path}: {error.strerror}", evidence=str(path)
        ) from error


def can_listen(address: str) -> bool:
    """Whether a guest's SSH port is free there; asks without a word to a guest."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, SSH_PORT))
        except OSError:
            return False
    return True
