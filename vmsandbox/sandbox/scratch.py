"""Owns guests for a look at a result: new ones that hold base and result and nothing else of the
author, or copies of the author's as it was left; gone afterwards.

Such a guest is a sandbox like any other while it lasts, marked from its first moment; if its user
is killed, `cleanup` knows it by that. Nothing in it is ever collected.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

from vmsandbox import review, worktree
from vmsandbox.errors import HostProblem, ReviewRefused, UsageProblem
from vmsandbox.guest import Capture, Guest, TaskSpec, Terminal
from vmsandbox.guest.task import as_user, user_environment
from vmsandbox.model import (
    ChangeSet,
    Endpoint,
    ExecResult,
    Image,
    Outcome,
    SandboxRecord,
    Snapshot,
)
from vmsandbox.sandbox import transfer
from vmsandbox.sandbox.ending import delete_sandbox
from vmsandbox.sandbox.equipping import Equipped
from vmsandbox.sandbox.forking import standing_still, with_copied_disk
from vmsandbox.sandbox.life import Manager
from vmsandbox.sandbox.listening import Halt, Listener
from vmsandbox.sandbox.plan import GRACE_S, plan_of
from vmsandbox.sandbox.rooms import Rooms, owner_uid
from vmsandbox.store import SandboxFolder

Share = Callable[[SandboxFolder, Callable[[], None]], AbstractContextManager[None]]
"""Waits until this host has room for the guest of a sandbox, and keeps that room inside; calls the
second meanwhile, which raises once nobody waits any more."""


@contextlib.contextmanager
def unasked(folder: SandboxFolder, check: Callable[[], None]) -> Iterator[None]:
    """The share of a guest that nobody else has to know of."""
    yield


class Scratch:
    """A guest with a result in it; its worktree is where the author's was."""

    def __init__(self, manager: Manager, guest: Guest, change_set: ChangeSet) -> None:
        self.guest = guest
        self.change_set = change_set
        self.folder = manager.folder
        self.record = manager.folder.read_record()
        self._listener = manager.listener

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], timeout_s: float | None
    ) -> ExecResult:
        """Run a command in the worktree as the agent's user; the listener hears what it says."""
        spec = TaskSpec(
            id=self.record.id,
            command=tuple(command),
            folder=self.record.task.worktree,
            env=env,
            timeout_s=timeout_s,
            grace_s=GRACE_S,
        )
        heard = Capture(self.folder.stdout, self.folder.stderr, on_output=self._listener.output)
        self._listener.phase("run")
        with heard as capture:
            return self.guest.run_task(spec, capture)

    def attach(self, command: Sequence[str], *, env: Mapping[str, str]) -> ExecResult:
        """Let a person use a command there, on our terminal."""
        argv = [*as_user("agent", "agent"), "/usr/bin/env"]
        argv += [
            f"{name}={value}" for name, value in (user_environment("agent") | dict(env)).items()
        ]
        terminal = Terminal(tty=True)
        folder = str(self.record.task.worktree)
        self._listener.phase("run")
        code = self.guest.interactive([*argv, *command], terminal, folder=folder)
        ended = Outcome.COMPLETED if code == 0 else Outcome.FAILED
        return ExecResult(exit_code=None if code in (None, -1) else code, outcome=ended)


class _Source(NamedTuple):
    """A sandbox whose result is looked at."""

    folder: SandboxFolder
    record: SandboxRecord
    base: Snapshot
    change_set: ChangeSet

    @classmethod
    def of(cls, folder: SandboxFolder) -> Self:
        change_set, _ = review.read(folder)
        record = folder.read_record()
        if record.snapshot is None:
            raise UsageProblem(
                "nothing_sent", f"sandbox {record.id} never got a worktree", hint="vmsandbox run …"
            )
        return cls(folder, record, record.snapshot, change_set)


