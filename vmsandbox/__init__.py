"""One VM per coding agent: a git worktree goes in, one reviewed change set comes out."""

import importlib
from typing import Any

__version__ = "0.1.0"

_API = {
    "run_batch": "vmsandbox.batch",
    "resume_batch": "vmsandbox.batch",
    "discard_batch": "vmsandbox.batch",
    "read_brief": "vmsandbox.sandbox",
    "verify": "vmsandbox.api",
    "inspect": "vmsandbox.api",
    "review_by": "vmsandbox.api",
    "waiting": "vmsandbox.api",
    "compare": "vmsandbox.api",
    "conflicts": "vmsandbox.api",
    "fork": "vmsandbox.api",
    "published_ports": "vmsandbox.api",
}
"""What programs import from here; read when it is first asked for, so that the command line is
quick. The stub beside this file says the same to type checkers."""


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module(_API[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
