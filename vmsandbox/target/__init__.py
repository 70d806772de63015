"""Owns the folder of the user that a change set is written to: compare, write, delete.

No link is ever followed below the folder, no git runs in it, and nothing but the given steps is
touched. It knows no sandbox and no decision; whoever calls it keeps the ledger.
"""

from vmsandbox.target.check import Batch, Conflict, check
from vmsandbox.target.folder import TargetFolder
from vmsandbox.target.write import commit, discard, stage, staging_paths

__all__ = [
    "Batch",
    "Conflict",
    "TargetFolder",
    "check",
    "commit",
    "discard",
    "stage",
    "staging_paths",
]
