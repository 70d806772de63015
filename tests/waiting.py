"""Waits for what must become true, under one deadline."""

import time
from collections.abc import Callable

_POLL_S = 0.01


def wait_until(true: Callable[[], object], deadline_s: float = 30) -> None:
    """Fails if it does not become true in time."""
    deadline = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < deadline, f"waited {deadline_s:g} s in vain"
        time.sleep(_POLL_S)
