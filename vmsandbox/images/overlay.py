"""Owns qemu-img's command line for overlays: disks that hold only what differs from another file.
Pure.
"""

from pathlib import Path
from typing import Literal

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
        "-F",
        backing_format,
        "-b",
        str(backing),
        str(path),
        f"{size_mib}M",
    ]
