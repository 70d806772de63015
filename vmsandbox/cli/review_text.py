"""Owns how a review looks: as text for people, as data for programs.

All that a guest could have chosen goes through `printable` or `quote_path`, and is put together
with rich's Text, which never reads markup.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

from vmsandbox.cli import proof_text
from vmsandbox.cli.life import size
from vmsandbox.cli.net import summary_lines
from vmsandbox.cli.output import code_and_why
from vmsandbox.cli.proof_text import labelled as _line
from vmsandbox.hostile import MEANING
from vmsandbox.text import command_line, printable, quote_path

if TYPE_CHECKING:
    from vmsandbox.model import Change, ChangeSet, Origin
    from vmsandbox.review import Applied, Review

_LISTED = 200
_COMMITS = 20
_SUBJECT = 100
_REPORTED = 40
_ASKED = 20
_TARGETS = 12
_COLOURS = {"A": "green", "M": "yellow", "D": "red", "T": "magenta", "R": "cyan"}
_DIFF_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def as_data(shown: "Review") -> dict[str, Any]:
    """A review as JSON-ready data."""
    whole = shown.model_dump(mode="json")
    change_set = whole.pop("change_set") or {}
    ended = whole.pop("exec_result") or {}
    record = whole.pop("result")
    return {
        **whole,
        "outcome": shown.outcome,
        "exit_code": ended.get("exit_code"),
        "detail": printable(ended.get("detail") or ""),
        "result": {
            **record,
            **{name: value for name, value in change_set.items() if name != "changes"},
            "agent_commits": [
                {**commit, "subject": printable(commit["subject"], newlines=False)}
                for commit in change_set.get("agent_commits", ())
            ],
        },
        "changes": [_change_data(change) for change in change_set.get("changes", ())],
        "totals": totals(shown.change_set) if shown.change_set else None,
        "flags": {flag: MEANING[flag] for flag in flags(shown.change_set)},
    }


def _change_data(change: dict[str, Any]) -> dict[str, Any]:
    modes = {name: f"{change[name]:06o}" for name in ("old_mode", "new_mode")}
    return {**change, **modes}


def totals(change_set: "ChangeSet") -> dict[str, int]:
    changes = change_set.changes
    return {
        "paths": len(changes),
        "added": sum(change.added or 0 for change in changes),
        "removed": sum(change.removed or 0 for change in changes),
        "bytes": sum(change.size_bytes for change in changes if change.new_oid is not None),
    }


def flags(change_set: "ChangeSet | None") -> Iterable[str]:
    changes = change_set.changes if change_set else ()
    found = {flag for change in changes for flag in change.flags}
    return (flag for flag in MEANING if flag in found)


# --- for people -----------------------------------------------------------------------------------


def whole(shown: "Review") -> Text:
    """All of a review."""
    return Text("\n").join([*_head(shown), *_changes(shown, _LISTED), *_tail(shown)])


def stat(shown: "Review") -> Text:
    """Only the changes, every one of them."""
    return Text("\n").join(_changes(shown, None) or [Text("no changes")])


def _head(shown: "Review") -> Iterator[Text]:
    name = shown.id if shown.name == shown.id else f"{shown.name} ({shown.id})"
    yield _line("sandbox", name)
    if shown.forked_from is not None:
        yield _line("forked from", f" {_origin(shown.forked_from)}")
    if shown.agent:
        yield _line("agent", printable(shown.agent, newlines=False))
    yield _line("command", command_line(shown.command))
    yield _line("outcome", outcome(shown))
    yield _line("worktree", printable(str(shown.worktree), newlines=False))
    yield _line("image", f"{shown.image_name}  {shown.image_digest}")
    yield _line("limits", _limits(shown))
    state = _line("result", shown.result.state.value)
    if shown.change_set is not None:
        state.append(f"  {shown.change_set.digest}")
    yield state
    for decision in shown.result.decisions:
        which = f", {len(decision.paths)} paths" if decision.paths else ""
        which += f", despite {len(decision.despite)} check(s)" if decision.despite else ""
        when = decision.when.isoformat(" ", "seconds")
        who = printable(decision.who, newlines=False)
        yield _line("", f"{decision.verdict} by {who}, {when}{which}  {decision.digest[:19]}")
    if shown.result.applied_paths:
        yield _line("", f"{len(shown.result.applied_paths)} paths in {shown.result.target}")


def _origin(origin: "Origin") -> str:
    name = origin.id if origin.name == origin.id else f"{origin.name} ({origin.id})"
    return name + (f"  its result {origin.digest[:19]}" if origin.digest else "")


def outcome(shown: "Review") -> str:
    ended = shown.exec_result
    if shown.live:
        return "still running"
    if ended is None:
        failure = shown.failure
        # What a guest's SSH server says at its greeting is quoted in it.
        return printable(f"{failure.code}: {failure.message}") if failure else "not run"
    failed = shown.failure if shown.failure and shown.failure.outcome else None
    code, why = code_and_why(ended.exit_code, failed.message if failed else ended.detail)
    return f"{shown.outcome}{code}" + (f"  ({printable(why, newlines=False)})" if why else "")


def _limits(shown: "Review") -> str:
    limits = shown.limits
    timeout = "no time limit" if limits.timeout_s is None else f"{limits.timeout_s:g} s"
    cpus = f"{limits.cpus} CPU" + ("s" if limits.cpus > 1 else "")
    return f"{cpus}, {limits.memory_mib} MiB memory, {limits.disk_mib} MiB disk, {timeout}"


def _changes(shown: "Review", most: int | None) -> list[Text]:
    change_set = shown.change_set
    if change_set is None:
        return []
    sums = totals(change_set)
    lines = [
        _line(
            "changes",
            f"{sums['paths']} paths, +{sums['added']} -{sums['removed']} lines,"
            f" {size(sums['bytes'])}",
        )
    ]
    lines += [_change_line(change) for change in change_set.changes[:most]]
    if most is not None and len(change_set.changes) > most:
        lines.append(Text(f"  … and {len(change_set.changes) - most} more: --stat lists them all"))
    lines += [_line("", f"[{flag}] {MEANING[flag]}") for flag in flags(change_set)]
    return lines


def _change_line(change: "Change") -> Text:
    line = Text("  ")
    line.append(f"{change.kind.value} ", style=_COLOURS[change.kind.value])
    if change.old_path is not None:
        line.append(f"{quote_path(change.old_path)} -> ")
    line.append(quote_path(change.path))
    line.append(f"  {_modes(change)}", style="dim")
    if change.added is not None:
        line.append(f"  +{change.added}", style="green")
        line.append(f" -{change.removed or 0}", style="red")
    elif change.new_oid is not None:
        line.append(f"  {size(change.size_bytes)}")
    for flag in change.flags:
        line.append(f"  [{flag}]", style="bold yellow")
    return line


def _modes(change: "Change") -> str:
    modes = dict.fromkeys(mode for mode in (change.old_mode, change.new_mode) if mode)
    return " -> ".join(f"{mode:06o}" for mode in modes)


def _tail(shown: "Review") -> Iterator[Text]:
    change_set = shown.change_set
    commits = change_set.agent_commits if change_set else ()
    for number, commit in enumerate(commits[:_COMMITS]):
        subject = printable(commit.subject[:_SUBJECT], newlines=False)
        yield _line("" if number else "commits", f"{commit.oid[:12]} {subject}")
    if len(commits) > _COMMITS:
        yield _line("", f"and {len(commits) - _COMMITS} more")
    if shown.brief is not None:
        yield _line("goal", printable(shown.brief.goal, newlines=False))
    if shown.agent_status:
        yield _line("status", shown.agent_status)
    for number, said in enumerate(shown.report.splitlines()[:_REPORTED]):
        yield _line("" if number else "report", said)
    yield from proof_text.lines(shown)
    yield from _egress(shown)
    if used := shown.usage.shown():
        yield _line("used", used)
    for number, asked in enumerate(shown.approvals[-_ASKED:]):
        by = f" by {printable(asked.who, newlines=False)}" if asked.who else ""
        when = asked.asked_at.isoformat(" ", "seconds")
        yield _line("" if number else "asked", f"{when} {asked.answer}{by}: {asked.text}")
    for number, conflict in enumerate(shown.conflicts):
        label = "" if number else "conflicts"
        yield _line(label, f"{quote_path(conflict.path)}: {conflict.what}", "red")
    for number, problem in enumerate(shown.problems):
        yield _line("" if number else "problems", printable(problem, newlines=False), "yellow")
    for number, (name, path) in enumerate(shown.evidence.items()):
        yield _line("" if number else "evidence", f"{name:<10} {path}")
    for number, command in enumerate(shown.next):
        yield _line("" if number else "next", command)


def _egress(shown: "Review") -> Iterator[Text]:
    if shown.egress is not None:
        first, *rest = summary_lines(shown.egress, _TARGETS)
        yield _line("egress", f"{shown.net}: {first}")
        yield from (_line("", line.strip()) for line in rest)


def diff(difference: bytes, most: int) -> Text:
    """A unified diff, every line escaped; only the first character of a line gives it a colour."""
    text = Text()
    for line in printable(difference[:most]).splitlines():
        text.append(line + "\n", style=_DIFF_COLOURS.get(line[:1], ""))
    if len(difference) > most:
        text.append(f"… cut after {size(most)}: --max-bytes shows more", style="yellow")
    return text


def applied(id_: str, done: "Applied") -> Text:
    """What an apply did."""
    lines = []
    if done.finished:
        lines.append(f"{id_}: finished an earlier apply: {len(done.finished)} paths")
    lines.append(f"{id_}: wrote {len(done.written)} paths to {done.target}")
    lines += [f"  {quote_path(path)}" for path in done.written[:_LISTED]]
    if done.already:
        lines.append(f"{id_}: {len(done.already)} paths were as in the result already")
    if done.remaining:
        lines.append(f"{id_}: {done.remaining} paths are left: vmsandbox review {id_}")
    return Text("\n".join(lines))
