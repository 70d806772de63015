"""Owns the verdict on a whole result: what is refused, what is flagged, which folders vanish."""

import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vmsandbox.errors import ReviewRefused
from vmsandbox.hostile.flags import flags_of
from vmsandbox.hostile.links import MAX_LINK_BYTES, LinkWalker
from vmsandbox.hostile.names import fold, parents, refuse_name, seen_by_file_systems
from vmsandbox.model import Change, TreeEntry
from vmsandbox.text import quote_path

MAX_ENTRIES = 2_000_000
"""A listing is given up here: a tree that repeats itself can be exponentially larger than its
objects."""

_MAX_NAMED = 20
# What git takes a folder for a repository by (its is_git_directory, setup.c), as folded.
_REPOSITORIES = (frozenset({b"head", b"objects", b"refs"}), frozenset({b"head", b"commondir"}))
_REPOSITORY_PARTS = frozenset().union(*_REPOSITORIES)
_GITLINK = 0o160000


class Refusal(NamedTuple):
    """A path that makes the whole result unacceptable, and why."""

    path: bytes
    reason: str


class Findings(NamedTuple):
    """What an inspection found: `changes` are the changes given, with their flags."""

    refusals: tuple[Refusal, ...]
    changes: tuple[Change, ...]
    removed_dirs: tuple[bytes, ...]


def inspect(
    changes: Sequence[Change],
    entries: Iterable[TreeEntry],
    read_link: Callable[[str], bytes],
    *,
    max_paths: int,
    max_bytes: int,
) -> Findings:
    """Judge a result by its changes and by the whole listing of its tree, folders included.

    `read_link` gives a link's target by its object name. The listing is read once, as a stream.
    """
    if refusals := list(_too_much(changes, max_paths, max_bytes)):
        return Findings(tuple(refusals), tuple(changes), ())
    listing = _read_listing(changes, entries)
    refusals = [*_bad_names(changes), *_bad_kinds(changes), *listing.refusals]
    if not refusals:  # links are only followed in a tree that is well formed
        refusals += _bad_links(changes, listing.links, read_link)
    flagged = [
        change.model_copy(
            update={
                "flags": flags_of(
                    change,
                    collides=listing.collides(change.path),
                    in_repository=listing.in_repository(change.path),
                )
            }
        )
        for change in changes
    ]
    return Findings(tuple(refusals), tuple(flagged), listing.removed_dirs)


def raise_refusals(refusals: Sequence[Refusal], *, evidence: str | None = None) -> None:
    """Raise ReviewRefused ``result_hostile`` naming the paths; do nothing if there are none."""
    if not refusals:
        return
    named = [f"{quote_path(path)}: {reason}" for path, reason in refusals[:_MAX_NAMED]]
    if len(refusals) > _MAX_NAMED:
        named.append(f"and {len(refusals) - _MAX_NAMED} more")
    raise ReviewRefused(
        "result_hostile",
        "the result is refused, nothing of it will be written:\n  " + "\n  ".join(named),
        hint="have the task put these paths right, or delete the sandbox",
        evidence=evidence,
    )


def _too_much(changes: Sequence[Change], max_paths: int, max_bytes: int) -> Iterator[Refusal]:
    if len(changes) > max_paths:
        yield Refusal(changes[max_paths].path, f"more than {max_paths} changed paths")
    total = 0
    for change in changes:
        total += change.size_bytes if change.new_oid is not None else 0
        if total > max_bytes:
            yield Refusal(change.path, f"more than {max_bytes} bytes of new content up to here")
            return


def _bad_names(changes: Iterable[Change]) -> Iterator[Refusal]:
    for change in changes:
        for path in (change.path, change.old_path):
            if path is not None and (reason := refuse_name(path)):
                yield Refusal(path, reason)


def _bad_kinds(changes: Iterable[Change]) -> Iterator[Refusal]:
    for change in changes:
        if change.new_oid is not None and (reason := _bad_kind(change)):
            yield Refusal(change.path, reason)


