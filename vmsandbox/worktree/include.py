"""Owns what an ``--include`` glob means: which ignored files come along. Pure; starts no git.

A glob is read as a line of ``.gitignore`` would be: without a slash it matches a name at any depth,
with one it is anchored at the worktree's top; ``*`` and ``?`` do not match a slash, ``**`` matches
any number of folders; a folder that matches brings everything below it.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from vmsandbox.errors import UsageProblem


def pathspecs(globs: Sequence[str]) -> tuple[str, ...]:
    """The globs as git pathspecs. Raises UsageProblem ``include_invalid``."""
    return tuple(spec for glob in globs for spec in _specs(_parts(glob), glob.endswith("/")))


def below(specs: Sequence[str], folder: str) -> tuple[str, ...]:
    """What the pathspecs of :func:`pathspecs` mean for somebody who stands in `folder`, a path
    relative to the top."""
    found = [spec.removeprefix(_MAGIC).split("/") for spec in specs]
    for name in folder.split("/"):
        found = [rest for parts in found for rest in _descend(parts, name)]
    return tuple(dict.fromkeys(_MAGIC + "/".join(parts) for parts in found))


_MAGIC = ":(glob)"


def _parts(glob: str) -> list[str]:
    parts = [part for part in glob.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or ".git" in parts or glob.startswith("!") or "\0" in glob:
        raise UsageProblem(
            "include_invalid",
            f"not a glob of files below the worktree: {glob!r}",
            hint="--include '.env'    or    --include 'build/**'",
        )
    anchored = "/" in glob.rstrip("/") or parts == ["**"]
    return parts if anchored else ["**", *parts]


def _specs(parts: list[str], folder: bool) -> list[str]:
    whole = _MAGIC + "/".join(parts)
    if parts[-1] == "**":
        return [whole]
    return [f"{whole}/**"] if folder else [whole, f"{whole}/**"]


def _descend(parts: list[str], name: str) -> list[list[str]]:
    """Every way to go on after `name` has been matched by the front of `parts`."""
    if parts == ["**"]:
        return [parts]
    if parts[0] == "**":
        return [parts, *_descend(parts[1:], name)]
    if len(parts) > 1 and fnmatchcase(name, parts[0]):
        return [parts[1:]]
    return []
