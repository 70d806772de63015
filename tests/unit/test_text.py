"""Foreign bytes become safe text, and paths come back as the bytes that they were."""

import shlex
import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmsandbox.text import command_line, is_plain, printable, quote_path, unquote_path

PATHS = st.binary(max_size=64).filter(lambda path: b"\0" not in path)
DANGEROUS = "\x1b\x07\x9b\x7f\r\u200e\u202e\u2066\u2069\u2028\u2029\ufeff\U000e0001\ue000"
INVISIBLE = "\u3164\u115f\uffa0\u034f\u17b4\ufe00\ufe0f\U000e0101"
"""Letters and marks by their category, but nobody sees them."""


@given(st.lists(st.text(string.ascii_letters + " ;'\"$\\\\", max_size=9), min_size=1))
def test_a_shown_command_has_the_same_words(command: list[str]) -> None:
    assert shlex.split(command_line(command)) == command


def test_a_shown_command_is_one_line_of_plain_characters() -> None:
    assert command_line(["sh", "-c", "a\nb\x1b[2J"]) == r"sh -c 'a\x0ab\x1b[2J'"


@given(PATHS | st.text(max_size=32).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_quoting_is_undone_exactly(path: bytes) -> None:
    assert unquote_path(quote_path(path)) == path


@given(PATHS)
def test_a_shown_path_is_one_line_of_plain_characters(path: bytes) -> None:
    assert all(is_plain(character) for character in quote_path(path))


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (b"src/main.py", "src/main.py"),
        (b"with space", "with space"),
        ("größe/日本".encode(), "größe/日本"),
        (b"", '""'),
        (b'"quoted"', '"\\"quoted\\""'),
        (b"back\\slash", '"back\\\\slash"'),
        (b"two\nlines", '"two\\nlines"'),
        (b"\x1b[2J", '"\\033[2J"'),
        (b"latin-\xe9", '"latin-\\351"'),
        ("txt.\u202eexe".encode(), '"txt.\\342\\200\\256exe"'),
    ],
)
def test_the_spelling_of_paths(path: bytes, shown: str) -> None:
    assert quote_path(path) == shown
    assert unquote_path(shown) == path


def test_text_without_quotes_stands_for_itself() -> None:
    assert unquote_path(r"a\n") == rb"a\n"
    assert unquote_path('"') == b'"'


@given(st.text() | st.text(alphabet=DANGEROUS + "ab\t\n") | st.binary())
def test_nothing_printable_can_command_a_terminal(text: str | bytes) -> None:
    for character in printable(text):
        assert character in "\t\n\ufe0f" or is_plain(character)
        assert unicodedata.bidirectional(character) not in {
            *("LRE", "RLE", "LRO", "RLO", "PDF"),
            *("LRI", "RLI", "FSI", "PDI"),
        }


@given(st.text(alphabet=DANGEROUS + "ab\t\n") | st.binary())
def test_without_newlines_the_text_stays_on_its_line(text: str | bytes) -> None:
    assert len(printable(text, newlines=False).splitlines()) <= 1


@pytest.mark.parametrize("character", list(DANGEROUS + INVISIBLE))
def test_each_dangerous_character_becomes_visible(character: str) -> None:
    shown = printable(f"a{character}b")
    assert character not in shown
    assert shown.startswith("a\\")
    assert shown.endswith("b")
    assert shown.isascii()


@given(
    st.text(
        alphabet=st.characters(
            categories=["L", "N", "P", "S", "Zs"], exclude_characters=INVISIBLE + "\u1160"
        )
    )
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert printable(text) == text


def test_only_an_emoji_keeps_its_selector() -> None:
    assert printable("\u26a0\ufe0f ok") == "\u26a0\ufe0f ok"
    assert printable("\u26a0\ufe0f\ufe0f") == "\u26a0\ufe0f\\ufe0f"
    assert quote_path("\u26a0\ufe0f".encode()) == '"\u26a0\\357\\270\\217"'


def test_bytes_that_are_no_text_stay_visible() -> None:
    assert printable(b"ok \xff\xfe") == "ok \\xff\\xfe"
    assert printable("\udcff") == "\\xff"
    assert printable("\ud800") == "\\ud800"
