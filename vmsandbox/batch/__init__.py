"""Owns batches: many tasks within what this host can carry.

`taskfile` and `plan` turn files into tasks, `admission` decides what fits, `budget` shares it
between batches, `record` keeps what came of each task, `making`, `worker` and `conducting` carry
them out, `report` tells. Knows guests only through sandboxes.
"""

from vmsandbox.batch.carrying import Carried, begin_batch, resume_batch, run_batch
from vmsandbox.batch.plan import Plan, plan_files, plan_ids
from vmsandbox.batch.record import clean_up
from vmsandbox.batch.report import BatchReport, TaskReport, Unwatched, Watcher
from vmsandbox.batch.taskfile import Planned, schema

__all__ = [
    "BatchReport",
    "Carried",
    "Plan",
    "Planned",
    "TaskReport",
    "Unwatched",
    "Watcher",
    "begin_batch",
    "clean_up",
    "plan_files",
    "plan_ids",
    "resume_batch",
    "run_batch",
    "schema",
]
