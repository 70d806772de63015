"""Owns images as one file to pass on: a tar of manifest and parts, compressed with zstd.

An archive from elsewhere is believed in nothing but its size limits until every part has the digest
that its manifest names; the manifest comes first, so that the rest can be held against it while it
is read.
"""

import contextlib
import io
import subprocess
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from vmsandbox.errors import UsageProblem
from vmsandbox.images.manifest import MANIFEST, PARTS, Manifest, Part
from vmsandbox.images.programs import failure, locate

MANIFEST_MAX_BYTES = 4 * 1024 * 1024
_CHUNK = 1024 * 1024


def write(folder: Path, target: Path) -> None:
    """Write the image in `folder` as `target`. The same image always gives the same tar within."""
    with _compressing(target) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for name in (MANIFEST, *PARTS):
            member = tarfile.TarInfo(name)
            member.size, member.mode = (folder / name).stat().st_size, 0o444
            with (folder / name).open("rb") as content:
                archive.addfile(member, content)


def read(source: Path, folder: Path) -> Manifest:
    """Unpack an archive into the empty `folder`.

    Raises UsageProblem ``image_archive_refused``: not an archive of ours, names or kinds of members
    that do not belong, sizes or digests other than the manifest's.
    """
    try:
        with _decompressing(source) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            return _unpack(iter(archive), archive, folder)
    except tarfile.TarError as error:
        raise _refused(f"{source} is no image archive: {error}") from error


def _unpack(members: Iterator[tarfile.TarInfo], archive: tarfile.TarFile, folder: Path) -> Manifest:
    manifest = _manifest(archive, next(members, None))
    (folder / MANIFEST).write_bytes(manifest.canonical())
    missing: dict[str, Part] = dict(manifest.parts)
    for member in members:
        part = missing.pop(member.name, None)
        if part is None or not member.isreg():
            raise _refused(f"the archive holds {member.name!r}, which does not belong there")
        if member.size != part.size_bytes:
            raise _refused(
                f"{member.name} has {member.size} bytes, its manifest says {part.size_bytes}"
            )
        content = archive.extractfile(member)
        assert content
        found = _write_sparse(content, folder / member.name)
        if found != part.sha256:
            raise _refused(f"{member.name} has the digest {found}, its manifest says {part.sha256}")
    if missing:
        raise _refused(f"the archive lacks {', '.join(sorted(missing))}")
    return manifest


def _manifest(archive: tarfile.TarFile, member: tarfile.TarInfo | None) -> Manifest:
    if member is None or member.name != MANIFEST or not member.isreg():
        raise _refused(f"the archive does not begin with {MANIFEST}")
    if member.size > MANIFEST_MAX_BYTES:
        raise _refused(f"{MANIFEST} claims {member.size} bytes")
    content = archive.extractfile(member)
    assert content
    try:
        return Manifest.model_validate_json(content.read())
    except ValidationError as error:
        raise _refused(f"{MANIFEST} is not valid: {error.error_count()} problems") from error


def _write_sparse(source: IO[bytes], target: Path) -> str:
    """Copy with holes for zeros; the digest of what was read."""
    hasher, zeros = sha256(), bytes(_CHUNK)
    with target.open("wb") as file:
        while chunk := source.read(_CHUNK):
            hasher.update(chunk)
            if chunk == zeros[: len(chunk)]:
                file.seek(len(chunk), io.SEEK_CUR)
            else:
                file.write(chunk)
        file.truncate()
    return f"sha256:{hasher.hexdigest()}"


def _refused(message: str) -> UsageProblem:
    return UsageProblem(
        "image_archive_refused",
        message,
        hint="ask for a fresh file made by: vmsandbox image export NAME FILE",
    )


@contextlib.contextmanager
def _compressing(target: Path) -> Iterator[IO[bytes]]:
    """A stream whose bytes end up compressed in `target`."""
    with target.open("wb") as file:
        process = subprocess.Popen(
            [locate("zstd"), "-q", "-T0", "-6", "-c"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.PIPE,
        )
    assert process.stdin
    assert process.stderr
    try:
        with process.stdin:
            yield process.stdin
    except BrokenPipeError:
        pass  # zstd ended early; its own words follow
    finally:
        complaint = process.stderr.read().decode(errors="replace")
        process.stderr.close()
        code = process.wait()
    if code:
        raise failure("zstd", code, complaint)


@contextlib.contextmanager
def _decompressing(source: Path) -> Iterator[IO[bytes]]:
    """The bytes that `source` holds; broken data looks like an early end."""
    with source.open("rb") as file:
        process = subprocess.Popen(
            [locate("zstd"), "-q", "-d", "-c"],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    assert process.stdout
    try:
        with process.stdout:
            yield process.stdout
    finally:
        process.wait()
