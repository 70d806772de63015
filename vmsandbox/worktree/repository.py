"""Owns the layout of our bare repositories: how one is made, whose objects it borrows.

Knows no snapshot and no result. Written by hand, because `git init` would read templates and
configuration that are not ours.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from vmsandbox.worktree.git import RAW_ATTRIBUTES, Git


def config_text(object_format: str, *, bare: bool = True, durable: bool = True) -> str:
    """The configuration of a repository of ours, on the host as in the guest.

    Names that Windows or macOS would confuse are legal here: a worktree may hold them, and the
    review judges those that a result brings.
    """
    version = 0 if object_format == "sha1" else 1
    core = {
        "repositoryformatversion": str(version),
        "bare": str(bare).lower(),
        "autocrlf": "false",
        "safecrlf": "false",
        "protectNTFS": "false",
        "protectHFS": "false",
        "bigFileThreshold": "32m",
    }
    if not durable:  # can be made again from the worktree
        core["fsync"] = "none"
    lines = ["[core]", *(f"\t{name} = {value}" for name, value in core.items())]
    lines += ["[index]", "\tversion = 2", "[pack]", "\twindowMemory = 64m", "\tcompression = 1"]
    if version:
        lines += ["[extensions]", f"\tobjectFormat = {object_format}"]
    return "\n".join(lines) + "\n"


def prepare(
    folder: Path,
    object_format: str,
    borrow: Sequence[Path],
    shallow: Iterable[str] = (),
    *,
    durable: bool = True,
) -> Git:
    """Make the bare repository `folder`, or bring an existing one up to date."""
    for name in ("objects/info", "objects/pack", "refs/heads", "info"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    _write(folder / "objects/info/alternates", alternates(borrow))
    _write(folder / "info/attributes", RAW_ATTRIBUTES)
    _write(folder / "shallow", "".join(f"{oid}\n" for oid in shallow).encode())
    _write(folder / "config", config_text(object_format, durable=durable).encode())
    _write(folder / "HEAD", b"ref: refs/heads/none\n")
    return Git(git_dir=folder)


def alternates(borrow: Sequence[Path]) -> bytes:
    """The content of ``objects/info/alternates``: quoted, so any path name will do."""
    return b"".join(b'"' + _c_quoted(os.fsencode(path)) + b'"\n' for path in borrow)


def borrowing(git: Git, objects: Path, borrow: Sequence[Path]) -> Git:
    """`git` that writes objects to `objects` and reads them from `borrow` as well."""
    variables = {
        "GIT_OBJECT_DIRECTORY": str(objects),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": alternates(borrow).decode("ascii").replace("\n", ":"),
    }
    return git.but(variables=variables)


def _c_quoted(name: bytes) -> bytes:
    plain = range(0x20, 0x7F)
    return b"".join(
        bytes([byte]) if byte in plain and byte not in b'"\\' else b"\\%03o" % byte for byte in name
    )


def _write(file: Path, content: bytes) -> None:
    """Write a small file atomically, unless it says so already; an empty one is removed."""
    try:
        if file.read_bytes() == content:
            return
    except FileNotFoundError:
        if not content:
            return
    if not content:
        file.unlink()
        return
    beside = file.with_name(file.name + ".new")
    beside.write_bytes(content)
    beside.replace(file)
