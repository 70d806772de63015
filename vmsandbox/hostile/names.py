"""Owns which path names may be written below a worktree, and which names file systems confuse.

The disguises of ``.git`` follow git's own ``is_hfs_dotgit`` (utf8.c) and ``is_ntfs_dotgit``
(path.c) and go beyond them: every default-ignorable character counts as invisible, every NTFS
short name and stream as the real one.
"""

import re
import unicodedata
from collections.abc import Iterator

from vmsandbox.text import INVISIBLE

MAX_NAME_BYTES = 255
"""NAME_MAX of Linux file systems."""

MAX_PATH_BYTES = 4000
"""Leaves room below PATH_MAX (4096) for the worktree's own path in most tools."""

_DOT_GIT = re.compile(r"\.git|git~[0-9]+")


def refuse_name(path: bytes) -> str | None:
    """Why this path name may not be written below a worktree; None if it may."""
    if not path or path.startswith(b"/"):
        return "not a relative path"
    if b"\0" in path:
        return "a NUL byte in the name"
    if len(path) > MAX_PATH_BYTES:
        return f"a path longer than {MAX_PATH_BYTES} bytes"
    for part in path.split(b"/"):
        if part in (b"", b".", b".."):
            return "an empty, '.' or '..' part"
        if len(part) > MAX_NAME_BYTES:
            return f"a name longer than {MAX_NAME_BYTES} bytes"
        # Windows reads a backslash as a separator, so a name with one is judged that way as well.
        if b".." in (pieces := part.split(b"\\")):
            return "a '..' part after a backslash"
        if any(is_dot_git(piece) for piece in pieces):
            return "a git directory, or a name that some file systems take for one"
    return None


def is_dot_git(name: bytes) -> bool:
    """Whether any file system in use takes this name for ``.git``."""
    return bool(_DOT_GIT.fullmatch(seen_by_file_systems(name)))


def seen_by_file_systems(name: bytes) -> str:
    """A name as the most careless file system compares it: NTFS, HFS+, APFS and FAT in one."""
    text = name.decode("utf-8", "surrogateescape")
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text.translate(INVISIBLE))
        text = unicodedata.normalize("NFKC", text.casefold()).translate(INVISIBLE)
    return text.casefold().split(":", 1)[0].rstrip(" .")


def fold(path: bytes) -> bytes:
    """Equal for two paths that a case- or normalisation-insensitive file system takes for one."""
    if path.isascii():
        return path.lower()
    text = path.decode("utf-8", "surrogateescape").translate(INVISIBLE)
    text = unicodedata.normalize("NFD", text).casefold()
    return unicodedata.normalize("NFD", text).encode("utf-8", "surrogateescape")


def parents(path: bytes) -> Iterator[bytes]:
    """The folders above a path, the outermost first."""
    cut = path.find(b"/")
    while cut >= 0:
        yield path[:cut]
        cut = path.find(b"/", cut + 1)
