"""The host goes on working while an agent does: what `receive --update` brings in, and what it
leaves alone."""

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.guestless import SCRIPTS, Guestless, files
from tests.repositories import Repository, git
from vmsandbox import worktree

MakeRepository = Callable[..., Repository]


@pytest.fixture
def guest(make_repository: MakeRepository, tmp_path: Path) -> Guestless:
    names = ("both", "same", "host", "agent", "host-gone", "agent-gone", "d/x", "mode", "e/x")
    repository = make_repository("p", {name: f"{name}\n" for name in names})
    guest = Guestless(repository.path, tmp_path / "g")
    guest.send()
    return guest


def both_work(guest: Guestless) -> None:
    for top, who in ((guest.host, "host"), (guest.inside, "agent")):
        (top / "both").write_text(f"{who}'s\n")
        (top / "same").write_text("the same\n")
        (top / who).write_text(f"changed by {who}\n")
        (top / f"{who}-new").write_text("new\n")
        (top / f"{who}-gone").unlink()
        (top / "added-by-both").write_text(who)
    (guest.host / "agent-gone").write_text("changed by host\n")
    (guest.host / "mode").chmod(0o755)


def test_host_changes_arrive_and_conflicts_stay(guest: Guestless) -> None:
    both_work(guest)
    report = guest.update()
    assert set(report.conflicts) == {b"both", b"added-by-both", b"agent-gone"}
    assert report.head_moved
    inside = files(guest.inside)
    assert inside[b"both"] == ("file", b"agent's\n")
    assert inside[b"host"] == ("file", b"changed by host\n")
    assert inside[b"agent"] == ("file", b"changed by agent\n")
    assert inside[b"host-new"] == ("file", b"new\n")
    assert inside[b"mode"][0] == "executable"
    assert b"host-gone" not in inside
    assert b"agent-gone" not in inside
    # What is compared with at apply is the host's version, except where both changed: there it is
    # what the agent started from, which the host no longer has, so apply will refuse.
    changes = guest.changes()
    assert {*changes} == {b"both", b"agent", b"agent-new", b"agent-gone", b"added-by-both"}
    assert guest.content(changes[b"both"].old_oid) == b"both\n"
    assert guest.content(changes[b"agent-gone"].old_oid) == b"agent-gone\n"
    assert changes[b"added-by-both"].old_oid is None
    assert report.updated == 4


def test_what_was_held_back_stays_held_back(guest: Guestless) -> None:
    both_work(guest)
    guest.update()
    (guest.host / "later").write_text("later\n")
    assert guest.update().conflicts == ()
    changes = guest.changes()
    assert guest.content(changes[b"both"].old_oid) == b"both\n"
    assert b"later" not in changes


def test_several_guests_of_one_worktree_hold_back_at_once(guest: Guestless) -> None:
    """They share its store; each base must hold back what its own guest said, and no more."""
    former = guest.snapshot
    both_work(guest)
    fresh = guest.take()
    sets = [(b"both",), (b"same",), (b"host", b"agent-gone")]
    alone = [worktree.hold_back(fresh, former, paths).tree for paths in sets]
    with ThreadPoolExecutor(len(sets)) as pool:
        for _ in range(12):
            bases = pool.map(lambda paths: worktree.hold_back(fresh, former, paths), sets)
            assert [base.tree for base in bases] == alone


def test_nothing_new_changes_nothing(guest: Guestless) -> None:
    (guest.inside / "agent").write_text("changed\n")
    report = guest.update()
    assert (report.updated, report.conflicts) == (0, ())
    assert {*guest.changes()} == {b"agent"}


def test_the_agents_commits_and_staging_are_left_alone(guest: Guestless) -> None:
    (guest.inside / "agent").write_text("committed\n")
    guest.git("commit", "-qam", "agent's")
    head = guest.git("rev-parse", "HEAD")
    (guest.host / "host").write_text("changed by host\n")
    report = guest.update()
    assert not report.head_moved
    assert guest.git("rev-parse", "HEAD") == head
    assert (guest.inside / "host").read_text() == "changed by host\n"
    assert {*guest.changes()} == {b"agent"}


def test_staged_work_stays_staged(guest: Guestless) -> None:
    (guest.inside / "agent").write_text("staged\n")
    guest.git("add", "agent")
    (guest.host / "host").write_text("changed by host\n")
    assert guest.update().head_moved
    assert guest.git("status", "--porcelain") == "M  agent"


def test_an_ignored_file_in_the_way_is_a_conflict(guest: Guestless) -> None:
    (guest.host / ".gitignore").write_text("*.log\n")
    (guest.inside / ".gitignore").write_text("*.log\n")
    (guest.inside / "x.log").write_text("agent's\n")
    (guest.host / "x.log").write_text("host's\n")
    git(guest.host, "add", "-f", "x.log")
    assert guest.update().conflicts == (b"x.log",)
    assert (guest.inside / "x.log").read_text() == "agent's\n"


