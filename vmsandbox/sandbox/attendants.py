"""Owns what of the host itself a guest may speak to: its gateways, and a person. Knows how they are
put behind the names that the guest has for them, and what becomes of a task that is out of budget.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from vmsandbox import spending
from vmsandbox.errors import UsageProblem, VmsandboxError
from vmsandbox.gateway.keys import keys_of
from vmsandbox.gateway.ledger import Ledger
from vmsandbox.guest import Guest
from vmsandbox.model import Event, ExecResult, Outcome, SandboxRecord
from vmsandbox.reach import ASK_HOST, GATEWAY_HOST
from vmsandbox.sandbox.plan import GRACE_S, RULES
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.store import SandboxFolder

if TYPE_CHECKING:
    from vmsandbox.outlet import Exchange, Handler

_T = TypeVar("_T")

_SET_UP_S = 60.0
_MAKE_RULES = f"""\
set -eu
rm -rf {RULES} && mkdir -p -m 755 {RULES}/bin && cat > {RULES}/list
while read -r name rest; do
    ln -sf /usr/lib/vmsandbox/ask-rule "{RULES}/bin/$name"
done < {RULES}/list
"""


class Attendants:
    """The handlers of one sandbox and what they need in its guest."""

    def __init__(self, rooms: Rooms, folder: SandboxFolder) -> None:
        self._rooms = rooms
        self._folder = folder
        self._missing: UsageProblem | None = None
        self._opening: Future[Handler] | None = None
        self._rules: Future[None] | None = None

    def begin(
        self, guest: Guest, record: SandboxRecord, lifetime: contextlib.ExitStack
    ) -> "dict[str, Handler]":
        """What answers, by the name it has in the guest. Does not wait."""
        self._missing = self._opening = self._rules = None
        handlers: dict[str, Handler] = {}
        if record.equipment.gateways:
            opening = _aside(lambda: self._gateway(guest, record, lifetime))
            handlers[GATEWAY_HOST] = lambda exchange: opening.result()(exchange)
            self._opening = opening
        if asks := record.equipment.asks:
            from vmsandbox.approvals import AskServer

            handlers[ASK_HOST] = AskServer(self._folder, asks.timeout_s)
            if asks.commands:
                self._rules = _aside(lambda: _make_rules(guest, asks.commands))
        return handlers

    def await_ready(self) -> None:
        """Raises UsageProblem ``gateway_without_key`` or GuestProblem where a task would begin
        without what it was promised."""
        if self._opening:
            self._opening.result()
        if self._missing and not self._folder.read_record().task_started:
            raise self._missing
        if self._rules:
            self._rules.result()

    def judge(self, ended: ExecResult) -> ExecResult:
        """A task that was refused something for lack of budget did not end by itself, whatever its
        exit code says."""
        usage = spending.used(self._folder)
        if not usage.refused or ended.outcome in (Outcome.CONNECTION_LOST, Outcome.GUEST_OOM):
            return ended
        detail = f"the budget is used up: {usage.exhausted}"
        return ended.model_copy(update={"outcome": Outcome.BUDGET_EXHAUSTED, "detail": detail})

    def _gateway(
        self, guest: Guest, record: SandboxRecord, lifetime: contextlib.ExitStack
    ) -> "Handler":
        """A gateway whose key is missing stays shut, and no more: a task that runs already, and a
        verb that only collects, go on without it."""
        # Reads a TLS library into memory, and so lies beside the way to the first command.
        from vmsandbox.gateway.forwarding import GatewayServer

        gateways = record.equipment.gateways
        try:
            keys = keys_of(gateways, os.environ)
        except UsageProblem as problem:
            self._missing = problem
            self._rooms.note(f"{problem.message}; {problem.hint}")
            return _refusing(problem)
        ledger = Ledger(
            record.equipment.budget,
            spending.used(self._folder),
            lambda call, usage: spending.write_down(self._folder, call, usage),
            lambda why: self._ran_out(guest, record.id, why),
        )
        server = GatewayServer(gateways, keys, ledger)
        lifetime.callback(server.close)
        return server

    def _ran_out(self, guest: Guest, task: str, why: str) -> None:
        """End the task politely: most agents would ask again for ever."""
        self._folder.append_event(Event(phase="gateway", text=f"the budget is used up: {why}"))

        def end() -> None:
            with contextlib.suppress(VmsandboxError):
                guest.stop_task(task, grace_s=GRACE_S)

        threading.Thread(target=end, name="out of budget", daemon=True).start()


def _refusing(problem: UsageProblem) -> "Handler":
    def refuse(exchange: "Exchange", /) -> None:
        exchange.refuse(503, problem.code, problem.message, f"on the host: {problem.hint}")

    return refuse


def _make_rules(guest: Guest, commands: tuple[str, ...]) -> None:
    rules = "".join(f"{rule}\n" for rule in commands).encode()
    guest.stream_in(["/bin/sh", "-c", _MAKE_RULES], [rules], timeout_s=_SET_UP_S)


def _aside(work: Callable[[], _T]) -> Future[_T]:
    pool = ThreadPoolExecutor(1, "attendants")
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future
