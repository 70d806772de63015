"""Tells which processes a test session left behind.

Processes that tests start inherit a mark in their environment. libvirt's daemons and QEMU get clean
environments; they are known by the state folder in their command line, or as a daemon that `doctor`
says it started.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

MARK = "VMSANDBOX_TEST_SESSION"


def _is_marked(process: psutil.Process, session: str) -> bool:
    try:
        return process.environ().get(MARK) == session
    except (psutil.Error, OSError):
        return False


def _names_folder(process: psutil.Process, folders: Iterable[Path]) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(str(folder) in words for folder in folders)


def left_behind(session: str, folders: Iterable[Path]) -> list[psutil.Process]:
    """Living processes of this session other than our own ancestors, `folders`: its state."""
    known = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [
        process
        for process in psutil.process_iter()
        if process.pid not in known
        and _alive(process)
        and (_is_marked(process, session) or _names_folder(process, folders))
    ]


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def own_listeners() -> list[str]:
    """Loopback ports that this very process still listens on."""
    return [
        f"{connection.laddr.ip}:{connection.laddr.port}"
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)
