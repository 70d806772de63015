"""Owns libvirt's daemons where nothing else starts them: starts them, finds them, ends its own.

Knows unix sockets and processes, but no libvirt API and no domain.

With systemd the daemons are systemd's. Without it (containers, build machines) they are started
here, each under ``tini -s``: QEMU is a grandchild of libvirtd that libvirt expects init to reap,
and waits 15 s for each one that stays a zombie. A small shell loop below tini brings a killed
daemon back while tini, to which the running guests belong, stays.
"""

import contextlib
import fcntl
import os
import pwd
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from vmsandbox.deadline import Deadline
from vmsandbox.errors import HostProblem
from vmsandbox.host import programs
from vmsandbox.model import Value

SYSTEM_URI = "qemu:///system"
SESSION_URI = "qemu:///session"

_START_DEADLINE_S = 30.0
_STOP_DEADLINE_S = 20.0
_POLL_S = 0.02
_REAPERS = frozenset(
    {
        "systemd",
        "init",
        "tini",
        "tini-static",
        "docker-init",
        "dumb-init",
        "catatonit",
        "s6-svscan",
        "runit",
        "openrc-init",
    }
)
_LIBVIRT_VARIABLES = ("HOME", "LANG", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
# Brings back a daemon that was killed and gives up on one that cannot start: ten short lives.
# A clean end is an end. Each guest costs the daemons a few descriptors: they get what there is.
_KEEP_RUNNING = """
ulimit -n "$(ulimit -H -n)"
trap 'exit 0' TERM
lives=10
while began=$(date +%s); ! "$@"; do
  [ "$(($(date +%s) - began))" -gt 5 ] && lives=10
  lives=$((lives - 1)) && [ "$lives" -gt 0 ] || exit 1
  sleep 0.5
done
"""


class Daemon(Value):
    """One libvirt daemon: how it is started and where it answers."""

    name: str
    argv: tuple[str, ...]
    socket: Path


class StartedDaemon(Value):
    """What we started, so that exactly this can be ended: a pid alone could be somebody else's."""

    name: str
    pid: int
    started_ticks: int
    argv: tuple[str, ...]
    log: Path


def default_uri() -> str:
    """The libvirt that a user of this kind owns."""
    return SYSTEM_URI if os.geteuid() == 0 else SESSION_URI


def systemd_runs() -> bool:
    """As sd_booted(3) decides it."""
    return Path("/run/systemd/system").is_dir()


def init_is_known_to_reap() -> bool:
    """Whether PID 1 is a program made to reap orphans, by its name; doctor measures it."""
    with contextlib.suppress(OSError):
        return Path("/proc/1/comm").read_text().strip() in _REAPERS
    return False


def session_runtime_dir() -> Path:
    """Where this user's libvirtd has its sockets, as GLib and so libvirt decide it.

    Without a login session there may be no XDG_RUNTIME_DIR; then it is the cache folder.
    """
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def prepare(uri: str) -> None:
    """Make sure that connecting to `uri` can work; call it once before connecting.

    Only the session daemon is ever started here, and only where libvirt's own way of starting it
    would leave QEMU to an init that does not reap. The system's daemons are for `doctor --fix`.
    """
    if uri != SESSION_URI:
        return
    _adopt_runtime_dir()
    if not init_is_known_to_reap():
        os.environ["LIBVIRT_AUTOSTART"] = "0"  # libvirt would start one without tini
        start(uri)


def _adopt_runtime_dir() -> None:
    """One user, one libvirtd: use the login session's folder also from cron, su or sudo."""
    folder = Path(f"/run/user/{os.geteuid()}")
    if "XDG_RUNTIME_DIR" not in os.environ and folder.is_dir():
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.geteuid():
                os.environ["XDG_RUNTIME_DIR"] = str(folder)


def daemons(uri: str) -> tuple[Daemon, ...]:
    """The daemons that `uri` needs, in the order of their start.

    A session's virtlogd is started by its libvirtd. Raises HostProblem ``libvirt_missing``.
    """
    if uri == SYSTEM_URI:
        run = Path("/run/libvirt")
        logd = Daemon(name="virtlogd", argv=(_daemon("virtlogd"),), socket=run / "virtlogd-sock")
        return (logd, _driver(run, ()))
    return (_driver(session_runtime_dir() / "libvirt", ("--timeout=120",)),)


def _driver(run: Path, arguments: tuple[str, ...]) -> Daemon:
    for name, file in (("libvirtd", "libvirt-sock"), ("virtqemud", "virtqemud-sock")):
        if path := programs.find(name):
            return Daemon(name=name, argv=(path, *arguments), socket=run / file)
    raise _missing("libvirtd")


def _daemon(name: str) -> str:
    path = programs.find(name)
    if path is None:
        raise _missing(name)
    return path


def _missing(name: str) -> HostProblem:
    return HostProblem(
        "libvirt_missing",
        f"{name} is not installed",
        hint="vmsandbox doctor    (names the package)",
    )


def answers(path: Path) -> bool:
    """Whether a daemon accepts connections on this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def start(uri: str) -> list[str]:
    """Start what `uri` needs and does not answer; returns the names of what was started.

    Idempotent, and safe to call from several processes at once. Raises HostProblem
    ``libvirt_missing``, ``tini_missing`` or ``daemon_failed``.
    """
    wanted = daemons(uri)
    if all(answers(daemon.socket) for daemon in wanted):
        return []
    if uri == SYSTEM_URI and systemd_runs():
        return _start_by_systemd(wanted)
    folder = _records(uri)
    with _locked(folder / "daemons.lock"):
        return [d.name for d in wanted if not answers(d.socket) and _start(d, folder)]


def _start_by_systemd(wanted: tuple[Daemon, ...]) -> list[str]:
    units = [f"{d.name}.service" if d.name == "libvirtd" else f"{d.name}.socket" for d in wanted]
    done = subprocess.run(
        ["systemctl", "enable", "--now", *units], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise HostProblem(
            "daemon_failed",
            f"systemctl could not start {' '.join(units)}: {done.stderr.strip()}",
            hint=f"journalctl -u {units[-1]}",
        )
    return [daemon.name for daemon in wanted]


def _records(uri: str) -> Path:
    """Where pids and logs of what we started are: gone with the next boot, as the processes are."""
    base = Path("/run") if uri == SYSTEM_URI else session_runtime_dir()
    folder = base / "vmsandbox"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start(daemon: Daemon, folder: Path) -> bool:
    tini = programs.find("tini")
    if tini is None:
        raise HostProblem(
            "tini_missing",
            f"{daemon.name} needs tini here: no systemd, and PID 1 does not reap orphans",
            hint="apt-get install tini    (dnf, pacman, zypper: the same name)",
        )
    argv = (tini, "-s", "-g", "--", "/bin/sh", "-c", _KEEP_RUNNING, "keep", *daemon.argv)
    log = folder / f"{daemon.name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=_environment(),
            start_new_session=True,
        )
    started = StartedDaemon(
        name=daemon.name,
        pid=process.pid,
        started_ticks=_started_ticks(process.pid) or 0,
        argv=daemon.argv,
        log=log,
    )
    (folder / f"{daemon.name}.json").write_text(started.model_dump_json() + "\n")
    _wait_answers(daemon, process, log)
    return True


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _LIBVIRT_VARIABLES if name in os.environ}
    kept.setdefault("HOME", pwd.getpwuid(os.geteuid()).pw_dir)
    return kept | {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def _wait_answers(daemon: Daemon, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = Deadline(_START_DEADLINE_S)
    while not answers(daemon.socket):
        if process.poll() is not None or deadline.passed():
            said = _last_line(log)
            process.terminate()
            process.wait()
            raise HostProblem(
                "daemon_failed",
                f"{daemon.name} does not answer on {daemon.socket}: {said}",
                hint=f"{' '.join(daemon.argv)}    (to see why)",
                evidence=str(log),
            )
        time.sleep(_POLL_S)


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-4096:].decode("utf-8", "replace").splitlines()
    return lines[-1] if lines else "it said nothing"


def started_by_us(uri: str) -> list[StartedDaemon]:
    """The daemons of ours that live now."""
    found = []
    for path in sorted(_records(uri).glob("*.json")):
        with contextlib.suppress(ValidationError, OSError):
            found.append(StartedDaemon.model_validate_json(path.read_bytes()))
    return [daemon for daemon in found if _lives(daemon)]


def _lives(daemon: StartedDaemon) -> bool:
    return _started_ticks(daemon.pid) == daemon.started_ticks


def _started_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone or a zombie.

    Field 22 of proc(5) stat, which unlike a date does not move when the clock is set.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def stop(uri: str) -> list[str]:
    """End exactly what :func:`start` started; returns their names. Running guests go on.

    Raises HostProblem ``daemon_stays`` if one does not end within 20 s.
    """
    folder = _records(uri)
    with _locked(folder / "daemons.lock"):
        ours = sorted(started_by_us(uri), key=lambda daemon: daemon.name == "virtlogd")
        for daemon in ours:
            _stop(daemon)
            (folder / f"{daemon.name}.json").unlink(missing_ok=True)
    return [daemon.name for daemon in ours]


def _stop(daemon: StartedDaemon) -> None:
    _signal(daemon.pid, signal.SIGTERM)
    deadline = Deadline(_STOP_DEADLINE_S)
    while _lives(daemon):
        if deadline.passed():
            raise HostProblem(
                "daemon_stays",
                f"{daemon.name} (pid {daemon.pid}) does not end",
                evidence=str(daemon.log),
            )
        time.sleep(_POLL_S)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
