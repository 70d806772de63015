"""Owns sockets that listen on the host: which address and port, and what to do when one cannot be
had. Binds loopback addresses and nothing else."""

import errno
import ipaddress
import socket
from collections.abc import Iterable
from typing import NamedTuple

from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.forwards import PortMapping, bracketed

_BACKLOG = 1024
_PRIVILEGED = 1024
_ASIDE = 20000
"""What is added to a port that cannot be had, for a number that people recognize."""


class Bound(NamedTuple):
    """A listening socket, and why it is not at the port that was asked for."""

    socket: socket.socket
    port: int
    note: str


def listen(address: str, port: int) -> socket.socket:
    """Listen there; OSError if that cannot be. 0 is any free port."""
    parsed = ipaddress.ip_address(address)
    if not parsed.is_loopback:
        raise ValueError(f"{address} is no loopback address")
    family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def listen_near(address: str, port: int) -> Bound:
    """Listen at this port if it can be had, else at a free one. OSError if there is none at all."""
    try:
        return Bound(listen(address, port), port, "")
    except OSError as error:
        note = _why(error, address, port)
    for other in (port + _ASIDE, 0):
        try:
            listening = listen(address, other)
        except (OSError, OverflowError):
            if not other:
                raise
            continue
        return Bound(listening, listening.getsockname()[1], note)
    raise OSError(errno.EADDRINUSE, "no free port")


def _why(error: OSError, address: str, port: int) -> str:
    if error.errno == errno.EACCES:
        return f"ports below {_PRIVILEGED} are not ours to bind"
    return f"port {port} is taken on {address}"


def check(mappings: Iterable[PortMapping]) -> None:
    """Raise what would keep these from being published: HostProblem ``port_taken``, ``port_denied``
    or ``address_missing``, UsageProblem ``port_twice``."""
    seen: set[tuple[str, int]] = set()
    for one in mappings:
        if (one.address, one.host) in seen:
            raise UsageProblem(
                "port_twice",
                f"port {one.host} of {one.address} is to be published twice",
                hint=_other(one),
            )
        seen.add((one.address, one.host))
        listen_as_asked(one).close()


def listen_as_asked(mapping: PortMapping) -> socket.socket:
    """Listen where ``--publish`` says. Raises as :func:`check`."""
    try:
        return listen(mapping.address, mapping.host)
    except OSError as error:
        raise _problem(error, mapping) from error


def _problem(error: OSError, mapping: PortMapping) -> HostProblem:
    where = f"port {mapping.host} of {mapping.address}"
    if error.errno == errno.EACCES:
        return HostProblem(
            "port_denied",
            f"{where} cannot be published: this user may not bind ports below {_PRIVILEGED}",
            hint=_other(mapping),
        )
    if error.errno == errno.EADDRINUSE:
        return HostProblem(
            "port_taken",
            f"{where} cannot be published: something listens there already",
            hint=f"{_other(mapping)}    (who it is: ss -ltnp 'sport = :{mapping.host}')",
        )
    return HostProblem(
        "address_missing", f"{where} cannot be published: {error.strerror}", hint=_other(mapping)
    )


def _other(mapping: PortMapping) -> str:
    where = "" if mapping.address == "127.0.0.1" else f"{bracketed(mapping.address)}:"
    other = mapping.host + _ASIDE if mapping.host + _ASIDE <= 65535 else mapping.host - _ASIDE
    return f"--publish {where}{other}:{mapping.guest}"
