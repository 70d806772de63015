"""Owns the question whether KVM works here, answered by booting a kernel under it.

Flags, permissions and even a created VM prove little: hosts exist on which /dev/kvm opens and
creates machines, and a stock kernel hangs or QEMU aborts. So a real kernel is booted by plain QEMU
(libvirt would hang along with it) under a deadline, as the user that QEMU will run as. The answer
is kept until anything about the host that could change it changes.
"""

import contextlib
import os
import pwd
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vmsandbox.host import tiny_guest
from vmsandbox.model import Accelerator, Value, digest_of
from vmsandbox.text import printable

DEVICE = Path("/dev/kvm")
DEADLINE_S = 10.0
_NO_CORE = ("/bin/sh", "-c", 'ulimit -c 0; exec "$@"', "probe")  # an abort would dump one


class Verdict(Value):
    """Which accelerator to use, and what was seen that says so."""

    accelerator: Accelerator
    reason: str


class Subject(Value):
    """What is probed: a kernel, by a QEMU, as the user it will run as."""

    kernel: Path
    kernel_digest: str
    qemu_binary: Path
    qemu_uid: int
    qemu_gid: int


class _Answer(Value):
    fingerprint: str
    verdict: Verdict


def choose(
    subject: Subject, cache: Path, note: Callable[[str], None], *, again: bool = False
) -> Verdict:
    """KVM if a kernel boots under it, else TCG with the reason; remembered in the file `cache`.

    `again` asks the host even if the answer is remembered; `note` hears what a probe finds. Takes
    up to 10 s where KVM hangs.
    """
    fingerprint = _fingerprint(subject)
    if not again and (known := _remembered(cache, fingerprint)):
        return known
    verdict = probe(subject)
    if verdict.accelerator is Accelerator.TCG:
        note(f"KVM does not work here, guests are emulated: {verdict.reason}")
    _remember(cache, _Answer(fingerprint=fingerprint, verdict=verdict))
    return verdict


def _fingerprint(subject: Subject) -> str:
    binary = subject.qemu_binary.stat()
    device = DEVICE.stat() if DEVICE.exists() else None
    return digest_of(
        {
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "release": os.uname().release,
            "qemu": [str(subject.qemu_binary), binary.st_mtime_ns, binary.st_size],
            # ctime stands for the access list too
            "device": device and [device.st_ino, device.st_mode, device.st_gid, device.st_ctime_ns],
            "kernel": subject.kernel_digest,
            "user": [
                subject.qemu_uid,
                subject.qemu_gid,
                *groups_of(subject.qemu_uid, subject.qemu_gid),
            ],
        }
    )


def _remembered(cache: Path, fingerprint: str) -> Verdict | None:
    with contextlib.suppress(OSError, ValidationError):
        answer = _Answer.model_validate_json(cache.read_bytes())
        if answer.fingerprint == fingerprint:
            return answer.verdict
    return None


def _remember(cache: Path, answer: _Answer) -> None:
    """Only to save time: a cache that cannot be written is no problem."""
    with (
        contextlib.suppress(OSError),
        tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False) as file,
    ):
        file.write(answer.model_dump_json() + "\n")
        file.flush()
        Path(file.name).replace(cache)


def probe(subject: Subject, *, deadline_s: float = DEADLINE_S) -> Verdict:
    """Boot the kernel under KVM, now. The process is gone when this returns."""
    if not DEVICE.exists():
        return Verdict(accelerator=Accelerator.TCG, reason=f"{DEVICE} does not exist")
    with _file_in_memory(tiny_guest.initramfs()) as initramfs:
        argv = [*_NO_CORE, *probe_argv(subject, Path(f"/proc/self/fd/{initramfs}"), "kvm")]
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=deadline_s,
                pass_fds=[initramfs],
                check=False,
                **_identity(subject),
            )
        except subprocess.TimeoutExpired as expired:
            return _hangs(expired.stdout or b"", deadline_s)
        except OSError as error:
            return Verdict(
                accelerator=Accelerator.TCG, reason=f"{subject.qemu_binary}: {error.strerror}"
            )
    if tiny_guest.MARKER.strip() in done.stdout:
        return Verdict(accelerator=Accelerator.KVM, reason="a kernel booted under KVM")
    return Verdict(accelerator=Accelerator.TCG, reason=_why(done, subject.qemu_binary.name))


def probe_argv(subject: Subject, initramfs: Path, accelerator: str) -> list[str]:
    """A QEMU that boots to the marker and ends."""
    return [
        str(subject.qemu_binary),
        *("-accel", accelerator, "-cpu", "host" if accelerator == "kvm" else "max"),
        *("-machine", "q35", "-m", "256", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-serial", "stdio"),
        *("-kernel", str(subject.kernel), "-initrd", str(initramfs)),
        *("-append", "console=ttyS0 quiet panic=-1"),
    ]


@contextlib.contextmanager
def _file_in_memory(data: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("initramfs")
    try:
        os.write(descriptor, data)
        yield descriptor
    finally:
        os.close(descriptor)


def _identity(subject: Subject) -> dict[str, Any]:
    """Become QEMU's user if we may; else we are that user already."""
    if os.geteuid() != 0 or subject.qemu_uid == 0:
        return {}
    return {
        "user": subject.qemu_uid,
        "group": subject.qemu_gid,
        "extra_groups": groups_of(subject.qemu_uid, subject.qemu_gid),
    }


def groups_of(uid: int, gid: int) -> list[int]:
    """The groups that QEMU has when it runs as this user and group."""
    if os.geteuid() == uid:
        return sorted(os.getgroups())
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(uid)
        # libvirt gives QEMU the groups of its user's login, and the group that is configured
        return sorted({*os.getgrouplist(user.pw_name, user.pw_gid), gid})
    return [gid]


def _hangs(output: bytes, deadline_s: float) -> Verdict:
    last = _last_line(output)
    said = f"its last line was {last!r}" if last else "it said nothing"
    reason = f"a kernel under KVM did not boot within {deadline_s:g} s; {said}"
    return Verdict(accelerator=Accelerator.TCG, reason=reason)


def _why(done: "subprocess.CompletedProcess[bytes]", program: str) -> str:
    """QEMU's first complaint names the cause; later ones (an assertion) follow from it."""
    complaints = done.stderr.decode("utf-8", "replace").splitlines()
    ending = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    said = complaints[0] if complaints else _last_line(done.stdout) or "nothing"
    said = said.removeprefix(f"{program}: ")
    return f"QEMU ended with {ending} under KVM: {printable(said, newlines=False)}"


def _last_line(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").split("\n")
    return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")
