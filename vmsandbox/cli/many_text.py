"""Owns how several results look together: a table of those that wait, a matrix, two side by side.

All that a guest could have chosen goes through `printable` or `quote_path`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from vmsandbox.cli import review_text
from vmsandbox.review.crossing import MEANING
from vmsandbox.text import command_line, printable, quote_path

if TYPE_CHECKING:
    from vmsandbox.model import Change
    from vmsandbox.review import Comparison, Matrix, Review, Standing, Waiting

_SIGNS = {
    "apart": ".",
    "same": "=",
    "merges": "~",
    "conflict": "x",
    "unknown": "?",
    "unrelated": "-",
}
_COLOURS = {"conflict": "red", "unknown": "yellow", "merges": "yellow"}
_NAMED = 20
_LISTED = 200
_REPORTED = 40


def _table(titles: Sequence[str], folded: Sequence[str]) -> Table:
    """A table without lines; the `folded` columns break what is too long for them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=True)
    for title in folded:
        table.add_column(title, overflow="fold", min_width=8)
    return table


def _worktrees(found: "Sequence[Waiting | Standing]") -> list[str]:
    """A cell for each, or none at all if all are of one worktree."""
    if len({one.worktree for one in found}) < 2:
        return []
    return [printable(str(one.worktree), newlines=False) for one in found]


# --- what waits -----------------------------------------------------------------------------------


def waiting(found: "Sequence[Waiting]") -> Table:
    """One row for each result; the number is what a pick list takes."""
    worktrees = _worktrees(found)
    titles = ("#", "name", "outcome", "result", "changes", "checks")
    table = _table(titles, ["flags", *(["worktree"] if worktrees else [])])
    for number, one in enumerate(found, 1):
        table.add_row(
            str(number),
            one.name,
            _outcome(one),
            one.state.value + (" (stale)" if one.stale else ""),
            f"{one.changes}  +{one.added} -{one.removed}",
            _checks(one),
            ", ".join(one.flags),
            *worktrees[number - 1 : number],
        )
    return table


def _outcome(one: "Waiting") -> str:
    if one.live:
        return "still running"
    code = f" ({one.exit_code})" if one.exit_code else ""
    return f"{one.outcome or 'not run'}{code}"


def _checks(one: "Waiting") -> str:
    passed = f"{one.checks - len(one.unproven)} of {one.checks}" if one.checks else ""
    return " ".join(filter(None, (passed, "DISAGREE" if one.disagreements else "")))


# --- a matrix -------------------------------------------------------------------------------------


def matrix_data(found: "Matrix") -> dict[str, Any]:
    """A matrix as JSON-ready data."""
    data = found.model_dump(mode="json")
    pairs = zip(data["pairs"], found.pairs, strict=True)
    data["pairs"] = [{**pair, "both_apply": met.both_apply} for pair, met in pairs]
    data["meaning"] = dict(MEANING)
    return data


def matrix(found: "Matrix") -> Iterator[Table | Text]:
    """Whether each applies now, and a grid of every two."""
    yield _standings(found.results)
    if found.pairs:
        yield _grid(found)
        used = {pair.fit for pair in found.pairs}
        yield Text("\n".join(f"{_SIGNS[fit]}  {MEANING[fit]}" for fit in MEANING if fit in used))
    lines = list(_meetings(found))
    if lines:
        yield Text("\n").join([Text(), *lines])
    for hindrance in found.hindrances:
        hint = f"\nhint: {hindrance.hint}" if hindrance.hint else ""
        yield Text(f"\n{printable(hindrance.message)}{hint}", style="yellow")


def _standings(results: "Sequence[Standing]") -> Table:
    worktrees = _worktrees(results)
    folded = ["applies now", *(["worktree"] if worktrees else [])]
    table = _table(("#", "name", "result", "paths"), folded)
    for number, one in enumerate(results, 1):
        table.add_row(
            str(number),
            one.name,
            one.state.value + (" (still running)" if one.live else ""),
            str(one.paths),
            _applies(one),
            *worktrees[number - 1 : number],
        )
    return table


def _applies(one: "Standing") -> str:
    if one.applies is None:
        return printable(one.problem, newlines=False)
    if one.applies:
        return "yes"
    named = ", ".join(quote_path(conflict.path) for conflict in one.conflicts[:3])
    more = len(one.conflicts) - 3
    return f"no: {named}" + (f" and {more} more" if more > 0 else "")


def _grid(found: "Matrix") -> Table:
    numbers = {one.id: number for number, one in enumerate(found.results, 1)}
    signs = {}
    for pair in found.pairs:
        signs[pair.one, pair.other] = signs[pair.other, pair.one] = pair.fit
    table = _table(("", *map(str, numbers.values())), ())
    for one, number in numbers.items():
        cells = [_sign(signs.get((one, other))) for other in numbers]
        table.add_row(str(number), *cells)
    return table


def _sign(fit: str | None) -> Text:
    return Text(_SIGNS[fit], style=_COLOURS.get(fit, "")) if fit else Text()


