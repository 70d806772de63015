"""The rules of the house that no linter knows: sizes, names, waits, and what no text may say."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
SHAPELESS = frozenset({"utils", "util", "helpers", "helper", "common", "manager", "misc"})
NOT_OURS = frozenset({".git", ".venv", ".hypothesis", "__pycache__", "build", "dist", "LICENSE"})


def project_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for base, names, files in os.walk(ROOT / folder):
            names[:] = [n for n in sorted(names) if n not in NOT_OURS and not n.endswith("_cache")]
            yield from (Path(base, name) for name in sorted(files) if name not in NOT_OURS)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


PYTHON = {
    path: ast.parse(path.read_bytes(), filename=str(path))
    for path in project_files("vmsandbox", "tests", "benchmarks", "demo")
    if path.suffix == ".py"
}
PRODUCT = [path for path in PYTHON if path.is_relative_to(ROOT / "vmsandbox")]
TEXTS = {
    path: path.read_text(errors="replace")
    for path in project_files(".")
    if path.suffix not in {".png", ".ico", ".pyc"}
}
EACH_PYTHON = pytest.mark.parametrize("path", PYTHON, ids=shown)
EACH_PRODUCT = pytest.mark.parametrize("path", PRODUCT, ids=shown)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


@EACH_PYTHON
def test_a_file_says_first_what_it_is(path: Path) -> None:
    assert ast.get_docstring(PYTHON[path]), f"{shown(path)} has no docstring"


@EACH_PRODUCT
def test_a_room_opens_with_what_it_owns(path: Path) -> None:
    if path.name == "__main__.py" or path == ROOT / "vmsandbox" / "__init__.py":
        return
    opening = ast.get_docstring(PYTHON[path]) or ""
    assert opening.startswith("Owns "), opening.splitlines()[:1]


@EACH_PYTHON
def test_files_and_functions_stay_small(path: Path) -> None:
    lines = len(TEXTS[path].splitlines())
    assert lines < MAX_FILE_LINES, f"{shown(path)}: {lines} lines"
    for function in functions(PYTHON[path]):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length < MAX_FUNCTION_LINES, f"{shown(path)}: {function.name}: {length} lines"


def test_no_module_has_a_shapeless_name() -> None:
    named = [path for path in PYTHON if {*path.relative_to(ROOT).with_suffix("").parts} & SHAPELESS]
    assert not named


@EACH_PYTHON
def test_every_sleep_is_a_poll_under_a_deadline(path: Path) -> None:
    for function in functions(PYTHON[path]):
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
        names |= {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
        if "sleep" in names:
            where = f"{shown(path)}:{function.lineno}: {function.name}"
            # Where the command line follows something, the person at the terminal is the deadline.
            assert path.is_relative_to(ROOT / "vmsandbox" / "cli") or any(
                "deadline" in name.lower() for name in names
            ), f"{where} sleeps without a deadline"
            assert any(isinstance(node, ast.While | ast.For) for node in ast.walk(function)), (
                f"{where} sleeps once instead of polling"
            )


def test_no_ssh_key_is_accepted_blindly() -> None:
    blind = re.compile(
        r"StrictHostKeyChecking[ =]+(no|off|accept-new)|AutoAddPolicy|WarningPolicy", re.IGNORECASE
    )
    code = [path for path in TEXTS if path.suffix != ".md" and path != Path(__file__)]
    assert not [shown(path) for path in code if blind.search(TEXTS[path])]


def test_no_text_names_the_place_where_it_was_written() -> None:
    homes = [str(ROOT)] if len(ROOT.parts) > 2 else []
    if len(Path.home().parts) > 2:
        homes.append(str(Path.home()))
    named = [f"{shown(path)}: {home}" for path in TEXTS for home in homes if home in TEXTS[path]]
    assert not named
