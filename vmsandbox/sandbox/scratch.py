"""Owns guests for a look at a result: new ones that hold base and result and nothing else of the
author, and are gone afterwards.

Such a guest is a sandbox like any other while it lasts, marked from its first moment; if its user
is killed, `cleanup` knows it by that. Nothing in it is ever collected.
"""

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence

from vmsandbox import review, worktree
from vmsandbox.errors import UsageProblem
from vmsandbox.guest import Capture, Guest, TaskSpec, Terminal
from vmsandbox.guest.task import as_user, user_environment
from vmsandbox.model import (
    ChangeSet,
    Endpoint,
    ExecResult,
    Outcome,
    SandboxRecord,
    Snapshot,
)
from vmsandbox.sandbox import transfer
from vmsandbox.sandbox.ending import delete_sandbox
from vmsandbox.sandbox.life import Manager
from vmsandbox.sandbox.listening import Halt, Listener
from vmsandbox.sandbox.plan import GRACE_S, plan_of
from vmsandbox.sandbox.rooms import Rooms, owner_uid
from vmsandbox.store import SandboxFolder


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
        return ExecResult(exit_code=code if code >= 0 else None, outcome=ended)


@contextlib.contextmanager
def scratch_guest(
    rooms: Rooms, source: SandboxFolder, listener: Listener, halt: Halt
) -> Iterator[Scratch]:
    """A new guest that holds the result of `source` on its base; deleted however the block ends.

    Asked through `halt`, the block ends with :class:`vmsandbox.guest.Interrupted`. Raises what a
    start raises, NegativeAnswer ``no_result``, HostProblem ``snapshot_missing``.
    """
    change_set, _ = review.read(source)
    record = source.read_record()
    base = record.snapshot
    if base is None:
        raise UsageProblem(
            "nothing_sent", f"sandbox {record.id} never got a worktree", hint="vmsandbox run …"
        )
    folder = _make(rooms, record)
    try:
        with (
            Manager.of(rooms, folder, listener) as manager,
            halt.heeded_by(manager.ask_to_end),
        ):
            guest = manager.ensure_guest()
            _send(guest, source, record, base, change_set)
            yield Scratch(manager, guest, change_set)
    finally:
        delete_sandbox(rooms, folder, force=True)


def _send(
    guest: Guest,
    source: SandboxFolder,
    record: SandboxRecord,
    base: Snapshot,
    change_set: ChangeSet,
) -> None:
    with worktree.exhibit(source.result_git, base, change_set) as snapshot:
        transfer.send(guest, record.task, snapshot)


def _make(rooms: Rooms, source: SandboxRecord) -> SandboxFolder:
    """A sandbox of the same image and size, of which nothing is known but whose result it holds."""
    image = rooms.images.resolve(source.image_digest)
    host = rooms.host_facts(image)
    task = source.task.model_copy(update={"brief": None, "verify": ()})

    def make(id_: str, name: str, endpoint: Endpoint) -> SandboxRecord:
        record = SandboxRecord(
            id=id_,
            name=name,
            task=task,
            scratch_of=source.id,
            limits=source.limits,
            image_name=source.image_name,
            image_digest=source.image_digest,
            libvirt_uri=rooms.uri,
            domain_uuid=str(uuid.uuid4()),
            endpoint=endpoint,
            cold=source.cold,
            publishes=False,
        )
        plan_of(record, rooms.store.folder(id_), rooms.store.path, image, host, owner_uid())
        return record

    return rooms.store.create(None, make)
