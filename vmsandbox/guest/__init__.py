"""Owns the way into a guest: SSH with pinned keys, readiness, commands, the detached task, the
terminal. The one owner of paramiko and tenacity.

Knows no domain, no image, no state folder and no git. Nothing that a guest sends is believed before
it is checked, and none of its bytes meet a terminal here unless a person asked for a terminal.
"""

from vmsandbox.deadline import Deadline
from vmsandbox.guest.capture import Capture
from vmsandbox.guest.channel import Completed, Stream
from vmsandbox.guest.connection import Interrupted
from vmsandbox.guest.incoming import Forward, GuestStream
from vmsandbox.guest.openssh import known_hosts_line, ssh_argv, ssh_config
from vmsandbox.guest.ready import Requirement, wait_ready
from vmsandbox.guest.session import Guest, check_task
from vmsandbox.guest.task import TaskSpec, on_screen
from vmsandbox.guest.terminal import DETACH_KEYS, Terminal, detach_bytes

__all__ = [
    "DETACH_KEYS",
    "Capture",
    "Completed",
    "Deadline",
    "Forward",
    "Guest",
    "GuestStream",
    "Interrupted",
    "Requirement",
    "Stream",
    "TaskSpec",
    "Terminal",
    "check_task",
    "detach_bytes",
    "known_hosts_line",
    "on_screen",
    "ssh_argv",
    "ssh_config",
    "wait_ready",
]
