"""Measures the time to the first command: a raw restore beside our clone, cold start and others.

    python -m benchmarks.start [--rounds 10] [--slow-rounds 5] [--memory 512] [--out FILE]

From the call to the first result of a command over SSH, in turns, all in one run:

- *floor*: raw QEMU continues a frozen guest of our image, gets a seed, plain ``ssh`` runs ``true``;
- *clone*, *cold*: a sandbox made and started through our API, until a command's result is there;
- *run*: the whole of ``vmsandbox run -- true``, as its ``timings`` tell, and its wall time; once,
  with a task of some seconds, the most memory that its process had: resident, and as its share
  (PSS) of what other processes use as well, such as libraries;
- *plain*: the same system as Debian starts it, see :mod:`benchmarks.boot`;
- *virtme-ng*, *quick-sandbox*: where they are installed.

Emits data, asserts nothing.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks import boot
from benchmarks.peers import Peers
from benchmarks.raw import RawTemplate
from benchmarks.series import Series, conditions, options
from vmsandbox.deadline import Deadline
from vmsandbox.model import Image, Limits
from vmsandbox.sandbox import Manager, Request, Rooms, create_sandbox, delete_sandbox
from vmsandbox.sandbox.listening import Quiet

_PATIENCE_S = 120.0


def ours(rooms: Rooms, folder: Path, memory_mib: int, *, cold: bool) -> float:
    """Seconds from the call to the first command's result in a sandbox made for it."""
    overrides = {"memory": f"{memory_mib}M", "cpus": 1}
    started = time.monotonic()
    request = Request(command=("true",), worktree=folder, keep=True, overrides=overrides, cold=cold)
    sandbox = create_sandbox(rooms, request)
    try:
        with Manager.of(rooms, sandbox, Quiet()) as manager:
            manager.ensure_guest()  # returns with the result of a command
            return time.monotonic() - started
    finally:
        delete_sandbox(rooms, sandbox, force=True)


def whole_run(series: Series, folder: Path, memory_mib: int) -> None:
    """``vmsandbox run`` as a person calls it, from its process's start."""
    program = str(Path(sys.executable).with_name("vmsandbox"))
    argv = [program, "run", "--json", "--memory", f"{memory_mib}M", "--worktree", str(folder)]
    started = time.monotonic()
    done = subprocess.run([*argv, "--", "true"], check=True, capture_output=True)
    series.add("run", "wall_s", time.monotonic() - started)
    data = json.loads(done.stdout)["data"]
    for phase, seconds in data["timings"].items():
        series.add("run", f"{phase}_s", seconds)
    subprocess.run([program, "delete", data["id"]], check=True, capture_output=True)


def manager_memory(series: Series, folder: Path, memory_mib: int) -> None:
    """The most that one ``vmsandbox run`` held, looked at ten times a second."""
    program = str(Path(sys.executable).with_name("vmsandbox"))
    argv = [program, "run", "--json", "--memory", f"{memory_mib}M", "--worktree", str(folder)]
    resident = share = 0
    with subprocess.Popen([*argv, "--", "sleep", "3"], stdout=subprocess.PIPE) as process:
        manager = psutil.Process(process.pid)
        with contextlib.suppress(psutil.Error):
            deadline = Deadline(_PATIENCE_S)
            while process.poll() is None and not deadline.passed():
                now = manager.memory_full_info()
                resident, share = max(resident, now.rss), max(share, now.pss)
                time.sleep(0.1)
        answer, _ = process.communicate()
    series.add("run", "manager_rss_mib", resident / 2**20)
    series.add("run", "manager_pss_mib", share / 2**20)
    identity = json.loads(answer)["data"]["id"]
    subprocess.run([program, "delete", identity], check=True, capture_output=True)


def plain(rooms: Rooms, image: Image, limits: Limits, scratch: Path) -> Callable[[], float]:
    """A boot of the stock system, with keys written into its disk."""
    disk, client, host = boot.with_a_way_in(image, scratch)

    def measure() -> float:
        machine = boot.Machine(rooms, image, disk, limits)
        spec = machine.spec.model_copy(update={"seed_iso": None})
        return machine.boot(spec, boot.guest_at(machine.endpoint, client, host))

    return measure


def main() -> None:
    parser = options(__doc__, rounds=10, memory=512)
    parser.add_argument("--slow-rounds", type=int, default=5, help="of cold, plain and the peers")
    parser.add_argument("--peers", type=Path, help="a virtual environment that holds them")
    parser.add_argument("--peers-kernel", type=Path, help="what virtme-ng boots")
    asked = parser.parse_args()
    peers = Peers(asked.peers, asked.peers_kernel)
    with contextlib.ExitStack() as stack:
        rooms = stack.enter_context(Rooms.open())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vms-start-")))
        scratch.chmod(0o711)
        (folder := scratch / "project").mkdir()
        (folder / "file").write_text("something to send\n")
        image, stock = boot.image_of(rooms, asked.image), boot.image_of(rooms, boot.PLAIN)
        facts = conditions(rooms, asked.image) | {
            "memory_mib": asked.memory,
            "plain": stock.digest,
            "peers": peers.versions(),
        }
        series = Series("start", facts, asked.out)
        raw = stack.enter_context(RawTemplate(rooms, image, scratch / "raw", asked.memory))
        limits = Limits(memory_mib=asked.memory)
        boot_plain = plain(rooms, stock, limits, scratch)
        ours(rooms, folder, asked.memory, cold=False)  # makes the template
        for number in range(asked.rounds):
            series.add("floor", "first_command_s", raw.first_command())
            series.add("clone", "first_command_s", ours(rooms, folder, asked.memory, cold=False))
            whole_run(series, folder, asked.memory)
            if number < asked.slow_rounds:
                series.add("cold", "first_command_s", ours(rooms, folder, asked.memory, cold=True))
                series.add("plain", "first_command_s", boot_plain())
                for name, seconds in peers.first_commands(asked.memory, facts["accelerator"]):
                    series.add(name, "first_command_s", seconds)
        manager_memory(series, folder, asked.memory)
        ratios(series)
        series.summary()


def ratios(series: Series) -> None:
    """What the aims speak of, from the medians of this run."""
    clone = series.median("clone", "first_command_s")
    series.add("clone/floor", "ratio", clone / series.median("floor", "first_command_s"))
    for slow in ("cold", "plain"):
        with contextlib.suppress(KeyError, statistics.StatisticsError):
            series.add(f"{slow}/clone", "ratio", series.median(slow, "first_command_s") / clone)


if __name__ == "__main__":
    main()
