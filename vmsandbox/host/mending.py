"""Owns what `doctor --fix` may change on a host: daemons that do not run, the mode of /dev/kvm, the
rules of AppArmor."""

import grp
import os
from pathlib import Path

from vmsandbox.host import accelerator, confinement, daemons
from vmsandbox.model import LibvirtFacts

_GROUP = "kvm"
_GROUP_MAY = 0o060


def mend(uri: str) -> list[str]:
    """Mend what can be mended; returns what was done, in words. Safe to call again.

    Raises HostProblem as :func:`vmsandbox.host.daemons.start` does.
    """
    done = ["opened /dev/kvm to group kvm"] if open_to_group(accelerator.DEVICE) else []
    daemons.prepare(uri)
    done += [f"started {name}" for name in daemons.start(uri)]
    return done


def admit_templates(libvirt: LibvirtFacts, state_root: Path, *, readonly: bool) -> list[str]:
    """Where AppArmor confines QEMU, let it have the memory of templates; what was done, in words.

    `readonly`: whether this QEMU maps it from a file that is opened for reading only.
    """
    if "apparmor" not in libvirt.security_models or os.geteuid() != 0:
        return []
    file = confinement.admit(state_root, readonly=readonly)
    return [f"admitted templates in {file}"] if file else []


def open_to_group(device: Path) -> bool:
    """Mode 0660, group kvm, as udev has it; whether that had to be done.

    libvirt asks QEMU about its capabilities anew at every start while QEMU's user cannot open
    the device and libvirtd can. Only root can change it, and only where that group exists.
    """
    if os.geteuid() != 0 or not device.exists():
        return False
    if device.stat().st_mode & _GROUP_MAY == _GROUP_MAY:
        return False
    try:
        group = grp.getgrnam(_GROUP).gr_gid
    except KeyError:
        return False
    os.chown(device, -1, group)
    device.chmod(0o660)
    return True
