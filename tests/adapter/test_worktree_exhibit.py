"""A result on its base, sent on to a guest that shall see nothing else of its author."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guestless import SCRIPTS, Guestless, files, run
from tests.repositories import Repository, git
from vmsandbox import worktree
from vmsandbox.errors import HostProblem
from vmsandbox.model import ChangeSet, Snapshot

MakeRepository = Callable[..., Repository]
ZERO = f"sha256:{'0' * 64}"


@pytest.fixture
def author(make_repository: MakeRepository, tmp_path: Path) -> Guestless:
    """An agent that worked on a dirty worktree with a past, and has a lot to say about it."""
    project = make_repository("project", {"kept": "k\n" * 50, "changed": "old\n", "gone": "g\n"})
    project.write("changed", "second\n")
    project.commit("the past")
    project.write("untracked", "of the user\n")
    guest = Guestless(project.path, tmp_path / "author")
    guest.send()
    (guest.inside / "changed").write_text("new\n")
    (guest.inside / "gone").unlink()
    (guest.inside / "added").write_bytes(b"\r\n\0binary")
    guest.git("add", "-A")
    guest.git("commit", "-qm", "I am sure that this is right")
    guest.collect()
    return guest


def change_set(guest: Guestless) -> ChangeSet:
    return ChangeSet(
        digest=ZERO,
        task_digest=ZERO,
        image_digest=ZERO,
        base_commit=guest.snapshot.commit,
        base_tree=guest.snapshot.tree,
        result_commit=guest.result.commit,
        result_tree=guest.result.tree,
    )


def received(author: Guestless, folder: Path) -> Path:
    """The exhibit, unpacked by the guest's own script; nothing of it is left on the host."""
    before = set(author.folder.rglob("*"))
    with worktree.exhibit(
        author.quarantine.folder, author.snapshot, change_set(author)
    ) as snapshot:
        send(snapshot, folder)
    assert set(author.folder.rglob("*")) == before
    return folder / "inside"


def send(snapshot: Snapshot, folder: Path) -> None:
    command = worktree.receive_command(
        folder / "inside",
        snapshot,
        scripts=SCRIPTS,
        state=folder / "state",
        owner="root",
        gitconfig=folder / "gitconfig",
    )
    folder.mkdir()
    run(command, b"".join(worktree.base_stream(snapshot)))


def test_base_and_result_and_nothing_of_the_author(author: Guestless, tmp_path: Path) -> None:
    inside = received(author, tmp_path / "reviewer")
    assert files(inside) == files(author.inside)
    assert git(inside, "status", "--porcelain") == b""
    subjects = git(inside, "log", "--format=%s").decode().splitlines()
    assert subjects[0] == "The result"
    assert subjects[2:] == ["the past", "first"]
    differing = git(inside, "diff", "--name-status", "HEAD~1").decode().splitlines()
    assert sorted(differing) == ["A\tadded", "D\tgone", "M\tchanged"]
    everything = git(inside, "log", "--all", "--format=%B")
    assert b"sure" not in everything
    assert (author.host / "changed").read_text() == "second\n"


def test_it_comes_from_the_quarantine_alone_where_the_author_changed_something(
    author: Guestless, tmp_path: Path
) -> None:
    shutil.rmtree(author.inside)
    inside = received(author, tmp_path / "reviewer")
    assert (inside / "added").read_bytes() == b"\r\n\0binary"


def test_what_was_held_back_is_no_part_of_the_result(author: Guestless, tmp_path: Path) -> None:
    (author.host / "changed").write_text("the host's own\n")
    author.update()
    author.collect()
    inside = received(author, tmp_path / "reviewer")
    assert (inside / "changed").read_text() == "new\n"
    assert git(inside, "show", "HEAD~1:changed") == b"second\n"


def test_without_the_snapshot_it_is_refused(author: Guestless, tmp_path: Path) -> None:
    shutil.rmtree(author.snapshot.git_dir)
    with pytest.raises(HostProblem) as caught:
        received(author, tmp_path / "reviewer")
    assert (caught.value.code, bool(caught.value.hint)) == ("snapshot_missing", True)


def test_objects_that_the_user_lost_are_told(author: Guestless, tmp_path: Path) -> None:
    shutil.rmtree(author.snapshot.git_dir / "objects")
    (author.snapshot.git_dir / "objects").mkdir()
    with pytest.raises(HostProblem) as caught:
        received(author, tmp_path / "reviewer")
    assert caught.value.code == "snapshot_unreadable"
    assert not list(author.folder.glob("exhibit-*"))
