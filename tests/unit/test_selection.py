"""Steps of a change set, and choosing among them."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmsandbox.errors import UsageProblem
from vmsandbox.model import Change, ChangeKind
from vmsandbox.selection import Selection, Step, parents, refuse_split, select, steps_of

OLD, NEW = "a" * 40, "b" * 40


def step(path: bytes, *, old: bool = False, new: bool = True) -> Step:
    return Step(
        path=path,
        old_mode=0o100644 if old else 0,
        old_oid=OLD if old else None,
        new_mode=0o100644 if new else 0,
        new_oid=NEW if new else None,
    )


def removal(path: bytes) -> Step:
    return step(path, old=True, new=False)


STEPS = tuple(step(path) for path in (b"a", b"a.txt", b"d/a", b"d/e/b.py", b"x\ny", b"\xff/z"))


def chosen(**selection: tuple[str | bytes, ...]) -> list[bytes]:
    return [s.path for s in select(STEPS, Selection.model_validate(selection))]


def test_a_rename_is_a_deletion_and_an_addition() -> None:
    change = Change(
        kind=ChangeKind.RENAMED,
        path=b"new",
        old_path=b"old",
        old_mode=0o100644,
        new_mode=0o100755,
        old_oid=OLD,
        new_oid=NEW,
        flags=("case-collision",),
    )
    new, old = steps_of([change])
    assert (old.path, old.old_oid, old.new_oid, old.collides) == (b"old", OLD, None, False)
    assert (new.path, new.old_oid, new.new_oid, new.collides) == (b"new", None, NEW, True)
    assert new.new_mode == 0o100755


def test_no_selection_is_everything() -> None:
    assert select(STEPS, None) == select(STEPS, Selection()) == STEPS
    assert select((), None) == ()


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (("a",), [b"a"]),
        (("d",), [b"d/a", b"d/e/b.py"]),
        (("d/e/", "a"), [b"a", b"d/e/b.py"]),
        (("./d/./a",), [b"d/a"]),
        (('"x\\ny"',), [b"x\ny"]),
        ((b"\xff",), [b"\xff/z"]),
        ((".",), [s.path for s in STEPS]),
    ],
)
def test_paths_are_exact_or_folders(paths: tuple[str | bytes, ...], found: list[bytes]) -> None:
    assert chosen(paths=paths) == found


@pytest.mark.parametrize(
    ("include", "exclude", "found"),
    [
        (("*.py",), (), [b"d/e/b.py"]),
        (("/a",), (), [b"a"]),
        (("a",), (), [b"a", b"d/a"]),
        (("d/**",), ("e/",), [b"d/a"]),
        ((), ("d", "*y", "z"), [b"a", b"a.txt"]),
        (("*",), ("*", "!a.txt"), [b"a.txt"]),
    ],
)
def test_patterns_mean_what_they_mean_in_a_gitignore(
    include: tuple[str, ...], exclude: tuple[str, ...], found: list[bytes]
) -> None:
    assert chosen(include=include, exclude=exclude) == found


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("**/c.py", b"a\nb/c.py", True),
        ("/src/**/c.py", b"src/a\n/b/c.py", True),
        ("src/**", b"src/\n", True),
        ("*.py", b"c.py\n", False),
        ("/c.py", b"c.py\n", False),
        ("a\nb", b"a\nb", True),
        ("a?b", b"a\nb", True),
    ],
)
def test_a_newline_in_a_name_is_a_character_like_others(
    pattern: str, path: bytes, fits: bool
) -> None:
    """Else a guest chooses names that what the user excludes does not reach."""
    odd = Step(path=path, new_mode=0o100644, new_oid="1" * 40)
    assert select([odd, removal(b"z")], Selection(exclude=(pattern,)))[0].path == (
        b"z" if fits else path
    )


@pytest.mark.parametrize("pattern", ["!", "\\"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        chosen(exclude=(pattern,))
    assert caught.value.code == "pattern_invalid"


def test_what_fits_nothing_is_named() -> None:
    with pytest.raises(UsageProblem, match=r"no changed path fits nowhere, e$") as caught:
        chosen(paths=("d", "nowhere", "e"))
    assert caught.value.code == "path_unmatched"


def test_a_selection_survives_its_json() -> None:
    selection = Selection(paths=(b"\xff\n",), include=("*.py",))
    assert Selection.model_validate_json(selection.model_dump_json()) == selection


@pytest.mark.parametrize(
    ("picked", "left"),
    [
        ([step(b"p/q")], removal(b"p")),
        ([step(b"p/q/r")], removal(b"p")),
        ([step(b"p")], removal(b"p/q")),
        ([step(b"p"), removal(b"p/q")], removal(b"p/r/s")),
    ],
)
def test_half_of_a_change_between_file_and_folder_is_refused(
    picked: list[Step], left: Step
) -> None:
    every = [*picked, left]
    with pytest.raises(UsageProblem) as caught:
        refuse_split(picked, every, ())
    assert caught.value.code == "selection_incomplete"
    assert caught.value.hint == "--path p"
    refuse_split(every, every, ())
    refuse_split(picked, every, {left.path})


@pytest.mark.parametrize("name", [b"p; touch pwned", b"$(id)", b"`id`\n", b"it's"])
def test_a_hint_is_safe_to_paste_whatever_a_guest_calls_its_files(name: bytes) -> None:
    every = [step(name + b"/q"), removal(name)]
    with pytest.raises(UsageProblem) as caught:
        refuse_split(every[:1], every, ())
    _, shown = shlex.split(caught.value.hint or "", posix=True)
    assert Selection.model_validate({"paths": [shown]}).paths == (name,)
    assert shlex.quote(shown) in (caught.value.hint or "")


def test_unrelated_deletions_may_stay_out() -> None:
    every = [step(b"p/q"), removal(b"p/x"), removal(b"pq")]
    refuse_split(every[:1], every, ())


PATHS = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=3).map(b"/".join)


@given(st.sets(PATHS, min_size=1), PATHS)
def test_a_path_and_the_rest_are_everything(paths: set[bytes], pick: bytes) -> None:
    steps = [step(path) for path in sorted(paths)]
    below = {path for path in paths if path == pick or path.startswith(pick + b"/")}
    if below:
        assert {s.path for s in select(steps, Selection(paths=(pick,)))} == below
    else:
        with pytest.raises(UsageProblem):
            select(steps, Selection(paths=(pick,)))


@given(PATHS)
def test_parents_are_all_folders_above_from_the_inside_out(path: bytes) -> None:
    above = list(parents(path))
    assert all(path.startswith(folder + b"/") for folder in above)
    assert len(above) == path.count(b"/")
    assert above == sorted(above, key=len, reverse=True)
