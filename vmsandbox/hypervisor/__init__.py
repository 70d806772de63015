"""Owns libvirt and the QEMU processes it runs. Knows no sandbox record, no image store, no guest.

`domains` is what others use; `connection` survives the daemon's restarts, `processes` looks at QEMU
where libvirt cannot, `problems` translates libvirt's errors.
"""

from vmsandbox.hypervisor.domains import DomainState, Hypervisor, Observation, OwnedDomain
from vmsandbox.hypervisor.evidence import Evidence
from vmsandbox.hypervisor.processes import MemoryFigures, QemuProcess

__all__ = [
    "DomainState",
    "Evidence",
    "Hypervisor",
    "MemoryFigures",
    "Observation",
    "OwnedDomain",
    "QemuProcess",
]
