"""An ordinary user for the tests of the rootless path.

Root makes one (with home and subordinate ids) and removes it afterwards; anybody else is one.
"""

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
NAME = "vmsandbox-test"
_DAEMONS = frozenset({"tini", "sh", "libvirtd", "virtqemud", "virtlogd"})
_DEVELOPMENT_ONLY = ("mypy*", "ruff*", "_pytest", "pytest*", "hypothesis*", "pip*", "types_*")


@dataclass(frozen=True)
class Person:
    """Somebody who runs commands with an environment of their own."""

    name: str
    uid: int
    gid: int
    home: Path
    program: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        path = f"{Path(self.program[0]).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        found = {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name, "PATH": path}
        found["LANG"] = "C.UTF-8"
        found["XDG_RUNTIME_DIR"] = str(self.home / "run")
        if len(self.program) > 1:
            found["PYTHONPATH"] = str(self.home / "lib")
        return found

    def as_them(self, argv: Sequence[str]) -> list[str]:
        """`argv`, run with their ids instead of ours."""
        if os.geteuid() == self.uid:
            return list(argv)
        ids = (f"--reuid={self.uid}", f"--regid={self.gid}", "--init-groups")
        return ["setpriv", *ids, "--", *argv]

    def run(self, argv: Sequence[str], **more: str) -> "subprocess.CompletedProcess[str]":
        """Run a command as this person; `more` is added to its environment."""
        return subprocess.run(
            self.as_them(argv),
            cwd=self.home,
            env=self.environment() | more,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )


@contextlib.contextmanager
def ordinary_person() -> Iterator[Person]:
    """A person who is not root, and nothing of theirs afterwards."""
    home = Path(tempfile.mkdtemp(prefix="vms-home-"))
    try:
        with _account(home) as (name, uid, gid):
            person = Person(name, uid, gid, home, (str(ROOT / ".venv/bin/vmsandbox"),))
            _own(home, person)
            if not _reachable(person):
                person = Person(name, uid, gid, home, _copied_program(home))
                _own(home, person)
            yield person
            _end_processes(person)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def _account(home: Path) -> Iterator[tuple[str, int, int]]:
    if os.geteuid() != 0:
        own = pwd.getpwuid(os.geteuid())
        yield own.pw_name, own.pw_uid, own.pw_gid
        return
    _remove_account()  # of a session that was killed
    command = ["useradd", "--no-create-home", "--home-dir", str(home), "--shell", "/bin/sh", NAME]
    subprocess.run(command, check=True, capture_output=True)
    try:
        made = pwd.getpwnam(NAME)
        yield NAME, made.pw_uid, made.pw_gid
    finally:
        _remove_account()


def _remove_account() -> None:
    subprocess.run(["userdel", "--force", NAME], check=False, capture_output=True)


def _own(home: Path, person: Person) -> None:
    (home / "run").mkdir(mode=0o700, exist_ok=True)
    for path in [home, *home.rglob("*")]:
        os.chown(path, person.uid, person.gid, follow_symlinks=False)


def _reachable(person: Person) -> bool:
    return person.run([*person.program, "--version"]).returncode == 0


def _copied_program(home: Path) -> tuple[str, ...]:
    """The clone may lie where only root gets through: then run a copy of it."""
    packages = Path(psutil.__file__).parents[1]
    ignore = shutil.ignore_patterns("__pycache__", *_DEVELOPMENT_ONLY)
    shutil.copytree(packages, home / "lib", ignore=ignore)
    for folder in ("vmsandbox", "images"):
        shutil.copytree(ROOT / folder, home / "lib" / folder, ignore=ignore)
    return (str(Path(sys.executable).resolve()), "-P", "-m", "vmsandbox")


def _end_processes(person: Person) -> None:
    """End the daemons of their libvirt; anything else of theirs that still runs is a leak."""
    if os.geteuid() == person.uid:
        return
    theirs = [p for p in psutil.process_iter(["uids", "name", "status"]) if _belongs(p, person)]
    leaked = [p.info["name"] for p in theirs if p.info["name"] not in _DAEMONS]
    for process in theirs:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(theirs, timeout=20)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not leaked, f"left running by {person.name}: {leaked}"


def _belongs(process: psutil.Process, person: Person) -> bool:
    uids = process.info["uids"]
    return bool(uids and uids.real == person.uid and process.info["status"] != "zombie")
