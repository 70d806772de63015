"""Owns that a sandbox's ports are published for as long as its guest runs: by its manager, or by a
keeper, a process of its own, for a guest that is left running without one.

Whoever publishes holds the sandbox's ports lock, so there is one at most, and who waits for it
takes over when the other ends or is killed. What is published is written down: it says what `ports`
shows, and what the next one opens at once, before the guest has said anything.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from vmsandbox import ports
from vmsandbox.deadline import Deadline
from vmsandbox.errors import HostProblem, UsageProblem, VmsandboxError
from vmsandbox.forwards import Listener, PortTable
from vmsandbox.guest import Guest, Interrupted
from vmsandbox.model import SandboxRecord, SandboxState
from vmsandbox.sandbox.access import running_record
from vmsandbox.sandbox.background import spawn_keeper
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.store import SandboxFolder, can_listen, is_locked, locked, read_value, write_value

_AFTER_S = 0.5
"""From a task's start, at least, until the guest is asked what listens."""
_TURN_S = 0.3
_LEAST_S = 0.1
"""Between two changes that are heeded."""
_AGAIN_S, _AGAIN_MOST_S = 1.0, 60.0
_END_S = 5.0
_POLL_S = 0.02
_BEGIN_S = 5.0  # a keeper has begun by then, also on a busy host

Note = Callable[[str], None]


class Shift:
    """One time of publishing: whether it is `over`, and whether it was ever `ours` to publish."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.ours = threading.Event()


class Publishing:
    """What a manager publishes: a service beside its life. A guest that is kept when the manager
    ends is left to a keeper."""

    def __init__(self, folder: SandboxFolder, note: Note) -> None:
        self._folder = folder
        self._note = note
        self._shift: Shift | None = None

    def begin(self, guest: Guest) -> None:
        """Publish in a thread from when the task has started."""
        if wanted(self._folder.read_record()):
            self._shift = Shift()
            arguments = (self._folder, guest, self._shift, self._note)
            threading.Thread(target=publish, args=arguments, name="ports", daemon=True).start()

    def await_ready(self) -> None:
        """No task has to wait for this."""

    def close(self) -> None:
        """Publish no more; the thread ends when the guest's connection is closed."""
        shift, self._shift = self._shift, None
        if shift is None:
            return
        shift.over.set()
        with contextlib.suppress(HostProblem):  # the sandbox may be gone
            record = self._folder.read_record()
            kept = record.state is SandboxState.READY and record.keep and record.collected
            if kept and (shift.ours.is_set() or not is_locked(self._folder.ports_lock)):
                spawn_keeper(self._folder)


def wanted(record: SandboxRecord) -> bool:
    """Whether anything of this sandbox is to be published."""
    return bool(record.publishes or record.publish)


def publish(folder: SandboxFolder, guest: Guest, shift: Shift, note: Note) -> None:
    """Publish as soon as nobody else does, until the shift is over or the guest is gone."""
    with contextlib.suppress(VmsandboxError), contextlib.ExitStack() as lifetime:
        record = folder.read_record()
        if not _our_turn(folder, shift.over, record, lifetime):
            return
        shift.ours.set()
        publisher = lifetime.enter_context(
            ports.Publisher(
                record.endpoint.address,
                guest.dial,
                asked=record.publish,
                automatic=record.publishes,
            )
        )
        for problem in publisher.open_asked():
            note(f"{problem.message}; {problem.hint}")
        told = _Told(folder, note)
        told.tell(publisher.offer(_known(folder)))
        if _await_task(folder, shift.over):
            for found in _watched(guest, shift.over):
                told.tell(publisher.offer(found))


def _our_turn(
    folder: SandboxFolder,
    over: threading.Event,
    record: SandboxRecord,
    lifetime: contextlib.ExitStack,
) -> bool:
    """Take the ports lock for a lifetime; False if we were told to end, or the guest went away."""
    while not over.is_set():
        try:
            lifetime.enter_context(locked(folder.ports_lock, wait=False))
            return True
        except BlockingIOError:
            if can_listen(record.endpoint.address):  # its QEMU is gone
                return False
            over.wait(_TURN_S)
    return False


def _await_task(folder: SandboxFolder, over: threading.Event) -> bool:
    """A task that is about to start is left alone for its first steps; False if it had ended by
    then, as asking would only keep its guest from handing over what it did."""
    if folder.read_record().task_started:
        return True
    while not over.wait(_TURN_S):
        if folder.read_record().task_started:
            return not over.wait(_AFTER_S) and (folder.read_record().state is SandboxState.RUNNING)
    return False


