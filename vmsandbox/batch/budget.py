"""Owns what was promised to guests of this host, in one file: by all batches of a state folder, and
to sandboxes that were started beside them.

A promise belongs to a batch or sandbox and counts while a process manages that: what was promised
to one that was killed is void by itself. Whoever waits longest is served first.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from typing import Literal

from pydantic import Field

from vmsandbox.batch.admission import Need, Promise, Verdict, decide
from vmsandbox.batch.record import BatchFolder
from vmsandbox.host import Load
from vmsandbox.model import Value, now
from vmsandbox.store import Store, locked, read_value, write_value

_WORTH_TELLING_BYTES = 8 * 1024 * 1024


class Reservation(Promise):
    """A promise, and whose."""

    batch: str
    task: str


class _Book(Value):
    version: Literal[1] = 1
    reservations: tuple[Reservation, ...] = ()
    waiting: Mapping[str, datetime] = Field(
        default_factory=dict, description="whose next guest does not fit, since when"
    )


class Budget:
    """The budget as one batch sees it, or one sandbox that belongs to none; by its id."""

    def __init__(self, store: Store, batch: str) -> None:
        self._store = store
        self._batch = batch
        self._file = store.budget
        self._guard = store.budget.with_suffix(".lock")

    def admit(self, task: str, wanted: Need, load: Load, *, urgent: bool = False) -> Verdict:
        """Decide, and reserve what was decided before anybody else looks.

        `urgent`: somebody waits for this one guest. It passes those that wait, and only what would
        hold it back if it were alone does so.
        """
        with self._open() as (book, write):
            mine = [one for one in book.reservations if self._is(one, task)]
            if mine:
                return Verdict(True)  # it has its share already
            if not urgent and (ahead := self._ahead(book)):
                return Verdict(False, f"{ahead} waits longer", lacking="turn")
            others = book.reservations
            verdict = decide(wanted, load, others, alone=urgent or not others)
            waiting = {name: since for name, since in book.waiting.items() if name != self._batch}
            if not verdict.admitted:
                waiting[self._batch] = book.waiting.get(self._batch, now())
                write(book.model_copy(update={"waiting": waiting}))
                return verdict
            mine = [self._of(task, wanted, starting=not urgent)]
            write(_Book(reservations=(*others, *mine), waiting=waiting))
            return verdict

    def alone(self) -> bool:
        """Whether nobody else was promised anything."""
        with self._open() as (book, _):
            return all(one.batch == self._batch for one in book.reservations)

    def adopt(self, task: str, wanted: Need) -> None:
        """Reserve without asking, for a guest that runs already."""
        with self._open() as (book, write):
            others = tuple(one for one in book.reservations if not self._is(one, task))
            kept = (*others, self._of(task, wanted, starting=False))
            write(book.model_copy(update={"reservations": kept}))

    def hold(self, held: Mapping[str, tuple[int, int]], starting: Collection[str] = ()) -> None:
        """Tell what the guests of these tasks hold by now: (memory, disk) bytes; and which tasks of
        this batch have hardly begun."""
        with self._open() as (book, write):
            told = tuple(self._with(one, held, starting) for one in book.reservations)
            if any(_differs(*pair) for pair in zip(told, book.reservations, strict=True)):
                write(book.model_copy(update={"reservations": told}))

    def release(self, task: str) -> None:
        """Its guest is gone."""
        with self._open() as (book, write):
            others = tuple(one for one in book.reservations if not self._is(one, task))
            write(book.model_copy(update={"reservations": others}))

    def give_back(self) -> None:
        """This batch has no guest, and waits for nothing."""
        with self._open() as (book, write):
            write(
                _Book(
                    reservations=tuple(o for o in book.reservations if o.batch != self._batch),
                    waiting={name: at for name, at in book.waiting.items() if name != self._batch},
                )
            )

    def _of(self, task: str, wanted: Need, *, starting: bool) -> Reservation:
        return Reservation(
            batch=self._batch,
            task=task,
            memory_bytes=wanted.memory_bytes,
            disk_bytes=wanted.disk_bytes,
            starting=starting,
        )

    def _is(self, one: Reservation, task: str) -> bool:
        return (one.batch, one.task) == (self._batch, task)

    def _with(
        self, one: Reservation, held: Mapping[str, tuple[int, int]], starting: Collection[str]
    ) -> Reservation:
        if one.batch != self._batch:
            return one
        memory, disk = held.get(one.task, (one.held_memory_bytes, one.held_disk_bytes))
        known = {"held_memory_bytes": memory, "held_disk_bytes": disk}
        return one.model_copy(update={**known, "starting": one.task in starting})

    def _ahead(self, book: _Book) -> str | None:
        """The batch that waits for a share, and longer than we do."""
        since = book.waiting.get(self._batch)
        longer = [
            name
            for name, at in book.waiting.items()
            if name != self._batch and (since is None or at < since)
        ]
        return min(longer, key=book.waiting.__getitem__, default=None)

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[_Book, Callable[[_Book], None]]]:
        self._guard.parent.mkdir(mode=0o700, exist_ok=True)  # there may never have been a batch
        with locked(self._guard):
            yield self._living(read_value(self._file, _Book) or _Book()), self._write

    def _write(self, book: _Book) -> None:
        write_value(self._file, book)

    def _living(self, book: _Book) -> _Book:
        """Without what was promised by batches that nobody manages."""
        names = {one.batch for one in book.reservations} | set(book.waiting)
        living = {name for name in names if name == self._batch or self._lives(name)}
        return _Book(
            reservations=tuple(one for one in book.reservations if one.batch in living),
            waiting={name: at for name, at in book.waiting.items() if name in living},
        )

    def _lives(self, name: str) -> bool:
        batch = BatchFolder(self._store.batches / name)
        return batch.managed() or self._store.folder(name).manager_alive()


def _differs(told: Reservation, before: Reservation) -> bool:
    """Small changes are not worth a write."""
    return (
        told.starting != before.starting
        or abs(told.held_memory_bytes - before.held_memory_bytes) > _WORTH_TELLING_BYTES
        or abs(told.held_disk_bytes - before.held_disk_bytes) > _WORTH_TELLING_BYTES
    )
