"""Owns the host's end of following a task: from the script's first answer to the last byte and the
report.

Knows one channel at a time; what to do when it is lost is decided above. The task script's head
describes the conversation.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from vmsandbox.deadline import Deadline
from vmsandbox.guest import task
from vmsandbox.guest.capture import Capture
from vmsandbox.guest.channel import Command, Stream
from vmsandbox.guest.task import EndMark, Report, TaskSpec
from vmsandbox.model import ExecResult


class TaskRun:
    """One task on its way, over as many channels as it takes."""

    def __init__(
        self,
        spec: TaskSpec,
        capture: Capture,
        script: tuple[str, ...],
        started: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._capture = capture
        self._script = script
        self._started = started
        self.known = False
        """The guest has said that it knows the task: it must not be started again."""
        self.cut_short = False
        """We left the channel before its end, to go on from the guest's bounded files."""

    def argv(self) -> list[str]:
        """The script's argv for the next channel."""
        if not self.known:
            return task.start_argv(self._spec, self._script)
        offsets = (self._capture.offset("stdout"), self._capture.offset("stderr"))
        return [*self._script, "follow", self._spec.id, *map(str, offsets)]

    def attend(self, command: Command, deadline: Deadline) -> ExecResult | None:
        """Follow on this channel; None if it ended and the task did not.

        Raises task.Refused, and GuestProblem ``guest_answer_invalid``, ``guest_command_timeout``.
        """
        may_flood, self.cut_short = not self.known, False
        pieces = command.received(deadline)
        answer, first = _first_line(pieces)
        if not answer:
            return None
        following = task.parse_following(answer)
        self.known = True
        booted_at = time.time() - following.uptime_s
        self._started()
        report = self._copy(following.end_mark, chain([first], pieces), may_flood)
        return report and task.exec_result(report, booted_at)

    def _copy(
        self, end_mark: bytes, pieces: Iterable[tuple[Stream, bytes]], may_flood: bool
    ) -> Report | None:
        """The report, once both streams have ended with the mark."""
        marks: dict[Stream, EndMark] = {"stdout": EndMark(end_mark), "stderr": EndMark(end_mark)}
        for stream, data in pieces:
            self._capture.write(stream, marks[stream].feed(data))
            if all(mark.report for mark in marks.values()):
                return marks["stderr"].report
            if may_flood and self._capture.full():
                self.cut_short = True
                return None
        return None


def _first_line(pieces: Iterator[tuple[Stream, bytes]]) -> tuple[bytes, tuple[Stream, bytes]]:
    """The first line of stdout and the piece after it; empty if the channel ended before."""
    text = b""
    for stream, data in pieces:
        if stream == "stderr":
            continue
        text += data
        line, newline, rest = text.partition(b"\n")
        if newline:
            return line + newline, ("stdout", rest)
        if len(text) > task.LINE_MAX_BYTES:
            raise task.invalid_answer(text)
    return b"", ("stdout", b"")
