"""Snapshots of worktrees: what is refused, what is never written, what is not read twice, and what
repositories in odd states come to."""

import ctypes
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.guestless import Guestless, files
from tests.repositories import Repository, fingerprint, git
from vmsandbox.errors import VmsandboxError
from vmsandbox.model import Snapshot
from vmsandbox.worktree import locate, snapshot, store_of
from vmsandbox.worktree.packing import whole_pack

MakeRepository = Callable[..., Repository]


def code(action: Callable[[], object]) -> str:
    """The code of the error that `action` must raise; it must come with a hint."""
    with pytest.raises(VmsandboxError) as caught:
        action()
    assert caught.value.hint
    return caught.value.code


def blob(taken: Snapshot, path: str) -> bytes:
    return git(taken.git_dir, "cat-file", "blob", f"{taken.commit}:{path}")


# --- where a worktree is ------------------------------------------------------------------------


def test_folders_that_are_no_worktree(make_repository: MakeRepository, tmp_path: Path) -> None:
    repository = make_repository()
    git(tmp_path, "init", "-q", "--bare", "bare.git")
    git(tmp_path, "init", "-q", "empty")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/.git").write_text("gitdir: /nonexistent\n")
    (tmp_path / "loop").symlink_to("loop")
    undecodable = tmp_path / os.fsdecode(b"\xff")
    undecodable.mkdir()
    for path, expected in {
        tmp_path / "nowhere": "worktree_missing",
        repository.path / "README": "worktree_missing",
        tmp_path / "loop": "worktree_missing",
        tmp_path / "bare.git": "worktree_bare",
        tmp_path / "bare.git/objects": "worktree_bare",
        repository.path / ".git": "worktree_inside_git_dir",
        repository.path / ".git/refs": "worktree_inside_git_dir",
        tmp_path / "broken": "worktree_broken",
        undecodable: "worktree_name",
    }.items():
        assert code(lambda path=path: locate(path)) == expected, path  # type: ignore[misc]
    assert code(lambda: snapshot(tmp_path / "empty", tmp_path / "s")) == "worktree_empty"
    assert code(lambda: snapshot(repository.path, tmp_path / "s", include=["../x"])) == (
        "include_invalid"
    )


