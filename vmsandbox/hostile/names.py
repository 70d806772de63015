"""Owns which path names may be written below a worktree, and which names file systems confuse.

The disguises of ``.git`` follow git's own ``is_hfs_dotgit`` (utf8.c) and ``is_ntfs_dotgit``
(path.c) and go beyond them: every default-ignorable character counts as invisible, every NTFS
short name and stream as the real one.
"""

import re
import unicodedata
from collections.abc import Iterator

MAX_NAME_BYTES = 255
"""NAME_MAX of Linux file systems."""

MAX_PATH_BYTES = 4000
"""Leaves room below PATH_MAX (4096) for the worktree's own path in most tools."""

# Default_Ignorable_Code_Point of Unicode: HFS+, APFS and ext4's casefold skip them in comparisons.
_IGNORABLE = (
    (0x00AD, 0x00AD),
    (0x034F, 0x034F),
    (0x061C, 0x061C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFF8),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)
_INVISIBLE: dict[int, None] = {
    code: None for first, last in _IGNORABLE for code in range(first, last + 1)
}
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
        text = unicodedata.normalize("NFKC", text.translate(_INVISIBLE))
        text = unicodedata.normalize("NFKC", text.casefold()).translate(_INVISIBLE)
    return text.casefold().split(":", 1)[0].rstrip(" .")


def fold(path: bytes) -> bytes:
    """Equal for two paths that a case- or normalisation-insensitive file system takes for one."""
    if path.isascii():
        return path.lower()
    text = unicodedata.normalize("NFD", path.decode("utf-8", "surrogateescape")).casefold()
    return unicodedata.normalize("NFD", text).encode("utf-8", "surrogateescape")


def parents(path: bytes) -> Iterator[bytes]:
    """The folders above a path, the outermost first."""
    cut = path.find(b"/")
    while cut >= 0:
        yield path[:cut]
        cut = path.find(b"/", cut + 1)
