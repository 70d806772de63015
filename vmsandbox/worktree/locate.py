"""Owns what the user's git says about a folder: its worktree's top, its HEAD, its ignore rules.

Only asks; the user's repository is never written, and no question makes git fetch, run a filter or
a hook. Knows nothing of snapshots.
"""

import os
from pathlib import Path
from typing import Literal

from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.model import Oid, Value
from vmsandbox.worktree.git import Completed, Git

_NOT_A_REPOSITORY = "fatal: not a git repository (or any"


class WorktreeInfo(Value):
    """A folder that can go into a sandbox, and the repository behind it if there is one."""

    top: Path
    is_git: bool = False
    common_dir: Path | None = None
    object_format: Literal["sha1", "sha256"] = "sha1"
    head: Oid | None = None
    branch: str | None = None
    shallow: tuple[Oid, ...] = ()
    partial: bool = False
    excludes_file: Path | None = None
    user_name: str | None = None
    user_email: str | None = None


def locate(path: Path) -> WorktreeInfo:
    """The worktree that `path` lies in: its top, or `path` itself where no repository is.

    A folder that the repository around it ignores counts as a plain folder. Raises UsageProblem
    ``worktree_missing``, ``worktree_bare``, ``worktree_inside_git_dir``, ``worktree_name`` and
    HostProblem ``worktree_broken``, ``git_missing``.
    """
    path = _checked(path)
    git = Git.of_user(path)
    flags = git.attempt(
        "rev-parse", "--is-bare-repository", "--is-inside-work-tree", "--show-object-format"
    )
    if flags.code:
        if flags.err.startswith(_NOT_A_REPOSITORY) and not _has_git(path):
            return _plain(git, path)
        raise _broken(path, flags)
    bare, inside, object_format = flags.out.decode("ascii").split()[:3]
    if inside != "true":
        raise _no_worktree(path, bare == "true")
    top = _path_answer(git, "rev-parse", "--show-toplevel")
    if top != path and git.attempt("check-ignore", "--quiet", ".").code == 0:
        return _plain(git, path)
    return _described(Git.of_user(top), top, object_format)


def _checked(path: Path) -> Path:
    try:
        path = path.resolve(strict=True)
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        raise UsageProblem(
            "worktree_name",
            f"the folder's name is not UTF-8: {os.fsencode(path)!r}",
            hint="rename it, or bind-mount it under another name",
        ) from None
    except (OSError, RuntimeError) as error:
        raise _missing(path, error) from error
    if not path.is_dir():
        raise _missing(path, NotADirectoryError())
    return path


def _missing(path: Path, error: Exception) -> UsageProblem:
    if isinstance(error, PermissionError):
        reason = f"the worktree cannot be entered: {path}"
    elif isinstance(error, NotADirectoryError):
        reason = f"the worktree is not a folder: {path}"
    else:
        reason = f"no such worktree: {path}"
    return UsageProblem("worktree_missing", reason, hint="name a folder: --worktree DIR")


def _has_git(path: Path) -> bool:
    return os.path.lexists(path / ".git")


def _broken(path: Path, answer: Completed) -> HostProblem:
    return HostProblem(
        "worktree_broken",
        f"git cannot read the repository of {path}: {answer.err.strip()}",
        hint=f"git -C {path} status    (and then: git fsck, git worktree repair)",
        evidence=str(path / ".git"),
    )


def _no_worktree(path: Path, bare: bool) -> UsageProblem:
    if bare:
        return UsageProblem(
            "worktree_bare",
            f"{path} is in a bare repository, which has no worktree",
            hint=f"git -C {path} worktree add ../work    (and then use that folder)",
        )
    return UsageProblem(
        "worktree_inside_git_dir",
        f"{path} is inside a repository's own .git folder",
        hint="name the folder that holds the files: --worktree DIR",
    )


def _path_answer(git: Git, *arguments: str) -> Path:
    return Path(os.fsdecode(git.run(*arguments).removesuffix(b"\n")))


def _plain(git: Git, path: Path) -> WorktreeInfo:
    name, email, _ = _settings(git)
    return WorktreeInfo(
        top=path, excludes_file=_excludes_file(git), user_name=name, user_email=email
    )


def _described(git: Git, top: Path, object_format: str) -> WorktreeInfo:
    common = _path_answer(git, "rev-parse", "--path-format=absolute", "--git-common-dir")
    name, email, partial = _settings(git)
    head = git.attempt("rev-parse", "--quiet", "--verify", "HEAD")
    return WorktreeInfo.model_validate(
        {
            "top": top,
            "is_git": True,
            "common_dir": common,
            "object_format": object_format,
            "head": None if head.code else head.out.decode("ascii").strip(),
            "branch": _branch(git),
            "shallow": _shallow(common),
            "partial": partial,
            "excludes_file": _excludes_file(git),
            "user_name": name,
            "user_email": email,
        }
    )


def _branch(git: Git) -> str | None:
    """The branch that HEAD is on, unborn or not; None if detached or not UTF-8."""
    answer = git.attempt("symbolic-ref", "--quiet", "HEAD")
    prefix = b"refs/heads/"
    if answer.code or not answer.out.startswith(prefix):
        return None
    try:
        return answer.out.removeprefix(prefix).removesuffix(b"\n").decode()
    except UnicodeDecodeError:
        return None


def _shallow(common: Path) -> tuple[str, ...]:
    try:
        return tuple((common / "shallow").read_text("ascii").split())
    except FileNotFoundError:
        return ()


def _settings(git: Git) -> tuple[str | None, str | None, bool]:
    """Who commits, and whether objects may be missing because they were never fetched."""
    wanted = r"^(user\.(name|email)|extensions\.partialclone|remote\..*\.promisor)$"
    answer = git.attempt("config", "--null", "--get-regexp", wanted)
    found: dict[str, str] = {}
    for entry in answer.out.decode("utf-8", "replace").split("\0"):
        name, _, value = entry.partition("\n")
        found[name] = value
    partial = any(
        name == "extensions.partialclone" or (name.endswith(".promisor") and value != "false")
        for name, value in found.items()
    )
    return found.get("user.name"), found.get("user.email"), partial


def _excludes_file(git: Git) -> Path | None:
    """The user's own list of ignored names; git's default where none is configured."""
    answer = git.attempt("config", "--null", "--type=path", "--get", "core.excludesFile")
    if answer.code == 0:
        named = os.fsdecode(answer.out.removesuffix(b"\0"))
        file = (git.work_tree or Path()) / (named or os.devnull)
    else:
        base = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
        file = Path(base) / "git" / "ignore"
    return file if file.is_file() else None


def common_dir_of(top: Path) -> Path | None:
    """The common git dir of the repository whose top is `top`; None if it is no such folder."""
    git = Git.of_user(top)
    shown = git.attempt("rev-parse", "--show-toplevel")
    if shown.code or Path(os.fsdecode(shown.out.removesuffix(b"\n"))) != top:
        return None
    return _path_answer(git, "rev-parse", "--path-format=absolute", "--git-common-dir")
