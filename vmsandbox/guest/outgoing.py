"""Owns connections to servers in the guest, over the one SSH connection: it reaches what listens on
any address of the guest, its loopback included, and needs no port of the host's.

Knows nothing of what is spoken on them.
"""

from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem
from vmsandbox.guest.connection import Connection
from vmsandbox.guest.incoming import GuestStream
from vmsandbox.guest.ssh import paramiko

_LONGEST_S = 3600.0
_ORIGIN = ("127.0.0.1", 0)


def open_stream(connection: Connection, address: str, port: int, deadline: Deadline) -> GuestStream:
    """Connect to a server in the guest. Raises GuestProblem ``guest_port_refused``,
    ``connection_lost``."""
    with connection.translated():
        try:
            channel = connection.check().open_channel(
                "direct-tcpip", (address, port), _ORIGIN, timeout=deadline.at_most(_LONGEST_S)
            )
        except paramiko.ChannelException as refused:
            raise GuestProblem(
                "guest_port_refused",
                f"nothing answers at port {port} of {address} in the guest: {refused.text}",
                hint="vmsandbox ports",
            ) from refused
    return GuestStream(channel)
