"""Owns how this room runs other programs to their end, and what their failures are called."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from vmsandbox.errors import HostProblem

PACKAGES = {
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "debugfs": "e2fsprogs",
    "e2fsck": "e2fsprogs",
    "zstd": "zstd",
    "qemu-img": "qemu-utils",
    "newuidmap": "uidmap",
    "setpriv": "util-linux",
    "cp": "coreutils",
    "npm": "npm",
    "unshare": "util-linux",
}
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def require(*names: str) -> None:
    """Raise HostProblem ``program_missing`` for the first program that is not there."""
    for name in names:
        locate(name)


def locate(name: str) -> str:
    """The path of a program; file system tools lie where an ordinary user's PATH does not look."""
    path = shutil.which(name) or shutil.which(name, path=_SBIN)
    if path is None:
        raise HostProblem(
            "program_missing",
            f"{name} is not installed",
            hint=f"sudo apt-get install {PACKAGES.get(name, name)}",
        )
    return path


def run(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run to the end; what it printed on both outputs. Raises HostProblem ``program_failed`` or
    ``host_disk_full``.
    """
    done = subprocess.run(
        [locate(argv[0]), *argv[1:]],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise failure(argv[0], done.returncode, done.stdout)
    return done.stdout


def failure(program: str, code: int, output: str, evidence: str | None = None) -> HostProblem:
    """What a program's failure means for the host; the last line that says something is quoted."""
    lines = [line for line in output.splitlines() if line.strip()]
    if "No space left on device" in output:
        return disk_full(f"{program} found no space left on the disk", evidence)
    said = lines[-1].strip() if lines else f"exit code {code}"
    return HostProblem("program_failed", f"{program} failed: {said}", evidence=evidence)


def disk_full(message: str, evidence: str | None = None) -> HostProblem:
    return HostProblem(
        "host_disk_full",
        message,
        hint="vmsandbox cleanup    (or: vmsandbox image list; vmsandbox image remove IMAGE)",
        evidence=evidence,
    )
