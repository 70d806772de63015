"""Owns the verbs that look after sandboxes: status, logs, sync, stop, delete, cleanup."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmsandbox.cli import output
from vmsandbox.cli.output import JsonFlag, Output, SelectorArgument
from vmsandbox.errors import UsageProblem

if TYPE_CHECKING:
    from rich.table import Table

    from vmsandbox.sandbox import Cleaned, Rooms, Status
    from vmsandbox.store import SandboxFolder

ManySelectors = Annotated[
    list[str] | None,
    typer.Argument(metavar="SANDBOX…", help="ids, unique prefixes, names, or 'last'"),
]


def register(app: typer.Typer) -> None:
    """Add the verbs to the program."""
    for verb in (status, logs, sync, stop, delete, cleanup):
        app.command()(verb)


def _selected(
    rooms: "Rooms", selectors: list[str] | None, everything: bool
) -> "list[SandboxFolder]":
    if everything:
        return rooms.store.folders()
    if not selectors:
        raise UsageProblem("nothing_named", "no sandbox named", hint="name one, or use --all")
    return list(dict.fromkeys(rooms.store.resolve(selector) for selector in selectors))


# --- status ---------------------------------------------------------------------------------------


def status(
    selectors: ManySelectors = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Draw again every second.")] = False,
    project: Annotated[
        Path | None,
        typer.Option("--project", metavar="DIR", help="Only of worktrees at or below this folder."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what is true of each sandbox: state, outcome, result, problems.

    Example: vmsandbox status --watch
    """
    from vmsandbox.sandbox import Rooms

    out = output.begin(as_json)
    with Rooms.open() as rooms:
        if not watch:
            _show_status(out, _statuses(rooms, selectors, project))
            return
        _watch(out, rooms, selectors, project)


def _statuses(rooms: "Rooms", selectors: list[str] | None, project: Path | None) -> "list[Status]":
    from vmsandbox.sandbox import observe_all

    folders = [rooms.store.resolve(s) for s in selectors] if selectors else rooms.store.folders()
    found = observe_all(rooms, folders)
    if project is None:
        return found
    top = project.resolve()
    return [s for s in found if s.worktree and (s.worktree == top or top in s.worktree.parents)]


def _show_status(out: Output, found: "list[Status]") -> None:
    data = {
        "sandboxes": [s.model_dump(mode="json") | {"outcome": s.outcome or None} for s in found]
    }
    out.result(data, _status_table(found) if found else "no sandboxes")
    if not out.as_json:
        for one in found:
            for problem in one.problems:
                out.note(f"{one.id}: {problem}")
            for asked in one.asks:
                out.note(f"{one.id} asks: {asked.text}: vmsandbox approvals allow|deny {asked.id}")


def _watch(out: Output, rooms: "Rooms", selectors: list[str] | None, project: Path | None) -> None:
    if out.as_json:
        while True:
            _show_status(out, _statuses(rooms, selectors, project))
            time.sleep(1.0)
    from rich.live import Live

    with Live(console=out.console(), auto_refresh=False) as live:
        while True:
            live.update(_status_table(_statuses(rooms, selectors, project)), refresh=True)
            time.sleep(1.0)