@contextlib.contextmanager
def scratch_guest(
    rooms: Rooms,
    folder: SandboxFolder,
    listener: Listener,
    halt: Halt,
    share: Share,
    given: Equipped | None = None,
) -> Iterator[Scratch]:
    """A new guest that holds the result of `folder` on its base; deleted however the block ends.

    With `given` it is of that agent's image, and its gateways are open.

    Asked through `halt`, the block ends with :class:`vmsandbox.guest.Interrupted`. Raises what a
    start raises, NegativeAnswer ``no_result``, HostProblem ``snapshot_missing``.
    """
    source = _Source.of(folder)
    kept = {"equipment": given.equipment} if given else {}
    image = rooms.images.resolve(given.image) if given and given.image else None
    made = rooms.store.create(None, _maker(rooms, source.record, image, **kept))
    with _manager_of(rooms, made, listener, halt, share) as manager:
        with worktree.exhibit(source.folder.result_git, source.base, source.change_set) as snapshot:
            transfer.send(manager.guest, source.record.task, snapshot)
        manager.services.await_ready()
        yield Scratch(manager, manager.guest, source.change_set)


@contextlib.contextmanager
def scratch_on_its_disk(
    rooms: Rooms, folder: SandboxFolder, listener: Listener, halt: Halt, share: Share
) -> Iterator[Scratch | None]:
    """As :func:`scratch_guest`, a guest that boots from a copy of the disk as the task left it.

    None, and a note that says why, if there is no such disk, somebody writes it, or what is on it
    is not the result that was collected.
    """
    source = _Source.of(folder)
    try:
        with standing_still(rooms, folder) as record:
            kept: dict[str, Any] = {"template": record.template, "snapshot": record.snapshot}
            made = with_copied_disk(rooms, folder, None, _maker(rooms, record, **kept))
    except (UsageProblem, HostProblem) as problem:
        rooms.note(f"a new guest with base and result alone: {problem.message}")
        yield None
        return
    with _manager_of(rooms, made, listener, halt, share) as manager:
        listener.phase("compare")
        if _holds(manager, source.change_set):
            yield Scratch(manager, manager.guest, source.change_set)
        else:
            rooms.note(
                "a new guest with base and result alone:"
                f" the disk of {source.record.id} is not as it was collected"
            )
            yield None


def _holds(manager: Manager, change_set: ChangeSet) -> bool:
    """Whether the worktree in a guest is the result."""
    try:
        found = transfer.collect(manager.guest, manager.folder, manager.folder.read_record())
    except ReviewRefused:
        return False
    return found.result_tree == change_set.result_tree


@contextlib.contextmanager
def _manager_of(
    rooms: Rooms, folder: SandboxFolder, listener: Listener, halt: Halt, share: Share
) -> Iterator[Manager]:
    """The manager of a scratch sandbox, with its guest; nothing of both is left afterwards."""
    try:
        with (
            Manager.of(rooms, folder, listener) as manager,
            halt.heeded_by(manager.ask_to_end),
            share(folder, manager.check_ending),
        ):
            manager.ensure_guest()
            yield manager
    finally:
        delete_sandbox(rooms, folder, force=True)


def _maker(
    rooms: Rooms, source: SandboxRecord, image: Image | None = None, **kept: Any
) -> Callable[[str, str, Endpoint], SandboxRecord]:
    """Makes a sandbox of the same size and, unless another is said, the same image, of which
    nothing is known but whose result it holds."""
    called = image.name if image else source.image_name
    image = image or rooms.images.resolve(source.image_digest)
    host = rooms.host_facts(image)
    task = source.task.model_copy(update={"brief": None, "verify": ()})

    def make(id_: str, name: str, endpoint: Endpoint) -> SandboxRecord:
        record = SandboxRecord(
            id=id_,
            name=name,
            task=task,
            scratch_of=source.id,
            limits=source.limits,
            image_name=called,
            image_digest=image.digest,
            libvirt_uri=rooms.uri,
            domain_uuid=str(uuid.uuid4()),
            endpoint=endpoint,
            cold=source.cold,
            publishes=False,
            **kept,
        )
        plan_of(record, rooms.store.folder(id_), rooms.store.path, image, host, owner_uid())
        return record

    return make
