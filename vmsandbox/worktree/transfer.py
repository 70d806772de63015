"""Owns what is said to the guest's scripts `receive` and `collect`: argv, streams, answers.

The scripts lie in ``vmsandbox/guest_scripts``; :mod:`shlex` quoting is left to whoever runs them.
What they answer is the guest's word and treated as such: bounded, parsed strictly, never trusted.
"""

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from vmsandbox.errors import GuestProblem
from vmsandbox.model import Snapshot, TreePath, Value
from vmsandbox.text import printable, unquote_path
from vmsandbox.worktree import include as including
from vmsandbox.worktree.git import RAW_ATTRIBUTES
from vmsandbox.worktree.packing import changed, new_pack, whole_pack
from vmsandbox.worktree.repository import config_text

SCRIPTS = Path("/usr/lib/vmsandbox")
STATE = Path("/var/lib/vmsandbox")
OWNER = "agent"

_LETTERS = frozenset("ADMTU")
"""Of ``git diff-index --name-status``; U is unmerged."""
_MAX_ANSWER = 16 << 20
_CHUNK = 1 << 18
_TAR_END = 2 * tarfile.BLOCKSIZE


def receive_command(
    worktree: Path,
    snapshot: Snapshot,
    previous: Snapshot | None = None,
    *,
    scripts: Path = SCRIPTS,
    state: Path = STATE,
    owner: str = OWNER,
    gitconfig: Path | None = Path("/etc/gitconfig"),
) -> tuple[str, ...]:
    """What to run in the guest, with :func:`base_stream` as its input.

    With `previous` the guest has a worktree already and is brought up to date; then the answer on
    stdout is for :func:`parse_update`. `gitconfig` is where root is told that the worktree, which
    `owner` owns, is safe.
    """
    words = [str(scripts / "receive"), "--worktree", str(worktree), "--commit", snapshot.commit]
    words += ["--state", str(state), "--owner", owner]
    if gitconfig:
        words += ["--gitconfig", str(gitconfig)]
    if previous:
        words += ["--update", previous.commit]
    return tuple(words)


def collect_command(
    worktree: Path,
    snapshot: Snapshot,
    *,
    include: Sequence[str] = (),
    agent_commits: bool = True,
    scripts: Path = SCRIPTS,
    state: Path = STATE,
    owner: str = OWNER,
) -> tuple[str, ...]:
    """What to run in the guest; its stdout is for :meth:`Quarantine.accept`.

    Without `agent_commits` only the result itself comes back, for when they are malformed.
    """
    words = [str(scripts / "collect"), "--worktree", str(worktree), "--base", snapshot.commit]
    words += ["--state", str(state), "--owner", owner]
    if not agent_commits:
        words.append("--without-agent-commits")
    return (*words, "--", *including.pathspecs(include))


def base_stream(snapshot: Snapshot, previous: Snapshot | None = None) -> Iterator[bytes]:
    """The input of `receive`, in chunks: a tar of repositories, see that script.

    With `previous`, only what a guest lacks that has it. Raises HostProblem
    ``snapshot_unreadable``, ``snapshot_missing``, ``host_disk_full``; if in the middle, the stream
    must not be ended in good order.
    """
    if previous:
        yield from _update_tar(snapshot, previous)
        return
    with whole_pack(snapshot) as whole:
        for name, content in small_files(snapshot):
            yield from tarred(name, content)
        stem = "base.git/objects/pack/pack-base"
        yield from tarred(f"{stem}.idx", whole.index_file)
        yield from tarred(f"{stem}.pack", whole.pack_file)
        yield tarfile.NUL * _TAR_END


def _update_tar(snapshot: Snapshot, previous: Snapshot) -> Iterator[bytes]:
    with new_pack(snapshot, previous) as new:
        stem = f"base.git/objects/pack/{new.name}"
        yield from tarred(f"{stem}.pack", new.pack_file)
        yield from tarred(f"{stem}.idx", new.index_file)  # last: from now on git looks at both
        yield from tarred("collect.git/info/exclude", _excludes(snapshot))
        yield from tarred("update/shallow", _shallow(snapshot))
        paths = changed(snapshot, previous)
        yield from tarred("update/changed", paths.names)
        yield from tarred("update/before", paths.before)
        yield tarfile.NUL * _TAR_END


