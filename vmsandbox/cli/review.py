"""Owns the verbs that decide on a result: review, approve, apply, drop."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmsandbox.cli import output, proof, review_many
from vmsandbox.cli.output import JsonFlag, Output, SelectorArgument
from vmsandbox.cli.reading import DIFF_BYTES, difference_of, is_live
from vmsandbox.errors import NegativeAnswer, UsageProblem

if TYPE_CHECKING:
    from vmsandbox.review import Applied, Selection
    from vmsandbox.store import SandboxFolder

Paths = Annotated[
    list[str] | None,
    typer.Option("--path", "-p", metavar="PATH", help="Only this file or folder. Repeatable."),
]
Includes = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Only what fits, as in a .gitignore."),
]
Excludes = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="GLOB", help="Leave out what fits, as in a .gitignore."),
]
Target = Annotated[
    Path | None,
    typer.Option("--target", metavar="DIR", help="Another folder. [default: the worktree]"),
]
DigestOption = Annotated[
    str | None,
    typer.Option(
        "--digest",
        metavar="SHA256[+SHA256]",
        help="Refuse unless the result (and what its checks came to) is this one; 24 digits do.",
    ),
]
DespiteChecks = Annotated[
    bool,
    typer.Option("--despite-checks", help="Although a check did not pass; that is recorded."),
]
By = Annotated[
    str, typer.Option(metavar="AGENT", help="First let another agent judge it; see above.")
]
Goal = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The goal for --by. [default: the task's]")
]


def register(app: typer.Typer) -> None:
    """Add the verbs to the program."""
    for verb in (review, approve, apply, drop):
        app.command()(verb)


def review(
    selector: Annotated[
        str | None, typer.Argument(metavar="SANDBOX", help="[default: choose among all]")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="List all that wait.")] = False,
    batch: Annotated[
        str, typer.Option("--batch", metavar="ID", help="Only what waits of this batch.")
    ] = "",
    diff: Annotated[bool, typer.Option("--diff", help="With the differences.")] = False,
    stat: Annotated[bool, typer.Option("--stat", help="Only the list of changes, all.")] = False,
    paths: Paths = None,
    max_bytes: Annotated[
        int, typer.Option(metavar="N", min=0, help="Of the differences, at most so many bytes.")
    ] = DIFF_BYTES,
    target: Target = None,
    by: By = "",
    brief: Goal = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what a task did: outcome, changes, risks, whether they still apply, and what is next.

    Writes nothing, and needs no guest. Without SANDBOX it lists what waits for a decision, and on a
    terminal asks which to view, approve or drop.

    With --by another guest starts that gets base, result and goal, and nothing that the author
    said. AGENT is a name from [agents.NAME] of vmsandbox.toml, or a line for the guest's shell;
    what it leaves in $VMSANDBOX_REPORT and $VMSANDBOX_FINDINGS is kept with the result and shown.

    Examples:

      vmsandbox review last --diff

      vmsandbox review last --by critic

      vmsandbox review --all --batch 1f2e
    """
    from vmsandbox import review as room
    from vmsandbox.cli import review_text as text

    out = output.begin(as_json)
    if selector is None or everything:
        if selector is not None:
            raise UsageProblem("all_or_one", f"{selector} or --all", hint="vmsandbox review --all")
        review_many.choose(out, batch, ask=not everything)
        return
    folder = _folder(selector)
    if by:
        proof.let_review(out, folder, by, brief)
    shown = room.show(folder, live=is_live(folder), target=target)
    data: dict[str, Any] = text.as_data(shown)
    if not diff:
        _print(out, data, text.stat(shown) if stat else text.whole(shown))
        return
    difference = difference_of(folder, shown, _selection(folder, paths), max_bytes)
    data |= {
        "diff": difference[:max_bytes].decode("utf-8", "backslashreplace"),
        "diff_truncated": len(difference) > max_bytes,
    }
    _print(out, data, text.whole(shown), text.diff(difference, max_bytes))


def approve(
    selector: SelectorArgument,
    paths: Paths = None,
    include: Includes = None,
    exclude: Excludes = None,
    digest: DigestOption = None,
    despite_checks: DespiteChecks = False,
    as_json: JsonFlag = False,
) -> None:
    """Record that the result, or a part of it, may be applied. Writes nothing to the worktree.

    The approval names the digest of what lies here now. If the task changes its result
    afterwards, the approval no longer holds.

    Example: vmsandbox approve last --digest 3f1c0a9be2d4c5b6a7980f1e
    """
    from vmsandbox import review as room

    out = output.begin(as_json)
    folder = _folder(selector)
    selection = _selection(folder, paths, include, exclude)
    record = room.approve(folder, selection=selection, digest=digest, despite_checks=despite_checks)
    out.result(
        {"id": folder.id, "result": record.model_dump(mode="json")},
        f"{folder.id}: {record.state}, {record.digest}",
    )


