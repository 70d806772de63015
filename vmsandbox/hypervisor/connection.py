"""Owns one connection to libvirt, which survives a restart of the daemon. Knows no domain.

Every call goes through :meth:`Connection.call`. A call that fails because the daemon went away is
made again on a new connection; transient domains live in QEMU and outlive libvirtd.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import libvirt

from vmsandbox.deadline import Deadline
from vmsandbox.hypervisor.problems import is_lost, translate

_T = TypeVar("_T")

RECONNECT_DEADLINE_S = 3.0
"""A daemon that was killed is back within two seconds, whoever looks after it."""

_KEEPALIVE_S = 5
_KEEPALIVE_COUNT = 4
_POLL_S = 0.05

# libvirt prints each error to stderr by itself unless told not to.
libvirt.registerErrorHandler(lambda _context, _error: None, None)


class _EventLoop:
    """libvirt's event loop in a thread, without which keepalive messages are not answered."""

    _lock = threading.Lock()
    _runs = False

    @classmethod
    def start(cls) -> None:
        with cls._lock:
            if not cls._runs:
                libvirt.virEventRegisterDefaultImpl()
                threading.Thread(target=cls._run, name="libvirt-events", daemon=True).start()
                cls._runs = True

    @staticmethod
    def _run() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()


class Connection:
    """Threads may share it. Opened by the first call, opened again when it was lost."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._lock = threading.Lock()
        self._libvirt: libvirt.virConnect | None = None

    def open(self) -> None:
        """Raises HostProblem ``libvirt_unreachable`` or ``libvirt_denied``."""
        with self._lock:
            if self._libvirt is None:
                self._libvirt = self._opened()

    def close(self) -> None:
        with self._lock:
            if self._libvirt is not None:
                _close(self._libvirt)
            self._libvirt = None

    def call(self, what: str, ask: Callable[[libvirt.virConnect], _T], *, again: bool = True) -> _T:
        """`ask` with a living connection; raises the translation of libvirt's error.

        `again`: if the connection is lost on the way, ask once more on a new one.
        """
        try:
            return self.raw(ask, again=again)
        except libvirt.libvirtError as error:
            raise translate(error, what) from error

    def raw(self, ask: Callable[[libvirt.virConnect], _T], *, again: bool = True) -> _T:
        """As :meth:`call`, for those who want to look at libvirt's own error."""
        self.open()
        connection = self._libvirt
        try:
            if connection is not None:
                return ask(connection)
        except libvirt.libvirtError as error:
            if not again or not self._is_lost(connection, error):
                raise
        return ask(self._reopened(connection))

    @staticmethod
    def _is_lost(connection: libvirt.virConnect, error: libvirt.libvirtError) -> bool:
        return is_lost(error) or not _alive(connection)

    def _reopened(self, lost: libvirt.virConnect | None) -> libvirt.virConnect:
        """One thread opens, the others find it open."""
        with self._lock:
            if self._libvirt is None or self._libvirt is lost:
                if lost is not None:
                    _close(lost)
                self._libvirt = None
                self._libvirt = self._opened(RECONNECT_DEADLINE_S)
            return self._libvirt

    def _opened(self, patience_s: float = 0.0) -> libvirt.virConnect:
        """Open within a deadline, for a daemon that is on its way up."""
        _EventLoop.start()
        deadline = Deadline(patience_s)
        while True:
            try:
                connection = libvirt.open(self.uri)
            except libvirt.libvirtError as error:
                if deadline.passed():
                    raise translate(error, f"connecting to {self.uri}") from error
            else:
                _keep_alive(connection)
                return connection
            time.sleep(_POLL_S)


def _keep_alive(connection: libvirt.virConnect) -> None:
    """Give up on a daemon that does not answer for 20 s instead of waiting for ever."""
    try:
        connection.setKeepAlive(_KEEPALIVE_S, _KEEPALIVE_COUNT)
    except libvirt.libvirtError:
        return  # test:///default is in this process and knows no keepalive


def _alive(connection: libvirt.virConnect) -> bool:
    try:
        return bool(connection.isAlive())
    except libvirt.libvirtError:
        return False


def _close(connection: libvirt.virConnect) -> None:
    try:
        connection.close()
    except libvirt.libvirtError:
        return  # it was lost
