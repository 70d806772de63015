"""Briefs: three ways to write one, what is refused, what is missed, and what an agent reads."""

import pytest

from vmsandbox.brief import PARTS, for_reviewer, markdown, missing, read
from vmsandbox.errors import UsageProblem
from vmsandbox.model import Brief

WHOLE = Brief(
    goal="The parser takes tabs.",
    why="Users send them.",
    tried=("a regex: too slow",),
    sources=("src/parse.py", "issue 7"),
    allowed=("tabs are 8 wide",),
    out_of_scope=("the printer",),
    report_back=("what was slow",),
    blockers=("no network",),
)
AS_YAML = """\
goal: The parser takes tabs.
why: Users send them.
tried: "a regex: too slow"
sources: [src/parse.py, issue 7]
allowed: [tabs are 8 wide]
out_of_scope: [the printer]
report_back: [what was slow]
blockers: no network
"""
AS_TOML = """\
goal = "The parser takes tabs."
why = "Users send them."
tried = ["a regex: too slow"]
sources = ["src/parse.py", "issue 7"]
allowed = "tabs are 8 wide"
out_of_scope = "the printer"
report_back = "what was slow"
blockers = "no network"
"""
AS_MARKDOWN = """\
# Goal
The parser takes tabs.

## Why
Users send them.
## What was tried
- a regex: too slow
## Sources
- src/parse.py
- issue 7
## Allowed facts
tabs are 8 wide
## Out of scope
* the printer
## Report back
- what was slow
## Blockers
- no network
"""


@pytest.mark.parametrize(
    ("file", "text"), [("b.yaml", AS_YAML), ("b.toml", AS_TOML), ("b.md", AS_MARKDOWN)]
)
def test_three_ways_to_write_the_same(file: str, text: str) -> None:
    assert read(file, text.encode()) == WHOLE


def test_what_the_agent_reads_is_read_again_as_the_same() -> None:
    told = markdown(WHOLE)
    assert "$VMSANDBOX_REPORT" in told
    assert "$VMSANDBOX_STATUS" in told
    assert read("b.md", told.partition("## How to report")[0].encode()) == WHOLE


def test_a_text_alone_is_the_goal_and_the_rest_is_missed_by_name() -> None:
    brief = read("b.md", b"Make it quick.\n")
    assert brief == Brief(goal="Make it quick.")
    assert missing(brief) == PARTS[1:]
    assert missing(WHOLE) == ()
    assert markdown(brief).startswith("# Goal\n\nMake it quick.\n")


@pytest.mark.parametrize("text", ["goal: ''", "goal: '  '", "why: because", "goal:\n", "{}"])
def test_an_empty_goal_is_refused(text: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        read("b.yaml", text.encode())
    assert caught.value.code == "brief_empty"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("b.yaml", "goal: x\ngaol: y\nwhy: [1]\n", ["b.yaml:2: unknown part", "b.yaml:3: "]),
        ("b.md", "# Goal\nx\n# Colour\nred\n", ["b.md:3: unknown part"]),
        ("b.yaml", "[1, 2]", ["b.yaml:1: a brief is a table"]),
        ("b.toml", "goal = \n", ["b.toml:1: "]),
        ("b.yaml", "goal: " + "x" * 70_000, ["larger than 64 KiB"]),
    ],
)
def test_every_problem_has_its_line(file: str, text: str, said: list[str]) -> None:
    with pytest.raises(UsageProblem) as caught:
        read(file, text.encode())
    assert caught.value.code == "brief_invalid"
    assert [needle for needle in said if needle not in caught.value.message] == []


def test_a_reviewer_reads_the_goal_and_nothing_of_the_author() -> None:
    told = Brief(
        goal="It works.",
        why="Because.",
        allowed=("A fact.",),
        out_of_scope=("The manual.",),
        tried=("mine",),
        report_back=("mine",),
        blockers=("mine",),
    )
    text = for_reviewer(told)
    assert "mine" not in text
    for wanted in ("## Goal\n\nIt works.", "### Why", "- A fact.", "- The manual.", "HEAD~1"):
        assert wanted in text
    assert "$VMSANDBOX_FINDINGS" in text
    assert "Nobody wrote down what was wanted." in for_reviewer(Brief())
