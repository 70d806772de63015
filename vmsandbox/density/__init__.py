"""Owns the density experiment: how many guests this host carries, and what one more costs.

`experiment` starts guests in steps and measures them, `fleet` are those guests, `guard` says when
it is enough, `figures` are the values, `report` writes them down, `costs` keeps what admission
needs. Knows libvirt, SSH and images only through sandboxes.
"""

from vmsandbox.density.costs import measured
from vmsandbox.density.experiment import Asked, Experiment
from vmsandbox.density.figures import Outcome, StoppedBy
from vmsandbox.density.page import summary_rows
from vmsandbox.density.report import INSTALL, default_folder, opened

__all__ = [
    "INSTALL",
    "Asked",
    "Experiment",
    "Outcome",
    "StoppedBy",
    "default_folder",
    "measured",
    "opened",
    "summary_rows",
]