def _meetings(found: "Matrix") -> Iterator[Text]:
    """Every two that keep each other from being applied, and where."""
    names = {one.id: one.name for one in found.results}
    for pair in found.pairs:
        if pair.both_apply:
            continue
        unlike = [path for path in pair.shared if path not in set(pair.alike)]
        where = named_paths(pair.clashes or unlike)
        why = f" ({printable(pair.reason, newlines=False)})" if pair.reason else ""
        line = Text(f"{_SIGNS[pair.fit]}  {names[pair.one]} and {names[pair.other]}: ")
        yield line.append(f"{where}{why}", style=_COLOURS[pair.fit])


def named_paths(paths: Sequence[bytes]) -> str:
    """Some paths on one line."""
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(quote_path(path) for path in paths[:_NAMED]) + more


# --- two results ----------------------------------------------------------------------------------


def comparison_data(found: "Comparison") -> dict[str, Any]:
    """A comparison as JSON-ready data."""
    data = found.model_dump(mode="json", exclude={"sides"})
    data["meeting"]["both_apply"] = found.meeting.both_apply
    sides = [review_text.as_data(side) for side in found.sides]
    runs = zip(sides, found.run_s, strict=True)
    return data | {"sides": [{**side, "run_s": run_s} for side, run_s in runs]}


def comparison(found: "Comparison") -> Iterator[Table | Text]:
    """Two results beside each other: facts, paths, reports."""
    table = _table([""], [side.name for side in found.sides])
    for label, cells in _facts(found):
        if any(cells):
            table.add_row(label, *cells)
    yield table
    yield _paths(found)
    yield Text("\n").join(_verdicts(found))


def _facts(found: "Comparison") -> Iterator[tuple[str, list[str]]]:
    sides = found.sides
    yield "id", [side.id for side in sides]
    yield "forked from", [side.forked_from.name if side.forked_from else "" for side in sides]
    yield "command", [command_line(side.command) for side in sides]
    yield "outcome", [review_text.outcome(side) for side in sides]
    yield "ran for", ["" if run_s is None else f"{run_s:.1f} s" for run_s in found.run_s]
    yield "result", [f"{side.result.state}  {(side.result.digest or '')[:19]}" for side in sides]
    yield "changes", [_stat(side) for side in sides]
    yield "flags", [", ".join(review_text.flags(side.change_set)) for side in sides]
    yield "checks", [_proof(side) for side in sides]
    yield "DISAGREE", ["\n".join(side.disagreements) for side in sides]
    yield "applies now", ["no" if side.conflicts else "yes" for side in sides]
    yield "status", [side.agent_status for side in sides]
    yield "report", [_report(side) for side in sides]


def _stat(side: "Review") -> str:
    if side.change_set is None:
        return ""
    totals = review_text.totals(side.change_set)
    return f"{totals['paths']} paths, +{totals['added']} -{totals['removed']} lines"


def _proof(side: "Review") -> str:
    """What each check came to, a line for each; the words are the guest's and safe already."""
    return "\n".join(
        f"{'ok' if result.ok else 'failed'}  {result.name}"
        + (" (fresh)" if run.fresh else "")
        + (f": {result.detail}" if result.detail else "")
        for run in side.result.checks
        for result in run.results
    )


def _report(side: "Review") -> str:
    lines = side.report.splitlines()
    more = [f"… and {len(lines) - _REPORTED} lines more"] if len(lines) > _REPORTED else []
    return "\n".join([*lines[:_REPORTED], *more])


def _paths(found: "Comparison") -> Table:
    """Every path that one of both touches."""
    table = _table([], ["path", *(side.name for side in found.sides), ""])
    alike, clashes = set(found.meeting.alike), set(found.meeting.clashes)
    changes = [_by_path(side) for side in found.sides]
    every = sorted({path for paths in (found.meeting.shared, *found.only) for path in paths})
    for path in every[:_LISTED]:
        both = path in found.meeting.shared
        said = "" if not both else "alike" if path in alike else "differ"
        if path in clashes:
            said = "clash"
        cells = (_change(side.get(path)) for side in changes)
        table.add_row(quote_path(path), *cells, said)
    if len(every) > _LISTED:
        table.add_row(f"… and {len(every) - _LISTED} more: --json lists them all")
    return table


def _by_path(side: "Review") -> "dict[bytes, Change]":
    found: dict[bytes, Change] = {}
    for change in side.change_set.changes if side.change_set else ():
        found[change.path] = change
        if change.old_path is not None:
            found.setdefault(change.old_path, change)
    return found


def _change(change: "Change | None") -> str:
    if change is None:
        return ""
    lines = "" if change.added is None else f"  +{change.added} -{change.removed or 0}"
    return f"{change.kind.value}{lines}"


def _verdicts(found: "Comparison") -> Iterable[Text]:
    """What follows for whoever has to choose."""
    met = found.meeting
    if found.same_result:
        yield Text("both results are the same, byte for byte")
    yield Text(f"they {MEANING[met.fit]}", style=_COLOURS.get(met.fit, ""))
    if not met.both_apply:
        yield Text("once one of them is applied, the other one is refused where they differ")
    for problem in found.problems:
        yield Text(problem, style="yellow")
    for hindrance in found.hindrances:
        yield Text(f"{printable(hindrance.message)}; {hindrance.hint}", style="yellow")