def _bad_kind(change: Change) -> str | None:
    kind = stat.S_IFMT(change.new_mode)
    if kind == stat.S_IFREG:
        return None
    if kind == _GITLINK:
        return "a submodule entry"
    if kind != stat.S_IFLNK:
        return f"an entry of unknown mode {change.new_mode:o}"
    if not 0 < change.size_bytes <= MAX_LINK_BYTES:
        return f"a link of {change.size_bytes} bytes"
    if seen_by_file_systems(change.path.rsplit(b"/", 1)[-1]) == ".gitmodules":
        return "a link in place of .gitmodules"
    return None


def _bad_links(
    changes: Iterable[Change], links: Mapping[bytes, str], read_link: Callable[[str], bytes]
) -> Iterator[Refusal]:
    """Links that are bad because of a change: their own, or one that lies on their way."""
    changed = {path for c in changes for path in (c.path, c.old_path) if path is not None}
    walker = LinkWalker({path: read_link(oid) for path, oid in links.items()}, changed)
    for path in links:
        way = walker.follow(path)
        if walker.exhausted:
            yield Refusal(path, "links that are too tangled to follow")
            return
        if way.reason and way.changed:
            yield Refusal(path, way.reason)


# --- the listing of the whole tree ----------------------------------------------------------------


class _Listing(NamedTuple):
    refusals: tuple[Refusal, ...]
    links: Mapping[bytes, str]  # path → object name; empty if no change concerns a link
    removed_dirs: tuple[bytes, ...]
    doubles: frozenset[bytes]  # folded names that stand for more than one name
    repositories: frozenset[bytes]  # folded names of folders that git takes for bare repositories

    def collides(self, path: bytes) -> bool:
        return bool(self.doubles) and any(fold(p) in self.doubles for p in _prefixes(path))

    def in_repository(self, path: bytes) -> bool:
        known = self.repositories
        return bool(known) and any(fold(parent) in known for parent in parents(path))


def _read_listing(changes: Sequence[Change], entries: Iterable[TreeEntry]) -> _Listing:
    """One pass over the tree, keeping only what the changes make interesting."""
    written = [change.path for change in changes if change.new_oid is not None]
    changed = {prefix for path in written for prefix in _prefixes(path)}
    folded = {fold(path) for path in changed}
    gone_dirs = {parent for change in changes for parent in parents(_left(change))}
    wants_links = any(stat.S_ISLNK(m) for c in changes for m in (c.old_mode, c.new_mode))
    refusals: list[Refusal] = []
    links: dict[bytes, str] = {}
    names: dict[bytes, bytes] = {}
    modes: dict[bytes, int] = {}
    doubles: set[bytes] = set()
    parts: dict[bytes, set[bytes]] = {}
    for count, (path, mode, oid) in enumerate(entries):
        if count >= MAX_ENTRIES:
            refusals.append(Refusal(path, f"more than {MAX_ENTRIES} entries in the tree"))
            break
        if stat.S_ISDIR(mode):
            gone_dirs.discard(path)
        elif wants_links and stat.S_ISLNK(mode):
            links[path] = oid
        if path in changed:
            if path in modes:
                refusals.append(Refusal(path, "the same name twice"))
            modes[path] = mode
        if (key := fold(path)) in folded and names.setdefault(key, path) != path:
            doubles.add(key)
        above, _, name = key.rpartition(b"/")
        if name in _REPOSITORY_PARTS:
            parts.setdefault(above, set()).add(name)
    refusals += _below_no_folder(written, modes)
    repositories = (at for at, found in parts.items() if any(found >= r for r in _REPOSITORIES))
    return _Listing(
        tuple(refusals),
        links,
        tuple(sorted(gone_dirs)),
        frozenset(doubles),
        frozenset(repositories),
    )


def _below_no_folder(written: Iterable[bytes], modes: Mapping[bytes, int]) -> Iterator[Refusal]:
    for path in written:
        for parent in parents(path):
            if not stat.S_ISDIR(modes.get(parent, 0)):
                yield Refusal(path, f"lies below {quote_path(parent)}, which is no folder")


def _left(change: Change) -> bytes:
    """The path that a change empties; empty bytes if it empties none."""
    if change.new_oid is None:
        return change.path
    return change.old_path if change.old_path is not None else b""


def _prefixes(path: bytes) -> Iterator[bytes]:
    yield from parents(path)
    yield path
