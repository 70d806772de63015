"""Owns which addresses are public. Pure.

Refused is everything that IANA's registries do not call globally reachable, and what carries such
an address inside: IPv4-mapped IPv6 and NAT64. Addresses come from the resolver as addresses; names
that only look like names never get here.
"""

import ipaddress
from collections.abc import Collection, Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NEVER: tuple[Network, ...] = (
    *map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",
            "100.64.0.0/10",  # carrier-grade NAT
            "168.63.129.16/32",  # Azure's metadata and DNS: globally reachable by the registry
            "192.88.99.0/24",  # 6to4 relays
            "224.0.0.0/4",
            "240.0.0.0/4",
        ),
    ),
    *map(
        ipaddress.IPv6Network,
        (
            "::/96",  # IPv4-compatible
            "64:ff9b:1::/48",  # NAT64 of one's own
            "2001::/32",  # Teredo
            "2002::/16",  # 6to4
            "3fff::/20",  # documentation, newer than some Python
            "5f00::/16",  # segment routing, likewise
            "fec0::/10",  # once site-local
            "ff00::/8",
        ),
    ),
)
"""Beside what Python's ipaddress does not call global, or what some versions of it do."""


def plain(address: Address) -> Address:
    """What an address really leads to: the IPv4 address inside it, if there is one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def objection(
    address: Address, private: Iterable[Network] = (), own: Collection[Address] = ()
) -> str:
    """Why an address may not be connected to; empty if it may.

    `private` are networks that the user named; `own` are the host's own addresses.
    """
    real = plain(address)
    if any(real.version == network.version and real in network for network in private):
        return ""
    if real in own:
        return "address_of_host"
    scoped = isinstance(address, ipaddress.IPv6Address) and address.scope_id
    never = any(real.version == network.version and real in network for network in _NEVER)
    return "" if real.is_global and not never and not scoped else "address_not_public"
