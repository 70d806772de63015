"""The guest's scripts, with an agent that breaks things: the work still comes back, and nothing
that the agent configured runs."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.guestless import SCRIPTS, Guestless, files
from tests.repositories import Repository, git
from vmsandbox import worktree

MakeRepository = Callable[..., Repository]


@pytest.fixture
def guest(make_repository: MakeRepository, tmp_path: Path) -> Guestless:
    guest = Guestless(make_repository("p", {"a": "a\n", "b": "b\n"}).path, tmp_path / "g")
    guest.send()
    return guest


def attempt(guest: Guestless, stdin: bytes) -> "subprocess.CompletedProcess[bytes]":
    command = worktree.receive_command(
        guest.inside, guest.snapshot, scripts=SCRIPTS, state=guest.state, owner="root",
        gitconfig=guest.folder / "gitconfig",
    )  # fmt: skip
    return subprocess.run(command, input=stdin, capture_output=True)


# --- in -------------------------------------------------------------------------------------------


def test_a_cut_stream_leaves_nothing_that_counts(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    guest = Guestless(make_repository().path, tmp_path / "g")
    guest.snapshot = guest.take()
    stream = b"".join(worktree.base_stream(guest.snapshot))
    for length in (10, 512, len(stream) - 2000):
        assert attempt(guest, stream[:length]).returncode
        assert not (guest.state / "received").exists()
    assert attempt(guest, stream).returncode == 0
    (guest.inside / "new").write_text("agent's\n")
    assert attempt(guest, stream).returncode == 0  # once more, as after a lost answer
    assert {*guest.changes()} == {b"new"}
    config = (guest.folder / "gitconfig").read_text()
    assert config.count(str(guest.inside)) == 1


@pytest.mark.parametrize("base", ["/tmp", "/var/tmp"])
def test_a_worktree_below_tmp_is_kept_when_the_guest_boots_again(
    make_repository: MakeRepository, base: str
) -> None:
    """Stock systems empty /tmp then; with the worktree all that the task did would be gone."""
    with TemporaryDirectory(dir=base) as folder:
        guest = Guestless(make_repository().path, Path(folder))
        guest.send()
        rules = guest.folder / "guest" / "tmpfiles.d" / "tmp.conf"
        assert rules.exists() == (base == "/tmp")
        if rules.exists():
            assert rules.read_text() == "d /tmp 1777 root root -\n"


def test_what_the_guest_had_is_not_overwritten(
    make_repository: MakeRepository, tmp_path: Path
) -> None:
    guest = Guestless(make_repository().path, tmp_path / "g")
    guest.inside.mkdir(parents=True)
    (guest.inside / "precious").write_text("x")
    guest.snapshot = guest.take()
    done = attempt(guest, b"".join(worktree.base_stream(guest.snapshot)))
    assert (done.returncode, files(guest.inside)) == (66, {b"precious": ("file", b"x")})
    assert b"files of its own" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files to somebody else")
def test_the_worktree_is_the_agents(make_repository: MakeRepository, short_path: Path) -> None:
    """As in a real guest: scripts as root, files of somebody else, below a folder of root's."""
    short_path.chmod(0o700)
    repository = Repository.create(short_path / "host", {"d/a": "a\n"})
    snapshot = worktree.snapshot(repository.path, short_path / "stores")
    inside, state = short_path / "closed" / "work", short_path / "state"
    (short_path / "closed").mkdir(mode=0o700)
    scripts = {"scripts": SCRIPTS, "state": state, "owner": "nobody"}
    gitconfig = short_path / "gitconfig"
    receive = worktree.receive_command(inside, snapshot, gitconfig=gitconfig, **scripts)  # type: ignore[arg-type]
    subprocess.run(receive, input=b"".join(worktree.base_stream(snapshot)), check=True)
    nobody = pwd.getpwnam("nobody").pw_uid
    assert {p.stat().st_uid for p in [inside, *inside.rglob("*")]} == {nobody}
    assert {p.stat().st_uid for p in (state / "collect.git").rglob("*")} == {0}
    told = {"GIT_CONFIG_SYSTEM": str(gitconfig), "GIT_CONFIG_GLOBAL": "/dev/null"}
    environment = {**os.environ, **told, "GIT_OPTIONAL_LOCKS": "0"}
    subprocess.run(["git", "-C", str(inside), "status"], env=environment, check=True)
    as_agent = ["setpriv", "--reuid=nobody", f"--regid={pwd.getpwnam('nobody').pw_gid}"]
    as_agent += ["--clear-groups", "--", "git", "-C", str(inside)]
    subprocess.run([*as_agent, "commit", "-q", "--allow-empty", "-m", "mine"], check=True)
    repository.write("d/new", "from the host\n")
    fresh = worktree.snapshot(repository.path, short_path / "stores")
    update = worktree.receive_command(inside, fresh, snapshot, **scripts)  # type: ignore[arg-type]
    stream = b"".join(worktree.base_stream(fresh, snapshot))
    answer = subprocess.run(update, input=stream, check=True, capture_output=True).stdout
    assert worktree.parse_update(answer).updated == 1
    assert {p.stat().st_uid for p in [inside, *inside.rglob("*")]} == {nobody}


