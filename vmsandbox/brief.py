"""Owns what a brief is good for: reading one from text, what it lacks, how an agent reads it.

Pure: knows no file and no guest. A brief is a YAML or TOML document, or Markdown with a heading for
each part.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from vmsandbox.document import Document, Problem, Unreadable, parse
from vmsandbox.errors import UsageProblem
from vmsandbox.model import Brief

MOST_BYTES = 64 * 1024
_TITLES: Mapping[str, str] = {
    "goal": "Goal",
    "why": "Why",
    "tried": "What was tried",
    "sources": "Sources",
    "allowed": "Facts you may take as given",
    "out_of_scope": "Out of scope",
    "report_back": "Report back",
    "blockers": "Blockers",
}
PARTS = tuple(_TITLES)
_TEXTS = ("goal", "why")
_AUTHORS = ("tried", "report_back", "blockers")
"""Parts that mean nothing to whoever reviews."""
_OTHER_NAMES = {"what_was_tried": "tried", "allowed_facts": "allowed"} | {
    re.sub(r"[^a-z]+", "_", title.lower()): part for part, title in _TITLES.items()
}
_HEADING = re.compile(r"#{1,3}\s+(.+?)\s*#*\s*")
_BULLET = re.compile(r"[-*]\s+(.*)")
_REPORTING = """\
## How to report

- Write what the person who decides should know to the file named by `$VMSANDBOX_REPORT` (Markdown).
- Keep one line in the file named by `$VMSANDBOX_STATUS`: `working: …`, `blocked: …`, `waiting: …`.
- Both files lie outside the worktree; what you change in the worktree is the result itself.
"""
_REVIEWING = """\
# Review a result

The worktree holds the result of somebody else's work on the goal below. It is committed: `HEAD` is
the result, `HEAD~1` the base, so `git diff HEAD~1` shows all of it. You know nothing of the
author's own view, on purpose. Judge whether the result reaches the goal, and what is wrong with it.
Run whatever helps: this machine is yours alone and is thrown away, with all that you change here.
"""
_FINDING = """\
## How to report

- Write your judgement, for the person who decides, to the file named by `$VMSANDBOX_REPORT`
  (Markdown).
- Write what you found to the file named by `$VMSANDBOX_FINDINGS`: a JSON list of objects such as
  `{"path": "src/a.py", "line": 7, "severity": "high", "text": "what is wrong"}`. `severity` is
  `info`, `low`, `medium`, `high` or `blocker`; `path` and `line` may be left out. None are `[]`.
"""


def read(file: str, data: bytes) -> Brief:
    """A brief from the content of a file whose name says what it is: .yaml, .toml or .md.

    Raises UsageProblem ``brief_invalid`` with every problem, ``brief_empty`` without a goal.
    """
    if len(data) > MOST_BYTES:
        problem = Problem(file, 0, f"larger than {MOST_BYTES // 1024} KiB, it was not read")
        raise _invalid([problem])
    try:
        document = _markdown(file, data) if file.endswith((".md", ".txt")) else parse(file, data)
    except Unreadable as unreadable:
        raise _invalid([unreadable.problem]) from None
    brief, problems = checked(document.value)
    if brief is None:
        raise _invalid([document.problem(place, text) for place, text in problems])
    if not brief.goal.strip():
        raise UsageProblem(
            "brief_empty",
            f"{file}: the goal is empty: nobody could tell when it is done",
            hint='goal: "what is true when it is done"',
        )
    return brief


def _invalid(problems: list[Problem]) -> UsageProblem:
    lines = [f"{len(problems)} problem(s) in the brief:", *map(str, problems)]
    return UsageProblem(
        "brief_invalid", "\n  ".join(lines), hint=f"the parts of a brief: {', '.join(PARTS)}"
    )


def checked(value: Any) -> tuple[Brief | None, list[tuple[tuple[str | int, ...], str]]]:
    """The brief that plain values mean, or where in them is what problem.

    A text alone is the goal; a part that takes several may be one text or a list.
    """
    if isinstance(value, str):
        value = {"goal": value}
    if not isinstance(value, dict):
        return None, [((), "a brief is a table of parts, or one text: the goal")]
    try:
        return Brief.model_validate({key: _part(key, one) for key, one in value.items()}), []
    except ValidationError as error:
        return None, [(item["loc"], _say(item)) for item in error.errors()]


def _part(key: str, value: Any) -> Any:
    if value is None:
        return "" if key in _TEXTS else ()
    return (value,) if isinstance(value, str) and key not in _TEXTS else value


def _say(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        return f"unknown part; there are {', '.join(PARTS)}"
    return str(item["msg"])


def _markdown(file: str, data: bytes) -> Document:
    """Headings name the parts; what stands before the first is the goal."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise Unreadable(Problem(file, 0, "not UTF-8")) from None
    parts: dict[str, list[str]] = {"goal": []}
    lines: dict[tuple[str | int, ...], int] = {}
    part = "goal"
    for number, line in enumerate(text.splitlines(), 1):
        if heading := _HEADING.fullmatch(line):
            name = re.sub(r"[^a-z]+", "_", heading[1].lower()).strip("_")
            part = _OTHER_NAMES.get(name, name)
            lines.setdefault((part,), number)
            parts.setdefault(part, [])
        else:
            parts[part].append(line)
    values = {
        part: "\n".join(said).strip() if part in _TEXTS else _points(said)
        for part, said in parts.items()
    }
    return Document(file, values, lines)


def _points(lines: list[str]) -> list[str]:
    """Each bullet is one; what has no bullets is one as a whole."""
    points: list[str] = []
    for line in lines:
        if bullet := _BULLET.fullmatch(line):
            points.append(bullet[1])
        elif line.strip() and points:
            points[-1] += "\n" + line.strip()
        elif line.strip():
            points.append(line.strip())
    return points


def missing(brief: Brief) -> tuple[str, ...]:
    """The parts that say nothing."""
    return tuple(part for part in PARTS if not getattr(brief, part))


def markdown(brief: Brief) -> str:
    """What the agent reads."""
    return "\n".join([*_sections(brief), _REPORTING])


def for_reviewer(brief: Brief) -> str:
    """What another agent reads that shall judge the result: the goal, and nothing of the author."""
    shown = brief.model_copy(update=dict.fromkeys(_AUTHORS, ()))
    if not shown.goal.strip():
        shown = shown.model_copy(update={"goal": "Nobody wrote down what was wanted."})
    return "\n".join([_REVIEWING, *_sections(shown, below=1), _FINDING])


def _sections(brief: Brief, below: int = 0) -> Iterator[str]:
    for part, title in _TITLES.items():
        said = getattr(brief, part)
        if isinstance(said, tuple):
            said = "\n".join("- " + point.strip().replace("\n", "\n  ") for point in said)
        if said:
            level = "#" * ((1 if part == "goal" else 2) + below)
            yield f"{level} {title}\n\n{said.strip()}\n"
