"""Owns batches: many tasks within what this host can carry.

`taskfile` and `plan` turn files into tasks, `admission` decides what fits, `budget` shares it
between batches and `beside` with guests that belong to none, `record` keeps what came of each task,
`making`, `worker` and `conducting` carry them out, `report` tells. Knows guests only through
sandboxes.
"""

from vmsandbox.batch.beside import share_of
from vmsandbox.batch.carrying import (
    Carried,
    beginning,
    discard_batch,
    resume_batch,
    resuming,
    run_batch,
)
from vmsandbox.batch.plan import Plan, granted, plan_files, plan_ids
from vmsandbox.batch.record import Discarded, clean_up
from vmsandbox.batch.report import BatchReport, TaskReport, Unwatched, Watcher
from vmsandbox.batch.taskfile import Grants, Planned, schema

__all__ = [
    "BatchReport",
    "Carried",
    "Discarded",
    "Grants",
    "Plan",
    "Planned",
    "TaskReport",
    "Unwatched",
    "Watcher",
    "beginning",
    "clean_up",
    "discard_batch",
    "granted",
    "plan_files",
    "plan_ids",
    "resume_batch",
    "resuming",
    "run_batch",
    "schema",
    "share_of",
]
