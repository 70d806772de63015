"""Owns the count of what a sandbox used of its gateways, and whether its budget allows more."""

import threading
from collections.abc import Callable

from vmsandbox.provider import Budget, Call, Gateway, Usage

BUDGET_EXHAUSTED = "budget_exhausted"


class Ledger:
    """Counts for one sandbox, from several threads.

    `told` hears of every call with the sums after it, one at a time; `exhausted` once, when
    something is refused because the budget is used up: who needs no more may end in peace.
    """

    def __init__(
        self,
        budget: Budget,
        usage: Usage,
        told: Callable[[Call, Usage], None],
        exhausted: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._budget = budget
        # What an earlier manager had counted stays; the budget may be another one now.
        self._usage = usage.model_copy(update={"exhausted": budget.exhausted(usage)})
        self._told = told
        self._exhausted = exhausted
        self._lock = threading.Lock()

    @property
    def usage(self) -> Usage:
        return self._usage

    @property
    def over(self) -> str:
        """Why nothing more is passed on, or an empty text."""
        return self._usage.exhausted

    def count(self, gateway: Gateway, call: Call) -> None:
        """Write a call down."""
        with self._lock:
            self._usage = self._summed(gateway, call)
            self._told(call, self._usage)
            first = call.problem == BUDGET_EXHAUSTED and self._usage.refused == 1
        if first:
            self._exhausted(self._usage.exhausted)

    def _summed(self, gateway: Gateway, call: Call) -> Usage:
        usage = self._usage
        price = gateway.price(call.model)
        cost = usage.cost if price is None else (usage.cost or 0.0) + price.of(call.tokens)
        failed = bool(call.problem) or (call.status or 500) >= 400
        summed = usage.model_copy(
            update={
                "requests": usage.requests + 1,
                "failed": usage.failed + failed,
                "refused": usage.refused + (call.problem == BUDGET_EXHAUSTED),
                "sent_bytes": usage.sent_bytes + call.sent_bytes,
                "received_bytes": usage.received_bytes + call.received_bytes,
                "tokens": usage.tokens + call.tokens,
                "estimated": usage.estimated + call.guessed,
                "cost": cost,
            }
        )
        why = usage.exhausted or self._budget.exhausted(summed)
        return summed.model_copy(update={"exhausted": why})
