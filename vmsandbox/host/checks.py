"""Owns the doctor's questions: what about this host keeps guests from starting, or makes it slow.

Each check looks at one thing and answers for itself; nothing is changed here. libvirt's part of the
answers arrives as values.
"""

import contextlib
import os
import pwd
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from vmsandbox.deadline import Deadline
from vmsandbox.errors import VmsandboxError
from vmsandbox.host import accelerator, confinement, daemons, programs
from vmsandbox.host.accelerator import Verdict
from vmsandbox.model import Accelerator, LibvirtFacts, Value

FIX = "vmsandbox doctor --fix"
_GIB = 2**30
_SLOW_ANSWER_S = 2.0
_REAPED_WITHIN_S = 0.5
_REAPER_DEADLINE_S = 4.0
_STATE_ROOT_MAX_BYTES = 107 - len("/sandboxes/01234567/seed.sock")  # of a socket's address
TEMPLATES_ROOT_MAX_BYTES = 107 - len("/templates/.making-0123456789abcdef/seed.sock")
_QEMU_MINIMUM = (7, 0)


class Status(StrEnum):
    """`warn`: works, but slower or not everything; `fail`: guests cannot start."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(Value):
    """One answer. `hint` is the command or step that helps."""

    name: str
    status: Status
    detail: str
    hint: str | None = None


@dataclass(frozen=True)
class Subject:
    """What is examined, as far as others had to be asked."""

    uri: str
    state_root: Path
    libvirt: LibvirtFacts | None
    libvirt_problem: VmsandboxError | None
    verdict: Verdict | None

    @property
    def qemu_uid(self) -> int:
        return self.libvirt.qemu_uid if self.libvirt else os.geteuid()

    @property
    def qemu_groups(self) -> frozenset[int]:
        if self.libvirt is None:
            return frozenset(os.getgroups())
        return frozenset(accelerator.groups_of(self.libvirt.qemu_uid, self.libvirt.qemu_gid))


def examine(subject: Subject) -> list[Check]:
    """Ask everything; takes up to some seconds."""
    return [
        _programs(),
        _image_programs(),
        _git(),
        _reaper(subject),
        _runtime_folder(subject),
        _libvirt(subject),
        _virtlogd(subject),
        _qemu(subject),
        _capabilities(subject),
        _security(subject),
        _device(subject),
        _accelerator(subject),
        _state_path(subject),
        _disk(subject),
        _memory(),
    ]


def _ok(name: str, detail: str) -> Check:
    return Check(name=name, status=Status.OK, detail=detail)


def _warn(name: str, detail: str, hint: str | None = None) -> Check:
    return Check(name=name, status=Status.WARN, detail=detail, hint=hint)


def _fail(name: str, detail: str, hint: str | None = None) -> Check:
    return Check(name=name, status=Status.FAIL, detail=detail, hint=hint)


# --- programs -------------------------------------------------------------------------------------


def _names(missing: Iterable[programs.Program]) -> str:
    return ", ".join(" or ".join(program.names) for program in missing)


def _programs() -> Check:
    missing = programs.missing("run")
    if not daemons.systemd_runs() and not daemons.init_is_known_to_reap():
        missing += programs.missing("init")
    if missing:
        hint = programs.install_hint(missing, programs.distribution())
        return _fail("programs", f"missing: {_names(missing)}", hint)
    return _ok("programs", "all that guests need is installed")


def _image_programs() -> Check:
    missing = [
        program
        for program in programs.missing("build")
        if os.geteuid() != 0 or program.names != ("newuidmap",)
    ]
    if missing:
        hint = programs.install_hint(missing, programs.distribution())
        detail = f"missing: {_names(missing)}; images can be imported, but not built"
        return _warn("image building", detail, hint)
    return _ok("image building", "all that it needs is installed")


def _git() -> Check:
    found, needed = programs.git_version(), ".".join(map(str, programs.GIT_MINIMUM))
    if found is None:
        return _fail("git", f"not found; {needed} or newer is needed")
    version = ".".join(map(str, found))
    if found < programs.GIT_MINIMUM:
        return _fail("git", f"{version} is too old; {needed} or newer is needed")
    return _ok("git", version)


# --- processes ------------------------------------------------------------------------------------


def _reaper(subject: Subject) -> Check:
    """Orphans that nobody reaps make libvirt wait 15 s for each QEMU it ends."""
    name = Path("/proc/1/comm").read_text().strip()
    if daemons.init_is_known_to_reap():
        return _ok("reaper", f"PID 1 ({name}) reaps orphans")
    if daemons.started_by_us(subject.uri):
        return _ok("reaper", f"libvirt runs under tini, not under PID 1 ({name})")
    waited_s = _orphan_stays_s()
    if waited_s <= _REAPED_WITHIN_S:
        return _ok("reaper", f"PID 1 ({name}) reaps orphans")
    how = "never" if waited_s >= _REAPER_DEADLINE_S else f"only after {waited_s:.1f} s"
    detail = f"PID 1 ({name}) reaps orphans {how}: ending a guest takes long"
    return _warn("reaper", detail, "end libvirtd, then: vmsandbox doctor --fix")


def _orphan_stays_s() -> float:
    """How long an orphan that has ended stays a zombie, at most _REAPER_DEADLINE_S."""
    argv = ["/bin/sh", "-c", "sleep 0.05 >/dev/null & echo $!"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    orphan, deadline = Path("/proc", said.strip()), Deadline(_REAPER_DEADLINE_S)
    while orphan.exists() and not deadline.passed():
        time.sleep(0.01)
    return deadline.elapsed()


def _runtime_folder(subject: Subject) -> Check:
    name = "runtime folder"
    if subject.uri != daemons.SESSION_URI:
        return _ok(name, "/run, as the system's libvirt has it")
    folder = daemons.session_runtime_dir()
    if "XDG_RUNTIME_DIR" in os.environ:
        return _ok(name, str(folder))
    detail = f"no XDG_RUNTIME_DIR (no login session): libvirt's sockets are in {folder}"
    if not daemons.systemd_runs():
        return _ok(name, detail)
    hint = f"sudo loginctl enable-linger {_user_name(os.geteuid())}    (then log in again)"
    return _warn(name, f"{detail}; a login session has another libvirt", hint)


# --- libvirt and QEMU -----------------------------------------------------------------------------


def _libvirt(subject: Subject) -> Check:
    if subject.libvirt is not None:
        return _ok("libvirt", f"{subject.libvirt.libvirt_version} answers at {subject.uri}")
    problem = subject.libvirt_problem
    said = problem.message if problem else "not asked"
    return _fail("libvirt", said, (problem and problem.hint) or FIX)


def _virtlogd(subject: Subject) -> Check:
    """It keeps the guests' consoles bounded, and domains do not start without it."""
    if subject.uri != daemons.SYSTEM_URI:
        return _ok("virtlogd", "started by the session's libvirtd when needed")
    if daemons.answers(Path("/run/libvirt/virtlogd-sock")):
        return _ok("virtlogd", "answers")
    return _fail("virtlogd", "does not answer: no guest could start", FIX)


