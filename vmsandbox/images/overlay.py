"""Owns qemu-img's command line for overlays: disks that hold only what differs from another file.
Pure.
"""

from pathlib import Path
from typing import Literal

# A guest writes blocks of 4 KiB here and there. With subclusters of 2 KiB each takes 4 KiB of
# the host's disk instead of 64, and none is read first to fill a cluster (QEMU documentation,
# "extended L2 entries", since 5.2).
_OPTIONS = "cluster_size=64k,extended_l2=on"

Format = Literal["raw", "qcow2"]


def argv(backing: Path, backing_format: Format, path: Path, size_mib: int) -> list[str]:
    """The command that makes an empty overlay `path` of `size_mib` on `backing`, which must never
    change again.
    """
    return [
        "qemu-img",
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        _OPTIONS,
        "-F",
        backing_format,
        "-b",
        str(backing),
        str(path),
        f"{size_mib}M",
    ]
