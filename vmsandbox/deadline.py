"""Owns the one way to wait: a point in time that everything done for one purpose must meet. Knows
no reason to wait.

A deadline is made once, at the top, and handed down; whoever waits asks it how long is left instead
of having a timeout of its own, so that the sum of all waits is what was promised.
"""

import math
import time
from collections.abc import Callable


class Deadline:
    """The moment `seconds` from now, on the monotonic clock; None means never."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.seconds = math.inf if seconds is None else seconds
        self._started = clock()

    def elapsed(self) -> float:
        """Seconds since the deadline was set."""
        return self._clock() - self._started

    def remaining(self) -> float:
        """Seconds left, never negative; infinite if there is no end."""
        return max(0.0, self.seconds - self.elapsed())

    def passed(self) -> bool:
        return self.elapsed() >= self.seconds

    def at_most(self, seconds: float) -> float:
        """`seconds`, or less if the deadline comes first: the timeout of a single step."""
        return min(seconds, self.remaining())

    def timeout(self) -> float | None:
        """What is left in the spelling of most libraries, where None waits for ever."""
        left = self.remaining()
        return None if math.isinf(left) else left
