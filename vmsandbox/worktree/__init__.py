"""Owns all that is done with git: a worktree's snapshot, what a guest is sent and sends back.

Knows no guest and no sandbox: streams come from and go to whoever calls. Nothing here runs git in a
folder that a guest wrote; a guest's objects are only read, from a store of our own.
"""

from vmsandbox.worktree.exhibit import exhibit
from vmsandbox.worktree.locate import WorktreeInfo, locate
from vmsandbox.worktree.quarantine import Quarantine, Result, ResultLimits, collect_result
from vmsandbox.worktree.results import MergeOutcome, ResultReader
from vmsandbox.worktree.snapshot import check_sendable, hold_back, snapshot
from vmsandbox.worktree.stores import store_of
from vmsandbox.worktree.transfer import (
    UpdateReport,
    base_stream,
    collect_command,
    parse_update,
    receive_command,
)

__all__ = [
    "MergeOutcome",
    "Quarantine",
    "Result",
    "ResultLimits",
    "ResultReader",
    "UpdateReport",
    "WorktreeInfo",
    "base_stream",
    "check_sendable",
    "collect_command",
    "collect_result",
    "exhibit",
    "hold_back",
    "locate",
    "parse_update",
    "receive_command",
    "snapshot",
    "store_of",
]
