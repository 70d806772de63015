"""Whole results: amounts, kinds, links and folders that a hostile guest may have made."""

import posixpath
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmsandbox.errors import ReviewRefused
from vmsandbox.hostile import MEANING, Findings, inspect, inspection, links, raise_refusals
from vmsandbox.hostile.links import LinkWalker
from vmsandbox.model import Change, ChangeKind, TreeEntry

FILE, EXECUTABLE, LINK, FOLDER, SUBMODULE = 0o100644, 0o100755, 0o120000, 0o40000, 0o160000


def oid_of(text: bytes) -> str:
    return text.hex().ljust(40, "0")[:40]


def added(path: bytes, mode: int = FILE, size: int = 1, **more: object) -> Change:
    facts: dict[str, object] = {
        "kind": ChangeKind.ADDED,
        "path": path,
        "new_mode": mode,
        "new_oid": "a" * 40,
        "added": 1 if mode != LINK else None,
        "size_bytes": size,
    }
    return Change.model_validate(facts | more)


def deleted(path: bytes, mode: int = FILE) -> Change:
    return Change(
        kind=ChangeKind.DELETED, path=path, old_mode=mode, old_oid="b" * 40, added=0, size_bytes=1
    )


def listing(paths: Mapping[bytes, int]) -> list[TreeEntry]:
    """The entries of a tree with these files, its folders included."""
    folders = {
        path[:i]: FOLDER for path in paths for i in range(len(path)) if path[i : i + 1] == b"/"
    }
    everything = {**folders, **paths}
    return [TreeEntry(path, everything[path], oid_of(path)) for path in sorted(everything)]


def judge(
    changes: Iterable[Change],
    kept: Mapping[bytes, int] | None = None,
    targets: Mapping[bytes, bytes] | None = None,
    *,
    max_paths: int = 1000,
    max_bytes: int = 10**6,
) -> Findings:
    """Inspect changes in a tree that holds them and `kept`; `targets` are the links' targets."""
    changes = list(changes)
    written = {c.path: c.new_mode for c in changes if c.new_oid is not None}
    by_oid = {oid_of(path): target for path, target in (targets or {}).items()}
    entries = listing({**(kept or {}), **written})
    return inspect(changes, entries, by_oid.__getitem__, max_paths=max_paths, max_bytes=max_bytes)


def reasons(findings: Findings) -> dict[bytes, str]:
    return {refusal.path: refusal.reason for refusal in findings.refusals}


# --- kinds and amounts ----------------------------------------------------------------------------


def test_a_plain_change_is_fine() -> None:
    findings = judge([added(b"src/a.py"), deleted(b"old.txt")], {b"README": FILE})
    assert not findings.refusals
    assert [c.flags for c in findings.changes] == [(), ()]


def test_a_submodule_entry_is_refused() -> None:
    assert "submodule" in reasons(judge([added(b"lib", SUBMODULE)]))[b"lib"]


@pytest.mark.parametrize("mode", [0o20644, 0o60644, 0o10644, 0o140755, FOLDER])
def test_an_entry_of_another_kind_is_refused(mode: int) -> None:
    assert "mode" in reasons(judge([added(b"x", mode)]))[b"x"]


def test_a_bad_old_name_of_a_rename_is_refused() -> None:
    change = added(b"b", kind=ChangeKind.RENAMED, old_path=b".git/a", old_mode=FILE)
    assert b".git/a" in reasons(judge([change]))


def test_too_many_paths_are_refused_at_the_first_one_too_many() -> None:
    changes = [added(b"f%d" % number) for number in range(6)]
    assert reasons(judge(changes, max_paths=5)).keys() == {b"f5"}
    assert not judge(changes, max_paths=6).refusals


def test_too_many_bytes_are_refused_where_they_become_too_many() -> None:
    changes = [added(b"a", size=60), deleted(b"d"), added(b"b", size=40), added(b"c", size=1)]
    assert reasons(judge(changes, max_bytes=100)).keys() == {b"c"}
    assert not judge(changes, max_bytes=101).refusals


def test_a_listing_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MAX_ENTRIES", 20_000)  # so that it is soon over

    def bomb() -> Iterable[TreeEntry]:
        while True:
            yield TreeEntry(b"x", FILE, "a" * 40)

    findings = inspect([added(b"y")], bomb(), lambda oid: b"", max_paths=10, max_bytes=10)
    assert any("entries" in reason for reason in reasons(findings).values())


