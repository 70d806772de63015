"""Owns the host's side of one sandbox's ports: which of its addresses and numbers listen now, and
what they lead to.

Told of every change in the guest, it listens and ceases to listen accordingly; who was connected
stays so. How a stream to the guest is opened, and who wants to know what is published, comes from
above. Bounded, because a guest may change its mind as often as it likes.
"""

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Self

from vmsandbox.errors import HostProblem
from vmsandbox.forwards import Listener, PortMapping, PortTable, PublishedPort, url_of
from vmsandbox.ports.binding import Bound, listen_as_asked, listen_near
from vmsandbox.ports.listeners import target_of
from vmsandbox.ports.relay import Relays, Stream

Dial = Callable[[str, int], Stream]
"""Opens a stream to an address and port in the guest; raises VmsandboxError."""

_ACCEPTED_AT_ONCE = 64
_LOCALHOST = "127.0.0.1"


class _Open(NamedTuple):
    """A port of the host that listens for a port of the guest."""

    address: str
    bound: Bound
    guest: int


class Publisher:
    """Publishes one sandbox at `address`, and the `asked` mappings where they say.

    A context manager; methods may be called from any thread.
    """

    def __init__(
        self, address: str, dial: Dial, *, asked: Sequence[PortMapping] = (), automatic: bool = True
    ) -> None:
        self._address = address
        self._dial = dial
        self._asked = asked
        self._automatic = automatic
        self._relays = Relays()
        self._lock = threading.Lock()
        self._listeners: Mapping[int, Listener] = MappingProxyType({})
        self._open: dict[int, _Open] = {}
        self._fixed: list[_Open] = []
        self._over = False
        self._selector = selectors.DefaultSelector()
        self._bell, self._ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._accept, name="publisher", daemon=True)

    def __enter__(self) -> Self:
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._over = True
            for one in (*self._open.values(), *self._fixed):
                self._forget(one)
        self._relays.close()
        self._wake()
        self._thread.join()
        self._selector.close()
        os.close(self._bell)
        os.close(self._ring)

    def open_asked(self) -> list[HostProblem]:
        """Listen where ``--publish`` says, whether or not the guest does yet; what went wrong."""
        problems = []
        with self._lock:
            for mapping in self._asked:
                try:
                    bound = Bound(listen_as_asked(mapping), mapping.host, "")
                except HostProblem as problem:
                    problems.append(problem)
                else:
                    self._fixed.append(_Open(mapping.address, bound, mapping.guest))
                    self._watch(self._fixed[-1])
        self._wake()
        return problems

    def offer(self, listeners: Mapping[int, Listener]) -> PortTable:
        """Publish exactly these, by their port in the guest."""
        with self._lock:
            self._listeners = MappingProxyType(dict(listeners))
            wanted = listeners.keys() if self._automatic else set()
            for port in self._open.keys() - wanted:
                self._forget(self._open.pop(port))
            for port in sorted(wanted - self._open.keys()):
                with contextlib.suppress(OSError):  # not one port of the address is free
                    bound = listen_near(self._address, port)
                    self._open[port] = _Open(self._address, bound, port)
                    self._watch(self._open[port])
            table = self._table()
        self._wake()
        return table

    # --- what listens ---------------------------------------------------------------------------

    def _table(self) -> PortTable:
        opened = [*self._open.values(), *self._fixed]
        opened.sort(key=lambda one: (one.guest, one.address != self._address))
        return PortTable(ports=tuple(map(self._published, opened)))

    def _published(self, one: _Open) -> PublishedPort:
        listener = self._listeners.get(one.guest)
        return PublishedPort(
            port=one.guest,
            url=url_of(one.address, one.bound.port),
            process=listener.process or None if listener else None,
            container=listener.container or None if listener else None,
            bound=listener.bound if listener else None,
            address=one.address,
            host_port=one.bound.port,
            note=one.bound.note,
        )

    def _watch(self, one: _Open) -> None:
        if not self._over:
            self._selector.register(one.bound.socket, selectors.EVENT_READ, one)

    def _forget(self, one: _Open) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(one.bound.socket)
        one.bound.socket.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._ring, b"*")

    # --- who connects ---------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._over:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._bell, 4096)
                else:
                    self._accept_from(key.data)

    def _accept_from(self, one: _Open) -> None:
        for near in _arrived(one.bound.socket):
            self._relays.carry(near, partial(self._dialled, one.guest))

    def _dialled(self, port: int) -> Stream:
        listener = self._listeners.get(port)
        return self._dial(target_of(listener.bound) if listener else _LOCALHOST, port)


def _arrived(listening: socket.socket) -> Iterable[socket.socket]:
    """Who waits to be accepted; nobody if it was just closed."""
    for _ in range(_ACCEPTED_AT_ONCE):
        try:
            near, _ = listening.accept()
        except OSError:
            return
        near.setblocking(True)
        yield near
