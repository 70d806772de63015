"""Owns the way from a name to a connection: resolved on the host, every address checked, and
connected to exactly an address that was checked.

Knows no rule about names.
"""

import ipaddress
import socket
from collections.abc import Iterable, Sequence

import psutil

from vmsandbox.deadline import Deadline
from vmsandbox.egress import addresses
from vmsandbox.egress.addresses import Address
from vmsandbox.reach import Net

_CONNECT_S = 20.0
_SHARE = 1 / 2
"""Of the time left for each address: one that does not answer must leave time for the next."""


class Denied(Exception):
    """It must not be reached; the text is a word for programs."""


class Unreachable(Exception):
    """It may be reached, but cannot; the text is a word for programs."""


def connect(net: Net, host: str, port: int) -> socket.socket:
    """A TCP connection to `host`, which the rules let through.

    One address that is not public refuses the name: whoever answers for it mixes them to get in.
    Raises Denied, Unreachable.
    """
    found = resolve(net, host)
    refuse(net, found)
    deadline = Deadline(_CONNECT_S)
    for address in found:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.5, deadline.remaining() * _SHARE))
            sock.connect((str(address), port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            sock.close()
        else:
            return sock
    raise Unreachable("upstream_unreachable")


def resolve(net: Net, host: str) -> Sequence[Address]:
    """All addresses of a name: the user's own word for it, else the host's resolver's."""
    if host in net.hosts:
        return [ipaddress.ip_address(text) for text in net.hosts[host]]
    try:
        # With the final dot no search domain is appended.
        answers = socket.getaddrinfo(f"{host}.", None, type=socket.SOCK_STREAM)
        found = [ipaddress.ip_address(str(sockaddr[0])) for *_, sockaddr in answers]
    except (OSError, ValueError, UnicodeError):
        raise Unreachable("name_unknown") from None
    return list(dict.fromkeys(found))


def refuse(net: Net, found: Iterable[Address]) -> None:
    """Raises Denied if any of these may not be connected to."""
    private = [ipaddress.ip_network(text) for text in net.private]
    own = own_addresses()
    for address in found:
        if why := addresses.objection(address, private, own):
            raise Denied(why)


def own_addresses() -> set[Address]:
    """The addresses of the host's interfaces at this moment."""
    return {
        ipaddress.ip_address(entry.address.partition("%")[0])
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
