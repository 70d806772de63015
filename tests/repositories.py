"""Makes real git repositories for tests, and tells whether a folder changed.

The git that is called here reads no configuration of the person who runs the tests.
"""

import hashlib
import os
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_ENVIRONMENT = {
    "PATH": os.environ.get("PATH", os.defpath),
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "Ann Author",
    "GIT_AUTHOR_EMAIL": "ann@example.org",
    "GIT_AUTHOR_DATE": "2024-01-02T03:04:05Z",
    "GIT_COMMITTER_NAME": "Ann Author",
    "GIT_COMMITTER_EMAIL": "ann@example.org",
    "GIT_COMMITTER_DATE": "2024-01-02T03:04:05Z",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ALLOW_PROTOCOL": "file",
    # A commit would start two processes more, to find that there is nothing to tidy.
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "maintenance.auto",
    "GIT_CONFIG_VALUE_0": "false",
}


def git(folder: Path, *arguments: str | bytes, stdin: bytes = b"") -> bytes:
    """Run git in `folder` and return what it prints; CalledProcessError shows its complaint."""
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=_ENVIRONMENT, input=stdin, capture_output=True
    )
    if done.returncode:
        raise AssertionError(f"git {arguments!r} in {folder}: {done.stderr.decode()}")
    return done.stdout


@cache
def _born() -> Mapping[Path, bytes | None]:
    """What `git init` makes, its hundred lines of sample hooks left out; None is a folder."""
    with TemporaryDirectory(prefix="vms-") as folder:
        git(Path(folder), "init", "--quiet", "--initial-branch=main")
        made = sorted(path for path in Path(folder, ".git").rglob("*") if path.suffix != ".sample")
        return {p.relative_to(folder): None if p.is_dir() else p.read_bytes() for p in made}


class Repository:
    """A repository with a work tree, or a linked worktree of one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, files: dict[str, str | bytes] | None = None) -> "Repository":
        """A new repository on branch main; with `files`, they are its first commit."""
        (path / ".git").mkdir(parents=True)
        for file, content in _born().items():
            if content is None:
                (path / file).mkdir()
            else:
                (path / file).write_bytes(content)
        repository = cls(path)
        for name, text in (files or {}).items():
            repository.write(name, text)
        if files:
            repository._commit("first")
        return repository

    def git(self, *arguments: str | bytes, stdin: bytes = b"") -> str:
        return git(self.path, *arguments, stdin=stdin).decode().strip()

    def write(self, name: str | bytes, content: str | bytes, *, executable: bool = False) -> Path:
        path = self.path / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(0o755 if executable else 0o644)
        return path

    def link(self, name: str, target: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
        return path

    def commit(self, message: str) -> str:
        """Commit everything there is; returns the commit."""
        self._commit(message)
        return self.git("rev-parse", "HEAD")

    def _commit(self, message: str) -> None:
        git(self.path, "add", "--all")
        git(self.path, "commit", "--quiet", "--allow-empty", "--message", message)

    def linked_worktree(self, path: Path, branch: str) -> "Repository":
        git(self.path, "worktree", "add", "--quiet", "-b", branch, str(path))
        return Repository(path)


def fingerprint(folder: Path, *, without: frozenset[str] = frozenset({".git"})) -> str:
    """One checksum over every name, type, mode, link target and byte below `folder`.

    `without` names directories directly below it that do not count.
    """
    whole = hashlib.sha256()
    for base, directories, files in os.walk(folder):
        if base == str(folder):
            directories[:] = [name for name in directories if name not in without]
            files = [name for name in files if name not in without]
        directories.sort()
        for path in (Path(base, name) for name in sorted([*directories, *files])):
            whole.update(os.fsencode(path.relative_to(folder)) + b"\0")
            whole.update(b"%o\0" % path.lstat().st_mode)
            if path.is_symlink():
                whole.update(os.fsencode(path.readlink()))
            elif path.is_file():
                whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


NEWLINE = b"line\nbreak"
INVALID = b"inv\xff\xfelid"


def awkward(folder: Path) -> Repository:
    """The linked worktree ``linked`` of ``main``, with a submodule, CRLF, an LFS attribute, links
    and odd names, all dirty in some way."""
    local = ("-c", "protocol.file.allow=always", "submodule")
    module = Repository.create(folder / "module", {"lib.c": "int x;\n", "deep/in.c": "y\n"})
    main = Repository.create(folder / "main", {"a.txt": "one\n", "doomed": "x\n"})
    main.git(*local, "add", "-q", str(module.path), "sub")
    main.commit("with a submodule")
    linked = main.linked_worktree(folder / "linked", "topic")
    linked.git(*local, "update", "--init", "-q")
    linked.write(".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text\n*.crlf eol=crlf\n")
    linked.write("large.bin", b"\0content that is no LFS pointer\n" * 9)
    linked.write("dos.crlf", "one\r\ntwo\r\n")
    linked.write("mixed.txt", "one\r\ntwo\nthree\r")
    linked.write("run.sh", "#!/bin/sh\n", executable=True)
    linked.write(NEWLINE, "newline\n")
    linked.write(INVALID, "invalid\n")
    linked.link("to-file", "a.txt")
    linked.link("to-folder", "sub/deep")
    linked.write("a.txt", "staged\n")
    linked.git("add", "a.txt")
    linked.write("a.txt", "staged, then dirty\n")
    (linked.path / "doomed").unlink()
    (linked.path / "sub" / "lib.c").write_text("int dirty;\n")
    return linked
