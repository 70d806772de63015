"""What programs import from the top is there, and type checkers are told the same."""

import ast
from pathlib import Path

import vmsandbox


def test_the_stub_names_what_there_is() -> None:
    stub = ast.parse(Path(vmsandbox.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    told = {alias.asname: node.module for node in imports for alias in node.names}
    assert told == vars(vmsandbox)["_API"]
    assert all(callable(getattr(vmsandbox, str(name))) for name in told)