def tarred(name: str, content: bytes | IO[bytes] | None) -> Iterator[bytes]:
    """One member of a tar, in chunks; None is a folder."""
    member = tarfile.TarInfo(name)
    member.mode = 0o755 if content is None else 0o644
    member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
    file = io.BytesIO(content or b"") if content is None or isinstance(content, bytes) else content
    member.size = file.seek(0, os.SEEK_END)
    file.seek(0)
    yield member.tobuf(tarfile.GNU_FORMAT)
    while chunk := file.read(_CHUNK):
        yield chunk
    yield tarfile.NUL * (-member.size % tarfile.BLOCKSIZE)


def small_files(snapshot: Snapshot) -> Iterator[tuple[str, bytes | None]]:
    """The three repositories but for their objects: (name, content), None for a folder."""
    ours = config_text(snapshot.object_format, durable=False).encode()
    for name, config in (("base", ours), ("collect", ours), ("agent", _agent_config(snapshot))):
        yield f"{name}.git/config", config
        yield f"{name}.git/HEAD", b"ref: refs/heads/none\n"
        yield f"{name}.git/info/attributes", RAW_ATTRIBUTES
        yield f"{name}.git/info/exclude", _excludes(snapshot)
        for folder in ("objects/info", "objects/pack", "refs/heads"):
            yield f"{name}.git/{folder}", None
        if snapshot.shallow:
            yield f"{name}.git/shallow", _shallow(snapshot)
    commit = f"{snapshot.commit}\n".encode()
    if snapshot.branch is None:
        yield "agent.git/HEAD", commit
    else:
        yield "agent.git/HEAD", f"ref: refs/heads/{snapshot.branch}\n".encode()
        yield f"agent.git/refs/heads/{snapshot.branch}", commit


def _excludes(snapshot: Snapshot) -> bytes:
    return b"".join(pattern + b"\n" for pattern in snapshot.excludes)


def _shallow(snapshot: Snapshot) -> bytes:
    return "".join(f"{oid}\n" for oid in snapshot.shallow).encode()


def _agent_config(snapshot: Snapshot) -> bytes:
    """The configuration of the agent's own repository: bytes stay as they are, commits work."""
    text = config_text(snapshot.object_format, bare=False)
    name, email = snapshot.user_name or OWNER, snapshot.user_email or f"{OWNER}@localhost"
    return (text + f"[user]\n\tname = {_quoted(name)}\n\temail = {_quoted(email)}\n").encode()


def _quoted(value: str) -> str:
    """A value in git's configuration syntax."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + "".join(c for c in escaped if c.isprintable()) + '"'


class UpdateReport(Value):
    """What became of the host's changes in the guest."""

    updated: int
    conflicts: tuple[TreePath, ...]
    head_moved: bool


def parse_update(answer: bytes) -> UpdateReport:
    """Read the answer of ``receive --update``. Raises GuestProblem ``guest_answer``."""
    updated: set[bytes] = set()
    conflicts: set[bytes] = set()
    *lines, last = answer[:_MAX_ANSWER].decode("ascii", "replace").splitlines() or [""]
    for line in lines:
        letter, _, name = line.partition("\t")
        path = unquote_path(name)
        if not path or b"\0" in path or letter not in _LETTERS:
            raise _odd(answer)
        (conflicts if letter == "U" else updated).add(path)
    if last not in ("head moved", "head kept"):
        raise _odd(answer)
    return UpdateReport(
        updated=len(updated - conflicts),
        conflicts=tuple(sorted(conflicts)),
        head_moved=last == "head moved",
    )


def _odd(answer: bytes) -> GuestProblem:
    shown = printable(answer[:200], newlines=False)
    return GuestProblem("guest_answer", f"the guest's answer to an update is odd: {shown!r}")
