"""Owns the guests of an experiment: started one by one, put to work, looked at, asked, freed.

Each is an ordinary sandbox that nobody manages once it has started. Knows no step and no guard.
"""

import contextlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmsandbox.density import probes
from vmsandbox.density.figures import Failed, Held, Sample, Start
from vmsandbox.density.workloads import spelled_out
from vmsandbox.errors import GuestProblem, HostProblem, VmsandboxError
from vmsandbox.guest import Deadline, Guest
from vmsandbox.guest.task import as_user, user_environment
from vmsandbox.model import Failure, LaunchPlan, SandboxRecord
from vmsandbox.sandbox import (
    Manager,
    Request,
    Rooms,
    create_sandbox,
    delete_sandbox,
    freezing,
    templates,
)
from vmsandbox.sandbox.access import open_guest
from vmsandbox.sandbox.listening import Quiet
from vmsandbox.store import SandboxFolder, allocated_bytes

_AT_ONCE = 4
"""Guests that are asked or freed at the same time."""

_ANSWER_S = 60.0
_LAST_WORDS = 200


@contextlib.contextmanager
def tiny_worktree() -> Iterator[Path]:
    """A folder of one file, for sandboxes that are not about their worktree."""
    with tempfile.TemporaryDirectory(prefix="vmsandbox-density-") as folder:
        path = Path(folder)
        (path / "README").write_text("A worktree for an experiment.\n")
        yield path


@dataclass
class Member:
    """A guest that runs, and what is known of it so far."""

    folder: SandboxFolder
    record: SandboxRecord
    pid: int | None
    sample: Sample

    def learn(self, **figures: object) -> None:
        self.sample = self.sample.model_copy(update=figures)


