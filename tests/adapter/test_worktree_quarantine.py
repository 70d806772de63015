"""What a hostile guest may send instead of a result, and what the store holds afterwards."""

import copy
import io
import os
import random
import shutil
import subprocess
import threading
import zlib
from hashlib import sha1
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.guestless import Guestless
from tests.repositories import Repository, git
from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem, HostProblem, ReviewRefused, VmsandboxError
from vmsandbox.worktree import Quarantine, Result, ResultLimits
from vmsandbox.worktree.git import Git
from vmsandbox.worktree.objects import ObjectReader

SMALL = ResultLimits(
    pack_bytes=1 << 20, inflated_bytes=4 << 20, objects=2000, added_paths=1000, timeout_s=20
)


def sent(folder: Path) -> Guestless:
    contents = {f"d{i}/f": f"content {i}\n" * 30 for i in range(9)}
    repository = Repository.create(folder / "project", {**contents})
    repository.write("dirty", "not committed\n")
    guest = Guestless(repository.path, folder / "g")
    guest.send()
    return guest


@pytest.fixture
def guest(tmp_path: Path) -> Guestless:
    """A worktree in its guest."""
    return sent(tmp_path)


@pytest.fixture(scope="module")
def module_guest(tmp_path_factory: pytest.TempPathFactory) -> Guestless:
    return sent(tmp_path_factory.mktemp("quarantine"))


@pytest.fixture
def still(module_guest: Guestless, tmp_path: Path) -> Guestless:
    """The same for all that only forge results, each with a store of its own."""
    guest = copy.copy(module_guest)
    guest.quarantine = Quarantine(tmp_path / "result.git")
    return guest


class Forger:
    """Makes any commit on top of the base, with git's plumbing or without."""

    def __init__(self, guest: Guestless, path: Path) -> None:
        self.base = guest.snapshot.commit
        self.path = path
        git(guest.folder, "init", "-q", "--bare", str(path))
        borrowed = guest.snapshot.git_dir / "objects"
        (self.path / "objects/info/alternates").write_text(f"{borrowed}\n")

    def object(self, kind: str, content: bytes) -> str:
        """Any content, well formed or not."""
        command = ("hash-object", "-w", "-t", kind, "--literally", "--stdin")
        return git(self.path, *command, stdin=content).decode().strip()

    def tree(self, *entries: tuple[str, bytes, str]) -> str:
        """A tree with exactly these entries: mode, name, object."""
        return self.object(
            "tree",
            b"".join(
                f"{mode} ".encode() + name + b"\0" + bytes.fromhex(oid)
                for mode, name, oid in entries
            ),
        )

    def commit(self, tree: str, *parents: str, who: str = "A <a@b> 1700000000 +0000") -> str:
        lines = [f"tree {tree}", *(f"parent {p}" for p in parents or (self.base,))]
        lines += [f"author {who}", f"committer {who}", "", "forged\n"]
        return self.object("commit", "\n".join(lines).encode())

    def pack(self, commit: str, *without: str) -> bytes:
        wanted = "\n".join([commit, *(f"^{oid}" for oid in without or (self.base,))])
        command = ("pack-objects", "--revs", "--stdout", "--thin", "-q")
        return git(self.path, *command, stdin=wanted.encode())

    def stream(self, commit: str, tree: str, pack: bytes | None = None) -> io.BytesIO:
        header = f"vmsandbox-result 1 {commit} {tree}\n".encode()
        return io.BytesIO(header + (self.pack(commit) if pack is None else pack))


@pytest.fixture
def forger(still: Guestless, tmp_path: Path) -> Forger:
    return Forger(still, tmp_path / "forger")


def refused(guest: Guestless, stream: BinaryIO, limits: ResultLimits = SMALL) -> VmsandboxError:
    """The refusal; the store must hold nothing of it."""
    with pytest.raises(VmsandboxError) as caught:
        guest.quarantine.accept(stream, guest.snapshot, limits)
    folder = guest.quarantine.folder
    assert not list(folder.glob("incoming-*"))
    assert not list((folder / "objects/pack").glob("*"))
    return caught.value


def raw_pack(*objects: tuple[int, bytes]) -> bytes:
    """A pack made by hand: (type, content) each; the size is as git counts it."""
    body = b"PACK" + (2).to_bytes(4, "big") + len(objects).to_bytes(4, "big")
    for kind, content in objects:
        size = len(content)
        byte = (kind << 4) | (size & 15)
        size >>= 4
        while size:
            body += bytes([byte | 0x80])
            byte, size = size & 0x7F, size >> 7
        body += bytes([byte]) + zlib.compress(content, 9)
    return body + sha1(body).digest()


