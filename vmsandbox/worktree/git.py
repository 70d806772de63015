"""Owns how git processes are started: scrubbed environment, no configuration but ours, one timeout.

Knows no repository layout and no object. Two kinds of repository are met: ours, where nothing is
read but what this package wrote, and the user's, where git sees the user's own configuration and is
only ever asked questions.
"""

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, NamedTuple

from vmsandbox.errors import HostProblem
from vmsandbox.text import printable

TIMEOUT_S = 1800.0
"""What a single git process may take unless its caller knows better; a guard against hanging."""

_MAX_STDERR = 1 << 16
_CHUNK = 1 << 20

RAW_ATTRIBUTES = b"* -text -filter -ident -working-tree-encoding !diff !merge\n"
"""For ``info/attributes``, which overrules every ``.gitattributes``: bytes stay as they are, and a
diff or merge is what the content asks for, not what a file in the tree asks for."""

# What no repository may decide for us, ours included. The user's git may ask a file system monitor
# even for a question.
_OVERRIDES = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null", "gc.auto": "0"}

# Without these, allocations of zlib's size are returned to the kernel after every object:
# twenty thousand small files take twice as long.
_MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
}


class Completed(NamedTuple):
    """What a git process answered."""

    code: int
    out: bytes
    err: str


class GitFailed(HostProblem):
    """A git process ended with a complaint; `complaint` is its last words, made printable."""

    def __init__(self, arguments: Sequence[str | bytes], code: int, complaint: str) -> None:
        verb = next((a for a in map(_shown, arguments) if not a.startswith("-")), "git")
        super().__init__("git_failed", f"git {verb} failed ({code}): {_last_lines(complaint)}")
        self.complaint = complaint
        self.git_code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (GitFailed, ((), self.git_code, self.complaint))


def _shown(argument: str | bytes) -> str:
    return printable(os.fsdecode(argument), newlines=False)


