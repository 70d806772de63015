"""Owns what a guest says of its listening sockets: bounded lines in, safe values out.

The guest is hostile: what is no line of the watching script is an error, and its texts are escaped
and cut before anybody sees them. ``vmsandbox/guest_scripts/ports`` writes the lines.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from vmsandbox.errors import GuestProblem
from vmsandbox.forwards import Listener
from vmsandbox.text import printable

ARGV = ("/usr/lib/vmsandbox/ports", "watch")
LINE_MAX_BYTES = 400
MOST_LISTENERS = 512
"""Of one guest; more are left out."""

_SHOWN = 64
_SSH = 22
_LINE = re.compile(
    rb"((?:[0-9A-F]{8}){1,4}):([0-9A-F]{4}) ([A-Za-z0-9][A-Za-z0-9_.-]{0,127}|-) (.*)\n"
)
_END = b".\n"

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def tables(lines: BinaryIO) -> Iterator[list[Listener]]:
    """Each whole table that the guest sends, until it ends. Raises GuestProblem
    ``guest_answer_invalid``."""
    found: list[Listener] = []
    while line := lines.readline(LINE_MAX_BYTES):
        if line == _END:
            yield found
            found = []
        elif len(found) < MOST_LISTENERS:
            found.append(parse_line(line))
        else:
            parse_line(line)


def parse_line(line: bytes) -> Listener:
    """One listener, as ``/proc/net/tcp`` spells addresses. Raises GuestProblem
    ``guest_answer_invalid``."""
    match = _LINE.fullmatch(line)
    address = _address(match[1]) if match else None
    if match is None or address is None:
        raise GuestProblem("guest_answer_invalid", f"no listening socket: {line[:80]!r}")
    return Listener(
        port=int(match[2], 16),
        bound=str(address),
        process=printable(match[4], newlines=False)[:_SHOWN].strip(),
        container="" if match[3] == b"-" else match[3].decode()[:_SHOWN],
    )


def _address(digits: bytes) -> _Address | None:
    """The kernel prints an address as words of the machine's own byte order."""
    raw = bytes.fromhex(digits.decode())
    turned = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    if len(turned) == 4:
        return ipaddress.IPv4Address(turned)
    if len(turned) == 16:
        six = ipaddress.IPv6Address(turned)
        return six.ipv4_mapped or six
    return None


def reachable(found: Iterable[Listener]) -> dict[int, Listener]:
    """By port the listener that a connection should lead to: loopback or any address before others,
    IPv4 before IPv6. What the guest's sshd holds is ours, and an address of a single link cannot be
    named."""
    best: dict[int, Listener] = {}
    for one in sorted(found, key=_rank):
        ours = one.port == _SSH or one.process == "sshd"
        if one.port and not ours and not ipaddress.ip_address(one.bound).is_link_local:
            best.setdefault(one.port, one)
    return dict(sorted(best.items()))


def _rank(one: Listener) -> tuple[bool, bool, str]:
    address = ipaddress.ip_address(one.bound)
    return not (address.is_loopback or address.is_unspecified), address.version == 6, one.bound


def target_of(bound: str) -> str:
    """The address to connect to in the guest for a socket that is bound there."""
    address = ipaddress.ip_address(bound)
    if not address.is_unspecified:
        return bound
    return "127.0.0.1" if address.version == 4 else "::1"
