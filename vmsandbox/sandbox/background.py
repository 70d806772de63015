"""Owns the processes of ours that go on for a sandbox without whoever started them: a manager, or a
keeper of its ports. Knows nothing of what they do.
"""

import os
import subprocess
import sys
import time

from vmsandbox.deadline import Deadline
from vmsandbox.store import SandboxFolder, is_locked

_MANAGES_WITHIN_S = 60.0
_POLL_S = 0.05


def spawn_manager(folder: SandboxFolder) -> None:
    """Let a process of its own carry the sandbox out.

    Returns once it holds the manager's lock, or has ended already.
    """
    process = _spawn(folder, "_manage")
    deadline = Deadline(_MANAGES_WITHIN_S)
    while not is_locked(folder.manager_lock) and process.poll() is None and not deadline.passed():
        time.sleep(_POLL_S)


def spawn_keeper(folder: SandboxFolder) -> None:
    """Let a process of its own publish the ports of a guest that runs on without a manager."""
    _spawn(folder, "_publish")


def _spawn(folder: SandboxFolder, verb: str) -> "subprocess.Popen[bytes]":
    """A hidden verb of the program in a session of its own; what it says goes to the log."""
    with folder.manager_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "vmsandbox", verb, folder.id],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "VMSANDBOX_HOME": str(folder.path.parent.parent)},
            start_new_session=True,
        )