# --- out ------------------------------------------------------------------------------------------


def remove(git_dir: Path) -> None:
    shutil.rmtree(git_dir)


def file_instead(git_dir: Path) -> None:
    shutil.rmtree(git_dir)
    git_dir.write_text("gitdir: /etc\n")


def link_instead(git_dir: Path) -> None:
    shutil.rmtree(git_dir)
    git_dir.symlink_to("/")


def fifos(git_dir: Path) -> None:
    for name in ("HEAD", "config"):
        (git_dir / name).unlink()
        os.mkfifo(git_dir / name)


def nonsense(git_dir: Path) -> None:
    (git_dir / "config").write_text("[core\n")
    (git_dir / "index").write_text("x")
    (git_dir / "index.lock").write_text("x")


def no_objects(git_dir: Path) -> None:
    git(git_dir.parent, "commit", "-q", "--allow-empty", "-m", "lost")
    shutil.rmtree(git_dir / "objects")


def another_history(git_dir: Path) -> None:
    git(git_dir.parent, "checkout", "-q", "--orphan", "other")
    git(git_dir.parent, "commit", "-q", "-m", "unrelated")


def separate(git_dir: Path) -> None:
    moved = git_dir.parents[1] / "elsewhere.git"
    git_dir.rename(moved)
    git_dir.write_text(f"gitdir: {moved}\n")


def stale_locks(git_dir: Path) -> None:
    state = git_dir.parents[1] / "state" / "collect.git"
    (state / "index.lock").write_text("left by a killed collection")
    (state / "index").write_bytes(b"torn")


BREAKAGES = [
    remove, fifos, file_instead, link_instead, nonsense, no_objects, another_history, separate,
    stale_locks,
]  # fmt: skip


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda b: str(b.__name__))
def test_a_broken_repository_loses_no_work(
    guest: Guestless, breakage: Callable[[Path], None]
) -> None:
    (guest.inside / "new").write_text("work\n")
    (guest.inside / "a").unlink()
    breakage(guest.inside / ".git")
    assert {*guest.changes()} == {b"new", b"a"}
    assert guest.result.agent_commits == ()


