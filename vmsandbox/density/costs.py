"""Owns the measured costs that experiments leave behind for those who must decide what fits.

Costs are kept per image, size, way to start and workload; a new measurement replaces the old one.
The file lies in the cache: without it, nothing is known.
"""

import contextlib
from typing import Literal

from vmsandbox.errors import HostProblem
from vmsandbox.model import MeasuredCost, Value
from vmsandbox.store import Store, locked, read_value, write_value


class _Costs(Value):
    version: Literal[1] = 1
    costs: tuple[MeasuredCost, ...] = ()


def keep(store: Store, cost: MeasuredCost) -> None:
    """Remember a cost. Raises HostProblem ``host_disk_full``, ``state_unwritable``."""
    with locked(store.lock):
        others = tuple(known for known in _read(store) if _key(known) != _key(cost))
        write_value(store.costs, _Costs(costs=(*others, cost)))


def measured(
    store: Store, image_digest: str, *, cpus: int, memory_mib: int, start: str = "clone"
) -> MeasuredCost | None:
    """The cost of such a guest, the largest if it was measured under several workloads."""
    wanted = (image_digest, cpus, memory_mib, start)
    found = [cost for cost in _read(store) if _key(cost)[:-1] == wanted]
    return max(found, key=lambda cost: cost.memory_bytes, default=None)


def _key(cost: MeasuredCost) -> tuple[str, int, int, str, str | None]:
    return cost.image_digest, cost.cpus, cost.memory_mib, cost.start, cost.workload


def _read(store: Store) -> tuple[MeasuredCost, ...]:
    """What cannot be read is as good as never measured."""
    with contextlib.suppress(HostProblem):
        if found := read_value(store.costs, _Costs):
            return found.costs
    return ()
