"""Shows that clones leave their template alone: each writes to all of its memory, then is deleted.

    python -m benchmarks.template_ram [--clones 100] [--memory 512] [--out FILE]

The clones come one after the other. Each fills a tmpfs with noise until its kernel has nothing left
to give, then its QEMU is asked how much of the template's RAM it has pages of its own for:
``copied_mib``. Figures that should be 0: ``changed`` (files of the template whose SHA-256 differs
at the end), ``cold`` (guests that were no clones). Emits data, asserts nothing.
"""

import hashlib
from pathlib import Path

import psutil

from benchmarks.series import Series, conditions, options, tell
from vmsandbox.config import load
from vmsandbox.density.fleet import tiny_worktree
from vmsandbox.guest import Guest
from vmsandbox.sandbox import Manager, Request, Rooms, create_sandbox, delete_sandbox, warm
from vmsandbox.sandbox.listening import Quiet
from vmsandbox.store import SandboxFolder

MIB = 1024 * 1024
PARTS = ("ram", "state", "disk.qcow2")
_FILL_S = 600.0

# A MiB of noise again and again: every page gets bytes that no template has. What is left over is
# for the shell and sshd.
FILL = """
mount -t tmpfs -o size=100% noise /mnt
head -c 1M /dev/urandom > /mnt/noise
sync
echo 3 > /proc/sys/vm/drop_caches
left=$(awk '/^MemAvailable/ { print int($2 / 1024) - 16 }' /proc/meminfo)
cat $(yes /mnt/noise | head -n "$left") > /mnt/fill
stat -c %s /mnt/fill
"""


def digests(template: Path) -> dict[str, str]:
    """SHA-256 of each file that clones use."""
    found = {}
    for part in PARTS:
        with (template / part).open("rb") as file:
            found[part] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def fill(guest: Guest) -> int:
    """Bytes written to the guest's memory."""
    answer = guest.run(["/bin/sh", "-c", FILL], timeout_s=_FILL_S)
    assert answer.code == 0, answer
    return int(answer.stdout)


def copied_bytes(pid: int) -> int:
    """Pages that a QEMU has instead of those in the file that it maps as its guest's memory."""
    maps = psutil.Process(pid).memory_maps(grouped=False)
    return sum(one.anonymous for one in maps if Path(one.path).name == "ram")


class Clones:
    """One clone after the other, all of one template."""

    def __init__(self, rooms: Rooms, series: Series, request: Request) -> None:
        self.rooms = rooms
        self.series = series
        self.request = request

    def one(self) -> None:
        folder = create_sandbox(self.rooms, self.request)
        try:
            self._use(folder)
        finally:
            delete_sandbox(self.rooms, folder, force=True)

    def _use(self, folder: SandboxFolder) -> None:
        with Manager.of(self.rooms, folder, Quiet()) as manager:
            with self.series.timed("clone", "ready_s"):
                guest = manager.ensure_guest()
            record = folder.read_record()
            self.series.add("clone", "cold", record.template is None)
            with self.series.timed("clone", "fill_s"):
                self.series.add("clone", "filled_mib", fill(guest) / MIB)
            if pid := self.rooms.hypervisor.pid(record.domain_uuid):
                self.series.add("clone", "copied_mib", copied_bytes(pid) / MIB)


def main() -> None:
    asked = options(__doc__, clones=100, memory=512).parse_args()
    overrides = {"image": asked.image, "memory": asked.memory}
    with Rooms.open(note=tell) as rooms, tiny_worktree() as worktree:
        limits = load([], overrides).limits()
        template = warm(rooms, rooms.images.resolve(asked.image), limits).template
        facts = conditions(rooms, asked.image) | {"clones": asked.clones, "memory": asked.memory}
        series = Series("template_ram", facts | {"template": template.name}, asked.out)
        before = digests(template.path)
        request = Request(command=("true",), worktree=worktree, overrides=overrides)
        clones = Clones(rooms, series, request)
        for _ in range(asked.clones):
            clones.one()
        after = digests(template.path)
        for part in PARTS:
            series.add(part, "changed", before[part] != after[part])
        series.summary()


if __name__ == "__main__":
    main()
