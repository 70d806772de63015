"""Names that may not be written, in all their disguises, and names that look like them but may."""

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vmsandbox.hostile import fold, is_dot_git, refuse_name

DOT_GIT = [
    b".git",
    b".GIT",
    b".Git",
    b".git.",
    b".git ",
    b".git . .",
    b".git:",
    b".git::$INDEX_ALLOCATION",
    b".GIT::$index_allocation",
    b".git:stream",
    b"git~1",
    b"GIT~1",
    b"Git~2",
    b"git~1.",
    b"git~1::$INDEX_ALLOCATION",
    ".g\u200cit".encode(),
    ".\u200dg\ufeffi\u206at".encode(),
    "\u200e.git\u202e".encode(),
    ".\u00adgit".encode(),
    ".gi\ufe0ft".encode(),
    "\u2060.git".encode(),
    ".\uff47it".encode(),
    ".gi\U0001d42d".encode(),
    ".G\u0131T".replace("\u0131", "I").encode(),
    ".git\u200c ".encode(),
]
INNOCENT = [
    b".gitignore",
    b".gitattributes",
    b".github",
    b".gitmodules",
    b"git",
    b"git~",
    b"git~x",
    b"agit~1",
    b"..git",
    b".git-blame-ignore-revs",
    b"x.git",
    b".gitx",
    b"...",
    b". .",
    b"dev-disk-by\\x2dlabel.mount",
    "naïve.txt".encode(),
    b"\xff\xfe",
    b"new\nline",
    b"a:b",
]


@pytest.mark.parametrize("name", DOT_GIT, ids=repr)
def test_every_disguise_of_dot_git_is_refused(name: bytes) -> None:
    assert is_dot_git(name)
    for path in (name, name + b"/config", b"a/" + name, b"a/b/" + name + b"/hooks/x"):
        assert refuse_name(path), path


@pytest.mark.parametrize("name", DOT_GIT, ids=repr)
def test_dot_git_behind_a_backslash_is_refused(name: bytes) -> None:
    assert refuse_name(b"a\\" + name)
    assert refuse_name(name + b"\\config")


@pytest.mark.parametrize("name", INNOCENT, ids=repr)
def test_innocent_names_pass(name: bytes) -> None:
    assert refuse_name(name) is None
    assert refuse_name(b"a/" + name + b"/b") is None


@pytest.mark.parametrize(
    "path",
    [
        b"",
        b"/",
        b"/etc/passwd",
        b"//x",
        b"..",
        b"../x",
        b"a/../b",
        b"a/..",
        b".",
        b"./a",
        b"a/./b",
        b"a//b",
        b"a/",
        b"a\0b",
        b"a\\..\\b",
        b"..\\x",
        b"a/b\\..",
        b"n" * 256,
        b"a/" + b"n" * 256,
        b"a/" * 2000 + b"b",
    ],
    ids=lambda path: repr(path[:24]),
)
def test_names_that_lead_elsewhere_are_refused(path: bytes) -> None:
    assert refuse_name(path)


@pytest.mark.parametrize("path", [b"n" * 255, b"a/" * 1999 + b"b", b"..a", b"a../b", b"a\\.b"])
def test_the_longest_and_oddest_permitted_names_pass(path: bytes) -> None:
    assert refuse_name(path) is None


IGNORABLE = st.sampled_from("\u200b\u200c\u200d\u200e\u202a\u202e\u206a\u206f\ufeff\u00ad\ufe0f")


@st.composite
def disguised(draw: st.DrawFn) -> bytes:
    """``.git`` with ignorable characters anywhere, any case, and a tail that NTFS drops."""
    letters = [draw(st.sampled_from([c, c.upper()])) for c in ".git"]
    woven = "".join(draw(st.text(IGNORABLE, max_size=3)) + c for c in letters)
    tail = draw(st.text(st.sampled_from(" ."), max_size=4))
    stream = draw(st.sampled_from(["", ":", "::$INDEX_ALLOCATION", ":anything"]))
    return (woven + tail + stream).encode()


@given(disguised(), st.lists(st.text(string.ascii_letters, min_size=1), max_size=3))
def test_any_woven_disguise_is_refused_anywhere(name: bytes, folders: list[str]) -> None:
    assert refuse_name(b"/".join([*(f.encode() for f in folders), name]))


@given(st.binary(max_size=40))
@example(b"\xe2\x80")
@example(b"\xed\xb2\x80")
def test_any_bytes_get_a_verdict(path: bytes) -> None:
    verdict = refuse_name(path)
    assert verdict is None or verdict
    if verdict is None:
        assert b".." not in path.split(b"/")
        assert b".git" not in path.lower().split(b"/")
        assert not path.startswith(b"/")


@given(st.text(string.ascii_lowercase + string.digits + "_-", min_size=1, max_size=30))
def test_plain_names_are_never_refused(name: str) -> None:
    assert refuse_name(name.encode()) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"README", b"readme"),
        ("é".encode(), "e\u0301".encode()),
        ("É".encode(), "é".encode()),
        ("straße".encode(), b"STRASSE"),
        ("\u212a".encode(), b"k"),
        (b"a/B", b"A/b"),
        ("Make\u200cfile".encode(), b"makefile"),
        ("a\u0301\u034f\u0323".encode(), "a\u0323\u0301".encode()),
    ],
)
def test_names_that_a_file_system_confuses_fold_to_one(one: bytes, other: bytes) -> None:
    assert fold(one) == fold(other)


@given(st.binary(max_size=20))
def test_folding_twice_is_folding_once(path: bytes) -> None:
    assert fold(fold(path)) == fold(path)
