"""Owns change sets on their way to the host: inspect, present, show, approve, apply, drop.

The only writer of a sandbox's change set, result record and ledger. It never needs a guest, and
what it writes to is only ever the folder it is told to. Without a decision nothing is applied.
"""

from vmsandbox.review.applying import (
    Applied,
    ApplyConflict,
    apply,
    chosen_paths,
    conflicts,
    unapproved,
)
from vmsandbox.review.checks import record_run, unproven
from vmsandbox.review.comparing import Comparison, compare
from vmsandbox.review.crossing import Hindrance, Matrix, Meeting, Standing, matrix
from vmsandbox.review.decisions import (
    approve,
    decider,
    drop,
    short,
    task_runs,
)
from vmsandbox.review.inspection import ResultStore, inspect_result
from vmsandbox.review.opinions import attach, disagreements, opinions, parse_findings
from vmsandbox.review.record import Ledger, abandon, latest, present, read
from vmsandbox.review.show import Review, show
from vmsandbox.review.told import Told, told
from vmsandbox.review.waiting import Queue, Waiting, is_undecided, waiting
from vmsandbox.selection import Selection
from vmsandbox.target import Conflict

__all__ = [
    "Applied",
    "ApplyConflict",
    "Comparison",
    "Conflict",
    "Hindrance",
    "Ledger",
    "Matrix",
    "Meeting",
    "Queue",
    "ResultStore",
    "Review",
    "Selection",
    "Standing",
    "Told",
    "Waiting",
    "abandon",
    "apply",
    "approve",
    "attach",
    "chosen_paths",
    "compare",
    "conflicts",
    "decider",
    "disagreements",
    "drop",
    "inspect_result",
    "is_undecided",
    "latest",
    "matrix",
    "opinions",
    "parse_findings",
    "present",
    "read",
    "record_run",
    "short",
    "show",
    "task_runs",
    "told",
    "unapproved",
    "unproven",
    "waiting",
]