def test_the_same_name_twice_is_refused() -> None:
    entries = [TreeEntry(b"a", FILE, "a" * 40), TreeEntry(b"a", LINK, "b" * 40)]
    findings = inspect([added(b"a")], entries, lambda oid: b"", max_paths=10, max_bytes=10)
    assert "twice" in reasons(findings)[b"a"]


@pytest.mark.parametrize("above", [LINK, FILE])
def test_a_path_below_a_link_or_file_is_refused(above: int) -> None:
    entries = [TreeEntry(b"d", above, "a" * 40), TreeEntry(b"d/x", FILE, "b" * 40)]
    findings = inspect([added(b"d/x")], entries, lambda oid: b"t", max_paths=9, max_bytes=9)
    assert "no folder" in reasons(findings)[b"d/x"]


def test_refusals_name_the_paths_and_are_bounded() -> None:
    findings = judge([added(b"n%d/.git" % number) for number in range(50)])
    with pytest.raises(ReviewRefused) as caught:
        raise_refusals(findings.refusals)
    assert caught.value.code == "result_hostile"
    assert "n0/.git" in caught.value.message
    assert "30 more" in caught.value.message


def test_a_refused_name_is_shown_without_control_characters() -> None:
    findings = judge([added(b"\x1b[31m\n/.git")])
    with pytest.raises(ReviewRefused) as caught:
        raise_refusals(findings.refusals)
    assert "\x1b" not in caught.value.message


def test_no_refusals_raise_nothing() -> None:
    raise_refusals(())


# --- folders that vanish --------------------------------------------------------------------------


def test_removed_dirs_are_all_folders_that_only_the_base_had() -> None:
    changes = [deleted(b"a/b/c/x"), deleted(b"a/b/y"), deleted(b"k/z")]
    assert judge(changes, {b"k/stays": FILE}).removed_dirs == (b"a", b"a/b", b"a/b/c")


def test_a_rename_out_of_a_folder_removes_it() -> None:
    change = added(b"new/x", kind=ChangeKind.RENAMED, old_path=b"old/x", old_mode=FILE)
    assert judge([change]).removed_dirs == (b"old",)


def test_a_folder_that_becomes_a_file_is_removed() -> None:
    assert judge([deleted(b"d/x"), added(b"d")]).removed_dirs == (b"d",)


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "target"),
    [
        (b"l", b"/etc/passwd"),
        (b"l", b"//x"),
        (b"l", b".."),
        (b"l", b"../x"),
        (b"l", b"a/../../x"),
        (b"a/l", b"../../x"),
        (b"a/b/l", b"../../../x"),
        (b"l", b"./.././x"),
        (b"l", b"x/../y/../../z"),
        (b"l", b".git"),
        (b"l", b".git/hooks/pre-commit"),
        (b"a/l", b"../.GIT/config"),
        (b"l", b"sub/.git ./x"),
        (b"l", b"a\0b"),
    ],
)
def test_a_link_that_leaves_the_tree_is_refused(link: bytes, target: bytes) -> None:
    findings = judge([added(link, LINK, len(target))], {b"a/f": FILE}, {link: target})
    assert reasons(findings).keys() == {link}


@pytest.mark.parametrize(
    ("link", "target"),
    [
        (b"l", b"a"),
        (b"l", b"nowhere"),
        (b"a/l", b"../b"),
        (b"a/b/l", b"../../c"),
        (b"l", b"."),
        (b"a/l", b".."),
        (b"l", b"l"),
        (b"l", b"..."),
        (b"l", b"a/../b"),
        (b"l", b".gitignore"),
    ],
)
def test_a_link_within_the_tree_passes_and_is_flagged(link: bytes, target: bytes) -> None:
    findings = judge([added(link, LINK, len(target))], {}, {link: target})
    assert not findings.refusals
    assert findings.changes[0].flags == ("link",)


def test_a_link_that_leaves_through_another_link_is_refused() -> None:
    """`d` leads to the root, so ``d/..`` is outside although it does not look so."""
    targets = {b"a/b/d": b"../..", b"a/b/l": b"d/../x"}
    changes = [added(path, LINK, len(target)) for path, target in targets.items()]
    assert reasons(judge(changes, {}, targets)).keys() == {b"a/b/l"}


def test_a_link_of_the_base_that_a_changed_link_turns_outward_is_refused() -> None:
    targets = {b"p/q/d": b"..", b"l": b"p/q/d/../../x"}
    change = added(b"p/q/d", LINK, 2)
    assert reasons(judge([change], {b"l": LINK}, targets)).keys() == {b"l"}


def test_a_link_of_the_users_own_that_leaves_the_tree_is_no_matter() -> None:
    targets = {b"mine": b"/usr/share", b"new": b"a"}
    assert not judge([added(b"new", LINK, 1)], {b"mine": LINK}, targets).refusals


