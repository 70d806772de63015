"""A stand-in for a guest: a real sshd on loopback with its own keys, running the real task script.

It is the host itself that answers, so tests use temporary folders, an unprivileged user and a
cgroup below the host's own.
"""

import contextlib
import grp
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.processes import MARK
from vmsandbox import seed
from vmsandbox.deadline import Deadline
from vmsandbox.guest import Guest, TaskSpec
from vmsandbox.model import Endpoint

SCRIPT = Path(__file__).parents[2] / "vmsandbox" / "guest_scripts" / "task"
NOBODY = pwd.getpwnam("nobody")
LOGIN = pwd.getpwuid(os.getuid()).pw_name


def cgroup_root() -> Path | None:
    """Where cgroup v2 is mounted, if we may make groups there."""
    for path in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (path / "cgroup.controllers").exists() and os.access(path, os.W_OK):
            return path
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class LoopbackGuest:
    """A running sshd and the keys that fit it."""

    endpoint: Endpoint
    client: seed.KeyPair
    host: seed.KeyPair
    folder: Path
    sshd: psutil.Process

    def guest(self, *, endpoint: Endpoint | None = None, key: str | None = None) -> Guest:
        return Guest(
            endpoint or self.endpoint,
            key=key or self.client.private,
            host_key=self.host.public,
            user=LOGIN,
            script=(str(SCRIPT),),
        )

    @property
    def worktree(self) -> Path:
        """A folder that the task's user may write."""
        path = self.folder / "worktree"
        if not path.exists():
            path.mkdir()
            path.chmod(0o777)
        return path

    def task(self, *command: str, task_id: str = "t1", **changes: object) -> TaskSpec:
        fields: dict[str, object] = {
            "id": task_id,
            "command": command,
            "folder": self.worktree,
            "user": NOBODY.pw_name,
            "group": grp.getgrgid(NOBODY.pw_gid).gr_name,
        }
        return TaskSpec.model_validate(fields | changes)

    def cut(self) -> None:
        """End all connections as a failing network would: the server's side is killed."""
        for child in self.sshd.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@contextlib.contextmanager
def loopback_guest(folder: Path) -> Iterator[LoopbackGuest]:
    client, host = seed.new_key(), seed.new_key()
    port = free_port()
    (folder / "host_key").write_text(host.private)
    (folder / "host_key").chmod(0o600)
    (folder / "authorized_keys").write_text(f"{client.public}\n")
    with _own_cgroup() as cgroup:
        config = _write_config(folder, port, cgroup or folder / "no-cgroups")
        _make_separation_folder()
        with _sshd(folder, config, port) as process:
            endpoint = Endpoint(address="127.0.0.1", port=port)
            yield LoopbackGuest(endpoint, client, host, folder, process)


def _write_config(folder: Path, port: int, cgroup: Path) -> Path:
    folder.chmod(0o755)
    environment = {
        "VMSANDBOX_TASKS": folder / "tasks",
        "VMSANDBOX_CAPTURES": folder / "captures",
        "VMSANDBOX_CGROUPS": cgroup,
        MARK: os.environ.get(MARK, ""),
        "SHLVL": "2",  # else bash under sshd reads ~/.bashrc, which may be anything here
    }
    config = folder / "sshd_config"
    config.write_text(
        f"ListenAddress 127.0.0.1:{port}\n"
        f"HostKey {folder}/host_key\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\n"
        f"SetEnv {' '.join(f'{name}={value}' for name, value in environment.items())}\n"
        "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\nMaxSessions 40\nMaxStartups 100\n"
    )
    return config


def _make_separation_folder() -> None:
    """sshd as root wants its empty folder, which a boot would have made; others may use it, too."""
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)


@contextlib.contextmanager
def _sshd(folder: Path, config: Path, port: int) -> Iterator[psutil.Process]:
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "openssh-server is missing"
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen([program, "-D", "-e", "-f", str(config)], stderr=log)
    try:
        _wait_listening(port, folder / "sshd.log")
        yield psutil.Process(process.pid)
    finally:
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.terminate()
        process.wait(10)


def _wait_listening(port: int, log: Path) -> None:
    deadline = Deadline(10)
    while not deadline.passed():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)
    raise AssertionError(log.read_text())


@contextlib.contextmanager
def _own_cgroup() -> Iterator[Path | None]:
    """A cgroup below which the tasks of one test module live, and die with it."""
    root = cgroup_root() if os.geteuid() == 0 else None
    if root is None:
        yield None
        return
    group = root / f"vmsandbox-test-{os.getpid()}-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        yield group
    finally:
        (group / "cgroup.kill").write_text("1")
        deadline = Deadline(10)
        while group.exists() and not deadline.passed():
            for folder in (*group.glob("*/"), group):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            time.sleep(0.01)
