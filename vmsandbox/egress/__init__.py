"""Owns egress: what a guest asks for is judged by name, resolved here, and only an address that was
checked is connected to; every decision is written down.

`proxy` is the handler that :mod:`vmsandbox.outlet` calls; it is imported from there, as only
managers need it. Knows no SSH, guest or domain.
"""

from vmsandbox.egress.grants import Grant, add_grant, read_grants
from vmsandbox.egress.journal import Entry, Summary, read_entries, summary_of

__all__ = [
    "Entry",
    "Grant",
    "Summary",
    "add_grant",
    "read_entries",
    "read_grants",
    "summary_of",
]