def test_a_good_forgery_is_taken(still: Guestless, forger: Forger) -> None:
    tree = forger.tree(("100644", b"a", forger.object("blob", b"x")))
    commit = forger.commit(tree)
    taken = still.quarantine.accept(forger.stream(commit, tree), still.snapshot, SMALL)
    assert taken == Result(commit=commit, tree=tree, pack_bytes=taken.pack_bytes)
    assert taken.pack_bytes == len(forger.pack(commit))


@pytest.mark.parametrize(
    "said",
    [b"", b"sh: git: not found\n", b"vmsandbox-result 1 zz zz\n", b"\x1b[2J" * 1000, b"a" * 9999],
)
def test_no_announcement(still: Guestless, said: bytes) -> None:
    with pytest.raises(GuestProblem) as caught:
        still.quarantine.accept(io.BytesIO(said), still.snapshot)
    assert caught.value.code == "result_not_announced"
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 1000


def test_truncated_and_altered_packs(still: Guestless, forger: Forger) -> None:
    tree = forger.tree(("100644", b"a", forger.object("blob", b"x" * 5000)))
    commit = forger.commit(tree)
    pack = forger.pack(commit)
    for length in (0, 3, 12, 13, len(pack) // 2, len(pack) - 20, len(pack) - 1):
        error = refused(still, forger.stream(commit, tree, pack[:length]))
        assert error.code == "result_refused_malformed", (length, error)
    for position in range(0, len(pack), 7):
        altered = pack[:position] + bytes([pack[position] ^ 0x55]) + pack[position + 1 :]
        assert refused(still, forger.stream(commit, tree, altered)).code.startswith(
            "result_refused"
        )


def test_wrong_announcements(still: Guestless, forger: Forger) -> None:
    tree = forger.tree(("100644", b"a", forger.object("blob", b"x")))
    commit = forger.commit(tree)
    other = still.snapshot.tree
    for announced in ((commit, other), (other, tree), (tree, tree), ("0" * 40, tree)):
        stream = forger.stream(*announced, pack=forger.pack(commit))
        assert refused(still, stream).code == "result_refused_malformed"
    for base in (forger.commit(tree, still.snapshot.parent or ""), forger.commit(other)):
        orphan = forger.commit(tree, base)
        code = refused(still, forger.stream(orphan, tree)).code
        assert code == "result_refused_base"
    unrelated = forger.commit(tree, still.snapshot.parent or "")
    merged = forger.commit(tree, forger.base, unrelated)
    assert refused(still, forger.stream(merged, tree)).code == "result_refused_base"
    octopus = forger.commit(tree, forger.base, forger.commit(tree), forger.commit(other))
    assert refused(still, forger.stream(octopus, tree)).code == "result_refused_base"


def test_a_head_that_only_looks_like_a_merge(still: Guestless, forger: Forger) -> None:
    """git knows no parent further down; and what stands there is no word to give to git."""
    tree = forger.tree(("100644", b"a", forger.object("blob", b"x")))
    plain = git(forger.path, "cat-file", "commit", forger.commit(tree))
    parent = f"parent {forger.base}".encode()
    for line in (parent, b"parent --all", b"parent \xff"):
        headed = plain.replace(b"\n\n", b"\n" + line + b"\n\n", 1)
        rootless = forger.object("commit", headed.replace(parent + b"\n", b"", 1))
        assert refused(still, forger.stream(rootless, tree)).code == "result_refused_base"
    commit = forger.object("commit", headed)
    assert still.quarantine.accept(forger.stream(commit, tree), still.snapshot, SMALL).tree == tree


def test_a_tag_is_no_commit(still: Guestless, forger: Forger) -> None:
    tree = forger.tree(("100644", b"a", forger.object("blob", b"x")))
    commit = forger.commit(tree)
    text = f"object {commit}\ntype commit\ntag t\ntagger A <a@b> 1700000000 +0000\n\nm\n"
    tag = forger.object("tag", text.encode())
    assert refused(still, forger.stream(tag, tree)).code == "result_refused_malformed"


@pytest.mark.parametrize(
    "entries",
    [
        [("100644", b"b", "blob"), ("100644", b"a", "blob")],  # not sorted
        [("100644", b"a", "blob"), ("100644", b"a", "blob")],  # twice
        [("100644", b"", "blob")],
        [("40000", b"a", "blob")],  # a folder that is a file
        [("100644", b"a", "tree")],
        [("100644", b"a", "missing")],
        [("40000", b"a", "missing")],
        [("120000", b".gitmodules", "blob")],
    ],
)
def test_malformed_trees(
    still: Guestless, forger: Forger, entries: list[tuple[str, bytes, str]]
) -> None:
    known = {"blob": forger.object("blob", b"x"), "tree": still.snapshot.tree, "missing": "1" * 40}
    tree = forger.tree(*((mode, name, known[kind]) for mode, name, kind in entries))
    commit = forger.commit(tree)
    objects = [
        (3, b"x"),
        (2, git(forger.path, "cat-file", "tree", tree)),
        (1, git(forger.path, "cat-file", "commit", commit)),
    ]
    error = refused(still, forger.stream(commit, tree, raw_pack(*objects)))
    assert error.code in ("result_refused_malformed", "result_refused_incomplete")


def test_names_are_left_to_the_review(still: Guestless, forger: Forger) -> None:
    blob = forger.object("blob", b"x")
    names = sorted([b".git", b"..", b".GIT", b"git~1", b"a\\b", b"new\nline", b"\xff"])
    tree = forger.tree(*(("100644", name, blob) for name in names))
    taken = still.quarantine.accept(forger.stream(forger.commit(tree), tree), still.snapshot, SMALL)
    with still.quarantine.reading() as results:
        assert [entry.path for entry in results.entries(taken.tree)] == names
        found = {change.path for change in results.changes(still.snapshot.tree, taken.tree)}
    assert found > set(names)


def test_bombs(still: Guestless, forger: Forger) -> None:
    zeros = forger.tree(("100644", b"zeros", forger.object("blob", bytes(8 << 20))))
    error = refused(still, forger.stream(forger.commit(zeros), zeros))
    assert error.code == "result_refused_too_large"

    noise = forger.object("blob", random.Random(1).randbytes(3 << 20))
    tree = forger.tree(("100644", b"noise", noise))
    error = refused(still, forger.stream(forger.commit(tree), tree))
    assert (error.code, "maximum" in error.message) == ("result_refused_too_large", True)

    many = b"PACK" + (2).to_bytes(4, "big") + (0xFFFFFFFF).to_bytes(4, "big")
    error = refused(still, forger.stream("1" * 40, "1" * 40, many))
    assert error.code == "result_refused_too_large"


def test_a_guest_that_stops_in_the_middle(still: Guestless, forger: Forger) -> None:
    tree = forger.tree(("100644", b"a", forger.object("blob", b"x" * 5000)))
    commit = forger.commit(tree)
    reader, writer = os.pipe()
    os.write(writer, forger.stream(commit, tree).getvalue()[:-50])
    over = threading.Timer(1.5, os.close, [writer])  # as when the connection is given up
    over.start()
    with os.fdopen(reader, "rb") as stream:
        error = refused(still, stream, SMALL.model_copy(update={"timeout_s": 0.5}))
    over.join()
    assert (error.code, "within 0.5 s" in error.message) == ("result_refused_too_large", True)


def test_a_tree_that_repeats_itself(still: Guestless, forger: Forger) -> None:
    """Eleven small objects that would be 10^10 files."""
    kind, oid = "100644", forger.object("blob", b"x")
    for _ in range(10):
        oid = forger.tree(*((kind, b"%d" % i, oid) for i in range(10)))
        kind = "40000"
    error = refused(still, forger.stream(forger.commit(oid), oid))
    assert error.code == "result_refused_too_large"


def chain(forger: Forger, depth: int, kind: str, oid: str) -> str:
    """So many folders in each other, and one entry in the innermost."""
    for _ in range(depth):
        oid, kind = forger.tree((kind, b"a", oid)), "40000"
    return oid


def test_folders_that_are_long_in_sum(still: Guestless, forger: Forger) -> None:
    """Few and short paths, each allowed for itself, but no folder above them is another's."""
    deep = chain(forger, 150, "100644", forger.object("blob", b"x"))
    tree = forger.tree(*(("40000", b"%03d" % number, deep) for number in range(500)))
    error = refused(still, forger.stream(forger.commit(tree), tree))
    assert error.code == "result_refused_too_large"
    assert "folders" in error.message


def test_folders_without_end_and_without_a_file(still: Guestless, forger: Forger) -> None:
    oid = forger.tree()
    for _ in range(40):
        oid = forger.tree(("40000", b"a", oid), ("40000", b"b", oid))
    error = refused(still, forger.stream(forger.commit(oid), oid))
    assert error.code == "result_refused_too_large"
    assert "folders" in error.message


def test_a_very_deep_tree(still: Guestless, forger: Forger) -> None:
    objects, kind, oid = [(3, b"x")], b"100644", sha1(b"blob 1\0x").digest()
    for _ in range(1500):
        content = kind + b" d\0" + oid
        objects.append((2, content))
        oid = sha1(b"tree %d\0" % len(content) + content).digest()
        kind = b"40000"
    commit = git(forger.path, "cat-file", "commit", forger.commit(oid.hex()))
    objects.append((1, commit))
    name = sha1(b"commit %d\0" % len(commit) + commit).hexdigest()
    stream = forger.stream(name, oid.hex(), raw_pack(*objects))
    taken = still.quarantine.accept(stream, still.snapshot, SMALL)
    with still.quarantine.reading() as results:
        longest = max(len(entry.path) for entry in results.entries(taken.tree))
    assert longest == 2 * 1500 - 1


def test_delta_bomb(still: Guestless, forger: Forger) -> None:
    """A few hundred bytes that say sixteen times a mebibyte, each time a little different."""

    def varint(value: int) -> bytes:
        out = b""
        while value >= 0x80:
            out += bytes([value & 0x7F | 0x80])
            value >>= 7
        return out + bytes([value])

    body = raw_pack((3, bytes(1 << 20)))[12:-20]
    copy_all = bytes([0b11000000, 0x10])  # from offset 0, 0x100000 bytes
    for number in range(1, 11):
        delta = varint(1 << 20) + varint((16 << 20) + 1) + copy_all * 16 + bytes([1, number])
        head = bytes([(6 << 4) | (len(delta) & 15) | 0x80, len(delta) >> 4])
        body += head + _offset(len(body)) + zlib.compress(delta)
    pack = b"PACK" + (2).to_bytes(4, "big") + (11).to_bytes(4, "big") + body
    assert len(pack) < 2000
    error = refused(still, forger.stream("1" * 40, "1" * 40, pack + sha1(pack).digest()))
    assert error.code == "result_refused_too_large", error
    assert str(10 * ((16 << 20) + 1) + (1 << 20)) in error.message


def _offset(value: int) -> bytes:
    """The distance to a delta's base, as packs write it."""
    out = bytes([value & 0x7F])
    while value := value >> 7:
        value -= 1
        out = bytes([0x80 | value & 0x7F]) + out
    return out


def test_agents_malformed_commits_do_not_lose_the_work(guest: Guestless) -> None:
    (guest.inside / "new").write_text("new\n")
    guest.git("add", "new")
    tree = guest.git("write-tree")
    text = f"tree {tree}\nparent {guest.snapshot.commit}\nauthor no mail\ncommitter x\n\nbad\n"
    made = subprocess.run(
        ["git", "hash-object", "-w", "-t", "commit", "--literally", "--stdin"],
        cwd=guest.inside, input=text.encode(), capture_output=True, check=True,
    )  # fmt: skip
    guest.git("update-ref", "HEAD", made.stdout.decode().strip())
    with pytest.raises(ReviewRefused):
        guest.quarantine.accept(io.BytesIO(guest.collected()), guest.snapshot)
    result = guest.collect()
    assert result.agent_commits == ()
    assert {*guest.changes()} == {b"new"}


def test_the_store_stands_alone(guest: Guestless) -> None:
    """After the user's repository and the snapshot are gone, a review has all it needs."""
    (guest.inside / "d0/f").write_text("content 0\n" * 29 + "changed\n")
    (guest.inside / "d1/f").rename(guest.inside / "moved")
    (guest.inside / "d2/f").unlink()
    shutil.copy(guest.inside / "d3/f", guest.inside / "copied")
    result = guest.collect()
    shutil.rmtree(guest.host)
    shutil.rmtree(guest.stores)
    with guest.quarantine.reading() as results:
        changes = results.changes(guest.snapshot.tree, result.tree)
        assert [(c.kind.value, c.path) for c in changes] == [
            ("A", b"copied"), ("M", b"d0/f"), ("D", b"d2/f"), ("R", b"moved")
        ]  # fmt: skip
        for change in changes:
            for oid in (change.old_oid, change.new_oid):
                if oid:
                    with results.open_blob(oid) as blob:
                        assert blob.read().startswith(b"content")
        assert len([*results.entries(guest.snapshot.tree)]) == 19
        assert b"+changed" in results.diff(guest.snapshot.tree, result.tree, [], 10**6)
        with pytest.raises(HostProblem) as caught, results.open_blob("1" * 40):
            pass
        assert caught.value.code == "object_missing"
    with pytest.raises(HostProblem) as missing:
        guest.quarantine.accept(io.BytesIO(guest.collected()), guest.snapshot)
    assert missing.value.code == "snapshot_missing"
    with guest.quarantine.reading() as results:
        assert results.changes(guest.snapshot.tree, result.tree) == changes


def test_only_the_latest_result_is_kept(guest: Guestless) -> None:
    sizes = []
    for number in range(3):
        (guest.inside / "new").write_text(f"{number}\n" * 1000)
        with guest.quarantine.replacing():
            assert {*guest.changes()} == {b"new"}
        sizes.append(sum(p.stat().st_size for p in guest.quarantine.folder.rglob("*.pack")))
        assert guest.content(_oid(guest, guest.result, b"new")) == f"{number}\n".encode() * 1000
    assert max(sizes) < 1.1 * min(sizes)


def _oid(guest: Guestless, result: Result, path: bytes) -> str:
    with guest.quarantine.reading() as results:
        return next(entry.oid for entry in results.entries(result.tree) if entry.path == path)


def test_diffs_are_bounded_and_plain(guest: Guestless) -> None:
    (guest.inside / ".gitattributes").write_text("* -diff\n*.x diff=evil textconv=evil\n")
    (guest.inside / "a.x").write_text("shown\n")
    (guest.inside / "*").write_text("star\n")
    (guest.inside / "long").write_text("0123456789\n" * 100_000)
    result = guest.collect()
    base = guest.snapshot.tree
    with guest.quarantine.reading() as results:
        one = results.diff(base, result.tree, [b"a.x"], 1000)
        assert one.endswith(b"+shown\n")
        assert results.diff(base, result.tree, [b"*"], 1000).count(b"diff --git") == 1
        assert len(results.diff(base, result.tree, [], 5000)) == 5001
        assert results.diff(base, base, [], 5000) == b""
        lines = {c.path: c.added for c in results.changes(base, result.tree)}
    assert lines == {b".gitattributes": 2, b"a.x": 1, b"*": 1, b"long": 100_000}


def test_blobs_are_streamed_one_after_the_other(guest: Guestless) -> None:
    big = bytes(range(256)) * 8_000
    (guest.inside / "big").write_bytes(big)
    (guest.inside / "empty").write_bytes(b"")
    result = guest.collect()
    big_oid, empty = _oid(guest, result, b"big"), _oid(guest, result, b"empty")
    with guest.quarantine.reading() as results:
        for _ in range(3):
            with results.open_blob(big_oid) as blob:
                assert blob.read(10) == big[:10]  # and the rest is left alone
            with results.open_blob(empty) as blob:
                assert blob.read() == b""
            with results.open_blob(big_oid) as blob:
                assert blob.read() == big


def test_a_reader_waits_as_long_as_what_is_read_is_written(still: Guestless) -> None:
    """Only what git itself takes is limited, or a slow disk would never see an apply end."""
    hasty = Git(git_dir=still.snapshot.git_dir, timeout_s=0.05)
    working = Deadline(0.3)
    with ObjectReader.of(hasty) as reader:
        commit = reader.read(still.snapshot.commit)
        while not working.passed():
            assert reader.read(still.snapshot.commit) == commit


def test_merging_results_of_one_base(guest: Guestless, tmp_path: Path) -> None:
    other = Guestless(guest.host, tmp_path / "other")
    other.send()
    for one, word in ((guest, "ours"), (other, "theirs")):
        (one.inside / "d0/f").write_text(f"{word}\n")
        (one.inside / word).write_text(f"{word}\n")
        (one.inside / "d1/f").write_text(
            ("first\n" if word == "ours" else "content 1\n")
            + "content 1\n" * 28
            + ("last\n" if word == "theirs" else "content 1\n")
        )
    ours, theirs = guest.collect(), other.collect()
    (guest.folder / "unused").mkdir()
    with guest.quarantine.reading() as results:
        merged = results.merge(guest.snapshot.tree, ours.tree, theirs.tree, other.quarantine.folder)
        assert merged.conflicts == (b"d0/f",)
        same = results.merge(guest.snapshot.tree, ours.tree, ours.tree)
        assert (same.conflicts, same.tree) == ((), ours.tree)