def test_a_new_link_through_the_users_own_outward_link_is_refused() -> None:
    targets = {b"mine": b"/usr/share", b"new": b"mine/x"}
    findings = judge([added(b"new", LINK, 6)], {b"mine": LINK}, targets)
    assert reasons(findings).keys() == {b"new"}


@pytest.mark.parametrize("size", [0, 4096, 10**9])
def test_a_link_too_long_or_empty_is_refused_unread(size: int) -> None:
    findings = judge([added(b"l", LINK, size)], {}, {}, max_bytes=10**12)
    assert "link of" in reasons(findings)[b"l"]


@pytest.mark.parametrize("name", [b".gitmodules", b".GITMODULES", ".git\u200cmodules".encode()])
def test_a_link_in_place_of_gitmodules_is_refused(name: bytes) -> None:
    assert ".gitmodules" in reasons(judge([added(name, LINK, 1)], {}, {name: b"a"}))[name]


def test_links_that_loop_lead_nowhere() -> None:
    targets = {b"a": b"b", b"b": b"a", b"c": b"c/../.."}
    changes = [added(path, LINK, len(target)) for path, target in targets.items()]
    assert not judge(changes, {}, targets).refusals


def test_tangled_links_cost_a_bounded_effort() -> None:
    """Each link goes through the one before it many times over: exponential without a budget."""
    targets = {b"l0": b"d"}
    for number in range(1, 3000):
        targets[b"l%d" % number] = b"/".join([b"l%d/.." % (number - 1)] * 300)
    changes = [added(path, LINK, len(target)) for path, target in targets.items()]
    findings = judge(changes, {}, targets, max_paths=10_000, max_bytes=10**8)
    assert "tangled" in " ".join(reasons(findings).values())


