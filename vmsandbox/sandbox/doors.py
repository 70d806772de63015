"""Owns which ways out one sandbox has: the handlers behind its outlet, and that the guest knows of
them.

Without any way out nothing is opened, the guest is told nothing, and nothing of it is read into
memory here.
"""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem
from vmsandbox.guest import Forward, Guest
from vmsandbox.model import SandboxRecord
from vmsandbox.reach import NO_PROXY, OUTLET_PORT, NetMode
from vmsandbox.sandbox.attendants import Attendants
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.store import SandboxFolder

if TYPE_CHECKING:
    from vmsandbox.outlet import Exchange, Handler

_OPEN_S = 60.0
_SET_UP = "/usr/lib/vmsandbox/outlet"


class Doors:
    """The outlet of one sandbox; a service, see :mod:`vmsandbox.sandbox.services`."""

    def __init__(self, rooms: Rooms, folder: SandboxFolder) -> None:
        self._rooms = rooms
        self._folder = folder
        self._attendants = Attendants(rooms, folder)
        self.judge = self._attendants.judge
        self._lifetime = contextlib.ExitStack()
        self._forward: Forward | None = None
        self._set_up: Future[object] | None = None

    def begin(self, guest: Guest) -> None:
        record = self._folder.read_record()
        local = self._attendants.begin(guest, record, self._lifetime)
        reaches_out = record.net.mode is not NetMode.NONE
        if not (local or reaches_out):
            return
        from vmsandbox.outlet import Outlet

        outlet = Outlet(self._egress(record) if reaches_out else _shut, local)
        self._lifetime.callback(outlet.close)
        self._forward = guest.forward(OUTLET_PORT, outlet.accept)
        self._lifetime.callback(self._forward.end)
        if reaches_out:
            aside = ThreadPoolExecutor(1, "outlet-set-up")
            self._set_up = aside.submit(_tell, guest)
            aside.shutdown(wait=False)

    def await_ready(self) -> None:
        """Raises GuestProblem ``outlet_refused``, ``guest_command_failed``; UsageProblem
        ``gateway_without_key``.

        A guest whose task has begun may have spoilt its way out: that must not keep what it did
        from being collected, so then it is a note.
        """
        self._attendants.await_ready()
        try:
            self._await_open()
        except GuestProblem as problem:
            if not self._folder.read_record().task_started:
                raise
            self._rooms.note(f"the guest has no way out: {problem.message}")

    def _await_open(self) -> None:
        if self._set_up:
            self._set_up.result()
        if self._forward:
            self._forward.await_open(Deadline(_OPEN_S))

    def close(self) -> None:
        self._lifetime.close()
        self._forward = self._set_up = None

    def _egress(self, record: SandboxRecord) -> "Handler":
        from vmsandbox.egress.journal import Journal
        from vmsandbox.egress.proxy import Egress

        journal = Journal(self._folder.egress_log)
        egress = Egress(record.net, journal, self._folder.egress_grants, record.name)
        self._lifetime.callback(egress.close)
        return egress


def _tell(guest: Guest) -> None:
    """Let everything in the guest that knows proxies know of this one."""
    guest.stream_in([_SET_UP, str(OUTLET_PORT), NO_PROXY], [], timeout_s=_OPEN_S)


def _shut(exchange: "Exchange") -> None:
    hint = "on the host: vmsandbox run --net allow"
    exchange.refuse(403, "net_none", "this sandbox has no egress", hint)
