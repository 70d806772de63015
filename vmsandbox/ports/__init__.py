"""Owns what it takes to reach a guest's ports from the host: sockets that listen on loopback,
connections carried to the guest and back, what a guest says of its own listeners.

Knows no guest and no SSH: a stream to the guest is whatever has a socket's verbs.
"""

from vmsandbox.ports.binding import check, listen, listen_near
from vmsandbox.ports.listeners import ARGV, parse_line, reachable, tables, target_of
from vmsandbox.ports.publisher import Publisher
from vmsandbox.ports.relay import Relays, Stream

__all__ = [
    "ARGV",
    "Publisher",
    "Relays",
    "Stream",
    "check",
    "listen",
    "listen_near",
    "parse_line",
    "reachable",
    "tables",
    "target_of",
]
