"""Owns the verbs about several results: compare, conflicts; and the list to choose from."""

import re
import sys
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vmsandbox.cli import output
from vmsandbox.cli.output import JsonFlag, Output, SelectorArgument
from vmsandbox.cli.reading import DIFF_BYTES, difference_of, is_live
from vmsandbox.errors import VmsandboxError

if TYPE_CHECKING:
    from vmsandbox.review import Waiting
    from vmsandbox.store import Store

Batch = Annotated[str, typer.Option("--batch", metavar="ID", help="Only results of this batch.")]
_ASK = "View 1, approve: a 1 3, drop: d 2, list: l, quit: q"
_WISH = re.compile(r"([vad]?)\s*((?:\d+[\s,]*)+)")


def register(app: typer.Typer) -> None:
    """Add the verbs to the program."""
    for verb in (compare, conflicts):
        app.command()(verb)


def compare(
    one: SelectorArgument,
    other: Annotated[str, typer.Argument(metavar="SANDBOX", help="the one to compare it with")],
    as_json: JsonFlag = False,
) -> None:
    """Put two results of one brief side by side: outcome, changes, checks, time, report, and which
    paths both changed.

    Example: vmsandbox compare fix-parser-claude fix-parser-codex
    """
    from vmsandbox import review as room
    from vmsandbox.cli import many_text as text
    from vmsandbox.store import Store

    out = output.begin(as_json)
    store = Store()
    found = room.compare(store.resolve(one), store.resolve(other), is_live)
    if as_json:
        out.result(text.comparison_data(found))
        return
    for part in text.comparison(found):
        out.console().print(part)


def conflicts(
    selectors: Annotated[
        list[str] | None,
        typer.Argument(metavar="SANDBOX…", help="[default: all that wait for a decision]"),
    ] = None,
    batch: Batch = "",
    as_json: JsonFlag = False,
) -> None:
    """Tell which results touch the same paths, which of those git could merge, and which still
    apply to their worktree as it is now. Writes nothing.

    The exit code is 1 if some of them cannot be applied, or not one after the other.

    Example: vmsandbox conflicts --batch 1f2e
    """
    from vmsandbox import review as room
    from vmsandbox.cli import many_text as text
    from vmsandbox.store import Store

    out = output.begin(as_json)
    store = Store()
    folders = [store.resolve(selector) for selector in selectors or ()]
    if not selectors:
        folders = [store.folder(one.id) for one in _waiting(out, store, batch)]
    found = room.matrix(list(dict.fromkeys(folders)), is_live)
    if as_json:
        out.result(text.matrix_data(found))
    elif not found.results:
        out.result(None, "no result waits for a decision")
    else:
        for part in text.matrix(found):
            out.console().print(part, soft_wrap=True)
    well = all(one.applies for one in found.results) and all(p.both_apply for p in found.pairs)
    if not well:
        raise typer.Exit(1)


# --- what waits -----------------------------------------------------------------------------------


def choose(out: Output, batch: str, *, ask: bool) -> None:
    """List the results that wait; with `ask`, on a terminal, go on to decide about them."""
    from vmsandbox.cli import many_text as text
    from vmsandbox.store import Store

    store = Store()
    found = _waiting(out, store, batch)
    data = {"results": [one.model_dump(mode="json") for one in found]}
    out.result(data, text.waiting(found) if found else "no result waits for a decision")
    if not (ask and found and not out.as_json and sys.stdin.isatty() and sys.stderr.isatty()):
        return
    while wish := _wish(len(found)):
        if wish.verb == "l":
            found = _waiting(out, store, batch)
            out.result(None, text.waiting(found) if found else "no result waits for a decision")
            continue
        for number in wish.numbers:
            try:
                _carry_out(out, store, found[number - 1], wish.verb)
            except VmsandboxError as error:  # one refusal does not end the list
                out.error(error)


def _waiting(out: Output, store: "Store", batch: str) -> "tuple[Waiting, ...]":
    from vmsandbox import review as room

    folders = [store.folder(record.id) for record in store.records()]
    queue = room.waiting(folders, is_live, batch=batch)
    for problem in queue.problems:
        out.note(problem)
    return queue.results


class _Wish(NamedTuple):
    verb: str
    numbers: tuple[int, ...] = ()


def _wish(count: int) -> _Wish | None:
    """What the person wants next; None to end."""
    while True:
        answer = typer.prompt(_ASK, default="q", err=True).strip().lower()
        if answer in ("q", "quit"):
            return None
        if answer in ("l", "list"):
            return _Wish("l")
        if match := _WISH.fullmatch(answer):
            numbers = tuple(int(digits) for digits in re.findall(r"\d+", match[2]))
            if all(1 <= number <= count for number in numbers):
                return _Wish(match[1] or "v", numbers)
        typer.echo(f"not understood: {answer!r}; numbers go from 1 to {count}", err=True)


def _carry_out(out: Output, store: "Store", one: "Waiting", verb: str) -> None:
    """View, approve or drop one result; an approval names what the list showed."""
    from vmsandbox import review as room
    from vmsandbox.cli import review_text

    folder = store.folder(one.id)
    if verb == "v":
        shown = room.show(folder, live=is_live(folder))
        console = out.console()
        console.print(review_text.whole(shown), soft_wrap=True)
        difference = difference_of(folder, shown)
        console.print(review_text.diff(difference, DIFF_BYTES), soft_wrap=True)
    elif verb == "a":
        record = room.approve(folder, digest=one.named)
        out.note(f"{one.id}: {record.state}, {record.digest}; vmsandbox apply {one.id}")
    elif typer.confirm(f"Drop {one.changes} change(s) of {one.name} for good?", err=True):
        room.drop(folder, is_live=lambda: is_live(folder))
        out.note(f"{one.id}: dropped")
