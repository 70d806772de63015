"""Owns the decision to start no more guests before the host swaps. Pure."""

from vmsandbox.density.figures import MIB, HostReading, StoppedBy, reserve_bytes

PRESSURE_LIMIT = 10.0
"""Percent of ten seconds in which some process waited for memory: long before it hurts for good,
well above what an ordinary burst of writing does."""

_SWAP_TOLERANCE_BYTES = 8 * MIB
_LEAST_COST_BYTES = 16 * MIB


def stop_reason(before: HostReading, now: HostReading, expected_bytes: int) -> StoppedBy | None:
    """Why nothing that costs `expected_bytes` should be started now; None if it may be."""
    if now.swap_used_bytes > before.swap_used_bytes + _SWAP_TOLERANCE_BYTES:
        return StoppedBy.SWAP_GUARD
    if (now.memory_pressure or 0.0) > PRESSURE_LIMIT:
        return StoppedBy.PRESSURE_GUARD
    if now.available_bytes - expected_bytes < reserve_bytes(now.total_bytes):
        return StoppedBy.MEMORY_GUARD
    return None


def expected_bytes(
    before: HostReading, now: HostReading, *, alive: int, left: int, assumed: int | None, most: int
) -> int:
    """What the `left` guests of a step will take.

    What those alive took tells it, else what was measured earlier (`assumed`). Where nothing is
    known, one guest is let in if there is room for the `most` that it can take.
    """
    if alive:
        each = max(before.available_bytes - now.available_bytes, 0) // alive
        return left * max(each, assumed or 0, _LEAST_COST_BYTES)
    return left * assumed if assumed else most
