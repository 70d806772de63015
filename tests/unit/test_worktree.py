"""The pure parts of the worktree room: globs, git's machine-readable answers, what the guest's
scripts are told and what they answer."""

import io
import struct
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmsandbox.errors import GuestProblem, UsageProblem
from vmsandbox.model import ChangeKind, Snapshot
from vmsandbox.text import quote_path
from vmsandbox.worktree import collect_command, parse_update, receive_command
from vmsandbox.worktree.git import Completed, Git, GitFailed, private_environment, scrubbed
from vmsandbox.worktree.history import parents_of, walk
from vmsandbox.worktree.include import below, pathspecs
from vmsandbox.worktree.listing import change_of, numstats, raw_differences, read_index
from vmsandbox.worktree.quarantine import refusal
from vmsandbox.worktree.repository import alternates, config_text
from vmsandbox.worktree.transfer import small_files, tarred

A, B = "a" * 40, "b" * 40


# --- globs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "specs"),
    [
        (".env", ["**/.env", "**/.env/**"]),
        ("*.log", ["**/*.log", "**/*.log/**"]),
        ("/dist", ["dist", "dist/**"]),
        ("a/b", ["a/b", "a/b/**"]),
        ("./a//b/", ["a/b/**"]),
        ("build/", ["**/build/**"]),
        ("build/**", ["build/**"]),
        ("**", ["**"]),
    ],
)
def test_globs_are_read_like_ignore_rules(glob: str, specs: list[str]) -> None:
    assert pathspecs([glob]) == tuple(f":(glob){spec}" for spec in specs)


