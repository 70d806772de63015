"""Owns the state folder itself: which one it is, the sandboxes in it, their names and addresses."""

import contextlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import platformdirs

from vmsandbox.addresses import VARIABLE, Pool
from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.model import Endpoint, SandboxRecord
from vmsandbox.store.folder import File, SandboxFolder
from vmsandbox.store.locks import hold, locked
from vmsandbox.store.writing import host_problem, write_value

SSH_PORT = 2222
"""The same for all, as each has a loopback address of its own; above 1024: no privilege."""

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
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

    images = File("images")
    templates = File("templates")
    sandboxes = File("sandboxes")
    worktrees = File("worktrees")  # private snapshot stores
    cache = File("cache")  # host facts; safe to delete
    batches = File("batches")  # batch/record.py alone, and what is below it
    budget = File("batches/budget.json")  # what batches have reserved; batch/budget.py alone
    costs = File("cache/costs.json")  # what guests took of this host; density/costs.py alone
    lock = File("lock")  # names and addresses are given under it

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
        self._made[folder.id] = hold(folder.maker_lock)
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
