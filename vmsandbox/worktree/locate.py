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
    questions = ("--is-bare-repository", "--is-inside-work-tree", "--show-object-format")
    answer = git.attempt("rev-parse", *questions, "--show-toplevel")
    if answer.err.startswith(_NOT_A_REPOSITORY) and not _has_git(path):
        return _plain(git, path)
    words = answer.out.split(b"\n", len(questions))
    if len(words) <= len(questions):
        raise _broken(path, answer)
    bare, inside, object_format, shown = (os.fsdecode(word) for word in words)
    if inside != "true":
        raise _no_worktree(path, bare == "true")
    top = Path(shown.removesuffix("\n"))
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
    settings = _settings(git)
    return WorktreeInfo(
        top=path,
        excludes_file=_excludes_file(path, settings),
        user_name=_text(settings, "user.name"),
        user_email=_text(settings, "user.email"),
    )


def _described(git: Git, top: Path, object_format: str) -> WorktreeInfo:
    common = _path_answer(git, "rev-parse", "--path-format=absolute", "--git-common-dir")
    settings = _settings(git)
    head = git.attempt("rev-parse", "--quiet", "--verify", "HEAD")
    return WorktreeInfo.model_validate(
        {
            "top": top,
            "common_dir": common,
            "object_format": object_format,
            "head": None if head.code else head.out.decode("ascii").strip(),
            "branch": _branch(git),
            "shallow": _shallow(common),
            "partial": _is_partial(settings),
            "excludes_file": _excludes_file(top, settings),
            "user_name": _text(settings, "user.name"),
            "user_email": _text(settings, "user.email"),
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


def _settings(git: Git) -> dict[str, str]:
    """What matters here of the user's configuration, all levels together; the last one wins."""
    wanted = (
        r"^(core\.excludesfile|user\.(name|email)|extensions\.partialclone|remote\..*\.promisor)$"
    )
    answer = git.attempt("config", "--null", "--get-regexp", wanted)
    entries = (entry.partition("\n") for entry in os.fsdecode(answer.out).split("\0") if entry)
    return {name: value for name, _, value in entries}


def _text(settings: dict[str, str], name: str) -> str | None:
    value = settings.get(name)
    return value and os.fsencode(value).decode("utf-8", "replace")


def _is_partial(settings: dict[str, str]) -> bool:
    """Whether objects may be missing because they were never fetched."""
    return "extensions.partialclone" in settings or any(
        name.endswith(".promisor") and value != "false" for name, value in settings.items()
    )


def _excludes_file(top: Path, settings: dict[str, str]) -> Path | None:
    """The user's own list of ignored names; git's default where none is configured."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    named = settings.get("core.excludesfile", f"{base}/git/ignore")
    try:
        file = top / Path(named or os.devnull).expanduser()
    except RuntimeError:  # the home of somebody who does not exist
        return None
    return file if file.is_file() else None


def common_dir_of(top: Path) -> Path | None:
    """The common git dir of the repository whose top is `top`; None if it is no such folder."""
    git = Git.of_user(top)
    shown = git.attempt("rev-parse", "--show-toplevel")
    if shown.code or Path(os.fsdecode(shown.out.removesuffix(b"\n"))) != top:
        return None
    return _path_answer(git, "rev-parse", "--path-format=absolute", "--git-common-dir")
