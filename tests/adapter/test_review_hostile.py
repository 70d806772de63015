"""Results that only a hostile guest makes, as real git objects: refused, and nothing is written."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.adapter.crafted import Case, Exe, Files, Link, Node, content
from tests.repositories import fingerprint
from vmsandbox.errors import ReviewRefused
from vmsandbox.model import Limits
from vmsandbox.text import quote_path

BASE: Files = {b"README": b"hello\n", b"dir/a": b"1\n", b"dir/b": b"2\n"}
FILE, LINK, FOLDER, SUBMODULE = 0o100644, 0o120000, 0o40000, 0o160000
Tree = list[tuple[int, str, bytes]]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path, BASE, BASE)


def refuse(case: Case, tree: str, *named: bytes, limits: Limits | None = None) -> str:
    """Collect `tree`; it must be refused by name, and nothing may change anywhere."""
    before = fingerprint(case.target), case.folder.change_set.read_bytes()
    with pytest.raises(ReviewRefused) as caught:
        case.collect_tree(tree, limits)
    assert caught.value.code == "result_hostile"
    for path in named:
        assert quote_path(path) in caught.value.message
    assert (fingerprint(case.target), case.folder.change_set.read_bytes()) == before
    return caught.value.message


def nested(case: Case, *names: bytes, mode: int = FILE, leaf: bytes = b"evil\n") -> str:
    """A tree with one entry, `names` deep."""
    oid = case.objects.blob(leaf)
    for name in reversed(names):
        oid, mode = case.objects.mktree([(mode, oid, name)]), FOLDER
    return oid


@pytest.mark.parametrize(
    "names",
    [
        (b".git", b"hooks", b"post-checkout"),
        (b".GIT", b"config"),
        (b"sub", b".git"),
        (b"git~1", b"config"),
        (b".git ", b"config"),
        (b".git.", b"config"),
        (b".git::$INDEX_ALLOCATION", b"config"),
        (".g\u200cit".encode(), b"config"),
        ("\ufeff.git".encode(), b"config"),
        (b"a\\.git\\hooks\\x",),
        (b"..", b"outside"),
        (b"a", b"..", b"..", b"outside"),
        (b".", b"x"),
    ],
    ids=repr,
)
def test_a_dangerous_name_is_refused(case: Case, names: tuple[bytes, ...]) -> None:
    refuse(case, nested(case, *names), b"/".join(names))


@pytest.mark.parametrize("name", [b"/etc/cron.d/x", b"a/../../x", b"a/b"])
def test_a_separator_within_one_name_is_refused(case: Case, name: bytes) -> None:
    """git itself never writes such a tree, so it is made byte by byte."""
    blob = case.objects.blob(b"evil\n")
    refuse(case, case.objects.raw_tree([(b"100644", name, blob)]), name)


@pytest.mark.parametrize(
    ("names", "target"),
    [
        ((b"l",), b"/etc/passwd"),
        ((b"l",), b"../outside"),
        ((b"dir", b"l"), b"../../outside"),
        ((b"l",), b".git/hooks/post-checkout"),
        ((b"l",), b"dir/../../outside"),
        ((b".gitmodules",), b"dir/a"),
        ((b"l",), b""),
        ((b"l",), b"x/" * 3000),
    ],
    ids=repr,
)
def test_a_link_out_of_the_tree_is_refused(
    case: Case, names: tuple[bytes, ...], target: bytes
) -> None:
    refuse(case, nested(case, *names, mode=LINK, leaf=target), b"/".join(names))


def test_a_link_out_of_the_tree_through_another_is_refused(case: Case) -> None:
    inner = case.objects.blob(b"..")
    outer = case.objects.blob(b"a/d/../x")
    folder = case.objects.mktree([(LINK, inner, b"d")])
    tree = case.objects.mktree([(FOLDER, folder, b"a"), (LINK, outer, b"l")])
    refuse(case, tree, b"l")


def test_a_path_below_a_link_is_refused(case: Case) -> None:
    """One name twice, as a link and as a folder: what is below would be written through it."""
    link = case.objects.blob(b"dir")
    folder = nested(case, b"x")
    tree = case.objects.raw_tree([(b"120000", b"p", link), (b"40000", b"p", folder)])
    refuse(case, tree, b"p")


def test_a_submodule_entry_is_refused(case: Case) -> None:
    refuse(case, case.objects.mktree([(SUBMODULE, "1" * 40, b"lib")]), b"lib")


def test_too_many_paths_are_refused(case: Case) -> None:
    blob = case.objects.blob(b"")
    tree = case.objects.mktree([(FILE, blob, b"f%04d" % number) for number in range(200)])
    message = refuse(case, tree, limits=Limits(result_max_paths=100))
    assert "more than 100 changed paths" in message


def test_too_many_bytes_are_refused_however_small_the_pack(case: Case) -> None:
    zeros = case.objects.blob(b"\0" * (1024 * 1024 + 1))
    tree = case.objects.mktree([(FILE, zeros, b"zeros")])
    refuse(case, tree, b"zeros", limits=Limits(result_max_mib=1))


def test_a_file_where_the_host_has_a_folder_with_foreign_content_is_refused(case: Case) -> None:
    """Not known when the result comes in: the apply refuses it. See the contract's tests too."""
    (case.target / "build").mkdir()
    (case.target / "build/mine").write_text("foreign\n")
    case.collect({**BASE, b"build": b"a file\n"})
    before = fingerprint(case.target)
    with pytest.raises(Exception, match="build: new in the result"):
        case.apply()
    assert fingerprint(case.target) == before


