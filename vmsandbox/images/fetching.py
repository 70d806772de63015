"""Owns npm and pip as they bring a layer's packages: exactly those of a lock file, checked against
its hashes, unpacked and no more. Nothing of a package is run here.

Which registry they ask, through what proxy, is the host's own configuration of them.
"""

import fnmatch
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from vmsandbox.images.programs import require, run
from vmsandbox.images.recipe import Fetch

PYTHON = "3.11"
"""Of the guest, whatever the host's own is."""

_GLIBC_MINORS = (36, 35, 34, 31, 28, 27, 24, 17)
_LEFT_BY_PIP = ("bin/*", "*.dist-info/RECORD", "*/__pycache__/*")
"""What pip writes by itself, with the path of the host's Python in it."""


def npm_argv() -> list[str]:
    """In a folder with package.json and package-lock.json."""
    quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
    return ["npm", "ci", "--omit=dev", "--ignore-scripts", "--os=linux", "--cpu=x64", *quiet]


def pip_argv(lock: Path, target: Path) -> list[str]:
    """Wheels alone: a source distribution would have to be run to be built."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS]
    return [
        sys.executable,
        *("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"),
        *("--no-deps", "--require-hashes", "--only-binary=:all:", "--no-compile"),
        *("--implementation=cp", f"--python-version={PYTHON}", *platforms),
        "--platform=manylinux2014_x86_64",
        f"--target={target}",
        f"--requirement={lock}",
    ]


def fetch(wanted: Fetch, scratch: Path) -> Path:
    """The folder below `scratch` with what is to lie in the image's.

    Raises HostProblem ``program_missing``, ``program_failed``.
    """
    for name, content in wanted.files.items():
        (scratch / name).write_bytes(content)
    if wanted.tool == "npm":
        require("npm")
        run(npm_argv(), cwd=scratch)
        for name in wanted.files:
            (scratch / name).unlink()
        return scratch
    target = scratch / "target"
    (lock,) = (scratch / name for name in wanted.files)
    run(pip_argv(lock, target))
    return target


def add_to_tar(folder: Path, wanted: Fetch, tar: Path, epoch: int) -> None:
    """Append what was fetched to a layer's tar, owned by root, all of one date."""
    with tarfile.open(tar, "a") as archive:
        for path in _kept(folder, wanted):
            member = archive.gettarinfo(path, f"{wanted.into}/{path.relative_to(folder)}")
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            member.mtime = epoch
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            if member.isreg():
                with path.open("rb") as content:
                    archive.addfile(member, content)
            else:
                archive.addfile(member)


def _kept(folder: Path, wanted: Fetch) -> Iterator[Path]:
    left_out = (*wanted.leave_out, *(_LEFT_BY_PIP if wanted.tool == "pip" else ()))
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in left_out):
            yield path
