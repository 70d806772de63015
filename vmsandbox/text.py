"""Owns how foreign bytes become safe text: path quoting and terminal escaping.

Must know no files and no processes. Path names in a git tree are bytes. Everything of ours keeps
them as bytes and shows them quoted, in the C style that git itself uses (``git ls-files`` with
``core.quotePath=false``), so that a JSON document stays valid UTF-8 and a terminal never receives a
control character that a guest chose.
"""

import re
import unicodedata

_NAMED = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}
_CODES = {letter: code for code, letter in _NAMED.items()}
_ESCAPE = re.compile(r'\\([abtnvfr"\\]|[0-7]{3})')


def is_plain(character: str) -> bool:
    """True if a terminal shows it as itself: no control, format (bidirectional), lone surrogate."""
    return unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


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

    Tabs stay; newlines stay where `newlines` says so. Invalid UTF-8 shows as ``\\xNN``.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    kept = "\t\n" if newlines else "\t"
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in kept or is_plain(c) else _show(c) for c in text)


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
