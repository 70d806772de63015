"""Owns a guest's share of the host's CPU time while there is too little of it: a weight that counts
for the guest as a whole, however many virtual CPUs it has.

Where libvirt gives each guest a control group, the kernel weighs guests against each other already,
and libvirt is told another weight than the usual one. Where it does not (``qemu:///session``, hosts
without cgroups) QEMU is a session of its own, which Linux may weigh as one (autogroup, sched(7));
for where it does not do even that, threads are made the nicer the more of them compete.
"""

import contextlib
import math
import os
from pathlib import Path
from typing import NamedTuple

import libvirt

USUAL = 100
"""The weight of a guest of which nothing else was said."""

_V1_USUAL, _V2_USUAL = 1024, 100
_STEP = 1.25
"""By how much one level of nice changes a weight (Linux, kernel/sched/core.c)."""

_NICEST = 19
_LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE
_AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")


class Group(NamedTuple):
    """Where a process is among those whose CPU time the kernel weighs."""

    path: str
    usual: int
    """The weight that a group has at first: the two versions of cgroups count differently."""


def group_of(cgroups: str) -> Group:
    """By a process's /proc/PID/cgroup (cgroups(7))."""
    fields = [line.split(":", 2) for line in cgroups.splitlines()]
    for _, controllers, path in fields:
        if "cpu" in controllers.split(","):
            return Group(path, _V1_USUAL)
    return next((Group(path, _V2_USUAL) for n, _, path in fields if n == "0"), Group("/", 0))


def is_own(group: Group, domain_id: int) -> bool:
    """Whether it is the group of the domain of this id alone. Its name would not do: libvirt leaves
    out some characters. systemd escapes the dashes."""
    return f"qemu-{domain_id}-" in group.path.replace("\\x2d", "-")


def nice_of(weight: float) -> int:
    """The nice value whose weight comes nearest; weights above the usual one have none."""
    return min(_NICEST, max(0, round(math.log(USUAL / weight, _STEP))))


def give(domain: libvirt.virDomain, pid: int, weight: int, vcpus: int) -> None:
    """Let a running domain have this weight (1 to 100). Again is harmless.

    A process that is gone, or another user's, is left alone. Raises libvirtError.
    """
    with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        group = group_of(Path(f"/proc/{pid}/cgroup").read_text())
        if not is_own(group, domain.ID()):
            be_nice(pid, weight, vcpus)
        elif weight != USUAL:
            shares = max(2, round(group.usual * weight / USUAL))
            domain.setSchedulerParametersFlags({"cpu_shares": shares}, _LIVE)


def be_nice(pid: int, weight: int, vcpus: int) -> None:
    """Weigh a process without libvirt: its autogroup as a whole, and each thread for where
    autogroups do not count. New threads inherit."""
    level = nice_of(weight)
    if level and _AUTOGROUPS.exists() and _AUTOGROUPS.read_text().strip() == "1":
        Path(f"/proc/{pid}/autogroup").write_text(str(level))
    if level := nice_of(weight / vcpus):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), level)
