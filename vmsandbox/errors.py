"""Owns the error tree: every failure of vmsandbox itself, with a stable code, a hint, an exit code.

Must know nothing else. A guest's answer (its exit code, a timeout, out of memory) is data and never
one of these. Foreign exceptions are translated into these once, in the module that owns the foreign
thing.
"""

from collections.abc import Mapping
from typing import Any


class VmsandboxError(Exception):
    """What failed, on what; how to go on; where to look.

    `code` is stable and made for programs (``image_unknown``); `hint` is the command or step that
    helps; `evidence` is the path of a file that says more.
    """

    exit_code = 3

    def __init__(
        self, code: str, message: str, *, hint: str | None = None, evidence: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.evidence = evidence

    @property
    def data(self) -> Mapping[str, Any]:
        """What programs may want to go through one by one; JSON-ready, empty for most."""
        return {}

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.code, self.message, self.hint, self.evidence))


def _rebuild(
    kind: type[VmsandboxError], code: str, message: str, hint: str | None, evidence: str | None
) -> VmsandboxError:
    return kind(code, message, hint=hint, evidence=evidence)


class NegativeAnswer(VmsandboxError):
    """The question was fine and the answer is no: a conflict, a failed check."""

    exit_code = 1


class UsageProblem(VmsandboxError):
    """What was asked cannot be meant: bad flags, bad config, an unknown name."""

    exit_code = 2


class HostProblem(VmsandboxError):
    """The host cannot do it: libvirt, QEMU, disk space, permissions, a broken image."""

    exit_code = 3


class GuestProblem(VmsandboxError):
    """The guest did not do what vmsandbox needs: no boot, no SSH answer, no collection."""

    exit_code = 4


class ReviewRefused(VmsandboxError):
    """Result or decision is not acceptable: hostile content, a stale approval, a live task."""

    exit_code = 5
