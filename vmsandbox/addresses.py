"""Owns which loopback addresses sandboxes may have: a pool, and an order in which to try them.

Pure: who has an address, and whether something listens there, is asked of others.
"""

import ipaddress
import random
from collections.abc import Callable, Collection, Iterator

from vmsandbox.errors import HostProblem, UsageProblem

VARIABLE = "VMSANDBOX_ADDRESSES"
DEFAULT = "127.0.0.0/8"
_LOOPBACK = ipaddress.IPv4Network("127.0.0.0/8")
_OF_THE_SYSTEM = ipaddress.IPv4Network("127.0.0.0/16")
"""127.0.0.1, and what distributions use beside it: 127.0.0.53, 127.0.1.1."""
_ALL_TRIED = 1 << 16
_TRIES = 4096


class Pool:
    """A network of loopback addresses. The default is so large that two users' hardly meet."""

    def __init__(self, text: str | None = None) -> None:
        """Raises UsageProblem ``addresses_invalid``."""
        try:
            self.network = ipaddress.IPv4Network(text or DEFAULT)
        except ValueError as error:
            raise _invalid(f"{text!r} is no network: {error}") from None
        if not self.network.subnet_of(_LOOPBACK):
            raise _invalid(f"{text} lies outside {_LOOPBACK}: only loopback is ever bound")

    def choose(self, used: Collection[str], free: Callable[[str], bool]) -> str:
        """An address that is not `used` and that is `free`. Raises HostProblem
        ``addresses_used_up``."""
        for address in self._candidates():
            if address not in used and free(address):
                return address
        raise HostProblem(
            "addresses_used_up",
            f"no address of {self.network} is free for another sandbox",
            hint=f"vmsandbox cleanup    (or a larger pool: {VARIABLE}={DEFAULT})",
        )

    def _candidates(self) -> Iterator[str]:
        """In random order: all of a small pool, some thousands of a large one."""
        size = self.network.num_addresses
        chosen = random.SystemRandom()
        numbers = (
            chosen.sample(range(size), size)
            if size <= _ALL_TRIED
            else (chosen.randrange(size) for _ in range(_TRIES))
        )
        for number in numbers:
            address = self.network[number]
            # What programs take for a network or a broadcast is left alone.
            if address not in _OF_THE_SYSTEM and address.packed[-1] not in (0, 255):
                yield str(address)


def _invalid(why: str) -> UsageProblem:
    return UsageProblem("addresses_invalid", why, hint=f"{VARIABLE}=127.20.0.0/16, or unset it")
