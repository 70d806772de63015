"""Guests of another size are clones as well, and have what was asked for; one that fills its disk
hurts itself alone; busy ones share the host by weight, and none keeps another from answering.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.repositories import Repository
from tests.sandboxes import State
from tests.vm.lives import status_of, wait_for

SIZE = "[sandbox]\ncpus = 2\nmemory = '640M'\ndisk = '3G'\n"
BUSY = "for n in 1 2; do while :; do :; done & done; echo busy > /tmp/busy; wait"
LOOK_S = 6.0
ANSWER_S = 30.0
MIB = 1024 * 1024

ASK = """\
nproc
sed -n 's/^MemTotal: *//p' /proc/meminfo
df -k --output=size / | tail -n 1
cut -d ' ' -f 1 /proc/uptime
dd if=/dev/zero of=/tmp/zeros bs=1M count=40 conv=fsync 2> /dev/null
cut -d ' ' -f 1 /proc/uptime
"""

MakeProject = Callable[[str, str], Path]


@pytest.fixture
def project(tmp_path: Path) -> MakeProject:
    """A worktree with these settings."""

    def make(name: str, settings: str) -> Path:
        return Repository.create(tmp_path / name, {"vmsandbox.toml": settings}).path

    return make


@pytest.fixture
def guests(shared_state: State) -> Iterator[State]:
    yield shared_state
    shared_state("delete", "--all", "--force")


def record_folder(state: State, name: str) -> Path:
    return Path(state.path / "sandboxes" / status_of(state, name)["id"])


def test_a_clone_has_the_size_that_was_asked_for(guests: State, project: MakeProject) -> None:
    here = project("sized", SIZE + "disk_mib_s = 8\n")
    answer = guests("run", "--name", "sized", "--", "sh", "-c", ASK, cwd=here)
    assert answer.code == 0, answer.err
    cpus, memory, disk, began, ended = answer.out.splitlines()
    assert cpus == "2"
    assert 560 < int(memory.split()[0]) / 1024 < 640
    assert 2.7 < int(disk) / 1024**2 < 3.0
    assert float(ended) - float(began) > 3.5, "40 MiB at 8 MiB a second"
    assert not (record_folder(guests, "sized") / "seed.iso").exists(), "it was booted, not cloned"


def test_a_guest_that_fills_its_disk_hurts_itself_alone(
    guests: State, project: MakeProject
) -> None:
    script = "echo kept > kept; cat /dev/zero > /tmp/rest"
    flags = ("--json", "--cold", "--disk", "1G", "--name", "full")
    answer = guests("run", *flags, "--", "sh", "-c", script, cwd=project("full", ""))
    assert (answer.code, answer.data["outcome"]) == (1, "guest_disk_full"), answer.err
    assert "no space is left in the guest" in answer.data["detail"]
    assert answer.data["result"]["changes"] == 1
    overlay = record_folder(guests, "full") / "overlay.qcow2"
    assert overlay.stat().st_blocks * 512 < 1024 * MIB


@pytest.mark.alone
def test_busy_guests_share_by_weight_and_a_third_answers(
    guests: State, project: MakeProject
) -> None:
    light, usual = project("light", SIZE + "cpu_weight = 20\n"), project("usual", SIZE)
    for name, here in (("light", light), ("usual", usual)):
        guests.ok("run", "--detach", "--name", name, "--", "sh", "-c", BUSY, cwd=here)
    for name in ("light", "usual"):
        wait_for(f"{name} works", partial(running, guests, name))
    pids = [qemu_of(guests, name) for name in ("light", "usual")]
    before = [spent_s(pid) for pid in pids]
    deadline = time.monotonic() + LOOK_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
    less, more = (spent_s(pid) - was for pid, was in zip(pids, before, strict=True))
    assert 0 < less < 0.5 * more, (less, more)

    guests.ok("run", "--keep", "--name", "third", "--", "true", cwd=usual)
    began = time.monotonic()
    assert guests("exec", "third", "--", "echo", "here").out == "here\n"
    assert time.monotonic() - began < ANSWER_S


def running(state: State, name: str) -> bool:
    return bool(state("exec", name, "--", "test", "-e", "/tmp/busy").code == 0)


def qemu_of(state: State, name: str) -> int:
    folder = str(record_folder(state, name))
    found: list[Any] = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "qemu-system" in (process.info["cmdline"] or [""])[0]
        and folder in " ".join(process.info["cmdline"])
    ]
    (pid,) = found
    return int(pid)


def spent_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
