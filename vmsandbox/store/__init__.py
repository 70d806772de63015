"""Owns every path and file name of the state folder, its locks, atomic records and events.

Knows no libvirt, no guest and no git; it stores what others decide. docs/layout.md lists every
file named here: `state` the folder and what is shared, `folder` one sandbox; `writing` and `locks`
say how files are written and held.
"""

from vmsandbox.store.folder import SandboxFolder, allocated_bytes
from vmsandbox.store.locks import is_locked, locked
from vmsandbox.store.state import SSH_PORT, Store, can_listen, state_root, user_config
from vmsandbox.store.writing import host_problem, read_value, write_atomic, write_value

__all__ = [
    "SSH_PORT",
    "SandboxFolder",
    "Store",
    "allocated_bytes",
    "can_listen",
    "host_problem",
    "is_locked",
    "locked",
    "read_value",
    "state_root",
    "user_config",
    "write_atomic",
    "write_value",
]
