"""The one way to wait."""

import math

from vmsandbox.deadline import Deadline


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_counts_down_and_never_below_zero() -> None:
    clock = Clock()
    deadline = Deadline(5, clock)
    assert (deadline.remaining(), deadline.passed()) == (5, False)
    assert (deadline.at_most(2), deadline.at_most(9), deadline.timeout()) == (2, 5, 5)
    clock.now += 4
    assert (deadline.elapsed(), deadline.remaining(), deadline.at_most(2)) == (4, 1, 1)
    clock.now += 4
    assert (deadline.remaining(), deadline.passed(), deadline.timeout()) == (0, True, 0)


def test_no_deadline_never_comes() -> None:
    deadline = Deadline(None)
    assert math.isinf(deadline.remaining())
    assert not deadline.passed()
    assert deadline.timeout() is None
    assert deadline.at_most(3) == 3