@pytest.mark.parametrize("mode", [b"104755", b"102755", b"106777", b"101777"])
def test_set_id_and_sticky_bits_never_survive(case: Case, mode: bytes) -> None:
    blob = case.objects.blob(b"#!/bin/sh\n")
    case.collect_tree(case.objects.raw_tree([(mode, b"tool", blob)]))
    case.apply()
    assert (case.target / "tool").stat().st_mode & 0o7111 == 0o111
    assert content(case.target) == {b"tool": Exe(b"#!/bin/sh\n")}


def test_set_id_bits_of_the_users_own_file_do_not_pass_to_new_content(case: Case) -> None:
    """A guest must not get content of its choice into a file that the user made set-id."""
    case.collect({**BASE, b"README": b"changed\n"})
    (case.target / "README").chmod(0o6644)
    case.apply()
    assert (case.target / "README").stat().st_mode & 0o7777 == 0o644


def test_a_name_of_the_users_own_that_would_be_refused_may_stay(tmp_path: Path) -> None:
    base: Files = {b"link": Link(b"/usr/share/dict"), b"a\\..\\b": b"1", b"x": b"1"}
    case = Case(tmp_path, base, {**base, b"x": b"2"})
    case.apply()
    assert case.content() == {**base, b"x": b"2"}


# --- made-up trees --------------------------------------------------------------------------------

NAMES = st.sampled_from(
    [b"a", b"b", b"c", b"A", b".git", b"git~1", b"..", b"\xff", b"n\nl", b".gitmodules", b"-x"]
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
CONTENT = st.binary(max_size=8)
NODES: st.SearchStrategy[Node] = st.one_of(
    CONTENT,
    CONTENT.map(Exe),
    st.lists(NAMES | st.just(b""), max_size=4).map(b"/".join).map(Link),
)


def consistent(files: dict[bytes, Node]) -> dict[bytes, Node]:
    """Without paths below another path, so that a folder can hold them."""
    return {
        path: node
        for path, node in files.items()
        if not any(other != path and path.startswith(other + b"/") for other in files)
    }


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    return lambda: tmp_path_factory.mktemp("made-up")


WILD = {b".git", b"git~1", b".."}


def is_wild(path: bytes) -> bool:
    return not WILD.isdisjoint(path.split(b"/"))


def in_a_folder(files: dict[bytes, Node]) -> dict[bytes, Node]:
    """What of it the user can have on the host."""
    return {path: node for path, node in files.items() if not is_wild(path) and node != Link(b"")}


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(PATHS, NODES, max_size=6).map(consistent).map(in_a_folder),
    st.dictionaries(PATHS, NODES, max_size=6).map(consistent),
)
def test_any_result_is_either_refused_whole_or_applied_exactly(
    fresh: Callable[[], Path], base: dict[bytes, Node], result: dict[bytes, Node]
) -> None:
    root = fresh()
    case = Case(root, base, base)
    try:
        case.collect_tree(tree_of(case, result))
        assert not any(is_wild(path) for path in result)
        case.apply()
        assert case.content() == result
    except ReviewRefused:
        assert case.content() == base
    finally:
        assert {path.name for path in root.iterdir()} == {"sandbox", "worktree"}


def tree_of(case: Case, files: dict[bytes, Node]) -> str:
    """Like `GitResults.tree`, for names that git's own importer refuses."""
    below: dict[bytes, dict[bytes, Node]] = {}
    lines: Tree = []
    for path, node in files.items():
        name, slash, rest = path.partition(b"/")
        if slash:
            below.setdefault(name, {})[rest] = node
        else:
            mode = LINK if isinstance(node, Link) else 0o100755 if isinstance(node, Exe) else FILE
            data = node if isinstance(node, bytes) else node[0]
            lines.append((mode, case.objects.blob(data), name))
    lines += [(FOLDER, tree_of(case, inner), name) for name, inner in below.items()]
    return case.objects.mktree(lines)
