"""Owns facts about this host and its mending: accelerator, daemons, programs, the doctor's checks.

Knows no libvirt API; what libvirt says arrives as values.
"""

from vmsandbox.host.checks import Check, Status, Subject, examine
from vmsandbox.host.daemons import default_uri as libvirt_uri
from vmsandbox.host.daemons import prepare, stop
from vmsandbox.host.facts import facts, verdict
from vmsandbox.host.load import Load, load, pressure
from vmsandbox.host.mending import admit_templates, mend

__all__ = [
    "Check",
    "Load",
    "Status",
    "Subject",
    "admit_templates",
    "examine",
    "facts",
    "libvirt_uri",
    "load",
    "mend",
    "prepare",
    "pressure",
    "stop",
    "verdict",
]