def test_many_links_of_the_users_own_are_not_tangled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder of packages that one package manager links with each other."""
    monkeypatch.setattr(links, "_MAX_STEPS", 1000)
    own = {b"m/p%d/m/dep" % number: b"../../p%d/m" % (number + 1) for number in range(500)}
    changes = [added(b"new", LINK, 1)]
    findings = judge(changes, dict.fromkeys(own, LINK), {**own, b"new": b"x"})
    assert reasons(findings) == {}


PART = st.sampled_from([b"a", b"b", b"c", b"..", b".", b""])


@given(
    st.dictionaries(
        st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=3).map(b"/".join),
        st.lists(PART, min_size=1, max_size=5).map(b"/".join).filter(bool),
        max_size=4,
    )
)
def test_the_walker_never_calls_a_lexically_outward_lone_link_good(
    links: dict[bytes, bytes],
) -> None:
    for path, target in links.items():
        walker = LinkWalker({path: target}, {path})
        joined = posixpath.join(posixpath.dirname(path), target)
        outward = target.startswith(b"/") or posixpath.normpath(joined).split(b"/")[0] == b".."
        through_itself = path in {
            posixpath.normpath(posixpath.join(posixpath.dirname(path), target[:i]))
            for i in range(1, len(target) + 1)
        }
        if outward and not through_itself:
            assert walker.follow(path).reason


# --- flags ----------------------------------------------------------------------------------------


def flags(change: Change, kept: Mapping[bytes, int] | None = None) -> tuple[str, ...]:
    findings = judge([change], kept)
    assert not findings.refusals
    return findings.changes[0].flags


def test_an_executable_is_flagged_when_it_is_new_or_becomes_one() -> None:
    assert flags(added(b"tool", EXECUTABLE)) == ("executable",)
    became = added(b"tool", EXECUTABLE, kind=ChangeKind.MODIFIED, old_mode=FILE, old_oid="c" * 40)
    assert flags(became) == ("executable",)
    was = added(
        b"tool", EXECUTABLE, kind=ChangeKind.MODIFIED, old_mode=EXECUTABLE, old_oid="c" * 40
    )
    assert flags(was) == ()


def test_binary_and_large_files_are_flagged() -> None:
    assert flags(added(b"x.bin", added=None, size=5)) == ("binary",)
    assert flags(added(b"empty", added=None, size=0)) == ()
    large = judge([added(b"x.txt", size=1024 * 1024)], max_bytes=10**9).changes[0]
    assert large.flags == ("large",)


@pytest.mark.parametrize(
    "name",
    [
        b"a\x1b[0m",
        b"a\nb",
        "a\u202egnp.exe".encode(),
        "a\u200bb".encode(),
        "a\u3164b".encode(),
        "a\ufe0fb".encode(),
        b"\xff",
        b"a\\b",
        b"-rf",
        b"dir /x",
        b"x.",
        b" x",
    ],
    ids=repr,
)
def test_names_that_mislead_are_flagged(name: bytes) -> None:
    assert flags(added(name)) == ("odd-name",)
    assert "odd-name" in judge([deleted(name)]).changes[0].flags


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        (b".envrc", "runs-shell"),
        (b"sub/.ENVRC", "runs-shell"),
        (b".husky/pre-commit", "runs-git"),
        (b".pre-commit-config.yaml", "runs-git"),
        (b".gitattributes", "runs-git"),
        (b"hooks/post-merge", "runs-git"),
        (b"sub/.hg/hgrc", "runs-git"),
        (b".github/workflows/ci.yml", "runs-ci"),
        (b".gitlab-ci.yml", "runs-ci"),
        (b".ci/run", "runs-ci"),
        (b".vscode/tasks.json", "runs-editor"),
        (b"a/.devcontainer/devcontainer.json", "runs-editor"),
        (b".claude/settings.json", "runs-agent"),
        (b"AGENTS.md", "runs-agent"),
        (b"Makefile", "runs-build"),
        (b"sub/CMakeLists.txt", "runs-build"),
        (b"vite.config.ts", "runs-build"),
        (b"conftest.py", "runs-build"),
        (b"Dockerfile", "runs-build"),
        (b"package.json", "runs-package"),
        (b"setup.py", "runs-package"),
        (b"requirements-dev.txt", "runs-package"),
        (b"src/evil.pth", "runs-package"),
        (b"sub/.Rprofile", "runs-package"),
        (b".ghci", "runs-package"),
        (b".pylintrc", "runs-build"),
        (b".latexmkrc", "runs-build"),
        (b"package-lock.json", "lock-file"),
        (b"Cargo.lock", "lock-file"),
        (b"go.sum", "lock-file"),
    ],
)
def test_files_that_act_on_the_host_are_flagged(path: bytes, flag: str) -> None:
    assert flag in flags(added(path))


@pytest.mark.parametrize(
    "path", [b"src/main.c", b"docs/on-makefiles.txt", b"web/hooks/useThing.ts", b"notes.txt"]
)
def test_ordinary_files_are_not_flagged(path: bytes) -> None:
    assert flags(added(path)) == ()


@pytest.mark.parametrize(
    "parts",
    [
        (b"HEAD", b"objects/x", b"refs/x"),
        (b"Head", b"OBJECTS/x", b"refs/x"),
        (b"HEAD", b"commondir"),
    ],
)
def test_what_lies_in_a_bare_repository_is_flagged(parts: tuple[bytes, ...]) -> None:
    """git obeys its configuration as soon as anybody in it asks for the status."""
    whole = {b"a/b/" + part: FILE for part in parts}
    for path, found in ((b"a/b/config", ("runs-git",)), (b"a/b/c/d", ("runs-git",)), (b"a/x", ())):
        assert judge([added(path)], whole).changes[0].flags == found
    for left_out in whole:
        less = {path: mode for path, mode in whole.items() if path != left_out}
        assert judge([added(b"a/b/config")], less).changes[0].flags == ()


def test_names_that_differ_only_in_case_or_form_are_flagged() -> None:
    assert flags(added(b"readme"), {b"README": FILE}) == ("case-collision",)
    assert flags(added("e\u0301".encode()), {"é".encode(): FILE}) == ("case-collision",)
    assert flags(added(b"DIR/x"), {b"dir/y": FILE}) == ("case-collision",)
    both = judge([added(b"a"), added(b"A")]).changes
    assert [change.flags for change in both] == [("case-collision",)] * 2


def test_a_rename_that_only_changes_case_is_no_collision() -> None:
    change = added(b"readme", kind=ChangeKind.RENAMED, old_path=b"README", old_mode=FILE)
    assert flags(change) == ()


def test_every_flag_has_a_meaning() -> None:
    paths = (b".envrc", b".husky/x", b".ci/x", b".idea/x", b"CLAUDE.md", b"Makefile", b"go.sum")
    found = {flag for path in (*paths, b"setup.py") for flag in flags(added(path))}
    assert found <= MEANING.keys()
    assert len(found) == 8


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=8, unique=True))
def test_any_names_get_a_verdict_and_known_flags(paths: list[bytes]) -> None:
    findings = judge([added(path) for path in paths])
    if not findings.refusals:
        assert {flag for change in findings.changes for flag in change.flags} <= MEANING.keys()