def test_the_top_is_found_from_below(make_repository: MakeRepository, tmp_path: Path) -> None:
    repository = make_repository("p", {".gitignore": "ignored\n", "deep/er/file": "x"})
    (repository.path / "ignored/inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(repository.path / "deep")
    assert locate(repository.path / "deep/er").top == repository.path
    assert locate(tmp_path / "link").top == repository.path
    ignored = locate(repository.path / "ignored/inside")
    assert (ignored.top, ignored.common_dir) == (repository.path / "ignored/inside", None)


def test_a_worktree_of_a_bare_repository(make_repository: MakeRepository, tmp_path: Path) -> None:
    source = make_repository()
    bare = tmp_path / "bare.git"
    git(tmp_path, "clone", "-q", "--bare", str(source.path), str(bare))
    git(bare, "worktree", "add", "-q", str(bare / "inside"))
    before = fingerprint(bare, without=frozenset())
    guest = Guestless(bare / "inside", tmp_path / "g")
    assert guest.send().branch == "inside"
    assert fingerprint(bare, without=frozenset()) == before


def test_odd_paths(make_repository: MakeRepository, tmp_path: Path) -> None:
    for name in ("-dash 'quo\"te; co:lon ümlaut", "#new\nline\\"):
        repository = make_repository(name, {"file": "x\n"})
        repository.write("dirty", "x\n")
        guest = Guestless(repository.path, tmp_path / f"g{len(name)}")
        guest.send()
        assert files(guest.inside) == files(repository.path)
        (guest.inside / "new").write_text("n\n")
        assert {*guest.changes()} == {b"new"}, name


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files to somebody else")
def test_root_may_take_somebody_elses_worktree(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    """As with sudo; git refuses that unless it is told."""
    repository = make_repository("p", {".gitignore": "*.log\n", "a.log": "x\n"})
    repository.git("add", "-f", "a.log")
    repository.commit("tracked although ignored")
    for path in [repository.path, *repository.path.rglob("*")]:
        os.chown(path, 65534, 65534)
    taken = snapshot(repository.path, tmp_path / "s")
    assert (taken.files, taken.commit) == (2, taken.parent)


# --- what is not written --------------------------------------------------------------------------


def test_nothing_of_the_users_runs_or_is_written(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository(
        "p", {"file": "x\n", "a.up": "x\n", ".gitattributes": "*.up filter=f\n"}
    )
    repository.git("config", "core.untrackedCache", "true")
    repository.git("config", "core.splitIndex", "true")
    repository.git("update-index", "--split-index", "--force-untracked-cache")
    marker = tmp_path / "ran"
    hook = f"#!/bin/sh\ntouch '{marker}'\n"
    for name in (
        "post-index-change",
        "fsmonitor",
        "pre-commit",
        "post-checkout",
        "reference-transaction",
    ):
        path = repository.path / ".git/hooks" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(hook)
        path.chmod(0o755)
    for name in ("core.fsmonitor", "filter.f.clean", "filter.f.smudge", "filter.f.process"):
        repository.git("config", name, str(repository.path / ".git/hooks/fsmonitor"))
    repository.git("config", "core.hooksPath", str(repository.path / ".git/hooks"))
    marker.unlink(missing_ok=True)
    repository.write("a.up", "dirty\n")
    repository.write("new", "x\n")
    before = fingerprint(repository.path, without=frozenset())
    kept = [repository.path / ".git" / name for name in ("index", "HEAD", "config", "refs", "info")]
    stamps = [path.stat().st_mtime_ns for path in kept]
    guest = Guestless(repository.path, tmp_path / "g")
    guest.send()
    guest.take()
    guest.collect()
    assert fingerprint(repository.path, without=frozenset()) == before
    assert [path.stat().st_mtime_ns for path in kept] == stamps
    assert not marker.exists()


# --- what is read, and when -----------------------------------------------------------------------


@contextmanager
def opened_files(folder: Path) -> Iterator[set[str]]:
    """The names directly in `folder` that anybody opens meanwhile (inotify(7), IN_OPEN)."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(descriptor, os.fsencode(folder), 0x20) >= 0
    found: set[str] = set()
    try:
        yield found
        events = os.read(descriptor, 1 << 20)
        while events:
            *_, length = struct.unpack_from("iIII", events)
            found.add(events[16 : 16 + length].rstrip(b"\0").decode())
            events = events[16 + length :]
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)


def test_only_what_changed_is_read_again(make_repository: MakeRepository, tmp_path: Path) -> None:
    names = [f"f{i}" for i in range(5)]
    repository = make_repository("p", {name: name for name in names})
    repository.write("untracked", "x")
    for name in (*names, "untracked"):
        os.utime(repository.path / name, (1_700_000_000, 1_700_000_000))
    guest = Guestless(repository.path, tmp_path / "g")
    with opened_files(repository.path) as first:
        guest.take()
    assert {*names, "untracked"} <= first
    with opened_files(repository.path) as second:
        guest.take()
    assert not second & {*names, "untracked"}
    repository.write("f3", "changed")
    with opened_files(repository.path) as third:
        taken = guest.take()
    assert third & {*names, "untracked"} == {"f3"}
    assert blob(taken, "f3") == b"changed"


def test_a_change_within_the_same_second_is_seen(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    """Same size, same inode, same second: git's cache alone would miss it."""
    repository = make_repository("p", {"file": "0000\n"})
    guest = Guestless(repository.path, tmp_path / "g")
    for number in range(5):
        with (repository.path / "file").open("r+") as file:
            file.write(f"{number:04}\n")
        assert blob(guest.take(), "file") == f"{number:04}\n".encode()


def test_a_file_that_never_holds_still(make_repository: MakeRepository, tmp_path: Path) -> None:
    repository = make_repository("p", {"file": "0" * 1000})
    path = repository.path / "file"
    guest = Guestless(repository.path, tmp_path / "g")
    over = threading.Event()

    def scribble() -> None:
        number = 0
        while not over.is_set():
            number = (number + 1) % 10
            with path.open("r+") as file:
                file.write(str(number) * 1000)
            beside = path.with_name("beside")
            beside.write_text("x")
            beside.replace(repository.path / f"moving{number}")
            (repository.path / f"moving{number}").unlink()

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for _ in range(5):
            content = blob(guest.take(), "file")
            assert len(content) == 1000
    finally:
        over.set()
        writer.join()
    path.write_text("final")
    taken = guest.take()
    assert blob(taken, "file") == b"final"
    git(taken.git_dir, "fsck", "--full", "--strict")


def test_two_at_once_and_after_a_crash(make_repository: MakeRepository, tmp_path: Path) -> None:
    repository = make_repository()
    repository.write("dirty", "x")
    guest = Guestless(repository.path, tmp_path / "g")
    first = guest.take()
    folder = store_of(guest.stores, repository.path)
    for index in (folder / "indexes-sha1").iterdir():
        (index.parent / f"{index.name}.lock").write_text("left behind")
        index.write_bytes(b"DIRC, but torn")
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: guest.take(), range(4)))
    assert taken == [first] * 4


def test_unreadable_files_are_named(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads everything, so for root this is done as somebody else."""
    repository = Repository.create(short_path / "p", {"d/file": "x", "open": "y"})
    repository.write("secret file", "x")
    before = os.geteuid()
    if before == 0:
        for path in [short_path, *short_path.rglob("*")]:
            os.chown(path, 65534, 65534)
        os.seteuid(65534)
        monkeypatch.setenv("HOME", str(short_path))
    try:
        for name, mode in (("secret file", 0o600), ("d/file", 0o600), ("d", 0o700)):
            (repository.path / name).chmod(0)
            with pytest.raises(VmsandboxError) as caught:
                snapshot(repository.path, short_path / "s")
            (repository.path / name).chmod(mode)
            assert caught.value.code == "worktree_unreadable"
            assert name in caught.value.message
        assert snapshot(repository.path, short_path / "s").files == 3
    finally:
        os.seteuid(before)


# --- repositories in odd states -------------------------------------------------------------------


def history(tmp_path: Path) -> Repository:
    repository = Repository.create(tmp_path / "origin", {"file": "1\n"})
    for number in range(2, 7):
        repository.write("file", f"{number}\n")
        repository.commit(f"commit {number}")
    return repository


@pytest.mark.parametrize(
    ("wanted", "dirty", "seen"),
    [("full", True, 7), ("none", False, 1), ("3", True, 4)],
)
def test_how_much_history(tmp_path: Path, wanted: str, dirty: bool, seen: int) -> None:
    repository = history(tmp_path)
    if dirty:
        repository.write("file", "dirty\n")
    guest = Guestless(repository.path, tmp_path / "g", history=wanted)
    guest.send()
    assert len(guest.git("log", "--format=%h").splitlines()) == seen
    assert guest.git("status", "--porcelain") == ""
    guest.git("fsck", "--full", "--strict")
    (guest.inside / "new").write_text("x")
    guest.git("add", "new")
    guest.git("commit", "-qm", "agent's")
    assert [c.subject for c in guest.collect().agent_commits] == ["agent's"]


@pytest.mark.parametrize("wanted", ["none", "2"])
def test_history_stays_whole_over_updates(tmp_path: Path, wanted: str) -> None:
    repository = history(tmp_path)
    guest = Guestless(repository.path, tmp_path / "g", history=wanted)
    guest.send()
    repository.commit("and on")
    repository.write("file", "dirty again\n")
    assert guest.update().head_moved
    guest.git("fsck", "--full", "--strict")
    assert guest.git("log", "--format=%s").splitlines()[0].startswith("Worktree as it was")
    assert guest.changes() == {}


def test_shallow_clones(tmp_path: Path) -> None:
    origin = history(tmp_path)
    git(tmp_path, "clone", "-q", "--depth=2", f"file://{origin.path}", "clone")
    clone = Repository(tmp_path / "clone")
    clone.write("file", "dirty\n")
    for wanted, seen in (("full", 3), ("9", 3)):
        guest = Guestless(clone.path, tmp_path / f"g{wanted}", history=wanted)
        guest.send()
        assert len(guest.git("log", "--format=%h").splitlines()) == seen
        guest.git("fsck", "--full", "--strict")
        assert guest.changes() == {}


def test_partial_clones_fetch_nothing(tmp_path: Path) -> None:
    origin = history(tmp_path)
    origin.git("config", "uploadpack.allowFilter", "true")
    for kind in ("blob:none", "tree:0"):
        path = tmp_path / kind
        git(tmp_path, "clone", "-q", f"--filter={kind}", f"file://{origin.path}", str(path))
        clone = Repository(path)
        clone.write("dirty", "x\n")
        before = fingerprint(path, without=frozenset())
        guest = Guestless(path, tmp_path / f"g-{kind}")
        guest.send()
        assert fingerprint(path, without=frozenset()) == before
        assert files(guest.inside) == files(path)
        assert len(guest.git("log", "--format=%h").splitlines()) == 1
        guest.git("fsck", "--full", "--strict")


def test_borrowed_objects_grafts_and_replacements(tmp_path: Path) -> None:
    origin = history(tmp_path)
    git(tmp_path, "clone", "-q", "--shared", str(origin.path), "shared")
    git(tmp_path, "clone", "-q", "--shared", str(tmp_path / "shared"), "again")
    clone = Repository(tmp_path / "again")
    head, before = (clone.git("rev-parse", name) for name in ("HEAD", "HEAD~2"))
    clone.git("replace", "HEAD:file", "HEAD~1:file")
    clone.git("replace", "--graft", head, before)
    (clone.path / ".git/info/grafts").write_text(f"{head}\n")
    guest = Guestless(clone.path, tmp_path / "g")
    taken = guest.send()
    assert taken.commit == head
    assert len(guest.git("log", "--format=%h").splitlines()) == 6
    assert guest.changes() == {}


def test_staged_objects_that_the_users_gc_removed(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository()
    repository.write("staged", "borrowed from the user's store\n")
    repository.git("add", "staged")
    guest = Guestless(repository.path, tmp_path / "g")
    first = guest.take()
    repository.git("rm", "-q", "--cached", "staged")
    repository.git("gc", "-q", "--prune=now")
    assert guest.take() == first
    guest.send()
    assert files(guest.inside) == files(repository.path)


def test_a_merge_in_progress(make_repository: MakeRepository, tmp_path: Path) -> None:
    repository = make_repository("p", {"file": "base\n", "gone": "x\n"})
    repository.git("checkout", "-q", "-b", "other")
    repository.write("file", "theirs\n")
    repository.write("gone", "changed\n")
    repository.commit("theirs")
    repository.git("checkout", "-q", "main")
    repository.write("file", "ours\n")
    (repository.path / "gone").unlink()
    repository.commit("ours")
    with pytest.raises(AssertionError):
        repository.git("merge", "-q", "other")
    guest = Guestless(repository.path, tmp_path / "g")
    guest.send()
    assert files(guest.inside) == files(repository.path)
    assert b"<<<<<<<" in (guest.inside / "file").read_bytes()


def test_what_changes_kind_between_snapshots(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository("p", {"a": "x\n", "d/x": "y\n", "e/x": "y\n", ".gitignore": "e\n"})
    top = repository.path
    guest = Guestless(top, tmp_path / "g")
    guest.take()
    (top / "a").unlink()
    Repository.create(top / "a", {"inner": "i\n"})
    shutil.rmtree(top / "d")
    (top / "d").symlink_to("a")
    shutil.rmtree(top / "e")
    (top / "e").symlink_to("a")
    guest.send()
    assert {*files(guest.inside)} == {b"a/inner", b"d", b".gitignore"}
    shutil.rmtree(top / "a")
    (top / "a").write_text("a file again\n")
    (top / "d").unlink()
    (top / "d").mkdir()
    (top / "d/y").write_text("y\n")
    assert blob(guest.take(), "a") == b"a file again\n"
    assert blob(guest.take(), "d/y") == b"y\n"


def test_the_same_content_is_the_same_commit(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository()
    repository.write("dirty", "x\n")
    one = snapshot(repository.path, tmp_path / "one")
    two = snapshot(repository.path, tmp_path / "two")
    assert (one.commit, one.tree) == (two.commit, two.tree)
    assert one.commit != one.parent


# --- the pack -----------------------------------------------------------------------------------


def deltas(taken: Snapshot) -> int:
    """How many objects of the pack that is sent stand there as a delta of another."""
    with whole_pack(taken) as pack:
        told = git(taken.git_dir, "verify-pack", "-v", pack.pack_file.name).decode()
    lines = [line.split() for line in told.splitlines()]
    return sum(len(words) == 7 and words[1] == "blob" for words in lines)


def test_no_delta_is_looked_for_and_those_that_are_there_are_kept(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository()
    lines = [f"line {number} of {number**3}\n" for number in range(3000)]
    for version in range(4):
        repository.write("file", "".join([*lines, f"version {version}\n"]))
        repository.commit(f"version {version}")
    assert deltas(snapshot(repository.path, tmp_path / "loose")) == 0
    repository.git("repack", "-q", "-a", "-d", "-f")
    assert deltas(snapshot(repository.path, tmp_path / "packed")) == 3
