"""The project's own sources, read and parsed once per process; for the tests that judge them.

Tests that use this belong to the xdist group ``sources``: one process does it for all of them.
"""

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vmsandbox"
_NOT_OURS = frozenset({".git", ".venv", ".hypothesis", "__pycache__", "build", "dist", "LICENSE"})
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


def project_files(*folders: str) -> Iterator[Path]:
    """What somebody wrote below these folders of the project."""
    for folder in folders:
        for base, names, files in os.walk(ROOT / folder):
            names[:] = [n for n in sorted(names) if n not in _NOT_OURS and not n.endswith("_cache")]
            yield from (Path(base, name) for name in sorted(files) if name not in _NOT_OURS)


@cache
def python() -> Mapping[Path, ast.Module]:
    """Every Python file of the project, parsed."""
    return {
        path: ast.parse(path.read_bytes(), filename=str(path))
        for path in project_files("vmsandbox", "tests", "benchmarks", "demo")
        if path.suffix == ".py"
    }


@cache
def statements(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All statements of a file, wherever they are; no expression holds one."""
    return tuple(_statements(tree))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for block in _BLOCKS:
        for inner in getattr(node, block, ()):
            yield inner
            yield from _statements(inner)


def none(found: Iterable[str]) -> None:
    """There must be nothing; all that there is is told."""
    told = "\n".join(found)
    assert not told, told
