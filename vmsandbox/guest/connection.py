"""Owns the one SSH connection to a guest: made with pinned keys, made again when lost, shared by
all channels.

Knows no scripts and no tasks. paramiko's, socket's and EOF errors are translated here. All methods
may be called from any thread.

A host forward of QEMU accepts at once, whether or not anything listens in the guest, so an open
port says nothing: only the server's banner does; see :mod:`vmsandbox.guest.knock`.
"""

import base64
import contextlib
import hmac
import io
import logging
import threading
from collections.abc import Callable, Iterator

from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem, VmsandboxError
from vmsandbox.guest.flood import PacketSocket
from vmsandbox.guest.knock import Knocker, NotYet
from vmsandbox.guest.ssh import paramiko
from vmsandbox.model import Endpoint

# Without a handler Python prints paramiko's tracebacks; every one of them reaches us as an error.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

FOREIGN = (paramiko.SSHException, EOFError, OSError)
"""What paramiko raises when a connection or channel is not there or ends."""

_KEX = ("curve25519-sha256@libssh.org",)
_CIPHERS = ("aes128-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
_MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-256")
_HOST_KEYS = ("ssh-ed25519",)
_KEEPALIVE_S = 15
_LONGEST_S = 24 * 3600.0


class Interrupted(VmsandboxError):
    """Whoever waits for the guest was told to stop waiting, by :meth:`Guest.interrupt`."""

    exit_code = 125

    def __init__(self) -> None:
        super().__init__("interrupted", "interrupted")


class Connection:
    """At most one live SSH transport to one guest, for one user.

    `key` is a private Ed25519 key in OpenSSH's form, `host_key` the public line of the only host
    key that is accepted. `opened` is told of each transport that was made, and must not wait.
    """

    def __init__(self, endpoint: Endpoint, *, key: str, host_key: str, user: str) -> None:
        self.endpoint = endpoint
        self.user = user
        self._key = paramiko.Ed25519Key(file_obj=io.StringIO(key))
        self._host_key = base64.b64decode(host_key.split()[1])
        self._lock = threading.RLock()
        self._transport: paramiko.Transport | None = None
        self._opening: paramiko.Transport | None = None
        self._knocker = Knocker(endpoint)
        self._interrupted = False
        self.opened: Callable[[paramiko.Transport], None] = lambda transport: None

    def close(self) -> None:
        """Close the connection, and with it every channel. It may be made again.

        Never waits: a thread that is just connecting holds the lock, and finds out by itself.
        """
        for transport in (self._transport, self._opening):
            if transport:
                transport.close()
        self._transport = None
        if self._lock.acquire(blocking=False):
            self._knocker.close()
            self._lock.release()

    def interrupt(self) -> None:
        """Make every wait on this guest, now and later, raise :class:`Interrupted`."""
        self._interrupted = True
        self.close()

    def resume(self) -> None:
        """Take an :meth:`interrupt` back."""
        self._interrupted = False

    def check_interrupted(self) -> None:
        if self._interrupted:
            raise Interrupted

    def attempt(self, deadline: Deadline) -> None:
        """Connect if not connected, without waiting for a server that is silent.

        Raises NotYet, or GuestProblem ``host_key_mismatch``, which trying again cannot mend.
        """
        with self._lock:
            self.check_interrupted()
            if self._live() is None:
                self._transport = self._open(deadline)
                self.opened(self._transport)

    def check(self) -> paramiko.Transport:
        """The live transport; GuestProblem ``connection_lost`` if there is none."""
        self.check_interrupted()
        if transport := self._live():
            return transport
        raise self.lost("there is no connection")

    def channel(self, deadline: Deadline) -> paramiko.Channel:
        """A new channel. Raises GuestProblem ``connection_lost``; then nothing was asked of the
        guest."""
        with self.translated():
            return self.check().open_session(timeout=deadline.at_most(_LONGEST_S))

    def lost(self, what: str) -> GuestProblem:
        where = f"{self.endpoint.address}:{self.endpoint.port}"
        return GuestProblem(
            "connection_lost",
            f"the SSH connection to the guest at {where} was lost: {what}",
            hint="vmsandbox status",
        )

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """paramiko's errors as ours: :class:`Interrupted`, or GuestProblem ``connection_lost``."""
        try:
            yield
        except FOREIGN as error:
            self.check_interrupted()
            raise self.lost(str(error) or type(error).__name__) from error

    def _live(self) -> paramiko.Transport | None:
        transport = self._transport
        return transport if transport and transport.is_active() else None

    def _open(self, deadline: Deadline) -> paramiko.Transport:
        with contextlib.ExitStack() as undo:
            sock = PacketSocket.of(self._knocker.knock(deadline))
            undo.callback(sock.close)
            transport = self._opening = paramiko.Transport(sock)
            undo.callback(transport.close)
            _choose_algorithms(transport)
            # What happens from here costs the guest real work: it gets all the time there is.
            transport.banner_timeout = transport.auth_timeout = deadline.at_most(_LONGEST_S)
            transport.handshake_timeout = transport.banner_timeout
            try:
                transport.start_client(timeout=deadline.at_most(_LONGEST_S))
                self._check_host_key(transport.get_remote_server_key())
                transport.auth_publickey(self.user, self._key)
            except paramiko.AuthenticationException as error:
                raise NotYet(f"login as {self.user} was refused: {error}") from error
            except FOREIGN as error:
                raise NotYet(f"the SSH handshake failed: {error or 'end of file'}") from error
            transport.set_keepalive(_KEEPALIVE_S)
            self.check_interrupted()
            undo.pop_all()
            return transport

    def _check_host_key(self, key: paramiko.PKey) -> None:
        if not hmac.compare_digest(key.asbytes(), self._host_key):
            raise GuestProblem(
                "host_key_mismatch",
                f"{self.endpoint.address}:{self.endpoint.port} answers with another SSH host key "
                f"({key.fingerprint}) than the one made for this guest",
                hint="another program may use this port, or the guest did not take its seed: "
                "vmsandbox logs --console",
            )


def _choose_algorithms(transport: paramiko.Transport) -> None:
    options = transport.get_security_options()
    options.kex = _KEX
    options.ciphers = _CIPHERS
    options.digests = _MACS
    options.key_types = _HOST_KEYS
    options.compression = ("none",)
