"""Owns which ways out one sandbox has: the handlers behind its outlet, and that the guest knows of
them.

Without any way out nothing is opened and the guest is told nothing.
"""

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future

from vmsandbox.deadline import Deadline
from vmsandbox.guest import Forward, Guest
from vmsandbox.model import SandboxRecord
from vmsandbox.outlet import PORT, Exchange, Handler, Outlet
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.store import SandboxFolder

GATEWAY_HOST, ASK_HOST = "gateway.vmsandbox", "ask.vmsandbox"
"""Names of the guest's own loopback, where the outlet is."""

_OPEN_S = 60.0
_SET_UP = "/usr/lib/vmsandbox/outlet"


def local_handlers(
    rooms: Rooms, folder: SandboxFolder, record: SandboxRecord
) -> Mapping[str, Handler]:
    """What of the host itself the guest may speak to, by the name it has in the guest."""
    return {}


def _shut(exchange: Exchange) -> None:
    exchange.refuse(
        403, "egress_none", "this sandbox has no egress", hint="on the host: run --net allow"
    )


class Doors:
    """The outlet of one sandbox; a service, see :mod:`vmsandbox.sandbox.services`."""

    def __init__(self, rooms: Rooms, folder: SandboxFolder) -> None:
        self._rooms = rooms
        self._folder = folder
        self._lifetime = contextlib.ExitStack()
        self._forward: Forward | None = None
        self._set_up: Future[object] | None = None

    def begin(self, guest: Guest) -> None:
        record = self._folder.read_record()
        local = local_handlers(self._rooms, self._folder, record)
        if not local:
            return
        outlet = Outlet(_shut, local)
        self._lifetime.callback(outlet.close)
        self._forward = guest.forward(PORT, outlet.accept)
        self._lifetime.callback(self._forward.end)

    def await_ready(self) -> None:
        if self._forward:
            self._forward.await_open(Deadline(_OPEN_S))

    def close(self) -> None:
        self._lifetime.close()
        self._forward = self._set_up = None