def test_a_folder_that_becomes_a_link_is_held_back(guest: Guestless) -> None:
    """Nobody else touched it, but git does not merge a file with a folder; nothing is lost."""
    (guest.host / "e/x").unlink()
    (guest.host / "e").rmdir()
    (guest.host / "e").symlink_to("d")
    assert guest.update().conflicts == (b"e",)
    assert guest.changes() == {}


@pytest.mark.parametrize("agent_has", ["folder", "file"])
def test_a_file_against_a_folder(guest: Guestless, agent_has: str) -> None:
    folder, file = (
        (guest.inside, guest.host) if agent_has == "folder" else (guest.host, guest.inside)
    )
    (folder / "clash").mkdir()
    (folder / "clash/inner").write_text("in a folder\n")
    (file / "clash").write_text("a file\n")
    before = files(guest.inside)
    report = guest.update()
    assert report.conflicts
    assert files(guest.inside) == before


def test_a_broken_agent_repository_does_not_stop_an_update(guest: Guestless) -> None:
    (guest.inside / ".git/HEAD").unlink()
    os.mkfifo(guest.inside / ".git/index.lock")
    (guest.host / "host").write_text("changed by host\n")
    assert not guest.update().head_moved
    assert (guest.inside / "host").read_text() == "changed by host\n"


def test_a_snapshot_that_the_store_has_lost(guest: Guestless) -> None:
    """Then everything is sent again; the guest still knows what it had."""
    previous = guest.snapshot
    (guest.host / "host").write_text("changed by host\n")
    subprocess.run(["rm", "-r", str(guest.stores)], check=True)
    (guest.inside / "agent").write_text("changed\n")
    fresh = guest.take()
    command = worktree.receive_command(
        guest.inside, fresh, previous, scripts=SCRIPTS, state=guest.state, owner="root"
    )
    done = subprocess.run(
        command, input=b"".join(worktree.base_stream(fresh, previous)), capture_output=True
    )
    assert worktree.parse_update(done.stdout).updated == 1
    guest.snapshot = worktree.hold_back(fresh, previous, [])
    assert {*guest.changes()} == {b"agent"}


def edit_and_update(guest: Guestless) -> worktree.UpdateReport:
    (guest.host / "d/x").write_text("edited\n")
    (guest.host / "mode").chmod(0o755)
    return guest.update()


def test_edits_alone_bring_the_agents_repository_along(guest: Guestless) -> None:
    (guest.inside / "agent").write_text("changed\n")
    (guest.inside / "same").write_text("staged\n")
    guest.git("add", "same")
    private = guest.state / "collect.git" / "index"
    before = private.read_bytes()
    report = edit_and_update(guest)
    assert (report.updated, report.conflicts, report.head_moved) == (2, (), True)
    assert private.read_bytes() == before  # nothing but the agent's index was rewritten
    assert files(guest.inside)[b"d/x"] == ("file", b"edited\n")
    assert files(guest.inside)[b"mode"][0] == "executable"
    assert guest.git("status", "--porcelain") == "M agent\nM  same"
    assert guest.git("rev-parse", "HEAD") == guest.snapshot.commit
    assert {*guest.changes()} == {b"agent", b"same"}
    (guest.host / "d/x").write_text("edited again\n")
    assert guest.update().updated == 1
    assert {*guest.changes()} == {b"agent", b"same"}


@pytest.mark.parametrize(
    "ruse",
    [
        "echo theirs > d/x",
        "git update-index --assume-unchanged d/x && echo theirs > d/x",
        "git update-index --skip-worktree d/x && echo theirs > d/x",
        "echo theirs > d/x && git add d/x && git cat-file blob HEAD:d/x > d/x",
        "mv d elsewhere && ln -s elsewhere d",
        "rm d/x",
        "rm d/x && mkfifo d/x",
        "chmod +x d/x",
    ],
)
def test_what_the_agent_did_to_an_edited_path_is_never_lost(guest: Guestless, ruse: str) -> None:
    subprocess.run(ruse, shell=True, cwd=guest.inside, check=True)
    there = files(guest.inside)
    report = edit_and_update(guest)
    now = files(guest.inside)
    if "git add" in ruse:  # the agent's own copy on disk is the base's: it may be replaced
        assert now[b"d/x"] == ("file", b"edited\n")
    else:
        assert {name: now.get(name) for name in there if name != b"mode"} == {
            name: there[name] for name in there if name != b"mode"
        }
        assert report.conflicts
    assert now[b"mode"][0] == "executable"


def test_an_edit_beside_the_agents_own_commits_leaves_its_branch(guest: Guestless) -> None:
    (guest.inside / "agent").write_text("committed\n")
    guest.git("commit", "-qam", "mine")
    head = guest.git("rev-parse", "HEAD")
    assert not edit_and_update(guest).head_moved
    assert guest.git("rev-parse", "HEAD") == head
    assert {*guest.changes()} == {b"agent"}
