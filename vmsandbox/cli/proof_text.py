"""Owns how the proof of a result looks: checks, opinions of reviewers, and where they disagree.

All of it was made safe when it was taken in; it is made so again, as that costs nothing.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from vmsandbox.text import printable

if TYPE_CHECKING:
    from vmsandbox.model import CheckResult, CheckRun, Finding, Opinion
    from vmsandbox.review import Review

_LABEL = 11
_TAIL_LINES = 12
_REPORT_LINES = 40
_FINDINGS = 50
_COLOURS = {"blocker": "bold red", "high": "red", "medium": "yellow"}


def labelled(label: str, value: str, style: str = "") -> Text:
    """A line whose label stands in a column of its own; whatever the value is, it is made safe."""
    line = Text(f"{label:<{_LABEL}}", style="bold" if label else "")
    line.append(printable(value), style=style or "not bold")
    return line


def lines(shown: "Review") -> Iterator[Text]:
    """What proves a result, and what speaks against it."""
    for run in shown.result.checks:
        yield from run_lines(run)
    if shown.unproven and not shown.result.checks:
        yield labelled("checks", f"not run: {_safe(', '.join(shown.unproven))}", "yellow")
    for opinion in shown.opinions:
        yield from _opinion_lines(opinion)
    for number, sentence in enumerate(shown.disagreements):
        yield labelled("" if number else "DISAGREE", _safe(sentence), "bold red")


def run_lines(run: "CheckRun") -> Iterator[Text]:
    """One run of the checks: each check, and of a failed one the end of what it said."""
    where = "in a fresh guest, base and result alone" if run.fresh else "in the guest of the task"
    yield labelled("checks", f"{where}, {run.when.isoformat(' ', 'seconds')}")
    for result in run.results:
        yield from _result_lines(result)


def _result_lines(result: "CheckResult") -> Iterator[Text]:
    mark, style = ("ok", "green") if result.ok else ("FAILED", "bold red")
    detail = f"  {_safe(result.detail)}" if result.detail else ""
    line = Text("  ")
    line.append(f"{mark:<7}", style=style)
    line.append(f"{_safe(result.name)}  ({result.seconds:.1f} s){detail}")
    yield line
    if not result.ok:
        yield from _quoted(result.tail.splitlines()[-_TAIL_LINES:])


def _opinion_lines(opinion: "Opinion") -> Iterator[Text]:
    ended = "" if opinion.exit_code is None else f", exit code {opinion.exit_code}"
    count = len(opinion.findings)
    yield labelled("reviewer", f"{_safe(opinion.by)}: {opinion.outcome}{ended}, {count} finding(s)")
    if opinion.problem:
        yield labelled("", f"its findings cannot be read: {_safe(opinion.problem)}", "yellow")
    for finding in sorted(opinion.findings, key=_by_weight)[:_FINDINGS]:
        yield from _finding_lines(finding)
    if count > _FINDINGS:
        yield labelled("", f"and {count - _FINDINGS} more: --json has them all")
    yield from _quoted(opinion.report.splitlines()[:_REPORT_LINES])


def _by_weight(finding: "Finding") -> int:
    from vmsandbox.model import Severity

    return -list(Severity).index(finding.severity)


def _finding_lines(finding: "Finding") -> Iterator[Text]:
    place = finding.path + ("" if finding.line is None else f":{finding.line}")
    line = Text("  ")
    line.append(f"{finding.severity:<8}", style=_COLOURS.get(finding.severity, ""))
    first, *more = printable(finding.text).splitlines() or [""]
    line.append(f"{_safe(place)}{': ' if place else ''}{first}")
    yield line
    yield from _quoted(more)


def _quoted(said: Sequence[str]) -> Iterator[Text]:
    return (Text(f"    | {_safe(line)}", style="dim") for line in said)


def _safe(text: str) -> str:
    return printable(text, newlines=False)
