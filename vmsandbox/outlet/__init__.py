"""Owns the one way out of a guest: an HTTP server in the manager that only the guest's port 3128
reaches, and which handler answers what.

Knows no rule, no upstream and no SSH: streams come in, handlers decide. What arrives is hostile.
"""

from vmsandbox.outlet.exchange import Exchange, Handler, Head, Headers, Stream
from vmsandbox.outlet.server import Outlet

__all__ = ["Exchange", "Handler", "Head", "Headers", "Outlet", "Stream"]