@pytest.mark.parametrize("glob", ["", "/", ".", "../x", "a/../b", "!x", ".git/config", "a\0b"])
def test_globs_that_mean_nothing(glob: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        pathspecs([glob])
    assert caught.value.code == "include_invalid"


@pytest.mark.parametrize(
    ("glob", "folder", "specs"),
    [
        (".env", "sub", ["**/.env", "**/.env/**"]),
        ("/sub/dist", "sub", ["dist", "dist/**"]),
        ("/other/dist", "sub", []),
        ("s*/x/y", "sub/x", ["y", "y/**"]),
        ("sub/**", "sub/deep", ["**"]),
        ("/a/**/z", "a/b/c", ["**/z", "**/z/**"]),
    ],
)
def test_globs_seen_from_a_folder(glob: str, folder: str, specs: list[str]) -> None:
    assert set(below(pathspecs([glob]), folder)) == {f":(glob){spec}" for spec in specs}


# --- git's answers --------------------------------------------------------------------------------


def index_entry(name: bytes, mode: int, size: int, *, extended: bool = False) -> bytes:
    flags = min(len(name), 0xFFF) | (0x4000 if extended else 0)
    head = struct.pack(">6I", *range(6)) + struct.pack(">4I", mode, 0, 0, size)
    entry = head + bytes(20) + struct.pack(">H", flags) + (b"\0\0" if extended else b"") + name
    return entry + bytes(8 - len(entry) % 8)


def test_an_index_is_summed_up() -> None:
    names = [b"a", b"seven77", b"eight888", b"x" * 5000]
    entries = [index_entry(name, 0o100644, 7) for name in names]
    entries += [index_entry(b"module", 0o160000, 0), index_entry(b"z", 0o100755, 5, extended=True)]
    data = struct.pack(">4sII", b"DIRC", 3, len(entries)) + b"".join(entries) + b"TREE" + bytes(30)
    assert read_index(data, 20) == (6, 33, (b"module",))
    with pytest.raises(ValueError, match="version 4"):
        read_index(struct.pack(">4sII", b"DIRC", 4, 0), 20)


def test_differences_are_read() -> None:
    raw = (
        f":100644 100755 {A} {B} M\0odd\n\xff name\0"
        f":100644 100644 {A} {A} R100\0old\0new\0"
        f":000000 120000 {'0' * 40} {B} A\0link\0"
        f":100644 000000 {A} {'0' * 40} D\0gone\0"
    ).encode("latin-1")
    stat = b"3\t1\todd\n\xff name\x000\t0\t\0old\0new\x001\t0\tlink\0-\t-\tgone\0"
    raws, rest = raw_differences(raw + stat)
    assert rest == stat
    lines = numstats(rest)
    changed, renamed, link, gone = (change_of(one, lines, {A: 10, B: 20}) for one in raws)
    assert (changed.path, changed.added, changed.removed) == (b"odd\n\xff name", 3, 1)
    assert (changed.old_mode, changed.new_mode, changed.size_bytes) == (0o100644, 0o100755, 20)
    assert (renamed.kind, renamed.old_path, renamed.path) == (ChangeKind.RENAMED, b"old", b"new")
    assert (link.added, link.old_oid, link.old_path) == (None, None, None)
    assert (gone.kind, gone.new_oid, gone.size_bytes, gone.added) == ("D", None, 10, None)


def test_commits_name_their_parents() -> None:
    commit = f"tree {A}\nparent {A}\nparent {B}\nauthor x\n\nparent {B}\n".encode()
    assert parents_of(commit) == [A, B]


@pytest.mark.parametrize(
    "line", [b"parent " + B.encode(), b"parent --all", b"parent \xff", b"parent"]
)
def test_only_what_git_takes_for_a_parent_is_one(line: bytes) -> None:
    head = f"tree {A}\nparent {A}\nauthor x\ncommitter x\n".encode()
    assert parents_of(head + line + b"\n\nmessage\n") == [A]
    assert parents_of(b"tree x\n" + line) == []


def test_history_is_cut_after_so_many_generations() -> None:
    graph = {"e": ["d", "x"], "d": ["c"], "c": ["b"], "b": ["a"], "a": [], "x": ["b"]}
    assert walk("e", 1, graph.__getitem__) == ({"e"}, {"e"})
    assert walk("e", 2, graph.__getitem__) == ({"e", "d", "x"}, {"d", "x"})
    assert walk("e", 3, graph.__getitem__) == ({"e", "d", "x", "c", "b"}, {"c", "b"})
    assert walk("e", 9, graph.__getitem__) == (set(graph), set())


# --- processes ------------------------------------------------------------------------------------


def test_no_variable_of_the_user_steers_git() -> None:
    hostile = {
        "GIT_DIR": "/evil", "GIT_CONFIG_PARAMETERS": "x", "GIT_EXTERNAL_DIFF": "evil",
        "GIT_CONFIG_COUNT": "1", "GIT_SSH_COMMAND": "evil", "HOME": "/home/me",
        "XDG_CONFIG_HOME": "/evil", "PATH": "/bin", "LC_ALL": "de_DE", "LD_PRELOAD": "evil",
    }  # fmt: skip
    assert scrubbed(hostile).keys() & hostile.keys() == {
        "HOME", "XDG_CONFIG_HOME", "PATH", "LC_ALL", "LD_PRELOAD"
    }  # fmt: skip
    ours = private_environment(hostile)
    assert ours.keys() & hostile.keys() == {"HOME", "PATH", "LC_ALL"}
    assert (ours["HOME"], ours["LC_ALL"], ours["GIT_CONFIG_GLOBAL"]) == (
        "/nonexistent", "C", "/dev/null"
    )  # fmt: skip


def test_settings_come_before_the_verb() -> None:
    git = Git(git_dir=Path("/g"), settings={"a.b": "c"}, prefix=("prlimit", "--"))
    argv = git.argv(["log", b"\xff"])
    assert argv[:3] == ["prlimit", "--", "git"]
    assert argv[-3:] == ["a.b=c", "log", b"\xff"]
    assert "core.fsmonitor=false" in argv
    assert git.environment()["GIT_DIR"] == "/g"


def test_a_complaint_names_the_verb() -> None:
    error = GitFailed(["-c", "x", "read-tree"], 128, "warning: a\nfatal: b\n")
    assert "128" in error.message
    assert error.message.endswith("warning: a; fatal: b")


@pytest.mark.parametrize(
    ("code", "complaint", "kind"),
    [
        (128, "fatal: pack exceeds maximum allowed size (1 KiB)", "too_large"),
        (128, "fatal: Out of memory, malloc failed", "too_large"),
        (-24, "", "too_large"),
        (-25, "", "too_large"),
        (-9, "", "too_large"),
        (-11, "", "malformed"),
        (128, "fatal: pack has 3 unresolved deltas", "incomplete"),
        (128, "fatal: did not receive expected object 1", "incomplete"),
        (128, "fatal: fsck error in packed object", "malformed"),
    ],
)
def test_refusals_are_told_apart(code: int, complaint: str, kind: str) -> None:
    assert refusal(Completed(code, b"", complaint)).code == f"result_refused_{kind}"


# --- what is said to the guest --------------------------------------------------------------------

SNAPSHOT = Snapshot(
    git_dir=Path("/store"),
    commit=A,
    tree=B,
    parent=None,
    branch="topic",
    excludes=(b"*.swp", b"\xff"),
    shallow=(A, B),
    user_name='A "quoted"\\ name\n[core]',
    user_email=None,
)


def test_receive_and_collect_are_told_what_they_need() -> None:
    received = receive_command(Path("/home/me/pro ject"), SNAPSHOT)
    assert received[0] == "/usr/lib/vmsandbox/receive"
    said = dict(zip(received[1::2], received[2::2], strict=True))
    assert said == {
        "--worktree": "/home/me/pro ject", "--commit": A,
        "--state": "/var/lib/vmsandbox", "--owner": "agent", "--gitconfig": "/etc/gitconfig",
    }  # fmt: skip
    assert receive_command(Path("/w"), SNAPSHOT, SNAPSHOT)[-2:] == ("--update", A)
    collected = collect_command(Path("/w"), SNAPSHOT, include=[".env"], agent_commits=False)
    assert collected[-4:] == (
        "--without-agent-commits", "--", ":(glob)**/.env", ":(glob)**/.env/**"
    )  # fmt: skip


def test_the_guest_gets_three_repositories() -> None:
    parts = dict(small_files(SNAPSHOT))
    agents = parts["agent.git/config"] or b""
    assert parts["base.git/config"] == config_text("sha1", durable=False).encode()
    assert b'name = "A \\"quoted\\"\\\\ name\\n[core]"\n' in agents
    assert b'email = "agent@localhost"' in agents
    assert agents.count(b"\n[core]\n") == 0
    assert b"-text -filter -ident -working-tree-encoding" in (
        parts["agent.git/info/attributes"] or b""
    )
    assert parts["collect.git/info/exclude"] == b"*.swp\n\xff\n"
    assert parts["base.git/shallow"] == f"{A}\n{B}\n".encode()
    assert parts["agent.git/HEAD"] == b"ref: refs/heads/topic\n"
    assert parts["agent.git/refs/heads/topic"] == f"{A}\n".encode()
    detached = dict(small_files(SNAPSHOT.model_copy(update={"branch": None})))
    assert detached["agent.git/HEAD"] == f"{A}\n".encode()


def test_a_tar_is_a_tar() -> None:
    members = [
        ("a/folder", None),
        ("a/file", b"x" * 700),
        ("long/" * 60 + "name", b""),
        ("é", b"y"),
    ]
    stream = b"".join(chunk for name, content in members for chunk in tarred(name, content))
    with tarfile.open(fileobj=io.BytesIO(stream + bytes(1024))) as tar:
        found = [(m.name, (tar.extractfile(m) or io.BytesIO()).read()) for m in tar]
    assert found == [(name, content or b"") for name, content in members]


def test_configuration_says_the_object_format() -> None:
    assert "objectFormat" not in config_text("sha1")
    assert "repositoryformatversion = 1" in config_text("sha256")
    assert "objectFormat = sha256" in config_text("sha256")


def test_borrowed_stores_are_quoted() -> None:
    assert alternates([Path('/a "b"\n#é')]) == b'"/a \\042b\\042\\012#\\303\\251"\n'


@given(st.lists(st.binary(min_size=1, max_size=20).filter(lambda p: not {0, 47} & {*p})))
def test_any_name_may_be_in_conflict(paths: list[bytes]) -> None:
    lines = [f"U\t{_git_quoted(path)}" for path in paths]
    report = parse_update("\n".join(["M\t/", *lines, "head kept", ""]).encode())
    assert (report.updated, report.head_moved) == (1, False)
    assert report.conflicts == tuple(sorted({*paths}))


def _git_quoted(path: bytes) -> str:
    """As git quotes with core.quotePath: everything that is not ASCII as octal."""
    shown = quote_path(path)
    if shown.isascii():
        return shown
    inner = shown[1:-1] if shown.startswith('"') else shown
    return (
        '"'
        + "".join(c if c.isascii() else "".join(f"\\{b:03o}" for b in c.encode()) for c in inner)
        + '"'
    )


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"M\nhead kept\n",
        b"M\tx\nevil\n",
        b'U\t""\nhead kept\n',
        b'U\t"x\\000100755 ' + A.encode() + b'\\ty"\nhead kept\n',
        b"\xff\n",
        b"U\tx\n",
        b"evil x\nhead kept",
    ],
)
def test_odd_answers_are_refused(answer: bytes) -> None:
    with pytest.raises(GuestProblem) as caught:
        parse_update(answer)
    assert caught.value.code == "guest_answer"
