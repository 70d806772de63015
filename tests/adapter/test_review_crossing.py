"""Which results get in each other's way, told from the stores alone."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.adapter.crafted import BASE, Exe, Files, Link
from tests.adapter.several import Several
from tests.repositories import fingerprint
from vmsandbox import review
from vmsandbox.errors import NegativeAnswer
from vmsandbox.model import Origin, ResultState
from vmsandbox.review import Meeting

LINES = b"".join(b"line %d\n" % number for number in range(40))
TEXT: Files = {**BASE, b"text": LINES}


@pytest.fixture
def several(tmp_path: Path) -> Several:
    return Several(tmp_path)


def edited(**files: bytes | Exe | Link | None) -> Files:
    """TEXT with some files changed; None takes one away."""
    names = {name.replace("__", "/").replace("_", ".").encode(): to for name, to in files.items()}
    changed: dict[bytes, Any] = {**TEXT, **names}
    return {path: node for path, node in changed.items() if node is not None}


def met(several: Several, one: Files, other: Files) -> Meeting:
    cases = [several(files, base=TEXT) for files in (one, other)]
    before = fingerprint(several.root)
    found = review.matrix([case.folder for case in cases])
    assert fingerprint(several.root) == before, "something was written"
    (pair,) = found.pairs
    return pair


FIRST = LINES.replace(b"line 1\n", b"the first\n")
LAST = LINES.replace(b"line 38\n", b"the last\n")
OTHER = LINES.replace(b"line 1\n", b"another\n")


@pytest.mark.parametrize(
    ("one", "other", "fit", "shared", "clashes"),
    [
        (edited(a=b"1"), edited(b=b"2"), "apart", (), ()),
        (edited(text=FIRST, a=b"1"), edited(text=FIRST), "same", (b"text",), ()),
        (edited(text=FIRST), edited(text=LAST), "merges", (b"text",), ()),
        (edited(text=FIRST), edited(text=OTHER), "conflict", (b"text",), (b"text",)),
        (edited(text=None), edited(text=LAST), "conflict", (b"text",), (b"text",)),
        (edited(text=None), edited(text=None), "same", (b"text",), ()),
        (edited(README=Exe(b"hello\n")), edited(README=b"hi\n"), "merges", (b"README",), ()),
        (edited(link=Link(b"a")), edited(link=Link(b"b")), "conflict", (b"link",), (b"link",)),
        (edited(new=b"1"), edited(new=b"2"), "conflict", (b"new",), (b"new",)),
        (edited(new=b"1"), edited(new__deep=b"2"), "conflict", (), (b"new",)),
        (
            edited(new=b"1", text=FIRST),
            edited(new__deep=b"2", text=LAST),
            "conflict",
            (b"text",),
            (b"new",),
        ),
        (edited(text=None, renamed=LINES), edited(text=LAST), "merges", (b"text",), ()),
        (edited(old__x=b"1"), edited(old__gone_txt=None), "conflict", (), (b"old/x",)),
        (edited(old__d__x=b"1"), edited(old__gone_txt=None), "conflict", (), (b"old/d/x",)),
        (edited(src__x=b"1"), edited(src__b_py=None), "apart", (), ()),
        (
            edited(old__gone_txt=None, old__x=b"1"),
            edited(old__gone_txt=None),
            "same",
            (b"old/gone.txt",),
            (),
        ),
        (
            edited(text=None, text__x=b"1"),
            edited(text=None),
            "conflict",
            (b"text",),
            (b"text",),
        ),
        (
            edited(old__gone_txt=None, old=b"1"),
            edited(old__gone_txt=None),
            "conflict",
            (b"old/gone.txt",),
            (b"old",),
        ),
    ],
    ids=[
        "apart",
        "same",
        "merges",
        "edits",
        "delete-edit",
        "both-delete",
        "mode-edit",
        "links",
        "both-add",
        "file-folder",
        "file-folder-and-merge",
        "rename-edit",
        "into-removed-folder",
        "below-removed-folder",
        "into-shrunk-folder",
        "into-folder-that-both-empty",
        "folder-for-file-that-both-remove",
        "file-for-folder-that-both-remove",
    ],
)
def test_two_results_fit_together_in_one_way(
    several: Several,
    one: Files,
    other: Files,
    fit: str,
    shared: tuple[bytes, ...],
    clashes: tuple[bytes, ...],
) -> None:
    pair = met(several, one, other)
    assert (pair.fit, pair.shared, pair.clashes) == (fit, shared, clashes)
    assert pair.both_apply == (fit in ("apart", "same"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (edited(a=b"1"), edited(b=b"2")),
        (edited(text=FIRST, a=b"1"), edited(text=FIRST, b=b"2")),
        (edited(text=FIRST), edited(text=LAST)),
        (edited(new=b"1"), edited(new__deep=b"2")),
        (edited(text=None, renamed=LINES), edited(text=LAST)),
        (edited(src__deep__d=b"1"), edited(src__b_py=None)),
        (edited(old__x=b"1"), edited(old__gone_txt=None)),
        (edited(old__d__x=b"1"), edited(old__gone_txt=None)),
        (edited(old__gone_txt=None, old__x=b"1"), edited(old__gone_txt=None)),
        (edited(text=None, text__x=b"1"), edited(text=None)),
        (edited(old__gone_txt=None, old=b"1"), edited(old__gone_txt=None)),
    ],
)
def test_what_is_said_to_apply_one_after_the_other_does(
    several: Several, one: Files, other: Files
) -> None:
    cases = [several(files, base=TEXT) for files in (one, other)]
    folders = [case.folder for case in cases]
    (pair,) = review.matrix(folders).pairs
    cases[0].apply()
    first, second = review.matrix(folders).results
    assert first.applies
    assert second.applies == pair.both_apply
    if pair.both_apply:
        cases[1].apply()
    else:
        with pytest.raises(review.ApplyConflict):
            cases[1].apply()


def test_what_still_applies_is_told_by_looking(several: Several) -> None:
    case = several()
    (standing,) = review.matrix([case.folder]).results
    assert standing.applies
    (case.target / "README").write_text("mine\n")
    before = fingerprint(several.root)
    (standing,) = review.matrix([case.folder]).results
    assert standing.applies is False
    assert [conflict.path for conflict in standing.conflicts] == [b"README"]
    assert case.record.state is ResultState.PENDING, "to look is no attempt to apply"
    assert fingerprint(several.root) == before
    case.target.rename(several.root / "moved")
    (standing,) = review.matrix([case.folder]).results
    assert standing.applies is None
    assert "no folder to write to" in standing.problem


def test_results_of_other_bases_are_compared_by_their_paths(several: Several) -> None:
    one = several(edited(text=FIRST), base=TEXT)
    elsewhere = several(edited(text=LAST), base={**TEXT, b"later": b"1"})
    alone = several({**TEXT, b"later": b"1", b"new": b"1"}, base={**TEXT, b"later": b"1"})
    pairs = review.matrix([one.folder, elsewhere.folder, alone.folder]).pairs
    assert [pair.fit for pair in pairs] == ["unknown", "apart", "apart"]
    assert pairs[0].shared == (b"text",)
    assert "different states" in pairs[0].reason


def test_other_worktrees_matter_only_where_the_base_is_one(several: Several) -> None:
    one = several(edited(text=FIRST), base=TEXT)
    linked = several(edited(text=OTHER), base=TEXT, host="linked")
    foreign = several({b"text": b"2"}, base={b"text": b"1"}, host="foreign")
    pairs = review.matrix([one.folder, linked.folder, foreign.folder]).pairs
    assert [pair.fit for pair in pairs] == ["conflict", "unrelated", "unrelated"]


def test_what_a_tree_says_about_merging_is_not_obeyed(several: Several) -> None:
    attributes = b"* merge=union\ntext merge=binary\n"
    pair = met(
        several,
        edited(text=FIRST, **{".gitattributes": attributes}),
        edited(text=OTHER, **{".gitattributes": attributes}),
    )
    assert pair.clashes == (b"text",)
    assert pair.alike == (b".gitattributes",)


OLD_GIT = """\
#!/bin/sh
for word; do
    case $word in
        merge-tree) echo 'usage: git merge-tree <base-tree> <branch1> <branch2>' >&2; exit 129 ;;
        version) echo 'git version 2.30.2'; exit 0 ;;
    esac
