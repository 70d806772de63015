"""Owns what AppArmor must admit beyond what libvirt tells it, where it confines QEMU.

virt-aa-helper makes each guest's profile from the files that its domain names. It does not read
``<qemu:commandline>``, the one way to say where a guest's memory lies, and the sockets for device
state are named over QMP only. libvirt's abstraction for all guests includes files for such
additions (libvirt, "QEMU driver", "AppArmor sVirt"); a guest that starts later has them.
"""

import re
from pathlib import Path

ABSTRACTIONS = Path("/etc/apparmor.d")
_ABSTRACTION = "abstractions/libvirt-qemu"
_PLAIN = re.compile(r"[\w./+:@-]+", re.ASCII)


def rules(state_root: Path, *, readonly: bool) -> str:
    """The rules that templates below this state folder need. With `readonly` QEMU opens a private
    mapping's file for reading only."""
    templates = (state_root / "templates").resolve()
    sandboxes = (state_root / "sandboxes").resolve()
    return (
        f"{_mark(state_root)}\n"
        f"  {templates}/*/ram {'r' if readonly else 'rw'},\n"
        f"  {templates}/.making-*/{{ram,sock}} rw,\n"
        f"  {sandboxes}/*/incoming/{{monitor,state}} rw,\n"
    )


def admits(state_root: Path, folder: Path = ABSTRACTIONS) -> bool:
    """Whether the rules for this state folder were added below AppArmor's `folder`."""
    file = _additions(folder)
    return file.is_file() and f"{_mark(state_root)}\n" in file.read_text()


def admit(state_root: Path, *, readonly: bool, folder: Path = ABSTRACTIONS) -> Path | None:
    """Add the rules, once; the file that they were added to, None if nothing was to be done or the
    path is one that would mean something in a rule."""
    if admits(state_root, folder) or not _PLAIN.fullmatch(str(state_root.resolve())):
        return None
    file = _additions(folder)
    file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with file.open("a") as text:
        text.write(rules(state_root, readonly=readonly))
    return file


def _mark(state_root: Path) -> str:
    return f"  # vmsandbox, templates of {state_root.resolve()}"


def _additions(folder: Path) -> Path:
    """What libvirt's abstraction includes: a folder for files of others, or one local file."""
    included = f"{_ABSTRACTION}.d"
    abstraction = folder / _ABSTRACTION
    if abstraction.is_file() and f"<{included}>" in abstraction.read_text():
        return folder / included / "vmsandbox"
    return folder / "local" / _ABSTRACTION
