"""Owns the share of this host that a single guest gets beside batches: one for a look at a result.

It takes part in their budget as a batch of one guest would, so neither takes what the other was
promised. Somebody waits for it: it is not held back by pressure nor by batches that wait, and it
does not wait for what nobody would give back.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from vmsandbox import host
from vmsandbox.batch import admission
from vmsandbox.batch.admission import Need, Verdict
from vmsandbox.batch.budget import Budget
from vmsandbox.deadline import Deadline
from vmsandbox.density import measured
from vmsandbox.errors import HostProblem
from vmsandbox.model import SandboxRecord
from vmsandbox.sandbox import Rooms, Share
from vmsandbox.store import SandboxFolder

_POLL_S = 0.5
_TASK = "look"


def share_of(rooms: Rooms) -> Share:
    """How guests for a look ask for room on this host.

    The share waits while batches hold what it needs, and notes why. It raises HostProblem
    ``host_memory_full`` or ``host_disk_full`` if there is no room and nobody to wait for.
    """

    @contextlib.contextmanager
    def share(folder: SandboxFolder, check: Callable[[], None]) -> Iterator[None]:
        budget = Budget(rooms.store, folder.id)
        wanted = _need(rooms, folder.read_record())
        try:
            _wait(rooms, budget, wanted, check)
            yield
        finally:
            budget.give_back()

    return share


def _wait(rooms: Rooms, budget: Budget, wanted: Need, check: Callable[[], None]) -> None:
    lacking = ""
    deadline = Deadline(None)  # a person who waits for it ends it
    while not deadline.passed():
        check()
        verdict = budget.admit(_TASK, wanted, host.load(rooms.store.path), urgent=True)
        if verdict.admitted:
            return
        if verdict.never or budget.alone():
            raise _full(verdict)
        if verdict.lacking != lacking:
            lacking = verdict.lacking
            rooms.note(f"waiting for room beside the batches: {verdict.reason}")
        time.sleep(_POLL_S)


def _need(rooms: Rooms, record: SandboxRecord) -> Need:
    limits = record.limits
    cost = measured(
        rooms.store,
        record.image_digest,
        cpus=limits.cpus,
        memory_mib=limits.memory_mib,
        start="cold" if record.cold or record.base_in_guest else "clone",
    )
    return admission.need(limits, (cost.memory_bytes, cost.disk_bytes) if cost else None, None)


def _full(verdict: Verdict) -> HostProblem:
    return HostProblem(
        "host_disk_full" if verdict.lacking == "disk" else "host_memory_full",
        f"there is no room for another guest: {verdict.reason}",
        hint="vmsandbox status    (then: vmsandbox stop SANDBOX)",
    )
