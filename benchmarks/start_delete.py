"""Starts guests one after another and deletes each: what is left of them on this host.

    python -m benchmarks.start_delete [--guests 200] [--memory 512] [--settle 20] [--out FILE]

A state folder of its own, so that all that names it is of these guests; the images and the template
are those of every day. Figures that should be 0: ``domains``, ``processes``, ``files`` (in the
state folder, libvirt's logs and its runtime folders), ``ports`` and ``sockets``, all *more than
before*. ``available_share`` is MemAvailable afterwards as a share of before, both when the host has
had time to settle. Emits data, asserts nothing.
"""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.series import Series, conditions, options, tell
from vmsandbox.config import load
from vmsandbox.deadline import Deadline
from vmsandbox.density.fleet import tiny_worktree
from vmsandbox.model import SandboxRecord
from vmsandbox.sandbox import Manager, Request, Rooms, create_sandbox, delete_sandbox, warm
from vmsandbox.sandbox.listening import Quiet
from vmsandbox.store import SSH_PORT, state_root

SHARED = ("images", "templates", "cache")
LIBVIRT = ("/run/libvirt", "/var/log/libvirt", "/var/lib/libvirt")
_POLL_S = 0.5


@contextmanager
def own_state() -> Iterator[Path]:
    """A state folder that borrows what takes long to make."""
    with tempfile.TemporaryDirectory(prefix="vms-", ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        path.chmod(0o711)
        for name in SHARED:
            (path / name).symlink_to(state_root() / name)
        yield path


class Traces:
    """What was started, and what of it, or of libvirt because of it, is to be seen."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self.root = rooms.store.path
        self.addresses: set[str] = set()
        self.names = {str(self.root)}

    def add(self, record: SandboxRecord) -> None:
        self.addresses.add(record.endpoint.address)
        self.names |= {record.id, record.domain_uuid}

    def _named(self, text: str) -> bool:
        return any(name in text for name in self.names)

    def seen(self) -> dict[str, set[str]]:
        """By kind: domains, processes, files, ports, sockets."""
        processes = psutil.process_iter(["pid", "cmdline"])
        lines = {str(p.info["pid"]): " ".join(p.info["cmdline"] or ()) for p in processes}
        lines.pop(str(os.getpid()))
        files = (str(path) for top in LIBVIRT for path in Path(top).rglob("*"))
        unix = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines())
        return {
            "domains": {one.uuid for one in self.rooms.hypervisor.list_owned(self.root)},
            "processes": {pid for pid, line in lines.items() if self._named(line)},
            "files": {str(path) for path in self.root.rglob("*")} | set(filter(self._named, files)),
            "ports": {address for address in self.addresses if answers(address)},
            "sockets": set(filter(self._named, unix)),
        }


def answers(address: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, SSH_PORT)) == 0


def settled_available_bytes(settle_s: float) -> int:
    """MemAvailable when nothing of ours has run for a while: the median of the looks."""
    looks, deadline = [], Deadline(settle_s)
    while not deadline.passed():
        looks.append(psutil.virtual_memory().available)
        time.sleep(_POLL_S)
    return sorted(looks)[len(looks) // 2]


def start_and_delete(rooms: Rooms, request: Request, series: Series, traces: Traces) -> None:
    with series.timed("guest", "start_s"):
        folder = create_sandbox(rooms, request)
        with Manager.of(rooms, folder, Quiet()) as manager:
            answer = manager.ensure_guest().run(["true"])
    assert answer.code == 0, answer
    record = folder.read_record()
    traces.add(record)
    series.add("guest", "cold", record.template is None)
    with series.timed("guest", "delete_s"):
        delete_sandbox(rooms, folder, force=True)


def main() -> None:
    asked = options(__doc__, guests=200, memory=512, settle=20.0).parse_args()
    overrides = {"image": asked.image, "memory": asked.memory}
    with own_state() as root, Rooms.open(root, tell) as rooms, tiny_worktree() as worktree:
        request = Request(command=("true",), worktree=worktree, overrides=overrides)
        warm(rooms, rooms.images.resolve(asked.image), load([], overrides).limits())
        facts = conditions(rooms, asked.image) | {"guests": asked.guests, "memory": asked.memory}
        series = Series("start_delete", facts, asked.out)
        traces = Traces(rooms)
        start_and_delete(rooms, request, Series("first", {}, Path(os.devnull)), traces)
        available, before = settled_available_bytes(asked.settle), traces.seen()
        for _ in range(asked.guests):
            start_and_delete(rooms, request, series, traces)
        available_after, after = settled_available_bytes(asked.settle), traces.seen()
        for what, those in after.items():
            more = sorted(those - before[what])
            series.add("left", what, len(more))
            for one in more[:20]:
                print(f"left: {what}: {one}", file=sys.stderr)
        series.add("host", "available_share", available_after / available)
        series.summary()


if __name__ == "__main__":
    main()
