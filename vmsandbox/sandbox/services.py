"""Owns what goes on beside a life for as long as its manager lives. Knows no step of a life.

A service begins when the guest is ready, again when the guest had to be booted again, and ends with
the manager. None may delay the first command; a task begins when all say that it may.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from vmsandbox.guest import Guest
from vmsandbox.model import ExecResult
from vmsandbox.sandbox.doors import Doors
from vmsandbox.sandbox.publishing import Publishing
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.store import SandboxFolder


class Service(Protocol):
    """One thing that goes on beside a life. Called from the manager's thread."""

    def begin(self, guest: Guest) -> None:
        """The guest answers; what was begun with a former one is over. Must not wait."""

    def await_ready(self) -> None:
        """The task is about to begin. Raises the VmsandboxError that keeps it from that."""

    def close(self) -> None:
        """The manager ends, or the guest of :meth:`begin` has gone. Safe to call again."""


class Services:
    """All services of one sandbox, as one."""

    def __init__(
        self, services: Sequence[Service], judge: Callable[[ExecResult], ExecResult]
    ) -> None:
        self._services = services
        self.judge = judge
        """What a task's end counts as, by what went on beside it."""

    def begin(self, guest: Guest) -> None:
        self.close()
        for service in self._services:
            service.begin(guest)

    def await_ready(self) -> None:
        for service in self._services:
            service.await_ready()

    def close(self) -> None:
        for service in self._services:
            service.close()


def services_of(rooms: Rooms, folder: SandboxFolder) -> Services:
    """What goes on beside the life of this sandbox."""
    doors = Doors(rooms, folder)
    return Services([doors, Publishing(folder, rooms.note)], doors.judge)
