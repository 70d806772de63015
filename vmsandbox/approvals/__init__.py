"""Owns questions that guests ask a person: kept in the sandbox's folder, answered by a verb of the
host, told to the guest that waits.

Whoever is root in a guest can leave the asking out: it is a courtesy among those who keep to it,
and no border. What crosses the border is held by others.
"""

from vmsandbox.approvals.record import answer, find, pending, questions
from vmsandbox.approvals.serving import AskServer

__all__ = ["AskServer", "answer", "find", "pending", "questions"]