def _qemu(subject: Subject) -> Check:
    if subject.libvirt is None:
        return _warn("qemu", "unknown while libvirt does not answer")
    version = subject.libvirt.qemu_version
    detail = f"{version} ({subject.libvirt.qemu_binary}, {subject.libvirt.machine})"
    if tuple(map(int, version.split(".")[:2])) < _QEMU_MINIMUM:
        needed = ".".join(map(str, _QEMU_MINIMUM))
        return _fail("qemu", f"{detail} is too old; {needed} or newer is needed")
    return _ok("qemu", detail)


def _capabilities(subject: Subject) -> Check:
    """libvirt keeps what it knows of QEMU, but drops it while /dev/kvm and QEMU's user disagree."""
    name = "capabilities"
    if subject.libvirt is None:
        return _warn(name, "unknown while libvirt does not answer")
    took = f"libvirt answered about QEMU in {subject.libvirt.answered_in_s:.2f} s"
    if subject.libvirt.answered_in_s < _SLOW_ANSWER_S:
        return _ok(name, took)
    detail = f"{took}: it asks QEMU again at every start, mostly because of /dev/kvm's mode"
    return _warn(name, detail, f"{FIX}    (normal right after libvirt was started)")


def _security(subject: Subject) -> Check:
    models = subject.libvirt.security_models if subject.libvirt else ()
    confining = [model for model in models if model in ("apparmor", "selinux")]
    if "apparmor" in confining and not confinement.admits(subject.state_root):
        detail = "AppArmor does not know of templates: all starts will be cold"
        return _warn("confinement", detail, f"sudo {FIX}" if os.geteuid() else FIX)
    if confining:
        return _ok("confinement", f"QEMU is confined by {' and '.join(confining)}")
    return _ok("confinement", "no AppArmor or SELinux; QEMU's own seccomp filter and user remain")


