"""Owns the values about asking a person: when it is demanded, what was asked, what was answered.

Must know no file and no guest.
"""

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from vmsandbox.values import Value, now

ANSWERED_WITHIN_S = 600.0


class AskRules(Value):
    """Whether, and when, a guest asks. `commands` are globs over a command with its arguments."""

    timeout_s: float = Field(default=ANSWERED_WITHIN_S, gt=0, description="then it is denied")
    commands: tuple[str, ...] = ()


class Answer(StrEnum):
    """Where a question stands. Only a person allows."""

    PENDING = "pending"
    ALLOWED = "allowed"
    DENIED = "denied"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"


class Approval(Value):
    """One question of a guest; its texts were made safe to show when they came in."""

    id: str = Field(description="sandbox id, hyphen, number")
    text: str
    command: tuple[str, ...] = ()
    rule: str = Field(default="", description="what demanded it; the guest's own word for it")
    asked_at: datetime = Field(default_factory=now)
    expires_at: datetime
    answer: Answer = Answer.PENDING
    who: str = ""
    answered_at: datetime | None = None
    reason: str = ""

    @property
    def sandbox(self) -> str:
        return self.id.partition("-")[0]

    def at(self, moment: datetime) -> "Approval":
        """As it stands then: what nobody answered in time is denied."""
        if self.answer is Answer.PENDING and moment >= self.expires_at:
            return self.model_copy(
                update={"answer": Answer.EXPIRED, "answered_at": self.expires_at}
            )
        return self
