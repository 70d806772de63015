"""Two that want one CPU: how it is divided between them, by real schedulers over real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.tiny_guests import TinyGuest, tiny_guest
from tests.waiting import wait_until
from vmsandbox.host import daemons
from vmsandbox.hypervisor import Hypervisor, shares

URI = daemons.default_uri()
LOOK_S = 2.0
BUSY = [sys.executable, "-c", "while True: pass"]


def crowd(*pids: int) -> None:
    """Let them all run on one CPU only."""
    cpu = {min(os.sched_getaffinity(0))}
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cpu)


def spent_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def divided(first: int, second: int) -> float:
    """How many times as much as the second the first got, of one CPU that both wanted."""
    crowd(first, second)
    before = spent_s(first), spent_s(second)
    deadline = time.monotonic() + LOOK_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
    return (spent_s(first) - before[0]) / max(spent_s(second) - before[1], 0.01)


@pytest.fixture
def busy() -> Iterator[list[int]]:
    """Two processes, each in a session of its own, as QEMU is."""
    both = [subprocess.Popen(BUSY, start_new_session=True) for _ in range(2)]
    yield [process.pid for process in both]
    for process in both:
        process.kill()
        process.wait()


def test_alike_without_a_word(busy: list[int]) -> None:
    assert 0.5 < divided(*busy) < 2


def test_the_lighter_one_gets_less_without_libvirt(busy: list[int]) -> None:
    shares.be_nice(busy[1], 20, 1)
    shares.be_nice(busy[1], 20, 1)
    assert divided(*busy) > 2.5


def test_many_cpus_count_for_no_more_than_one(busy: list[int]) -> None:
    shares.be_nice(busy[1], 100, 4)
    assert os.getpriority(os.PRIO_PROCESS, busy[1]) == 6


def says_hello(guest: TinyGuest) -> bool:
    return guest.spec.console.exists() and b"hello" in guest.spec.console.read_bytes()


def test_the_lighter_guest_gets_less(host: None, short_path: Path) -> None:
    daemons.prepare(URI)
    short_path.chmod(0o711)
    with Hypervisor.connect(URI) as hypervisor:
        facts = hypervisor.facts()
        roots = (short_path / f"{short_path.name}-{number}" for number in range(2))
        guests = [tiny_guest(root, facts, then="spin") for root in roots]
        try:
            for guest in guests:
                hypervisor.start(guest.xml)
            pids = [pid for guest in guests if (pid := hypervisor.pid(guest.uuid))]
            hypervisor.weigh(guests[0].uuid, 100, 1)
            hypervisor.weigh(guests[1].uuid, 20, 1)
            for guest in guests:
                wait_until(partial(says_hello, guest))
            assert divided(*pids) > 2.5
        finally:
            for guest in guests:
                hypervisor.destroy(guest.uuid)
                hypervisor.forget(guest.spec.name)
