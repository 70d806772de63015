"""Owns reading the host and processes: memory, swap, pressure, time on a CPU. Knows no guest.

Every reading is one look: nothing here waits or looks twice, so that what is measured stays idle.
"""

import contextlib
from pathlib import Path

import psutil

from vmsandbox.density.figures import HostReading
from vmsandbox.host import pressure

_NS = 1_000_000_000


def host() -> HostReading:
    """The host now."""
    memory = psutil.virtual_memory()
    return HostReading(
        available_bytes=memory.available,
        total_bytes=memory.total,
        swap_used_bytes=psutil.swap_memory().used,
        memory_pressure=pressure("memory"),
    )


def own_rss_bytes() -> int:
    """What this process holds."""
    return int(psutil.Process().memory_info().rss)


def cpu_s(pid: int) -> float | None:
    """Seconds that a process was on a CPU so far; None if it is gone.

    An idle guest runs for less than the 10 ms in which ``/proc/PID/stat`` counts, so the scheduler
    is asked for its nanoseconds; where it keeps none, the ticks must do. Threads that have ended
    are not counted.
    """
    try:
        if Path(f"/proc/{pid}/schedstat").exists():
            return sum(map(_on_cpu_ns, Path(f"/proc/{pid}/task").iterdir())) / _NS
        times = psutil.Process(pid).cpu_times()
    except (OSError, psutil.Error):
        return None
    return float(times.user + times.system)


def _on_cpu_ns(thread: Path) -> int:
    with contextlib.suppress(OSError):  # it has just ended
        return int((thread / "schedstat").read_text().split()[0])
    return 0