done
exec {git} "$@"
"""


def test_an_old_git_is_named_and_paths_are_compared_all_the_same(
    several: Several, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    real = next(
        path for part in os.environ["PATH"].split(":") if (path := Path(part, "git")).exists()
    )
    (folder / "git").write_text(OLD_GIT.format(git=real))
    (folder / "git").chmod(0o755)
    cases = [several(edited(text=text), base=TEXT) for text in (FIRST, LAST, FIRST)]
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    found = review.matrix([case.folder for case in cases])
    assert [pair.fit for pair in found.pairs] == ["unknown", "same", "unknown"]
    assert found.pairs[0].shared == (b"text",)
    (hindrance,) = found.hindrances
    assert hindrance.code == "git_too_old"
    assert "2.38" in (hindrance.hint or "")


def test_a_store_that_lost_its_objects_is_no_clean_merge(several: Several) -> None:
    one, other = (several(edited(text=text), base=TEXT) for text in (FIRST, LAST))
    blob = one.objects.blob(FIRST)
    for path in one.folder.result_git.rglob("*"):
        if path.is_file() and path.name == blob[2:]:
            path.unlink()
    for pack in one.folder.result_git.glob("objects/pack/*"):
        pack.unlink()
    (pair,) = review.matrix([one.folder, other.folder]).pairs
    assert pair.fit == "unknown"
    assert pair.reason


def test_a_sandbox_without_a_result_is_refused(several: Several) -> None:
    case = several()
    case.folder.change_set.unlink()
    with pytest.raises(NegativeAnswer, match="no collected result"):
        review.matrix([case.folder])


# --- two beside each other ------------------------------------------------------------------------


def test_a_comparison_says_what_each_did_and_both(several: Several) -> None:
    one = several(edited(text=FIRST, same=b"1", mine=b"1"), base=TEXT)
    other = several(edited(text=LAST, same=b"1", theirs=b"1"), base=TEXT)
    found = review.compare(one.folder, other.folder)
    assert found.meeting.shared == (b"same", b"text")
    assert found.meeting.alike == (b"same",)
    assert found.only == ((b"mine",), (b"theirs",))
    assert (found.same_brief, found.same_base, found.same_result) == (True, True, False)
    assert found.problems == ()
    assert review.compare(one.folder, one.folder).same_result


def test_a_comparison_warns_where_the_two_are_not_alike(several: Several) -> None:
    one = several()
    task = one.task.model_copy(update={"command": ("other",)})
    other = several(base={b"x": b"1"}, result={b"x": b"2"}, task=task)
    found = review.compare(one.folder, other.folder)
    assert len(found.problems) == 2
    assert found.meeting.fit == "apart"


# --- what waits -----------------------------------------------------------------------------------


def test_only_what_nobody_decided_on_waits(several: Several) -> None:
    cases = [several() for _ in range(5)]
    cases[0].drop()
    cases[1].apply()
    review.approve(cases[2].folder)
    cases[3].collect(BASE)
    queue = review.waiting([case.folder for case in cases])
    assert [one.id for one in queue.results] == [cases[2].folder.id, cases[4].folder.id]
    assert [one.state for one in queue.results] == [ResultState.APPROVED, ResultState.PENDING]
    pending = queue.results[1]
    assert (pending.changes, pending.added, pending.removed) == (9, 5, 11)
    assert pending.flags == ("executable", "link")
    cases[2].collect({**BASE, b"new": b"1"})
    (approved, _) = review.waiting([cases[2].folder, cases[4].folder]).results
    assert approved.stale


def test_what_cannot_be_read_is_told_and_hides_nothing(several: Several) -> None:
    broken, sound = several(), several()
    broken.folder.change_set.write_text("{")
    queue = review.waiting([broken.folder, sound.folder])
    assert [one.id for one in queue.results] == [sound.folder.id]
    (problem,) = queue.problems
    assert problem.startswith(f"{broken.folder.id}: changeset.json cannot be read")


def test_lineage_is_part_of_a_review(several: Several) -> None:
    source = several()
    digest = source.change_set.digest
    origin = Origin(id=source.folder.id, name="task-1", digest=digest)
    fork = several(edited(text=FIRST), base=TEXT, forked_from=origin)
    assert review.show(fork.folder, live=False).forked_from == origin
    assert review.waiting([fork.folder]).results[0].forked_from == origin
