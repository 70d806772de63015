"""Owns how a disk becomes two that know nothing of each other. Holes stay holes.

Where the file system lets files share blocks (btrfs, XFS) a copy takes no time, and no space until
one of both is written; elsewhere it takes what the disk really holds.
"""

import contextlib
import os
import shutil
from pathlib import Path

from vmsandbox.errors import HostProblem
from vmsandbox.images.programs import disk_full, run


def copy_disk(source: Path, target: Path, *, spare_bytes: int) -> None:
    """Copy a disk that nobody writes; the copy is on stable storage when this returns.

    Raises HostProblem ``host_disk_full``, before anything is copied if less than `spare_bytes`
    would be left, or ``program_failed``. A partial copy is removed.
    """
    try:
        if not _share(source, target):
            _refuse_scarcity(source, target.parent, spare_bytes)
            run(_argv("auto", source, target))
        with target.open("rb") as copy:
            os.fsync(copy.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _argv(reflink: str, source: Path, target: Path) -> list[str]:
    return ["cp", f"--reflink={reflink}", "--sparse=auto", "--", str(source), str(target)]


def _share(source: Path, target: Path) -> bool:
    """Let both have the same blocks; False where that cannot be."""
    with contextlib.suppress(HostProblem):
        run(_argv("always", source, target))
        return True
    return False


def _refuse_scarcity(source: Path, folder: Path, spare_bytes: int) -> None:
    """A host without space stops every guest that writes: better no copy."""
    needed = source.stat().st_blocks * 512 + spare_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise disk_full(
            f"{free >> 20} MiB are free below {folder}, a copy of the disk with some room beside it"
            f" takes {needed >> 20}",
            str(folder),
        )
