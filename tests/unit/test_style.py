"""The rules of the house that no linter knows: sizes, names, waits, and what no text may say."""

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.sources import ROOT, none, project_files, python, statements

pytestmark = pytest.mark.xdist_group("sources")  # read and parsed once
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
SHAPELESS = frozenset({"utils", "util", "helpers", "helper", "common", "manager", "misc"})


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def texts() -> Mapping[Path, str]:
    return {
        path: path.read_text(errors="replace")
        for path in project_files(".")
        if path.suffix not in {".png", ".ico", ".pyc"}
    }


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in statements(tree) if isinstance(node, Function))


def where(path: Path, function: Function) -> str:
    return f"{shown(path)}:{function.lineno}: {function.name}"


def test_a_file_says_first_what_it_is() -> None:
    none(shown(path) for path, tree in python().items() if not ast.get_docstring(tree))


def test_a_room_opens_with_what_it_owns() -> None:
    product = ROOT / "vmsandbox"
    openings = {
        path: ast.get_docstring(tree) or ""
        for path, tree in python().items()
        if path.is_relative_to(product) and path.name != "__main__.py"
    }
    del openings[product / "__init__.py"]
    none(
        f"{shown(path)}: {opening.splitlines()[:1]}"
        for path, opening in openings.items()
        if not opening.startswith("Owns ")
    )


def test_files_stay_small() -> None:
    lines = {path: len(texts()[path].splitlines()) for path in python()}
    none(f"{shown(p)}: {n} lines" for p, n in lines.items() if n >= MAX_FILE_LINES)


def test_functions_stay_small() -> None:
    none(
        f"{where(path, function)}: {length} lines"
        for path, tree in python().items()
        for function in functions(tree)
        if (length := (function.end_lineno or 0) - function.lineno + 1) >= MAX_FUNCTION_LINES
    )


def test_no_module_has_a_shapeless_name() -> None:
    named = [
        path for path in python() if {*path.relative_to(ROOT).with_suffix("").parts} & SHAPELESS
    ]
    assert not named


def names_in(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def sleeps(path: Path, function: Function) -> Iterator[str]:
    """What is wrong with how a function sleeps."""
    nodes = list(ast.walk(function))
    names = set(names_in(nodes))
    if "sleep" not in names:
        return
    # Where the command line follows something, the person at the terminal is the deadline.
    followed = path.is_relative_to(ROOT / "vmsandbox" / "cli")
    if not followed and not any("deadline" in name.lower() for name in names):
        yield f"{where(path, function)} sleeps without a deadline"
    if not any(isinstance(node, ast.While | ast.For) for node in nodes):
        yield f"{where(path, function)} sleeps once instead of polling"


def test_every_sleep_is_a_poll_under_a_deadline() -> None:
    none(
        wrong
        for path, tree in python().items()
        if "sleep" in texts()[path]
        for function in functions(tree)
        for wrong in sleeps(path, function)
    )


def test_no_ssh_key_is_accepted_blindly() -> None:
    blind = re.compile(
        r"StrictHostKeyChecking[ =]+(no|off|accept-new)|AutoAddPolicy|WarningPolicy", re.IGNORECASE
    )
    code = [path for path in texts() if path.suffix != ".md" and path != Path(__file__)]
    assert not [shown(path) for path in code if blind.search(texts()[path])]


def test_no_text_names_the_place_where_it_was_written() -> None:
    homes = [str(ROOT)] if len(ROOT.parts) > 2 else []
    if len(Path.home().parts) > 2:
        homes.append(str(Path.home()))
    named = [
        f"{shown(path)}: {home}" for path in texts() for home in homes if home in texts()[path]
    ]
    assert not named


def test_the_tests_of_a_group_share_a_process(request: pytest.FixtureRequest) -> None:
    """pytest 9.2 makes xdist 3.8 forget groups, and says nothing (pytest-xdist, issue 1386)."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@sources")
