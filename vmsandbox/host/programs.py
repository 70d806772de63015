"""Owns which programs are needed, in which package each distribution has them, and finding them.

The README shows the same packages; a test compares. Knows no version but git's.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from vmsandbox.model import Value

Family = Literal["debian", "fedora", "arch", "opensuse"]

INSTALL: dict[Family, str] = {
    "debian": "apt-get install",
    "fedora": "dnf install",
    "arch": "pacman -S",
    "opensuse": "zypper install",
}

GIT_MINIMUM = (2, 38)
"""`git merge-tree --write-tree` came with it."""


_TABLE = """
run qemu-system-x86_64|qemu-kvm qemu-system-x86 qemu-system-x86-core qemu-system-x86 qemu-x86
run qemu-img qemu-utils qemu-img qemu-img qemu-tools
run libvirtd|virtqemud libvirt-daemon-system libvirt-daemon-driver-qemu libvirt libvirt-daemon-qemu
run virtlogd libvirt-daemon-system libvirt-daemon-log libvirt libvirt-daemon-qemu
run git git git git git
run ssh openssh-client openssh-clients openssh openssh-clients
build mmdebstrap mmdebstrap mmdebstrap - -
build mke2fs e2fsprogs e2fsprogs e2fsprogs e2fsprogs
build zstd zstd zstd zstd zstd
build newuidmap uidmap shadow-utils shadow shadow
init tini tini tini tini -
"""
# What for, a program by any of its names, then its package in the order of INSTALL; - is none.


class Program(Value):
    """A program, any of whose names will do, and the packages that bring it."""

    purpose: str = Field(description="run guests, build images, or init: where there is no systemd")
    names: tuple[str, ...]
    packages: dict[Family, str]


def _program(row: str) -> Program:
    purpose, names, *packages = row.split()
    named = zip(INSTALL, packages, strict=True)
    return Program(
        purpose=purpose,
        names=tuple(names.split("|")),
        packages={family: package for family, package in named if package != "-"},
    )


PROGRAMS = tuple(_program(row) for row in _TABLE.strip().splitlines())


def find(name: str) -> str | None:
    """Like which(1), also in the sbin folders that an ordinary user's PATH leaves out."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    return shutil.which(name, path=path)


def missing(purpose: str, programs: Sequence[Program] = PROGRAMS) -> list[Program]:
    """The programs for a purpose that are not there under any of their names."""
    return [p for p in programs if p.purpose == purpose and not any(map(find, p.names))]


def distribution() -> Family | None:
    """From os-release(5): the distribution's own name, else those it says it is like."""
    with contextlib.suppress(OSError):
        return family_of(platform.freedesktop_os_release())
    return None


def family_of(release: dict[str, str]) -> Family | None:
    """The first of ID and ID_LIKE that is known."""
    known: dict[str, Family] = {
        "debian": "debian",
        "ubuntu": "debian",
        "fedora": "fedora",
        "rhel": "fedora",
        "arch": "arch",
        "opensuse": "opensuse",
        "suse": "opensuse",
    }
    names = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    families = (known.get(name.partition("-")[0]) for name in names)
    return next((family for family in families if family), None)


def install_hint(programs: Sequence[Program], family: Family | None) -> str:
    """The command that installs these here, or which packages to look for."""
    if family is None:
        return f"install: {' '.join(program.names[0] for program in programs)}"
    packages = sorted({p.packages[family] for p in programs if family in p.packages})
    absent = sorted(p.names[0] for p in programs if family not in p.packages)
    told = f"{INSTALL[family]} {' '.join(packages)}" if packages else ""
    unpackaged = f"no package known for: {' '.join(absent)}" if absent else ""
    return "    ".join(part for part in (told, unpackaged) if part)


def git_version() -> tuple[int, int] | None:
    """(major, minor); None if there is no git or it does not say."""
    if not (git := find("git")):
        return None
    said = subprocess.run([git, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None
