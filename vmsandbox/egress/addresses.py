"""Owns which addresses are public. Pure.

Refused is everything that IANA's registries do not call globally reachable, and what carries such
an address inside: IPv4-mapped IPv6 and NAT64. Of IPv6 only what IANA gives out as global unicast
can be public, so that a local network's translator of some other prefix is none. Addresses come
from the resolver as addresses; names that only look like names never get here.
"""

import ipaddress
from collections.abc import Collection, Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GIVEN_OUT = ipaddress.IPv6Network("2000::/3")
_NEVER: tuple[Network, ...] = (
    *map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",
            "100.64.0.0/10",  # carrier-grade NAT
            "192.0.0.0/24",  # protocols: PCP's anycast is the nearest router
            "168.63.129.16/32",  # Azure's metadata and DNS: globally reachable by the registry
            "192.88.99.0/24",  # 6to4 relays
            "224.0.0.0/4",
            "240.0.0.0/4",
        ),
    ),
    *map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # protocols: Teredo, PCP's anycast, ORCHIDs
            "2002::/16",  # 6to4
            "3fff::/20",  # documentation, newer than some Python
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
    foreign = real.version == 6 and real not in _GIVEN_OUT
    public = real.is_global and not (never or foreign or scoped)
    return "" if public else "address_not_public"
