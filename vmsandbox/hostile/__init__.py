"""Owns what a hostile guest's tree may not hold, and what in it deserves a second look.

Pure; knows no files and no git. *Refused* means that nothing of the result is ever written;
*flagged* means that a reviewer is told. Only what differs from the base is judged: the base is the
user's own.
"""

from vmsandbox.hostile.flags import MEANING
from vmsandbox.hostile.inspection import Findings, Refusal, inspect, raise_refusals
from vmsandbox.hostile.names import fold, is_dot_git, refuse_name

__all__ = [
    "MEANING",
    "Findings",
    "Refusal",
    "fold",
    "inspect",
    "is_dot_git",
    "raise_refusals",
    "refuse_name",
]
