"""Owns what the host carries at one moment: memory, disk, and how long processes wait for what.

One look each time: nothing here waits.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from vmsandbox.model import Value

_PRESSURE = Path("/proc/pressure")
_AVERAGE = re.compile(r"^some avg10=([0-9.]+)", re.MULTILINE)


class Load(Value):
    """The host now. A pressure is None where the kernel does not tell."""

    available_bytes: int = Field(description="MemAvailable")
    total_bytes: int
    disk_free_bytes: int = Field(description="below the state folder")
    memory_pressure: float | None = Field(description="percent of the last 10 s: some waited")
    cpu_pressure: float | None = Field(description="the same for a CPU")
    cpus: int = Field(default=1, description="that this process may use")


def load(folder: Path) -> Load:
    """What the host carries now; the disk is the one that `folder` lies on."""
    memory = psutil.virtual_memory()
    return Load(
        available_bytes=memory.available,
        total_bytes=memory.total,
        disk_free_bytes=shutil.disk_usage(folder).free,
        memory_pressure=pressure("memory"),
        cpu_pressure=pressure("cpu"),
        cpus=len(os.sched_getaffinity(0)),
    )


def pressure(resource: Literal["cpu", "memory"]) -> float | None:
    """Percent of ten seconds in which some process waited for it.

    None: kernels without pressure stall information have no such file, or refuse to read it.
    """
    with contextlib.suppress(OSError):
        if found := _AVERAGE.search((_PRESSURE / resource).read_text()):
            return float(found[1])
    return None
