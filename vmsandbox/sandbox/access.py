"""Owns stepping into a running guest: ssh, exec, ssh-config, and reading logs as they grow."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vmsandbox import guest as guest_room
from vmsandbox.errors import UsageProblem
from vmsandbox.model import SandboxRecord
from vmsandbox.sandbox.life import open_guest
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.store import SandboxFolder

_LOG_CHUNK = 1 << 20


def running_record(rooms: Rooms, folder: SandboxFolder) -> SandboxRecord:
    """The record of a sandbox whose guest runs; UsageProblem ``guest_not_running`` else."""
    record = folder.read_record()
    if rooms.guest_alive(record.domain_uuid) is False:
        raise UsageProblem(
            "guest_not_running",
            f"the guest of sandbox {record.id} does not run ({record.state.value})",
            hint="start a task with --keep to look into its guest afterwards",
            evidence=str(folder.console),
        )
    return record
