"""Owns where symbolic links lead, followed as the kernel would within a tree's own listing."""

from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

from vmsandbox.hostile.names import MAX_PATH_BYTES, is_dot_git

MAX_LINK_BYTES = 4095
_MAX_HOPS = 40  # as the kernel's ELOOP limit
_MAX_STEPS = 1_000_000
_STEPS_PER_LINK = 64  # many links that lead where they should are not tangled


class Way(NamedTuple):
    """How following a link ended: `reason` says why it is bad, `changed` whether a changed path
    lies on the way."""

    reason: str | None
    changed: bool


class LinkWalker:
    """Follows the links of one tree; all of them together within one budget of steps."""

    def __init__(self, targets: Mapping[bytes, bytes], changed_paths: Collection[bytes]) -> None:
        self._targets = targets
        self._changed = changed_paths
        self._budget = max(_MAX_STEPS, _STEPS_PER_LINK * len(targets))

    @property
    def exhausted(self) -> bool:
        """Whether the links are too tangled to be followed to the end."""
        return self._budget <= 0

    def follow(self, link: bytes) -> Way:
        """Walk one link. A link that leads nowhere (dangling, a loop) is not bad by that."""
        here = [b""]  # a stack of whole paths, the root first
        todo = deque(link.split(b"/"))
        changed = False
        hops = 0
        while todo and not self.exhausted and hops <= _MAX_HOPS:
            self._budget -= 1
            part = todo.popleft()
            if part in (b"", b"."):
                continue
            if part == b"..":
                if len(here) == 1:
                    return Way("a link that leaves the tree", changed)
                here.pop()
                continue
            if is_dot_git(part):
                return Way("a link into a git directory", changed)
            path = here[-1] + b"/" + part if here[-1] else part
            if len(path) > MAX_PATH_BYTES:
                break  # no folder of a tree lies that deep
            changed = changed or path in self._changed
            target = self._targets.get(path)
            if target is None:
                here.append(path)
            elif reason := _bad_target(target):
                return Way(reason, changed)
            else:
                hops += 1
                parts = target.split(b"/")
                self._budget -= len(parts)
                todo.extendleft(reversed(parts))
        return Way(None, changed)


def _bad_target(target: bytes) -> str | None:
    if target.startswith(b"/"):
        return "a link to an absolute path"
    if b"\0" in target:
        return "a NUL byte in a link"
    return None
