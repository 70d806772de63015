"""Owns the life of one sandbox: start, send, run, collect, stop.

A :class:`Manager` holds the sandbox's manager lock for as long as it works. Every step first looks
at what is already done, so carrying out a sandbox again after a crash goes on where the last
manager ended. Intent is written before the effect. Knows libvirt, SSH and git only through the
rooms that own them.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil

from vmsandbox import worktree
from vmsandbox.errors import GuestProblem, HostProblem, ReviewRefused, VmsandboxError
from vmsandbox.guest import Capture, Deadline, Guest, Interrupted, Requirement, wait_ready
from vmsandbox.model import (
    ChangeSet,
    ExecResult,
    Outcome,
    SandboxRecord,
    SandboxState,
    Snapshot,
)
from vmsandbox.sandbox import briefing, checking, setbacks, start, templates, transfer
from vmsandbox.sandbox.access import LogTail, open_guest
from vmsandbox.sandbox.attention import NOW, attending, sole_manager
from vmsandbox.sandbox.equipping import check_keys
from vmsandbox.sandbox.listening import Listener
from vmsandbox.sandbox.plan import GRACE_S, plan_of, task_spec
from vmsandbox.sandbox.recording import Recorder
from vmsandbox.sandbox.report import Report, report_of
from vmsandbox.sandbox.rooms import Rooms, owner_uid
from vmsandbox.sandbox.services import services_of
from vmsandbox.store import SandboxFolder

_FLUSH_S = 5.0
_CLONE_SHARE = 1 / 3
"""Of the time for a boot: a clone that has not answered by then would hardly do so later."""
_LISTEN_EVERY = 15
"""Looks, about as many seconds, between two questions for the agent's status: each costs the guest
a few processes."""


def keep_guest(rooms: Rooms, folder: SandboxFolder) -> None:
    """Let the guest run on after its task whenever the sandbox is carried out from now on."""
    rooms.store.update(folder, lambda record: record.model_copy(update={"keep": True}))


class Manager:
    """Carries one sandbox through its life while holding its manager lock."""

    def __init__(self, rooms: Rooms, folder: SandboxFolder, listener: Listener) -> None:
        self.rooms = rooms
        self.folder = folder
        self.listener = listener
        self.services = services_of(rooms, folder)
        self._recorder = Recorder(rooms.store, folder, listener)
        self._guest: Guest | None = None
        self._rebooted = False
        self._looks = 0
        self._standstill: HostProblem | None = None
        self._ending = threading.Event()
        self._at_once = threading.Event()
        self._task_runs = threading.Event()
        self._proving = threading.Event()
        self._called_at = psutil.Process().create_time()

    @classmethod
    @contextlib.contextmanager
    def of(cls, rooms: Rooms, folder: SandboxFolder, listener: Listener) -> "Iterator[Manager]":
        """Become the sandbox's manager.

        Raises UsageProblem ``managed_elsewhere`` if another process is.
        """
        hint = f"vmsandbox logs -f {folder.id}    (or: vmsandbox stop {folder.id})"
        with sole_manager(folder, code="managed_elsewhere", hint=hint):
            rooms.store.hand_over(folder)
            manager = cls(rooms, folder, listener)
            with (
                contextlib.closing(manager),
                contextlib.closing(manager.services),
                attending(folder, manager._heed, manager._look),
            ):
                yield manager

    # --- the whole life -------------------------------------------------------------------------

    def carry_out(self) -> Report:
        """Bring the sandbox from wherever it is to its end. Raises the first VmsandboxError.

        A failure is written to the record with its phase; the guest is stopped, unless it was to be
        kept and only its result was refused; its disk stays. Nothing changes where libvirt does not
        answer, or where a task would begin without the keys of its gateways.
        """
        record = self.folder.read_record()
        if not record.task_started:
            check_keys(record.equipment)
        self.rooms.guest_runs(record)
        with self._answering_for_failure(self._kept_after):
            self._steps()
        return self.report()

    def _steps(self) -> None:
        record = self.folder.read_record()
        over = record.state is SandboxState.STOPPED or not record.keep
        if record.collected and over and not checking.due(self.folder, record):
            self._ensure_stopped(record)
            return
        record = self._recorder.change(**setbacks.taken_up(record))
        with self._snapshot_aside(record) as snapshot:
            self.ensure_guest()
            self._ensure_worktree(snapshot)
        self._ensure_task()
        self.collect()
        self.verify()
        self.rest(keep=record.keep)

    def rest(self, *, keep: bool) -> None:
        """Leave the guest running if it is to be kept and nobody asked for its end, else stop."""
        if keep and not self._ending.is_set():
            self._recorder.become(SandboxState.READY)
        else:
            self.stop()

    def report(self) -> Report:
        """What came of it so far, read from the records."""
        return report_of(self.folder)

    def finish(self) -> Report:
        """End the task of a guest that nobody manages, collect what it did, stop the guest."""
        with self._answering_for_failure():
            if not (self.folder.read_record().base_in_guest and self._finish_task()):
                self._cancel("stopped before it began")
            self.stop()
        return self.report()

    def _finish_task(self) -> bool:
        """End the task and collect; False if it never began."""
        guest = self.ensure_guest()
        status = guest.task_status()
        if status is None and not self.folder.read_record().task_started:
            return False
        if status is not None and status.state == "running":
            guest.stop_task(self.folder.id, grace_s=GRACE_S)
        self._ensure_task()
        self.collect()
        return True

    # --- being asked to end ---------------------------------------------------------------------

    def ask_to_end(self) -> None:
        """End the task politely; what it did is still collected. From any thread."""
        self._ending.set()
        state = self.folder.read_record().state
        busy = state in (SandboxState.RUNNING, SandboxState.COLLECTING)
        if self._task_runs.is_set():
            self._stop_task()
        elif self._guest and (self._proving.is_set() or not busy):
            self._guest.interrupt()

    def _stop_task(self) -> None:
        if self._guest:
            with contextlib.suppress(VmsandboxError):
                self._guest.stop_task(self.folder.id, grace_s=GRACE_S)

    def _task_started(self) -> None:
        """The guest runs the task; whoever asked for its end meanwhile is heard now."""
        if not self.folder.read_record().task_started:
            self._recorder.change(task_started=True)
        self._task_runs.set()
        if self._ending.is_set():
            threading.Thread(target=self._stop_task, name="stop", daemon=True).start()

    def end_now(self) -> None:
        """Stop the guest without collecting; its disk is kept. From any thread."""
        self._ending.set()
        self._at_once.set()
        if self._guest:
            self._flush(self._guest)
            self._guest.interrupt()
        with contextlib.suppress(VmsandboxError):
            self.rooms.end_guest(self.folder.read_record().domain_uuid)

    def _heed(self, wish: str) -> None:
        """Another process asks for the end, see :mod:`vmsandbox.sandbox.attention`."""
        with contextlib.suppress(VmsandboxError):
            self.end_now() if wish == NOW else self.ask_to_end()

    def _look(self) -> None:
        """A guest that stands still answers nothing: stop waiting for it. One whose agent has
        something to say is listened to now and then."""
        with contextlib.suppress(VmsandboxError):
            record = self.folder.read_record()
            if self._guest and self.rooms.hypervisor.observe(record.domain_uuid).io_error:
                self._standstill = setbacks.stands_still(record, self.folder.path)
                self._guest.interrupt()
            self._looks += 1
            if self._guest and self._task_runs.is_set() and self._looks % _LISTEN_EVERY == 0:
                briefing.fetch(self._guest, self.folder, record)

    def check_ending(self) -> None:
        """Raises :class:`Interrupted` once somebody has asked for the end."""
        if self._ending.is_set():
            raise Interrupted

    # --- steps ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _snapshot_aside(self, record: SandboxRecord) -> "Iterator[Future[Snapshot] | None]":
        """Take the snapshot while the guest boots: git and the boot use different resources."""
        if record.base_in_guest:
            yield None
            return
        with ThreadPoolExecutor(1, thread_name_prefix="snapshot") as pool:
            yield pool.submit(self._snapshot, record)

    def _snapshot(self, record: SandboxRecord) -> Snapshot:
        if record.snapshot is not None:
            return record.snapshot
        task = record.task
        return worktree.snapshot(
            task.worktree, self.rooms.store.worktrees, include=task.include, history=task.history
        )

    def ensure_guest(self) -> Guest:
        """A guest that runs and answers: the one there is, else booted (again) from its disk."""
        record = self.folder.read_record()
        alive = self.rooms.guest_runs(record) and record.guest_made
        if record.state in setbacks.LIVE and not alive:
            self._recorder.become(SandboxState.FAILED)  # it was, while nobody looked
        if not alive:
            with self._recorder.phase("create"):
                self._create(record)
        elif record.state not in setbacks.LIVE:
            self._recorder.become(SandboxState.STARTING)
        with self._recorder.phase("boot"):
            guest = self._boot()
        self.services.begin(guest)
        if "first_command" not in record.timings:
            self._recorder.timed("first_command", round(time.time() - self._called_at, 3))
        if self.folder.read_record().state is SandboxState.STARTING:
            self._recorder.become(SandboxState.READY)
        return guest

    def _boot(self) -> Guest:
        """A guest that is ready. A clone that does not get there gives way to a cold start."""
        record = self.folder.read_record()
        clone_of = None if record.base_in_guest else record.template
        patience_s = record.limits.boot_timeout_s * (_CLONE_SHARE if clone_of else 1)
        guest = self._connect(record)
        try:
            self._wait_ready(guest, record, Deadline(patience_s))
        except GuestProblem as problem:
            if clone_of is None:
                raise
            self.rooms.note(f"starting cold: the clone did not get ready: {problem.message}")
            templates.strike(self.rooms, clone_of)
            self._create(self._recorder.change(cold=True, template=None))
            return self._boot()
        if clone_of:
            templates.absolve(self.rooms, clone_of)
        return guest

    def _wait_ready(self, guest: Guest, record: SandboxRecord, deadline: Deadline) -> None:
        def runs(_: Deadline) -> str | None:
            if self.rooms.guest_alive(record.domain_uuid) is False:
                raise self._boot_died()
            return None

        wait_ready(
            [
                Requirement("its domain", f"vmsandbox logs --console {record.id}", runs),
                guest.answers(),
                guest.seeded(record.id),
            ],
            deadline,
            evidence=str(self.folder.console),
        )

    def _boot_died(self) -> GuestProblem:
        record = self.folder.read_record()
        found = self.rooms.hypervisor.evidence(f"vmsandbox-{record.id}", self.folder.console)
        last = next(iter((*found.qemu_lines[-1:], *found.console_lines[-1:])), "no last words")
        return setbacks.died_booting(record, last, self.folder.console)

    def _create(self, record: SandboxRecord) -> None:
        image = self.rooms.images.resolve(record.image_digest)
        host = self.rooms.host_facts(image)
        plan = plan_of(record, self.folder, self.rooms.store.path, image, host, owner_uid())
        record = self._recorder.become(SandboxState.STARTING, guest_made=False)
        self._rebooted = record.base_in_guest
        self.rooms.end_guest(record.domain_uuid)  # one that was never sent its seed
        if not record.base_in_guest:  # nothing is on its disk, perhaps not even all of a disk
            self.folder.overlay.unlink(missing_ok=True)
        start.start_guest(
            self.rooms,
            record,
            plan,
            self.folder,
            cloned_from=lambda template: self._recorder.change(template=template),
            check=self.check_ending,
        )
        self._recorder.change(guest_made=True)

    def _connect(self, record: SandboxRecord) -> Guest:
        self.close()
        self._guest = open_guest(self.rooms, self.folder, record)
        self.check_ending()
        return self._guest

    def close(self) -> None:
        """Give up the connection to the guest; it is made again when it is needed."""
        if self._guest:
            self._guest.close()
            self._guest = None

    def _ensure_worktree(self, snapshot: "Future[Snapshot] | None") -> None:
        """Unpack the snapshot in the guest, once."""
        if snapshot is None:
            briefing.deliver_to_fork(self.guest, self.folder, self.folder.read_record())
            return
        with self._recorder.phase("sync"):
            taken = snapshot.result()
            self._recorder.change(snapshot=taken)
            self.check_ending()
            transfer.send(self.guest, self.folder.read_record().task, taken)
            briefing.deliver(self.guest, self.folder, self.folder.read_record())
            self._recorder.change(base_in_guest=True)

    def _ensure_task(self) -> None:
        """Start the task unless it was started, and follow it to its end."""
        record = self.folder.read_record()
        if self._rebooted and record.task_started and record.exec_result is None:
            record = self._recorder.change(exec_result=setbacks.LOST)
        if record.exec_result is not None:
            return
        self.check_ending()
        self.services.await_ready()
        self._recorder.become(SandboxState.RUNNING)
        heard = Capture(self.folder.stdout, self.folder.stderr, on_output=self.listener.output)
        with self._recorder.phase("run"), heard as capture:
            console = LogTail(self.folder.console)
            console.read()  # what it said before is not about the task
            ended = self.guest.run_task(task_spec(record), capture, started=self._task_started)
            ended = self.services.judge(setbacks.told_by_console(ended, console.read()))
        self._task_runs.clear()
        if self._at_once.is_set() or self._standstill:
            raise Interrupted
        self._recorder.change(exec_result=ended)
        if ended.outcome is Outcome.CONNECTION_LOST:
            raise setbacks.guest_gone(record, ended.detail, self.folder.console)

    def collect(self) -> ChangeSet:
        """Bring the change set out and put it up for review.

        Raises ReviewRefused for a result that must not come in.
        """
        record = self._recorder.become(SandboxState.COLLECTING, collected=False)
        with self._recorder.phase("collect"):
            briefing.fetch(self.guest, self.folder, record)
            try:
                change_set = transfer.collect(self.guest, self.folder, record)
            except ReviewRefused as refused:
                raise setbacks.result_refused(record, refused) from refused
        self._recorder.change(collected=True, failure=None)
        return change_set

    def verify(self, *, again: bool = False) -> None:
        """Run the checks, if there are any, on what was just collected; nothing of it flows back.

        Checks that were run on it already are run only if `again`.
        """
        if again or checking.due(self.folder, self.folder.read_record()):
            self._proving.set()
            with self._recorder.phase("verify"):
                checking.prove(self.guest, self.folder, self.check_ending, again=again)
            self._proving.clear()

    def stop(self) -> None:
        """Stop the guest; its disk stays until the sandbox is deleted."""
        with self._recorder.phase("stop"):
            self._free_guest()
            self._recorder.become(SandboxState.STOPPED)

    def _ensure_stopped(self, record: SandboxRecord) -> None:
        """Nothing is left to do for it but this, if even this."""
        if record.state is not SandboxState.STOPPED:
            self.stop()

    def _free_guest(self) -> None:
        if self._guest:
            self._flush(self._guest)
        self.close()
        self.rooms.end_guest(self.folder.read_record().domain_uuid)

    @property
    def guest(self) -> Guest:
        """The connection of :meth:`ensure_guest`."""
        if self._guest is None:
            raise GuestProblem("connection_lost", f"no connection to the guest of {self.folder.id}")
        return self._guest

    @staticmethod
    def _flush(guest: Guest) -> None:
        """Let the guest write its disk, so that what is cut off can be read later."""
        with contextlib.suppress(VmsandboxError):
            guest.run(["sync"], timeout_s=_FLUSH_S)

    # --- when it does not end well --------------------------------------------------------------

    def _interrupted(self) -> None:
        """Asked to end before there was a task, or to end at once; or nothing answers any more."""
        if self._standstill:
            raise self._standstill
        self._cancel("stopped at once")
        self.stop()

    def _cancel(self, detail: str) -> None:
        """A task that did not end by itself counts as cancelled, also if it never began."""
        ended = self.folder.read_record().exec_result or ExecResult(
            exit_code=None, outcome=Outcome.CANCELLED, detail=detail
        )
        self._recorder.change(cancelled=True, exec_result=ended)

    def _kept_after(self, error: VmsandboxError) -> bool:
        """In a guest that is kept, a result that was refused can be put right."""
        kept = self.folder.read_record().keep and not self._ending.is_set()
        return kept and isinstance(error, ReviewRefused)

    @contextlib.contextmanager
    def _answering_for_failure(
        self, keeps: Callable[[VmsandboxError], bool] = lambda error: False
    ) -> Iterator[None]:
        """A life that was asked to end is ended; of one that failed the first cause is written
        down, its guest is freed unless `keeps` says otherwise, and everything is kept that may
        explain it.

        What fails on top of that, on a full disk for example, must not hide the cause.
        """
        try:
            try:
                yield
            except Interrupted:
                self._interrupted()
        except VmsandboxError as error:
            self._recorder.event("failed", f"{error.code}: {error.message}")
            with contextlib.suppress(VmsandboxError):
                fields = setbacks.failed(self.folder.read_record(), error, self.folder.console)
                self._recorder.become(SandboxState.FAILED, **fields)
            with contextlib.suppress(VmsandboxError):
                if not keeps(error):
                    self._free_guest()
            raise