def _last_lines(complaint: str) -> str:
    lines = [line for line in complaint.splitlines() if line.strip()]
    return "; ".join(lines[-3:]) or "it says nothing"


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what git would obey, and with what keeps it quiet, local and alike."""
    kept = {name: value for name, value in environment.items() if not name.startswith("GIT_")}
    return kept | {
        "LC_ALL": "C",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_PAGER": "cat",
    }


def private_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """For repositories of ours: no system, global or per-user configuration and attributes."""
    return (
        scrubbed({"PATH": environment.get("PATH", os.defpath)})
        | _MALLOC
        | {
            "HOME": "/nonexistent",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
        }
    )


@dataclass(frozen=True)
class Git:
    """A repository, and how its git processes are to see it."""

    git_dir: Path | None = None
    work_tree: Path | None = None
    index: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    timeout_s: float = TIMEOUT_S
    users: bool = False

    @classmethod
    def of_user(cls, folder: Path) -> "Git":
        """The user's repository that `folder` lies in, only to be asked.

        The owner may be somebody else (``sudo``): none of the questions asked here runs anything.
        """
        return cls(work_tree=folder, users=True, settings={"safe.directory": "*"})

    def but(
        self,
        *,
        work_tree: Path | None = None,
        index: Path | None = None,
        settings: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] | None = None,
        timeout_s: float | None = None,
    ) -> "Git":
        """The same repository, seen differently; settings and variables are added."""
        return replace(
            self,
            work_tree=work_tree or self.work_tree,
            index=index or self.index,
            settings={**self.settings, **(settings or {})},
            variables={**self.variables, **(variables or {})},
            prefix=self.prefix if prefix is None else prefix,
            timeout_s=timeout_s or self.timeout_s,
        )

    def argv(self, arguments: Sequence[str | bytes]) -> list[str | bytes]:
        """The whole command line."""
        words: list[str | bytes] = [*self.prefix, "git"]
        for name, value in {**_OVERRIDES, **self.settings}.items():
            words += ["-c", f"{name}={value}"]
        return [*words, *arguments]

    def environment(self) -> dict[str, str]:
        """The whole environment."""
        if self.users:
            return scrubbed(os.environ)
        found = private_environment(os.environ)
        for name, path in (
            ("GIT_DIR", self.git_dir),
            ("GIT_WORK_TREE", self.work_tree),
            ("GIT_INDEX_FILE", self.index),
        ):
            if path is not None:
                found[name] = str(path)
        return {**found, **self.variables}

    def attempt(self, *arguments: str | bytes, stdin: bytes = b"") -> Completed:
        """Run to the end, whatever it answers. Raises HostProblem ``git_missing``,
        ``git_timeout``."""
        with translated(arguments):
            done = subprocess.run(
                self.argv(arguments),
                input=stdin,
                capture_output=True,
                env=self.environment(),
                cwd=self.work_tree or "/",
                timeout=self.timeout_s,
            )
        return Completed(done.returncode, done.stdout, _readable(done.stderr))

    def run(self, *arguments: str | bytes, stdin: bytes = b"") -> bytes:
        """What it prints. Raises :class:`GitFailed` if it complains."""
        done = self.attempt(*arguments, stdin=stdin)
        if done.code:
            raise GitFailed(arguments, done.code, done.err)
        return done.out

    def word(self, *arguments: str | bytes, stdin: bytes = b"") -> str:
        """As :meth:`run`, for answers of one line of ASCII."""
        return self.run(*arguments, stdin=stdin).decode("ascii").strip()

    def names(self, *arguments: str | bytes, stdin: bytes = b"") -> list[bytes]:
        """As :meth:`run`, for answers made of NUL-terminated names."""
        return [name for name in self.run(*arguments, stdin=stdin).split(b"\0") if name]

    @contextmanager
    def process(self, *arguments: str | bytes) -> "Iterator[Process]":
        """A running process with both pipes open; killed if it is still there at the end."""
        with translated(arguments):
            popen = subprocess.Popen(
                self.argv(arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self.environment(),
                cwd=self.work_tree or "/",
            )
        process = Process(popen, arguments, self.timeout_s)
        try:
            yield process
        finally:
            process.close()


class Process:
    """A running git process. What it complains is gathered aside, so it never blocks on that."""

    def __init__(
        self, popen: "subprocess.Popen[bytes]", arguments: Sequence[str | bytes], timeout_s: float
    ) -> None:
        assert popen.stdin
        assert popen.stdout
        assert popen.stderr
        self.stdin: IO[bytes] = popen.stdin
        self.stdout: IO[bytes] = popen.stdout
        self._popen = popen
        self._arguments = arguments
        self._complaint = b""
        self.timed_out = False
        self._reader = threading.Thread(target=self._gather, args=(popen.stderr,), daemon=True)
        self._reader.start()
        self._guard = threading.Timer(timeout_s, self._expire)
        self._guard.daemon = True
        self._guard.start()

    def _gather(self, stderr: IO[bytes]) -> None:
        while chunk := stderr.read1(_CHUNK):  # type: ignore[attr-defined]
            self._complaint = (self._complaint + chunk)[-_MAX_STDERR:]

    def _expire(self) -> None:
        self.timed_out = True
        self._popen.kill()

    def at_our_pace(self) -> None:
        """From now on it may take any time: it waits for us, not we for it."""
        self._guard.cancel()

    def chunks(self) -> Iterator[bytes]:
        """Its output as it comes; then its end is checked as :meth:`finish` does."""
        while chunk := self.stdout.read1(_CHUNK):  # type: ignore[attr-defined]
            yield chunk
        self.finish()

    def wait(self) -> Completed:
        """Wait for its end; its output is left to whoever reads it."""
        code = self._popen.wait()
        self._reader.join()
        return Completed(code, b"", _readable(self._complaint))

    def finish(self) -> None:
        """Wait for its end. Raises HostProblem ``git_timeout`` or :class:`GitFailed`."""
        done = self.wait()
        if self.timed_out:
            raise _timeout(self._arguments)
        if done.code:
            raise GitFailed(self._arguments, done.code, done.err)

    def close(self) -> None:
        self._guard.cancel()
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()
        self._reader.join()
        for pipe in (self.stdin, self.stdout, self._popen.stderr):
            try:
                if pipe:
                    pipe.close()
            except BrokenPipeError:
                pass


@contextmanager
def translated(arguments: Sequence[str | bytes]) -> Iterator[None]:
    """Turn what :mod:`subprocess` raises into errors of ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise _not_started(error) from error
    except subprocess.TimeoutExpired as error:
        raise _timeout(arguments) from error


def _not_started(error: FileNotFoundError) -> HostProblem:
    if error.filename in ("git", "prlimit"):
        return HostProblem(
            "git_missing",
            f"{error.filename} is not installed",
            hint="apt install git util-linux    (or: vmsandbox doctor --fix)",
        )
    return HostProblem(
        "worktree_missing", f"no such folder: {error.filename}", hint="ls -ld the folder"
    )


def _timeout(arguments: Sequence[str | bytes]) -> HostProblem:
    verb = next((a for a in map(_shown, arguments) if not a.startswith("-")), "git")
    return HostProblem("git_timeout", f"git {verb} did not end in time", hint="try again")


def _readable(complaint: bytes) -> str:
    return printable(complaint[-_MAX_STDERR:])