def _status_table(found: "list[Status]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("id", "name", "state", "outcome", "result", "changes", "disk", "age"):
        table.add_column(title, no_wrap=True)
    table.add_column("worktree", overflow="fold", min_width=16)
    forked = any(one.forked_from for one in found)
    if forked:
        table.add_column("forked from", no_wrap=True)
    reached = any(one.url for one in found)
    if reached:
        table.add_column("first port", no_wrap=True)
    says = any(one.agent_status for one in found)
    if says:
        table.add_column("agent says", overflow="fold", min_width=12)
    used = any(one.usage.requests for one in found)
    if used:
        table.add_column("used", overflow="fold", min_width=12)
    for one in found:
        origin = one.forked_from.name if one.forked_from else ""
        url = [one.url] if reached else []
        more = ([origin] if forked else []) + url + ([one.agent_status] if says else [])
        more += [one.usage.shown()] if used else []
        table.add_row(*_status_row(one), *more)
    return table


def _status_row(one: "Status") -> list[str]:
    from vmsandbox.text import printable

    outcome = one.outcome
    if one.exec_result and one.exec_result.exit_code not in (None, 0):
        outcome += f" ({one.exec_result.exit_code})"
    elif one.failure and not outcome:
        outcome = one.failure.code
    return [
        one.id,
        one.name if one.name != one.id else "",
        one.state.value + ("" if not one.problems else " !"),
        outcome,
        one.result.value,
        "" if one.changes is None else str(one.changes),
        size(one.disk_bytes),
        _age(one),
        printable(str(one.worktree or ""), newlines=False),
    ]


def _age(one: "Status") -> str:
    from vmsandbox.model import now

    if one.created_at is None:
        return ""
    seconds = int((now() - one.created_at).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{max(seconds, 0)}s"


def size(count: int) -> str:
    """A number of bytes for people: ``3.2 MiB``."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


# --- logs -----------------------------------------------------------------------------------------


def logs(
    selector: SelectorArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows.")] = False,
    stdout: Annotated[bool, typer.Option("--stdout", help="Only the task's stdout.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Only the task's stderr.")] = False,
    console: Annotated[bool, typer.Option("--console", help="The guest's serial console.")] = False,
    events: Annotated[
        bool, typer.Option("--events", help="What vmsandbox did, with times.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Bytes as the guest wrote them; unsafe on a terminal.")
    ] = False,
) -> None:
    """Show what the task wrote (stdout and stderr), the console log, or the events.

    Example: vmsandbox logs -f last
    """
    from vmsandbox.sandbox import Rooms

    output.begin(False)
    with Rooms.open() as rooms:
        folder = rooms.store.resolve(selector)
        if events:
            _print_events(folder, follow)
            return
        chosen = {"stdout": stdout, "stderr": stderr}
        if console:
            paths = [folder.console]
        else:
            every = not any(chosen.values())
            paths = [p for k, p in _streams(folder) if every or chosen[k]]
        _print_files(folder, paths, follow=follow, raw=raw)


def _streams(folder: "SandboxFolder") -> list[tuple[str, Path]]:
    return [("stdout", folder.stdout), ("stderr", folder.stderr)]


def _print_files(folder: "SandboxFolder", paths: list[Path], *, follow: bool, raw: bool) -> None:
    from vmsandbox.sandbox import LogTail

    tails = [LogTail(path) for path in paths]
    while True:
        # Asked before reading: what was written before the end is still read after it.
        live = follow and folder.manager_alive()
        for tail in tails:
            _write(tail.read(), raw)
        if not live:
            break
        time.sleep(0.1)


def _write(data: bytes, raw: bool) -> None:
    from vmsandbox.text import printable

    sys.stdout.buffer.write(data if raw else printable(data).encode())
    sys.stdout.flush()


def _print_events(folder: "SandboxFolder", follow: bool) -> None:
    from vmsandbox.text import printable

    shown = 0
    while True:
        live = follow and folder.manager_alive()
        events = folder.read_events()
        for event in events[shown:]:
            took = "" if event.seconds is None else f" ({event.seconds:.3f} s)"
            line = f"{event.at:%Y-%m-%d %H:%M:%S.%f} {event.phase}{took} {event.text}"
            typer.echo(printable(line.rstrip(), newlines=False))
        shown = len(events)
        if not live:
            break
        time.sleep(0.1)


# --- sync, stop, delete, cleanup ------------------------------------------------------------------


def sync(selector: SelectorArgument, as_json: JsonFlag = False) -> None:
    """Send what changed in the host worktree since the sandbox was made into its running guest.

    A path that the guest changed as well stays as the guest has it and is listed; the exit code is
    then 1.

    Example: vmsandbox sync last
    """
    from vmsandbox.sandbox import Rooms, sync_worktree

    out = output.begin(as_json)
    with Rooms.open() as rooms, out.waiting("sending changes"):
        report = sync_worktree(rooms, rooms.store.resolve(selector))
    data = report.model_dump(mode="json")
    lines = [f"{report.updated} path(s) updated"]
    lines += [f"kept as the guest has it: {path}" for path in data["conflicts"]]
    out.result(data, "\n".join(lines))
    if report.conflicts:
        raise typer.Exit(1)


def stop(
    selectors: ManySelectors = None,
    everything: Annotated[bool, typer.Option("--all", help="Every running sandbox.")] = False,
    at_once: Annotated[
        bool, typer.Option("--now", help="Do not wait for the task and do not collect.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """End the task, collect what it did, and stop the guest; its disk stays until delete.

    Examples:

      vmsandbox stop last

      vmsandbox stop --all --now
    """
    from vmsandbox.sandbox import Rooms, stop_sandbox

    out = output.begin(as_json)
    with Rooms.open() as rooms:
        rows = []
        for folder in _selected(rooms, selectors, everything):
            with out.waiting(f"stopping {folder.id}"):
                rows.append({"id": folder.id, "was": stop_sandbox(rooms, folder, at_once=at_once)})
    out.result({"stopped": rows}, "\n".join(f"{row['id']}: {row['was']}" for row in rows) or "none")


def delete(
    selectors: ManySelectors = None,
    everything: Annotated[bool, typer.Option("--all", help="Every sandbox.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Also while it runs.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove sandboxes with everything that belongs to them: guest, disk, logs, result.

    One that runs is refused without --force. On a terminal you are asked before a result is lost
    that nobody decided on.

    Examples:

      vmsandbox delete fix-login

      vmsandbox delete --all --force
    """
    from vmsandbox.sandbox import Rooms, delete_sandbox

    out = output.begin(as_json)
    with Rooms.open() as rooms:
        cleaned = []
        for folder in _selected(rooms, selectors, everything):
            _confirm_loss(out, rooms, folder, force)
            cleaned.append(delete_sandbox(rooms, folder, force=force))
    _show_cleaned(out, cleaned)


def _confirm_loss(out: Output, rooms: "Rooms", folder: "SandboxFolder", force: bool) -> None:
    """On a terminal, ask before a result that nobody decided on is thrown away."""
    from vmsandbox.sandbox import has_undecided_result

    if out.as_json or force or not (sys.stdin.isatty() and has_undecided_result(folder)):
        return
    typer.confirm(f"{folder.id} has a result that was not reviewed. Delete it?", abort=True)


def cleanup(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would go, remove nothing.")
    ] = False,
    templates: Annotated[
        bool, typer.Option("--templates", help="Also templates that later starts would use.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove what is left over: decided and empty sandboxes, half-made files, orphaned guests,
    templates that no start would use any more.

    Never touches what runs, nor a result that waits for a decision.

    Example: vmsandbox cleanup --dry-run
    """
    from vmsandbox.sandbox import Rooms, clean_up

    out = output.begin(as_json)
    with Rooms.open() as rooms, out.waiting("looking for leftovers"):
        cleaned = clean_up(rooms, dry_run=dry_run, whole_templates=templates)
        cleaned += _clean_batches(rooms, dry_run=dry_run)
    _show_cleaned(out, cleaned, dry_run=dry_run)


def _clean_batches(rooms: "Rooms", *, dry_run: bool) -> "list[Cleaned]":
    from vmsandbox import batch
    from vmsandbox.sandbox import Cleaned

    gone = "would go" if dry_run else "removed"
    return [
        Cleaned(
            kind="batch",
            what=freed.batch,
            outcome="kept" if freed.kept else gone,
            detail=freed.detail,
        )
        for freed in batch.clean_up(rooms.store, dry_run=dry_run)
    ]


def _show_cleaned(out: Output, cleaned: "list[Cleaned]", *, dry_run: bool = False) -> None:
    rows: list[dict[str, Any]] = [item.model_dump(mode="json") for item in cleaned]
    total = sum(item.freed_bytes for item in cleaned)
    verb = "would free" if dry_run else "freed"
    lines = [
        f"{i.kind} {i.what}: {i.outcome}" + (f" ({i.detail})" if i.detail else "") for i in cleaned
    ]
    lines.append(f"{verb} {size(total)}")
    out.result({"items": rows, "freed_bytes": total, "dry_run": dry_run}, "\n".join(lines))
