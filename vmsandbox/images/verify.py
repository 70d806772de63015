"""Owns the proof that an image is what its digest says: always for the manifest, once per change
for the parts.

Hashing a gigabyte takes seconds, so what a full check saw of each file (size, times, inode) is kept
beside the image; while nothing of that changed, a quick check believes it.
"""

import contextlib
import os
from pathlib import Path

from pydantic import ValidationError

from vmsandbox.errors import HostProblem
from vmsandbox.images.manifest import MANIFEST, PARTS, Manifest, folder_name, part_of
from vmsandbox.model import Value

_VERIFIED = "verified.json"


class Sight(Value):
    """What identifies a file's unchanged content; ctime cannot be set back without being root and
    forging the clock.
    """

    size_bytes: int
    inode: int
    mtime_ns: int
    ctime_ns: int
    uid: int

    @classmethod
    def of(cls, path: Path) -> "Sight":
        status = path.stat()
        return cls(
            size_bytes=status.st_size,
            inode=status.st_ino,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            uid=status.st_uid,
        )


class _Verified(Value):
    parts: dict[str, Sight]


def read_manifest(folder: Path, digest: str | None = None) -> Manifest:
    """The manifest in `folder`, which must have this digest, or one that fits the folder's name.

    Raises HostProblem ``image_broken`` or ``image_digest_mismatch``.
    """
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise HostProblem(
            "image_broken",
            f"the image in {folder} has no readable manifest",
            hint=_again(folder),
            evidence=str(path),
        ) from error
    found = manifest.digest()
    if found != (digest or found) or folder_name(found) != folder.name:
        raise _mismatch(path, digest or folder.name, found)
    return manifest


def check(folder: Path, manifest: Manifest) -> None:
    """Hash every part. Raises HostProblem ``image_digest_mismatch``: expected, found, path."""
    sights: dict[str, Sight] = {}
    for name in PARTS:
        path = folder / name
        sights[name] = _sight(path)
        found, expected = part_of(path), manifest.parts[name]
        if found != expected:
            raise _mismatch(path, expected.sha256, found.sha256)
    _remember(folder, sights)


def trust(folder: Path) -> None:
    """Remember the parts as they are: whoever made the image hashed them while writing."""
    _remember(folder, {name: _sight(folder / name) for name in PARTS})


def check_quickly(folder: Path, manifest: Manifest) -> None:
    """Believe the last full check if no part was touched since, else check in full."""
    try:
        path = folder / _VERIFIED
        seen = _Verified.model_validate_json(path.read_bytes())
        believed = path.stat().st_uid in (os.geteuid(), folder.stat().st_uid)
    except (OSError, ValidationError):
        return check(folder, manifest)
    if not believed or seen.parts != {name: _sight(folder / name) for name in PARTS}:
        check(folder, manifest)
    return None


def _sight(path: Path) -> Sight:
    try:
        return Sight.of(path)
    except OSError as error:
        raise HostProblem(
            "image_broken",
            f"{path} is missing or cannot be read",
            hint=_again(path.parent),
            evidence=str(path),
        ) from error


def _remember(folder: Path, sights: dict[str, Sight]) -> None:
    """Somebody else's image is checked in full every time."""
    temporary = folder / f".{_VERIFIED}.{os.getpid()}"
    with contextlib.suppress(OSError):
        temporary.write_text(_Verified(parts=sights).model_dump_json())
        temporary.chmod(0o444)
        temporary.replace(folder / _VERIFIED)


def _again(folder: Path) -> str:
    return f"vmsandbox image remove {folder.name}, then build or import it again"


def _mismatch(path: Path, expected: str, found: str) -> HostProblem:
    return HostProblem(
        "image_digest_mismatch",
        f"{path} is not what the image's digest says: expected {expected}, found {found}",
        hint=_again(path.parent),
        evidence=str(path),
    )
