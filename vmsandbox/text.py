"""Owns how foreign bytes become safe text: path quoting and terminal escaping.

Must know no files and no processes. Path names in a git tree are bytes. Everything of ours keeps
them as bytes and shows them quoted, in the C style that git itself uses (``git ls-files`` with
``core.quotePath=false``), so that a JSON document stays valid UTF-8 and a terminal never receives a
control character that a guest chose.
"""

import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence

_NAMED = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}
_CODES = {letter: code for code, letter in _NAMED.items()}
_ESCAPE = re.compile(r'\\([abtnvfr"\\]|[0-7]{3})')

# Default_Ignorable_Code_Point of Unicode.
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
INVISIBLE: Mapping[int, None] = {
    code: None for first, last in _IGNORABLE for code in range(first, last + 1)
}
"""Characters that nobody sees, though some are letters or marks: code is hidden in them. HFS+, APFS
and ext4's casefold skip them in comparisons. For :meth:`str.translate`."""

_NOT_PLAIN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_AS_EMOJI = "\ufe0f"


def is_plain(character: str) -> bool:
    """True if a terminal shows it as itself: no control, format (bidirectional), lone surrogate,
    and nothing invisible."""
    return unicodedata.category(character) not in _NOT_PLAIN and ord(character) not in INVISIBLE


def quote_path(path: bytes) -> str:
    """Show a path name: as it is if every character is plain, else in double quotes, C escapes."""
    text = path.decode("utf-8", "surrogateescape")
    if text and all(is_plain(c) and c not in '"\\' for c in text):
        return text
    return '"' + "".join(_quote_character(c) for c in text) + '"'


def _quote_character(character: str) -> str:
    if is_plain(character) and character not in '"\\':
        return character
    raw = character.encode("utf-8", "surrogateescape")
    return "".join("\\" + _NAMED.get(byte, f"{byte:03o}") for byte in raw)


def unquote_path(shown: str) -> bytes:
    """Undo :func:`quote_path`. Text without quotes stands for itself."""
    if len(shown) < 2 or not (shown.startswith('"') and shown.endswith('"')):
        return shown.encode("utf-8", "surrogateescape")
    pieces: list[bytes] = []
    position = 0
    inner = shown[1:-1]
    for match in _ESCAPE.finditer(inner):
        pieces.append(inner[position : match.start()].encode("utf-8", "surrogateescape"))
        code = match[1]
        pieces.append(bytes([int(code, 8) & 0xFF if len(code) == 3 else _CODES[code]]))
        position = match.end()
    pieces.append(inner[position:].encode("utf-8", "surrogateescape"))
    return b"".join(pieces)


def printable(text: str | bytes, *, newlines: bool = True) -> str:
    """Make guest text safe for a terminal or a page: what is not plain becomes a visible escape.

    Tabs stay; newlines stay where `newlines` says so. Invalid UTF-8 shows as ``\\xNN``. The one
    invisible character that stays is the selector that makes an emoji of the symbol before it.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    kept = "\t\n" if newlines else "\t"
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c in kept or is_plain(c) or (c == _AS_EMOJI and _is_symbol(before)) else _show(c)
        for before, c in zip(" " + text, text, strict=False)
    )


def command_line(command: Sequence[str]) -> str:
    """A command as a shell would take it, so that what is one word is seen to be one."""
    return printable(shlex.join(command), newlines=False)


def _is_symbol(character: str) -> bool:
    return unicodedata.category(character) == "So"


def _show(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape: a byte that was not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )
