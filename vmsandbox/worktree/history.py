"""Owns how much of the past goes along: which commits lose their parents in the guest."""

import re
from collections.abc import Callable, Collection

from vmsandbox.worktree.git import Git
from vmsandbox.worktree.objects import ObjectReader


def boundary(
    store: Git, commit: str, history: str, *, own: bool, known: Collection[str]
) -> tuple[str, ...]:
    """The commits that are parentless in the guest, for its ``shallow`` file.

    `history` is ``full``, ``none``, or a number of commits from HEAD, counted along the shortest
    way; `own` says that `commit` is ours, on top of HEAD, and does not count. `known` are the
    boundaries that the user's own shallow clone has already.
    """
    if history == "full":
        return tuple(known)
    generations = 1 if history == "none" else int(history) + (1 if own else 0)
    with ObjectReader.of(store) as reader:

        def parents(oid: str) -> list[str]:
            return [] if oid in known else parents_of(reader.read(oid))

        seen, cut = walk(commit, generations, parents)
    return tuple(sorted(cut | (seen & set(known))))


def walk(
    commit: str, generations: int, parents: Callable[[str], list[str]]
) -> tuple[set[str], set[str]]:
    """The commits of the first `generations`, and those among the last of them with parents."""
    level, seen = [commit], {commit}
    for _ in range(generations - 1):
        level = [parent for one in level for parent in parents(one)]
        level = [one for one in dict.fromkeys(level) if one not in seen]
        seen.update(level)
        if not level:
            break
    return seen, {one for one in level if parents(one)}


_PARENTS = re.compile(rb"tree [0-9a-f]+\n((?:parent [0-9a-f]+\n)*)")


def parents_of(commit: bytes) -> list[str]:
    """The parents that a commit object names, read as git does: directly after the tree, in hex.

    Anything may stand further down in the head of a commit that a guest made.
    """
    match = _PARENTS.match(commit)
    return match[1].decode("ascii").split()[1::2] if match else []