def test_nothing_of_the_agents_configuration_runs(guest: Guestless, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    evil = guest.inside / "evil"
    evil.write_text(f"#!/bin/sh\ntouch '{marker}'\n")
    evil.chmod(0o755)
    (guest.inside / ".gitattributes").write_text("* filter=evil diff=evil\n")
    for name in ("core.fsmonitor", "filter.evil.clean", "filter.evil.process", "diff.evil.command"):
        guest.git("config", name, str(evil))
    guest.git("config", "core.hooksPath", str(guest.inside / "hooks"))
    (guest.inside / "hooks").mkdir()
    for name in ("post-index-change", "pre-commit", "reference-transaction", "post-checkout"):
        shutil.copy(evil, guest.inside / "hooks" / name)
    guest.git("config", "core.excludesFile", str(guest.inside / "evil-excludes"))
    guest.git("config", "include.path", str(guest.inside / "more"))
    (guest.inside / "evil-excludes").write_text("*\n")
    (guest.inside / "more").write_text(f"[alias]\nrev-parse = !touch {marker}\n")
    (guest.inside / ".git/info/exclude").write_text("*\n")
    (guest.host / "b").write_text("host's\n")
    marker.unlink(missing_ok=True)
    guest.update()
    assert b"evil" in guest.changes()
    assert not marker.exists()


def test_fifos_where_git_reads_rules(guest: Guestless, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMSANDBOX_PATIENCE_S", "1")
    (guest.inside / "d").mkdir()
    for name in (".gitignore", ".gitattributes", ".gitmodules", "d/.gitignore"):
        os.mkfifo(guest.inside / name)
    (guest.inside / "d/new").write_text("work\n")
    assert {*guest.changes()} == {b"d/new"}


def test_the_worktree_is_gone(guest: Guestless) -> None:
    shutil.rmtree(guest.inside)
    assert {(name, c.kind.value) for name, c in guest.changes().items()} == {
        (b"a", "D"),
        (b"b", "D"),
    }
    guest.inside.write_text("a file instead")
    assert {*guest.changes()} == {b"a", b"b"}


def test_our_own_state_is_gone(guest: Guestless) -> None:
    shutil.rmtree(guest.state / "base.git")
    command = worktree.collect_command(
        guest.inside, guest.snapshot, scripts=SCRIPTS, state=guest.state, owner="root"
    )
    done = subprocess.run(command, capture_output=True)
    assert (done.returncode, done.stdout) == (67, b"")
    assert b"damaged" in done.stderr


def test_agents_commits_come_along(guest: Guestless) -> None:
    for number in range(3):
        (guest.inside / "a").write_text(f"{number}\n")
        guest.git("commit", "-qam", f"step {number}\n\nmore\n")
    (guest.inside / "b").write_text("and not committed\n")
    assert {*guest.changes()} == {b"a", b"b"}
    commits = guest.result.agent_commits
    assert [c.subject for c in commits] == ["step 2", "step 1", "step 0"]
    made = guest.git("rev-list", f"{guest.snapshot.commit}..").splitlines()
    assert [c.oid for c in commits] == made


# --- any tree -------------------------------------------------------------------------------------

NAME = st.binary(min_size=1, max_size=12).filter(
    lambda n: not set(n) & {0, 47} and n not in (b".", b"..") and n.lower() != b".git"
)
PATHS = st.lists(NAME, min_size=1, max_size=3).map(b"/".join)
CONTENT = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"a\r\nb\r\n", b"\r", b"$Id$\n", b"", b"\0" * 30])
)
TREES = st.dictionaries(PATHS, st.tuples(st.sampled_from("fxl"), CONTENT), max_size=8)


def write_tree(top: Path, tree: dict[bytes, tuple[str, bytes]]) -> None:
    """As much of the tree as a file system allows."""
    for name, (kind, content) in tree.items():
        path = top / os.fsdecode(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "l":
                path.symlink_to(os.fsdecode(content.replace(b"\0", b"0") or b"x"))
            else:
                path.write_bytes(content)
                path.chmod(0o755 if kind == "x" else 0o644)
        except OSError:
            continue


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=TREES, after=TREES)
def test_any_tree_comes_back(
    before: dict[bytes, tuple[str, bytes]],
    after: dict[bytes, tuple[str, bytes]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    host = folder / "host"
    host.mkdir()
    (host / "always").write_text("x")
    write_tree(host, {n: t for n, t in before.items() if not n.endswith(b".gitignore")})
    guest = Guestless(host, folder / "g")
    guest.send()
    assert files(guest.inside) == files(host)
    for old in guest.inside.iterdir():
        if old.name != ".git":
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    write_tree(guest.inside, {n: t for n, t in after.items() if not n.endswith(b".gitignore")})
    result = guest.collect()
    wanted = files(guest.inside)
    kinds = {"file": 0o100644, "executable": 0o100755, "link": 0o120000}
    with guest.quarantine.reading() as results:
        found = {e.path: e for e in results.entries(result.tree) if e.mode != 0o40000}
        assert {p: e.mode for p, e in found.items()} == {
            p: kinds[k] for p, (k, _) in wanted.items()
        }
        for path, change in (
            (c.path, c) for c in results.changes(guest.snapshot.tree, result.tree)
        ):
            if change.new_oid:
                with results.open_blob(change.new_oid) as blob:
                    assert blob.read() == wanted[path][1]
