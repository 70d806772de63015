"""A person at a terminal: the program runs on one of its own, and questions are answered."""

import os
import pty
import select
from collections.abc import Sequence

from tests.warm import program

_PATIENCE_S = 60


def on_a_terminal(question: str, answers: Sequence[str], *arguments: str) -> tuple[int, str]:
    """Type an answer each time that `question` is asked; all of them must be used.

    Returns the exit code and all that was seen.
    """
    ours, theirs = pty.openpty()
    program().begin(arguments, (theirs, theirs, theirs))
    os.close(theirs)
    seen, asked = b"", 0
    while select.select([ours], [], [], _PATIENCE_S)[0]:
        try:
            seen += os.read(ours, 4096)
        except OSError:  # EIO: the program is gone
            break
        if seen.count(question.encode()) > asked:
            os.write(ours, answers[asked].encode() + b"\n")
            asked += 1
    os.close(ours)
    assert asked == len(answers), seen.decode()
    return program().code(), seen.decode()
