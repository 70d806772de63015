"""Owns telling a full disk apart from everything else that may go wrong where this package writes.

Knows no repository. git says it in words, Python by number.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmsandbox.errors import HostProblem
from vmsandbox.worktree.git import GitFailed

_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT})
_WORDS = ("No space left on device", "Disk quota exceeded")


def says_full(complaint: str) -> bool:
    """Whether git gave up for lack of space."""
    return any(words in complaint for words in _WORDS)


def disk_full(where: Path) -> HostProblem:
    return HostProblem(
        "host_disk_full",
        f"no space left while writing below {where}",
        hint="vmsandbox cleanup",
        evidence=str(where),
    )


@contextmanager
def space_below(where: Path) -> Iterator[None]:
    """What fails inside because `where` is full raises HostProblem ``host_disk_full``."""
    try:
        yield
    except GitFailed as error:
        if says_full(error.complaint):
            raise disk_full(where) from error
        raise
    except OSError as error:
        if error.errno in _NUMBERS:
            raise disk_full(where) from error
        raise