# --- acceleration ---------------------------------------------------------------------------------


def _device(subject: Subject) -> Check:
    """Whether QEMU's user may open /dev/kvm."""
    name = str(accelerator.DEVICE)
    if not accelerator.DEVICE.exists():
        return _warn(
            name, "does not exist: guests are emulated", "enable virtualisation, or nest it"
        )
    found = accelerator.DEVICE.stat()
    shown = f"{stat.filemode(found.st_mode)} {found.st_uid}:{found.st_gid}"
    own = subject.qemu_uid == os.geteuid()
    allowed = (
        os.access(name, os.R_OK | os.W_OK)
        if own
        else permits(found, subject.qemu_uid, subject.qemu_groups, 0o6)
    )
    if allowed:
        return _ok(name, shown)
    user = _user_name(subject.qemu_uid)
    hint = f"sudo usermod --append --groups kvm {user}    (then log in again)" if own else FIX
    return _warn(name, f"{shown}: {user}, as whom QEMU runs, may not open it", hint)


def _user_name(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def _accelerator(subject: Subject) -> Check:
    if subject.verdict is None:
        return _warn(
            "accelerator",
            "not probed: needs libvirt and a kernel to boot",
            "vmsandbox image build debian-12",
        )
    if subject.verdict.accelerator is Accelerator.KVM:
        return _ok("accelerator", f"kvm: {subject.verdict.reason}")
    return _warn("accelerator", f"guests are emulated (tcg), slower: {subject.verdict.reason}")


# --- space ----------------------------------------------------------------------------------------


def _state_path(subject: Subject) -> Check:
    """QEMU must get through to the state folder, and a socket's name in it must fit."""
    root = subject.state_root
    if len(os.fsencode(root)) > _STATE_ROOT_MAX_BYTES:
        detail = f"{root} is too long for sockets below it (at most {_STATE_ROOT_MAX_BYTES} bytes)"
        return _fail("state folder", detail, "set VMSANDBOX_HOME to a shorter path")
    existing = _existing(root)
    if not os.access(existing, os.W_OK | os.X_OK):
        return _fail("state folder", f"{existing} is not writable", "set VMSANDBOX_HOME")
    if subject.qemu_uid != os.geteuid():
        for folder in _upwards(existing):
            if not permits(folder.stat(), subject.qemu_uid, subject.qemu_groups, 0o1):
                user = _user_name(subject.qemu_uid)
                detail = f"{user}, as whom QEMU runs, cannot get through {folder} to {root}"
                hint = f"chmod o+x {folder}    (or set VMSANDBOX_HOME elsewhere)"
                return _fail("state folder", detail, hint)
    if len(os.fsencode(root)) > TEMPLATES_ROOT_MAX_BYTES:
        detail = f"{root} is too long to make templates below it: all starts will be cold"
        return _warn("state folder", detail, "set VMSANDBOX_HOME to a shorter path")
    return _ok("state folder", str(root))


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _upwards(path: Path) -> Iterator[Path]:
    """From the root down to `path`, as the kernel walks."""
    real = path.resolve()
    yield from reversed((real, *real.parents))


def permits(found: os.stat_result, uid: int, groups: Iterable[int], wanted: int) -> bool:
    """Whether mode bits give `wanted` (octal rwx) to a user who is not us; ACLs are not seen."""
    if uid == 0:
        return True
    shift = 6 if found.st_uid == uid else 3 if found.st_gid in set(groups) else 0
    return (found.st_mode >> shift) & wanted == wanted


def _disk(subject: Subject) -> Check:
    folder = _existing(subject.state_root)
    free = psutil.disk_usage(str(folder)).free
    detail = f"{free / _GIB:.1f} GiB free at {folder}"
    if free < _GIB:
        return _fail("disk", detail, "vmsandbox cleanup")
    if free < 5 * _GIB:
        return _warn("disk", f"{detail}; an image and its guests want 5", "vmsandbox cleanup")
    return _ok("disk", detail)


def _memory() -> Check:
    free = psutil.virtual_memory().available
    detail = f"{free / _GIB:.1f} GiB available"
    if free < _GIB // 2:
        return _fail("memory", f"{detail}; one guest wants 0.5", "vmsandbox status")
    if free < 2 * _GIB:
        return _warn("memory", f"{detail}; enough for a guest or two")
    return _ok("memory", detail)