def _known(folder: SandboxFolder) -> Mapping[int, Listener]:
    """What listened when somebody published last."""
    table = read_value(folder.ports, PortTable) or PortTable()
    return {
        one.port: Listener(one.port, one.bound, one.process or "", one.container or "")
        for one in table.ports
        if one.bound
    }


def _watched(guest: Guest, over: threading.Event) -> Iterator[Mapping[int, Listener]]:
    """What listens in the guest, now and after each change, for as long as it can be asked."""
    again_s = _AGAIN_S
    while not over.is_set():
        try:
            with guest.follow(ports.ARGV) as lines:
                for table in ports.tables(lines):
                    again_s = _AGAIN_S
                    yield ports.reachable(table)
                    over.wait(_LEAST_S)
        except Interrupted:
            return
        except VmsandboxError:  # asked again, also of a guest that talks nonsense
            guest.connect(Deadline(_AGAIN_MOST_S))  # raises if it is gone
        over.wait(again_s)
        again_s = min(again_s * 2, _AGAIN_MOST_S)


class _Told:
    """Writes down what is published whenever it changes, and says what is not as expected."""

    def __init__(self, folder: SandboxFolder, note: Note) -> None:
        self._folder = folder
        self._note = note
        self._table: PortTable | None = None
        self._noted: set[tuple[int, str]] = set()

    def tell(self, table: PortTable) -> None:
        for one in table.ports:
            if one.note and (one.port, one.note) not in self._noted:
                self._noted.add((one.port, one.note))
                self._note(f"port {one.port} of the guest is {one.url}: {one.note}")
        if table != self._table:
            with contextlib.suppress(HostProblem):  # a full disk keeps nobody from connecting
                write_value(self._folder.ports, table)
                self._table = table


# --- who asks what is published -------------------------------------------------------------------


def published(folder: SandboxFolder) -> PortTable | None:
    """What is published now; None if nobody publishes."""
    if not is_locked(folder.ports_lock):
        return None
    return read_value(folder.ports, PortTable) or PortTable()


def first_url(folder: SandboxFolder) -> str:
    """Where the first port is found; empty if none is published."""
    with contextlib.suppress(VmsandboxError):
        table = published(folder)
        return table.ports[0].url if table and table.ports else ""
    return ""


def missing(folder: SandboxFolder, record: SandboxRecord) -> bool:
    """Whether nobody publishes, and somebody should."""
    return wanted(record) and record.task_started and not is_locked(folder.ports_lock)


def lost(folder: SandboxFolder, record: SandboxRecord) -> bool:
    """Whether that is so for longer than a keeper takes to begin."""
    with contextlib.suppress(FileNotFoundError):
        left_at = folder.record.stat().st_mtime
        return missing(folder, record) and time.time() - left_at > _BEGIN_S
    return False


def published_ports(rooms: Rooms, folder: SandboxFolder) -> tuple[SandboxRecord, PortTable]:
    """What is published of a guest that runs. Raises UsageProblem ``guest_not_running``, and
    ``not_published`` if nobody publishes and somebody should."""
    record = running_record(rooms, folder)
    deadline = Deadline(_BEGIN_S)
    while missing(folder, record) and not deadline.passed():
        time.sleep(_POLL_S)
    if missing(folder, record):
        raise UsageProblem(
            "not_published",
            f"nobody publishes the ports of {record.id}: was its manager killed?",
            hint=f"vmsandbox resume {record.id}",
        )
    return record, published(folder) or PortTable()


# --- the keeper -----------------------------------------------------------------------------------


def keep_published(folder: SandboxFolder, note: Note) -> None:
    """Publish until the guest is gone: the work of a keeper. Needs no libvirt."""
    record = folder.read_record()
    guest = Guest(
        record.endpoint,
        key=folder.client_key.read_text(),
        host_key=folder.host_key.read_text(),
        alive=lambda: not can_listen(record.endpoint.address),
    )
    with guest:
        publish(folder, guest, Shift(), note)


def await_unpublished(folder: SandboxFolder) -> None:
    """Wait a moment until nobody publishes a guest that has just ended."""
    deadline = Deadline(_END_S)
    while is_locked(folder.ports_lock) and not deadline.passed():
        time.sleep(_POLL_S)
