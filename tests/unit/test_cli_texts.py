"""What help, documents and hints tell somebody to call can be called so."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.sources import ROOT, none, python, statements
from vmsandbox import cli

pytestmark = pytest.mark.xdist_group("sources")  # read and parsed once

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 80


@cache
def top() -> Any:
    cli._register()
    return typer.main.get_command(cli.app)


def verbs(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb that may be called by itself."""
    for name, command in getattr(group, "commands", {}).items():
        if not command.hidden:
            yield from verbs(command, (*path, name))
    if not getattr(group, "no_args_is_help", False):
        yield path, group


def examples(command: Any) -> list[str]:
    lines = [line.strip() for line in (command.help or "").splitlines()]
    return [
        line.removeprefix("Example: ")
        for line in lines
        if line.startswith(("vmsandbox ", "Example: "))
    ]


def test_every_verb_has_an_example_of_itself() -> None:
    found = dict(verbs(top()))
    assert len(found) > 30
    none(
        " ".join(path)
        for path, command in found.items()
        if not any(" ".join(("vmsandbox", *path)) in line for line in examples(command))
    )


def test_no_example_is_broken_over_two_lines() -> None:
    told = [line for _, command in verbs(top()) for line in examples(command)]
    none(line for line in told if len(f"    {line}") >= WIDTH)


# --- calls ----------------------------------------------------------------------------------------


def wrong(call: str) -> str:
    """What is wrong with a call of ours, as far as its verb and options go; empty if nothing is."""
    plain = re.sub(r"['\"\[\]]", " ", call[call.index("vmsandbox ") :]).partition(" # ")[0]
    words = plain.split()
    command, path = top(), ""
    while len(words) > 1 and words[1] in getattr(command, "commands", {}):
        command = command.commands[words.pop(1)]
        path = command.name
    if command is top():
        return "" if words[1:2] in ([], ["--help"]) else f"no verb: {call}"
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    known.add("--help")
    for word in words[1:]:
        if word in ("--", "&&", "|", ">>"):
            break
        names = word.split("=")[0].split("|") if word.startswith("--") else [word]
        for name in names:
            if re.fullmatch(r"--?[a-z][a-z-]*", name) and not known & {name, name[:2]}:
                return f"{path} has no {name}: {call}"
    return ""


def called(text: str) -> Iterator[str]:
    """Calls in a document: in code, inline or in a block of it."""
    text = text.replace("\\|", "|")
    yield from re.findall(r"`(vmsandbox [^`]*)`", text)
    yield from re.findall(r"^(?:\$ | {4})(vmsandbox .*)$", text, re.MULTILINE)


def hinted() -> Iterator[tuple[Path, str]]:
    """Calls that errors hint at, with something in the place of what is only known then."""
    for path, tree in python().items():
        for node in statements(tree):
            for call in (one for one in ast.walk(node) if isinstance(one, ast.keyword)):
                if call.arg == "hint" and (text := spelled(call.value)).startswith("vmsandbox "):
                    yield path, text.split("    ")[0].replace("; ", " && ")


def spelled(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(spelled(v) if isinstance(v, ast.Constant) else "it" for v in node.values)
    return ""


def test_what_help_shows_can_be_called() -> None:
    none(said for _, command in verbs(top()) for line in examples(command) if (said := wrong(line)))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_documents_show_can_be_called(document: Path) -> None:
    none(said for call in called(document.read_text()) if (said := wrong(call)))


def test_what_errors_hint_at_can_be_called() -> None:
    found = list(hinted())
    assert len(found) > 60
    none(f"{path.relative_to(ROOT)}: {said}" for path, call in found if (said := wrong(call)))
