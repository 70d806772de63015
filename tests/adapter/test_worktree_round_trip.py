"""A worktree goes in and comes out: every kind of repository, every kind of file, byte for byte."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guestless import Guestless, files
from tests.repositories import INVALID, Repository, awkward, fingerprint, git
from vmsandbox.model import ChangeKind

MakeRepository = Callable[..., Repository]


@pytest.fixture
def every_kind(tmp_path: Path) -> Repository:
    """An awkward worktree, with what may only be on a host."""
    linked = awkward(tmp_path)
    with (linked.path / ".gitattributes").open("a") as attributes:
        attributes.write("*.id ident\n")
    linked.write("x.id", "$Id: keep me $\n")
    linked.write('quote"\\back\\', "quote\n")
    linked.write(" lead and trail ", "space\n")
    linked.write("CON", "")
    linked.write("git~1/x", "ntfs\n")
    linked.link("dangling", "nowhere/at/all")
    return linked


def test_unchanged_round_trip_is_an_empty_change_set(
    every_kind: Repository, tmp_path: Path
) -> None:
    before = fingerprint(tmp_path / "main", without=frozenset()), fingerprint(every_kind.path)
    guest = Guestless(every_kind.path, tmp_path / "g")
    guest.send()
    assert files(guest.inside) == files(every_kind.path)
    assert guest.git("status", "--porcelain") == ""
    assert guest.git("symbolic-ref", "HEAD") == "refs/heads/topic"
    assert guest.git("log", "--format=%s").splitlines()[1:] == ["with a submodule", "first"]
    assert guest.changes() == {}
    assert before == (
        fingerprint(tmp_path / "main", without=frozenset()),
        fingerprint(every_kind.path),
    )


def test_a_change_to_each_comes_back_byte_exact(every_kind: Repository, tmp_path: Path) -> None:
    guest = Guestless(every_kind.path, tmp_path / "g")
    guest.send()
    wanted = {}
    for name, (kind, content) in files(guest.inside).items():
        path = guest.inside / os.fsdecode(name)
        if kind == "link":
            path.unlink()
            path.symlink_to("changed\n target")
            wanted[name] = b"changed\n target"
        else:
            path.write_bytes(content + b"more\r\n")
            wanted[name] = content + b"more\r\n"
    changes = guest.changes()
    assert changes.keys() == wanted.keys()
    assert {name: guest.content(c.new_oid) for name, c in changes.items()} == wanted
    assert {c.kind for c in changes.values()} == {ChangeKind.MODIFIED}
    assert changes[b"run.sh"].new_mode == 0o100755


def test_every_kind_of_change(make_repository: MakeRepository, tmp_path: Path) -> None:
    names = {f"f{i}": f"content {i}\n" * 20 for i in range(6)}
    repository = make_repository(
        "project", {**names, "d/one": "1\n", "d/two": "2\n", "mode": "x\n"}
    )
    guest = Guestless(repository.path, tmp_path / "g")
    guest.send()
    inside = guest.inside
    (inside / "f0").write_text("content 0\n" * 19 + "changed\n")
    (inside / "f1").unlink()
    (inside / "f2").rename(inside / "renamed")
    (inside / "f3").unlink()
    (inside / "f3").symlink_to("/etc/passwd")
    (inside / "f4").unlink()
    (inside / "f4").mkdir()
    (inside / "f4" / "inner").write_text("new\n")
    shutil.rmtree(inside / "d")
    (inside / "d").symlink_to("f5")
    (inside / "mode").chmod(0o755)
    (inside / "blob").write_bytes(bytes(range(256)))
    changes = guest.changes()
    assert {name: c.kind.value for name, c in changes.items()} == {
        b"f0": "M",
        b"f1": "D",
        b"renamed": "R",
        b"f3": "T",
        b"f4": "D",
        b"f4/inner": "A",
        b"d": "A",
        b"d/one": "D",
        b"d/two": "D",
        b"mode": "M",
        b"blob": "A",
    }
    assert (changes[b"f0"].added, changes[b"f0"].removed) == (1, 1)
    assert changes[b"renamed"].old_path == b"f2"
    assert changes[b"f3"].added is None
    assert (changes[b"mode"].old_mode, changes[b"mode"].new_mode) == (0o100644, 0o100755)
    assert (changes[b"blob"].added, changes[b"blob"].size_bytes) == (None, 256)
    assert changes[b"f1"].size_bytes == len("content 1\n" * 20)


def test_a_clean_worktree_is_heads_own_commit(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository()
    guest = Guestless(repository.path, tmp_path / "g")
    snapshot = guest.send()
    assert snapshot.commit == snapshot.parent == repository.git("rev-parse", "HEAD")
    assert (snapshot.files, snapshot.content_bytes) == (1, 6)


@pytest.mark.parametrize("form", ["branch", "detached", "unborn", "plain", "sha256"])
def test_every_kind_of_head(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "file").write_text("content\n")
    if form != "plain":
        kind = ["--object-format=sha256"] if form == "sha256" else []
        git(folder, "init", "-q", "-b", "feature/one", *kind)
    if form not in ("plain", "unborn"):
        Repository(folder).commit("first")
    if form == "detached":
        git(folder, "checkout", "-q", "--detach")
    guest = Guestless(folder, tmp_path / "g")
    snapshot = guest.send()
    assert snapshot.branch == (None if form in ("detached", "plain") else "feature/one")
    assert guest.git("branch", "--show-current") == (snapshot.branch or "")
    assert len(snapshot.commit) == (64 if form == "sha256" else 40)
    (guest.inside / "new").write_text("new\n")
    guest.git("add", "new")
    guest.git("commit", "-q", "-m", "agent's")
    assert list(guest.changes()) == [b"new"]
    assert [c.subject for c in guest.result.agent_commits] == ["agent's"]


def test_ignored_files_stay_unless_included(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository("p", {".gitignore": "*.log\nbuild/\n.env\n"})
    (repository.path / ".git/info/exclude").write_text("# mine\nprivate\n")
    for name in ("a.log", "build/out", "build/deep/er", "sub/.env", ".env", "private", "keep"):
        repository.write(name, name)
    repository.write("tracked.log", "tracked although ignored\n")
    repository.git("add", "-f", "tracked.log")
    guest = Guestless(repository.path, tmp_path / "g", include=[".env", "build/**"])
    snapshot = guest.send()
    assert {*files(guest.inside)} == {
        b".gitignore", b"keep", b"tracked.log", b".env", b"sub/.env", b"build/out", b"build/deep/er"
    }  # fmt: skip
    assert snapshot.excludes == (b"private",)
    assert guest.git("status", "--porcelain") == ""
    for name in ("b.log", "build/new", "private", "sub/other", "sub/deep/.env"):
        path = guest.inside / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("agent's\n")
    (guest.inside / ".env").write_text("changed\n")
    (guest.inside / "tracked.log").unlink()
    assert {*guest.changes()} == {
        b"build/new", b"sub/other", b".env", b"sub/deep/.env", b"tracked.log"
    }  # fmt: skip
    guest.include = ()
    assert {*files_of(guest)} == {b".gitignore", b"keep", b"tracked.log"}


def files_of(guest: Guestless) -> list[bytes]:
    """The names in a fresh snapshot."""
    snapshot = guest.take()
    listed = git(snapshot.git_dir, "ls-tree", "-rz", "--name-only", snapshot.tree)
    return listed.rstrip(b"\0").split(b"\0")


def test_the_users_own_excludes_file_counts(
    make_repository: MakeRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / ".gitconfig").write_text("[core]\nexcludesFile = ~/mine\n[user]\nname = Me\n")
    (tmp_path / "mine").write_bytes(b"*.swp\ninv\xff*\n")
    repository = make_repository()
    repository.write("x.swp", "swap")
    repository.write(INVALID, "ignored")
    guest = Guestless(repository.path, tmp_path / "g")
    snapshot = guest.send()
    assert snapshot.parent == snapshot.commit
    assert snapshot.excludes == (b"*.swp", b"inv\xff*")
    assert type(snapshot).model_validate_json(snapshot.model_dump_json()) == snapshot
    (guest.inside / "y.swp").write_text("swap")
    assert guest.changes() == {}
    assert guest.git("config", "user.name") == "Me"


def test_repositories_inside_become_plain_files(tmp_path: Path) -> None:
    outer = Repository.create(tmp_path / "outer", {"file": "x\n"})
    inner = Repository.create(outer.path / "vendor/inner", {"code": "y\n", ".gitignore": "obj\n"})
    inner.write("obj", "ignored by its own rules")
    Repository.create(inner.path / "third", {"z": "z\n"})
    git(outer.path, "init", "-q", "unborn")
    outer.write("unborn/w", "w\n")
    guest = Guestless(outer.path, tmp_path / "g")
    for _ in range(2):
        assert {*files_of(guest)} == {
            b"file", b"vendor/inner/code", b"vendor/inner/.gitignore", b"vendor/inner/third/z",
            b"unborn/w",
        }  # fmt: skip
    guest.send()
    assert guest.changes() == {}


def test_repositories_that_the_agent_makes_become_plain_files(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    guest = Guestless(make_repository("p", {"becomes": "a repository\n"}).path, tmp_path / "g")
    guest.send()
    (guest.inside / "becomes").unlink()
    for name in ("becomes", "cloned", "cloned/inner", "odd\nname"):
        made = Repository.create(guest.inside / name)
        made.write("in it", name)
        made.commit("agent's")
    git(guest.inside, "init", "-q", "unborn")
    (guest.inside / "unborn" / "file").write_text("x")
    (guest.inside / "unborn" / ".gitignore").write_text("obj\n")
    (guest.inside / "unborn" / "obj").write_text("x")
    wanted = {
        b"becomes", b"becomes/in it", b"cloned/in it", b"cloned/inner/in it", b"odd\nname/in it",
        b"unborn/file", b"unborn/.gitignore",
    }  # fmt: skip
    assert {*guest.changes()} == wanted
    assert {*guest.changes()} == wanted


def test_sparse_checkout_is_what_is_on_disk(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository("p", {"in/a": "a\n", "out/b": "b\n", "top": "t\n"})
    repository.git("sparse-checkout", "set", "--cone", "--sparse-index", "in")
    guest = Guestless(repository.path, tmp_path / "g")
    guest.send()
    assert {*files(guest.inside)} == {b"in/a", b"top"}
    assert guest.changes() == {}


def test_flags_in_the_users_index_do_not_hide_changes(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository("p", {"assumed": "a\n", "skipped": "b\n", "intended": "c\n"})
    repository.git("update-index", "--assume-unchanged", "assumed")
    repository.git("update-index", "--skip-worktree", "skipped")
    for name in ("assumed", "skipped"):
        repository.write(name, "changed\n")
    repository.write("new", "n\n")
    repository.git("add", "--intent-to-add", "new")
    repository.git("rm", "-q", "--cached", "intended")
    guest = Guestless(repository.path, tmp_path / "g")
    guest.send()
    assert files(guest.inside) == files(repository.path)


def test_what_is_no_file_is_skipped(make_repository: MakeRepository, tmp_path: Path) -> None:
    repository = make_repository("p", {"file": "x\n", "becomes-fifo": "y\n", "d/x": "z\n"})
    guest = Guestless(repository.path, tmp_path / "g")
    guest.take()
    for name in ("becomes-fifo", "d/x"):
        (repository.path / name).unlink()
        os.mkfifo(repository.path / name)
    os.mkfifo(repository.path / "fifo")
    with socket.socket(socket.AF_UNIX) as one:
        directory = os.open(repository.path, os.O_RDONLY)
        one.bind(f"/proc/self/fd/{directory}/socket")
        os.close(directory)
        guest.send()
    assert {*files(guest.inside)} == {b"file"}
    (guest.inside / "file").unlink()
    os.mkfifo(guest.inside / "file")
    assert {*guest.changes()} == {b"file"}


def test_users_conversions_change_nothing(make_repository: MakeRepository, tmp_path: Path) -> None:
    repository = make_repository()
    repository.git("config", "core.autocrlf", "true")
    repository.git("config", "filter.shout.clean", "tr a-z A-Z")
    repository.git("config", "filter.shout.smudge", "tr A-Z a-z")
    repository.git("config", "filter.shout.required", "true")
    repository.write(
        ".gitattributes",
        "*.up filter=shout\n*.u16 working-tree-encoding=UTF-16LE eol=lf\n*.txt text\n",
    )
    repository.write("a.up", "quiet\n")
    repository.write("b.u16", "wide\n".encode("utf-16-le"))
    repository.write("c.txt", "dos\r\n")
    repository.commit("normalized")
    guest = Guestless(repository.path, tmp_path / "g")
    guest.send()
    assert files(guest.inside) == files(repository.path)
    assert guest.git("status", "--porcelain") == ""
    (guest.inside / "a.up").write_text("Loud\r\n")
    guest.git("commit", "-qam", "raw")
    assert guest.content(guest.changes()[b"a.up"].new_oid) == b"Loud\r\n"


def test_a_submodule_that_is_not_there_is_no_file(tmp_path: Path) -> None:
    module = Repository.create(tmp_path / "module", {"x": "x\n"})
    main = Repository.create(tmp_path / "main", {"a": "a\n"})
    main.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(module.path), "sub")
    main.commit("submodule")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(main.path), str(clone))
    guest = Guestless(clone, tmp_path / "g")
    guest.send()
    assert {*files(guest.inside)} == {b"a", b".gitmodules"}
    assert guest.changes() == {}
