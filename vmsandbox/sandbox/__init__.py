"""Owns sandboxes: what a user can do with them, from a request to the last freed byte.

`create` checks a request and makes the folder, `plan` decides the start, `start` and `life` carry
it out, `recording` writes it down, `forking` makes a sandbox of another one, `templates` knows what
guests can be cloned from and `freezing` makes it, `transfer` moves the worktree in and the change
set out, `status` says what is true, `access` steps into a guest, `checking` proves a result and
`proving` looks at one in a `scratch` guest, `background` starts what goes on without us, `ending`
stops, deletes and cleans up.
"""

from vmsandbox.sandbox.access import LogTail, exec_command, ssh_argv, ssh_config_text
from vmsandbox.sandbox.attaching import attach, await_report
from vmsandbox.sandbox.background import spawn_manager
from vmsandbox.sandbox.briefing import read_brief
from vmsandbox.sandbox.create import Request, agents_at, create_sandbox, propose, settings_here
from vmsandbox.sandbox.ending import (
    Cleaned,
    clean_up,
    delete_sandbox,
    has_undecided_result,
    remove_image,
    stop_sandbox,
)
from vmsandbox.sandbox.equipping import check_keys
from vmsandbox.sandbox.forking import fork_sandbox
from vmsandbox.sandbox.freezing import Warmed, warm
from vmsandbox.sandbox.life import Manager, keep_guest
from vmsandbox.sandbox.listening import Halt, Listener, Quiet
from vmsandbox.sandbox.proving import Inspected, inspect_sandbox, review_by, verify_sandbox
from vmsandbox.sandbox.publishing import published_ports
from vmsandbox.sandbox.report import Report
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.sandbox.scratch import Share
from vmsandbox.sandbox.status import Status, observe, observe_all
from vmsandbox.sandbox.templates import TemplateStatus, all_templates
from vmsandbox.sandbox.transfer import SyncReport, sync_worktree

__all__ = [
    "Cleaned",
    "Halt",
    "Inspected",
    "Listener",
    "LogTail",
    "Manager",
    "Quiet",
    "Report",
    "Request",
    "Rooms",
    "Share",
    "Status",
    "SyncReport",
    "TemplateStatus",
    "Warmed",
    "agents_at",
    "all_templates",
    "attach",
    "await_report",
    "check_keys",
    "clean_up",
    "create_sandbox",
    "delete_sandbox",
    "exec_command",
    "fork_sandbox",
    "has_undecided_result",
    "inspect_sandbox",
    "keep_guest",
    "observe",
    "observe_all",
    "propose",
    "published_ports",
    "read_brief",
    "remove_image",
    "review_by",
    "settings_here",
    "spawn_manager",
    "ssh_argv",
    "ssh_config_text",
    "stop_sandbox",
    "sync_worktree",
    "verify_sandbox",
    "warm",
]
