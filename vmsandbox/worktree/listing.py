"""Owns what git's machine-readable answers mean: the index file, tree listings, raw differences.

Pure: bytes in, values out. The index is our own and has a known version; trees and differences may
have been made by a guest, so sizes and counts are bounded by whoever reads them.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vmsandbox.model import Change, ChangeKind, TreeEntry

GITLINK = 0o160000
_LINK = 0o120000


class IndexSummary(NamedTuple):
    """What a private index holds."""

    files: int
    content_bytes: int
    gitlinks: tuple[bytes, ...]


def read_index(data: bytes, oid_bytes: int) -> IndexSummary:
    """Sum up an index of version 2 or 3; ValueError if it is none.

    The format is git's gitformat-index(5): ten 32-bit words, the object name, 16 bits of flags
    (16 more if the bit 0x4000 is set), the name, NULs up to a multiple of eight.
    """
    magic, version, count = struct.unpack_from(">4sII", data)
    if magic != b"DIRC" or version not in (2, 3):
        raise ValueError(f"index of version {version}")
    position, total, gitlinks = 12, 0, []
    words = struct.Struct(f">24xI8xI{oid_bytes}xH")
    for _ in range(count):
        mode, size, flags = words.unpack_from(data, position)
        start = position + words.size + (2 if flags & 0x4000 else 0)
        end = data.index(b"\0", start)
        total += size
        if mode == GITLINK:
            gitlinks.append(data[start:end])
        position += (end - position + 8) & ~7
    return IndexSummary(count, total, tuple(gitlinks))


def tree_entries(records: Iterable[bytes]) -> Iterator[TreeEntry]:
    """The records of ``ls-tree -r -t -z``, without their NULs."""
    for record in records:
        head, _, path = record.partition(b"\t")
        mode, _, oid = head.split(b" ")
        yield TreeEntry(path, int(mode, 8), oid.decode("ascii"))


class RawDifference(NamedTuple):
    """One record of ``diff-tree --raw -z``."""

    old_mode: int
    new_mode: int
    old_oid: str | None
    new_oid: str | None
    status: str
    old_path: bytes
    path: bytes


def raw_differences(data: bytes) -> tuple[list[RawDifference], bytes]:
    """The raw part of ``diff-tree --raw --numstat -z``, and the rest."""
    found, position = [], 0
    while data[position : position + 1] == b":":
        end = data.index(b"\0", position)
        old_mode, new_mode, old_oid, new_oid, status = data[position + 1 : end].split(b" ")
        old_path, position = _name(data, end + 1)
        path = old_path
        if status[:1] in b"RC":
            path, position = _name(data, position)
        found.append(
            RawDifference(
                int(old_mode, 8),
                int(new_mode, 8),
                _oid(old_oid),
                _oid(new_oid),
                status[:1].decode("ascii"),
                old_path,
                path,
            )
        )
    return found, data[position:]


def _name(data: bytes, start: int) -> tuple[bytes, int]:
    end = data.index(b"\0", start)
    return data[start:end], end + 1


def _oid(name: bytes) -> str | None:
    return None if not name.strip(b"0") else name.decode("ascii")


def numstats(data: bytes) -> dict[bytes, tuple[int | None, int | None]]:
    """Lines added and removed by path, as ``--numstat -z`` has it; None for binary content."""
    found: dict[bytes, tuple[int | None, int | None]] = {}
    position = 0
    while position < len(data):
        record, position = _name(data, position)
        added, removed, path = record.split(b"\t", 2)
        if not path:  # a rename: both names follow
            _, position = _name(data, position)
            path, position = _name(data, position)
        found[path] = (_lines(added), _lines(removed))
    return found


def _lines(count: bytes) -> int | None:
    return None if count == b"-" else int(count)


def change_of(
    raw: RawDifference,
    lines: dict[bytes, tuple[int | None, int | None]],
    sizes: dict[str, int],
) -> Change:
    """One difference as the model has it; links have no lines."""
    added, removed = lines.get(raw.path, (None, None))
    if _LINK in (raw.old_mode, raw.new_mode):
        added = removed = None
    oid = raw.new_oid or raw.old_oid
    return Change(
        kind=ChangeKind(raw.status),
        path=raw.path,
        old_path=raw.old_path if raw.status == "R" else None,
        old_mode=raw.old_mode,
        new_mode=raw.new_mode,
        old_oid=raw.old_oid,
        new_oid=raw.new_oid,
        added=added,
        removed=removed,
        size_bytes=sizes.get(oid or "", 0),
    )
