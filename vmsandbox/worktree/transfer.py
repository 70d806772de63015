"""Owns what is said to the guest's scripts `receive` and `collect`: argv, streams, answers.

The scripts lie in ``vmsandbox/guest_scripts``; :mod:`shlex` quoting is left to whoever runs them.
What they answer is the guest's word and treated as such: bounded, parsed strictly, never trusted.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from vmsandbox.errors import GuestProblem, HostProblem
from vmsandbox.model import Snapshot, TreePath, Value
from vmsandbox.text import printable, unquote_path
from vmsandbox.worktree import include as including
from vmsandbox.worktree.git import RAW_ATTRIBUTES, Git, GitFailed
from vmsandbox.worktree.repository import config_text

SCRIPTS = Path("/usr/lib/vmsandbox")
STATE = Path("/var/lib/vmsandbox")
OWNER = "agent"

_MAX_ANSWER = 16 << 20


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
    if snapshot.branch:
        words += ["--branch", snapshot.branch]
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
    """The input of `receive`: what it must write down, then the pack, in chunks as git makes it.

    With `previous`, only what a guest lacks that has it. Raises HostProblem
    ``snapshot_unreadable`` in the middle if objects are missing: then the stream must not be ended
    in good order.
    """
    yield preamble(snapshot)
    yield from pack(snapshot, previous)


def preamble(snapshot: Snapshot) -> bytes:
    """A line with the lengths of the parts, then the parts; see the script `receive`."""
    parts = (
        config_text(snapshot.object_format, durable=False).encode(),
        _agent_config(snapshot),
        RAW_ATTRIBUTES,
        b"".join(pattern + b"\n" for pattern in snapshot.excludes),
        "".join(f"{oid}\n" for oid in snapshot.shallow).encode(),
    )
    lengths = " ".join(str(len(part)) for part in parts)
    return f"vmsandbox-base 1 {lengths}\n".encode() + b"".join(parts)


def _agent_config(snapshot: Snapshot) -> bytes:
    """The configuration of the agent's own repository: bytes stay as they are, commits work."""
    text = config_text(snapshot.object_format, bare=False)
    name, email = snapshot.user_name or OWNER, snapshot.user_email or f"{OWNER}@localhost"
    return (text + f"[user]\n\tname = {_quoted(name)}\n\temail = {_quoted(email)}\n").encode()


def _quoted(value: str) -> str:
    """A value in git's configuration syntax."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + "".join(c for c in escaped if c.isprintable()) + '"'


def pack(snapshot: Snapshot, previous: Snapshot | None = None) -> Iterator[bytes]:
    """The snapshot's objects as a pack, in chunks; thin if `previous` is known to the guest."""
    store = Git(git_dir=snapshot.git_dir, settings={"pack.compression": "1"})
    if previous and store.attempt("cat-file", "-e", previous.commit).code:
        previous = None  # removed from the store since: send it all
    wanted = [f"--shallow {oid}" for oid in (*snapshot.shallow, *(previous or snapshot).shallow)]
    wanted += [snapshot.commit, *([f"^{previous.commit}"] if previous else [])]
    options = ["--thin"] if previous else []
    options += ["--shallow"] if len(wanted) > 2 else []
    arguments = ("pack-objects", "--revs", "--stdout", "--quiet", "--delta-base-offset", *options)
    try:
        with store.process(*arguments) as process:
            process.stdin.write("".join(f"{line}\n" for line in wanted).encode())
            process.stdin.close()
            yield from process.chunks()
    except (GitFailed, BrokenPipeError) as error:
        raise HostProblem(
            "snapshot_unreadable",
            f"the snapshot cannot be packed: {getattr(error, 'complaint', error)}",
            hint="git fsck in the worktree; or leave history out: vmsandbox run --history none …",
            evidence=str(snapshot.git_dir),
        ) from error


class UpdateReport(Value):
    """What became of the host's changes in the guest."""

    updated: int
    conflicts: tuple[TreePath, ...]
    head_moved: bool


def parse_update(answer: bytes) -> UpdateReport:
    """Read the answer of ``receive --update``. Raises GuestProblem ``guest_answer``."""
    updated, moved, conflicts = -1, False, []
    for line in answer[:_MAX_ANSWER].decode("ascii", "replace").splitlines():
        word, _, rest = line.partition(" ")
        if word == "updated" and rest.isdecimal():
            updated = int(rest)
        elif word == "conflict" and rest:
            conflicts.append(unquote_path(rest))
        elif word == "head" and rest in ("moved", "kept"):
            moved = rest == "moved"
        else:
            updated = -1
            break
    if updated < 0:
        shown = printable(answer[:200], newlines=False)
        raise GuestProblem("guest_answer", f"the guest's answer to an update is odd: {shown!r}")
    return UpdateReport(updated=updated, conflicts=tuple(conflicts), head_moved=moved)