class Fleet:
    """All guests of one pass. A context manager: nothing of them is left, whatever happened."""

    def __init__(
        self, rooms: Rooms, start: Start, overrides: dict[str, Any], over: threading.Event
    ) -> None:
        self.rooms = rooms
        self.start_kind = start
        self.failures: list[Failed] = []
        self.members: list[Member] = []
        self._overrides = overrides
        self._over = over
        self._made: list[SandboxFolder] = []
        self._asking = False
        self._manager: Manager | None = None
        self._guests: set[Guest] = set()
        self._token = secrets.token_hex(2)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Fleet":
        self._worktree = self._stack.enter_context(tiny_worktree())
        self._stack.callback(self._free)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    # --- starting -------------------------------------------------------------------------------

    def request(self, number: int) -> Request:
        """What a user would ask for to get the guest with this number."""
        return Request(
            command=("true",),
            worktree=self._worktree,
            name=f"density-{self._token}-{number:03}",
            keep=True,
            cold=self.start_kind == "cold",
            overrides=self._overrides,
        )

    def warm(self, plan: LaunchPlan) -> int:
        """Have the template made before anything is measured; the bytes it takes."""
        spec = templates.machine_of(self.rooms, plan.image, plan.host, plan.limits)
        made = freezing.ensure(self.rooms, spec, plan.image, plan.host, self._check)
        return allocated_bytes(made.path)

    def _check(self) -> None:
        if self._over.is_set():
            raise HostProblem("interrupted", "interrupted")

    def start(self, number: int) -> Member | None:
        """Start a guest and time its first command; None if it failed, which is then listed."""
        request = self.request(number)
        name = str(request.name)
        made = len(self._made)
        try:
            return self._start(request)
        except VmsandboxError as error:
            self._fail(name, error, "start")
            for folder in self._made[made:]:
                self._delete(folder)
            return None

    def _start(self, request: Request) -> Member:
        called = time.monotonic()
        folder = create_sandbox(self.rooms, request)
        self._made.append(folder)
        with Manager.of(self.rooms, folder, Quiet()) as manager:
            self._manager = manager
            try:
                self._check()
                answer = manager.ensure_guest().run(["true"])
                seconds = time.monotonic() - called
            finally:
                self._manager = None
        if answer.code != 0:
            raise GuestProblem("command_failed", f"`true` ended with exit code {answer.code}")
        record = folder.read_record()
        if self.start_kind == "clone" and folder.seed_iso.exists():
            raise GuestProblem(
                "started_cold",
                "no template could be used, the guest was booted from its image",
                hint="vmsandbox density --cold",
            )
        member = self._member(folder, record, round(seconds, 3))
        self.members.append(member)
        return member

    def _member(self, folder: SandboxFolder, record: SandboxRecord, seconds: float) -> Member:
        phases = ("create", "boot")
        sample = Sample(
            start=self.start_kind,
            id=record.id,
            name=record.name,
            alive=len(self.members) + 1,
            first_command_s=seconds,
            timings={name: record.timings[name] for name in phases if name in record.timings},
        )
        pid = self.rooms.hypervisor.pid(record.domain_uuid)
        return Member(folder, record, pid, sample)

    # --- work -----------------------------------------------------------------------------------

    def work(self, members: Sequence[Member], command: str) -> None:
        """Let all of these run a command to its end, at the same time."""
        with ThreadPoolExecutor(max(1, len(members)), thread_name_prefix="work") as pool:
            for member in members:
                member.learn(before_work=self.held(member))
                pool.submit(self._guarded, member, "workload", self._work, spelled_out(command))

    def _work(self, member: Member, command: str) -> None:
        variables = [f"{name}={value}" for name, value in user_environment("agent").items()]
        argv = [*as_user("agent", "agent"), "/usr/bin/env", *variables, "/bin/sh", "-c", command]
        began = time.monotonic()
        with self._open(member) as guest:
            answer = guest.run(argv, folder="/home/agent", timeout_s=None)
        member.learn(workload_s=round(time.monotonic() - began, 3))
        if answer.code != 0:
            said = answer.stderr.decode(errors="replace").strip()[-_LAST_WORDS:]
            raise GuestProblem("workload_failed", f"exit code {answer.code}: {said or 'no words'}")

    # --- looking --------------------------------------------------------------------------------

    def cpu_s(self) -> dict[str, float]:
        """Seconds on a CPU so far, by id."""
        looked = {m.sample.id: probes.cpu_s(m.pid) for m in self.members if m.pid is not None}
        return {id_: seconds for id_, seconds in looked.items() if seconds is not None}

    def held(self, member: Member) -> Held | None:
        """None if its QEMU is gone."""
        memory = self.rooms.hypervisor.memory(member.record.domain_uuid)
        if memory is None:
            return None
        return Held(
            pss_bytes=memory.pss_bytes,
            private_bytes=memory.private_bytes,
            rss_bytes=memory.rss_bytes,
            disk_bytes=member.folder.allocated_bytes(),
        )

    # --- asking ---------------------------------------------------------------------------------

    def ask_all(self, at_once: threading.Event) -> None:
        """Every guest must answer a command, until `at_once` is set."""

        def ask(member: Member) -> None:
            if at_once.is_set():
                return
            with self._open(member) as guest:
                guest.connect(Deadline(_ANSWER_S))
                answer = guest.run(["true"], timeout_s=_ANSWER_S)
            if answer.code != 0:
                raise GuestProblem("command_failed", f"`true` ended with {answer.code}")
            member.learn(answered=True)

        self._asking = True
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ask") as pool:
            for member in self.members:
                pool.submit(self._guarded, member, "end", ask)

    @contextlib.contextmanager
    def _open(self, member: Member) -> Iterator[Guest]:
        with open_guest(self.rooms, member.folder, member.record) as guest:
            self._guests.add(guest)
            try:
                yield guest
            finally:
                self._guests.discard(guest)

    def _guarded(
        self, member: Member, phase: str, work: Callable[..., None], *arguments: object
    ) -> None:
        try:
            work(member, *arguments)
        except VmsandboxError as error:
            self._fail(member.sample.name, error, phase)

    def _fail(self, name: str, error: VmsandboxError, phase: str) -> None:
        """What was cut off because the experiment ends early is no failure."""
        if error.code == "interrupted" or (self._over.is_set() and phase != "end"):
            return
        failure = Failure(
            code=error.code,
            message=error.message,
            hint=error.hint,
            evidence=error.evidence,
            phase=phase,
        )
        self.failures.append(Failed(start=self.start_kind, name=name, failure=failure))

    # --- ending ---------------------------------------------------------------------------------

    def interrupt(self, *, at_once: bool) -> None:
        """Cut short what is done for a guest now; the last question only `at_once`. From any
        thread."""
        if self._asking and not at_once:
            return
        with contextlib.suppress(VmsandboxError):
            if manager := self._manager:
                manager.ask_to_end()
        for guest in list(self._guests):
            guest.interrupt()

    def _free(self) -> None:
        """Delete every sandbox that was made."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="free") as pool:
            list(pool.map(self._delete, list(self._made)))

    def _delete(self, folder: SandboxFolder) -> None:
        try:
            delete_sandbox(self.rooms, folder, force=True)
        except VmsandboxError as error:
            self.rooms.note(f"{folder.id} is left: {error.message}: vmsandbox delete --force …")
        else:
            self._made.remove(folder)