def apply(
    selector: SelectorArgument,
    paths: Paths = None,
    include: Includes = None,
    exclude: Excludes = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All changes, not only the approved ones.")
    ] = False,
    target: Target = None,
    digest: DigestOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Approve and apply, without being asked.")
    ] = False,
    despite_checks: DespiteChecks = False,
    as_json: JsonFlag = False,
) -> None:
    """Write the approved changes into the worktree: all of those chosen, or nothing.

    A path must still be as it was when the task began, otherwise nothing is written and every
    such path is named. Other edits do not matter. Without an approval you are asked on a
    terminal, and refused elsewhere.

    Examples:

      vmsandbox apply last

      vmsandbox apply last --yes --path src --exclude '*.lock'
    """
    from vmsandbox import review as room
    from vmsandbox.cli import review_text as text
    from vmsandbox.worktree import Quarantine

    out = output.begin(as_json)
    folder = _folder(selector)
    selection = _selection(folder, paths, include, exclude)
    if selection is None and everything:
        selection = room.Selection()
    where = target or folder.read_record().task.worktree
    if not (yes or as_json) and _on_a_terminal():
        digest = _ask(out, folder, selection, where, digest, despite_checks=despite_checks)
    with Quarantine(folder.result_git).reading() as results:
        applied = room.apply(
            folder,
            results,
            where,
            is_live=lambda: is_live(folder),
            selection=selection,
            digest=digest,
            yes=yes,
            despite_checks=despite_checks,
        )
    _print(out, _applied_data(folder, applied), text.applied(folder.id, applied))


def drop(selector: SelectorArgument, as_json: JsonFlag = False) -> None:
    """Decide that what is not applied yet never will be. The logs stay until `delete`.

    Example: vmsandbox drop last
    """
    from vmsandbox import review as room

    out = output.begin(as_json)
    folder = _folder(selector)
    record = room.drop(folder, is_live=lambda: is_live(folder))
    out.result(
        {"id": folder.id, "result": record.model_dump(mode="json")},
        f"{folder.id}: dropped, nothing {'more ' if record.applied_paths else ''}will be written",
    )


# --- what they share ------------------------------------------------------------------------------


def _folder(selector: str) -> "SandboxFolder":
    from vmsandbox.store import Store

    return Store().resolve(selector)


def _selection(
    folder: "SandboxFolder",
    paths: list[str] | None,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
) -> "Selection | None":
    """What was chosen. Paths are relative to the worktree, or absolute within it."""
    from vmsandbox.review import Selection

    if not (paths or include or exclude):
        return None
    top = str(folder.read_record().task.worktree) + "/"
    inside = [path.removeprefix(top) for path in paths or ()]
    return Selection.model_validate(
        {"paths": inside, "include": include or (), "exclude": exclude or ()}
    )


def _on_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask(
    out: Output,
    folder: "SandboxFolder",
    selection: "Selection | None",
    where: Path,
    digest: str | None,
    *,
    despite_checks: bool,
) -> str | None:
    """Ask for the approval that is missing; returns the digest that the answer is about."""
    from vmsandbox import review as room
    from vmsandbox.cli import proof_text
    from vmsandbox.cli import review_text as text

    missing = room.unapproved(folder, selection)
    if not missing:
        return digest
    shown = room.show(folder, live=is_live(folder), target=where)
    if shown.change_set is None or shown.live or shown.result.state == "dropped":
        return digest  # apply says why not
    console = out.console(stderr=True)
    for part in (text.stat(shown), *proof_text.lines(shown)):
        console.print(part, soft_wrap=True)
    while True:
        answer = typer.prompt(
            f"Apply {len(missing)} changed paths to {where}? Yes/No/View", default="No", err=True
        )
        if answer.lower() in ("y", "yes"):
            seen = digest or room.short(shown.change_set, shown.result)
            room.approve(folder, selection=selection, digest=seen, despite_checks=despite_checks)
            return seen
        if answer.lower() in ("v", "view"):
            difference = difference_of(folder, shown, selection)
            console.print(text.diff(difference, DIFF_BYTES), soft_wrap=True)
        elif answer.lower() in ("n", "no"):
            raise NegativeAnswer(
                "declined",
                "not approved, nothing was written",
                hint=f"vmsandbox review {folder.id} --diff",
            )


def _applied_data(folder: "SandboxFolder", applied: "Applied") -> dict[str, Any]:
    return {"id": folder.id} | applied.model_dump(mode="json")


def _print(out: Output, data: dict[str, Any], *parts: Any) -> None:
    if out.as_json:
        out.result(data)
        return
    for part in parts:
        out.console().print(part, soft_wrap=True)
