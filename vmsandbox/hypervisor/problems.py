"""Owns the translation of libvirt's errors into ours. Knows no connection.

libvirt reports most QEMU failures as VIR_ERR_INTERNAL_ERROR with QEMU's last words in the message;
what can be told apart is told by those words.
"""

import re

import libvirt

from vmsandbox.errors import HostProblem

_UNREACHABLE = frozenset(
    {libvirt.VIR_ERR_NO_CONNECT, libvirt.VIR_ERR_RPC, libvirt.VIR_ERR_INVALID_CONN}
)
_DENIED = frozenset(
    {
        libvirt.VIR_ERR_AUTH_FAILED,
        libvirt.VIR_ERR_AUTH_CANCELLED,
        libvirt.VIR_ERR_AUTH_UNAVAILABLE,
        libvirt.VIR_ERR_ACCESS_DENIED,
    }
)
_DOCTOR = "vmsandbox doctor --fix"

# What QEMU or libvirt says → our code and the hint. The first that fits counts.
_WORDS: tuple[tuple[str, str, str], ...] = (
    (
        r"Could not set up host forwarding|Address already in use",
        "address_in_use",
        "start it again: another address is chosen",
    ),
    (
        r"Cannot allocate memory|cannot set up guest memory",
        "host_memory_full",
        "vmsandbox status    (stop a sandbox, or ask for less --memory)",
    ),
    (r"No space left on device", "host_disk_full", "vmsandbox cleanup"),
    (r"Could not access KVM|failed to initialize kvm|/dev/kvm", "kvm_unusable", _DOCTOR),
    (r"Failed to get .*lock", "disk_in_use", "vmsandbox status    (another domain has this disk)"),
    (r"already exists with uuid|is already (active|running)", "domain_exists", "vmsandbox status"),
    (r"Permission denied", "permission_denied", _DOCTOR),
    (r"UNIX socket path .* too long", "path_unsuitable", "set VMSANDBOX_HOME to a shorter path"),
    (
        r"Failed to find user record|unable to find security driver",
        "libvirt_misconfigured",
        _DOCTOR,
    ),
)
_QEMU_SPEAKS = re.compile(
    r"process exited|unexpectedly (closed|quit)|qemu-(system|kvm)|QEMU command|"
    r"Failed to connect to the monitor",
    re.IGNORECASE,
)
# "2026-01-31T09:30:00.123456Z qemu-system-x86_64: -netdev user,…: the cause"
_QEMU_PREFIX = re.compile(r"^(\S+Z )?(\S*/)?qemu-[\w-]+: ", re.MULTILINE)


def is_lost(error: libvirt.libvirtError) -> bool:
    """Whether the connection, and not what was asked, is the problem."""
    return (
        error.get_error_code() in _UNREACHABLE
        or error.get_error_domain() == libvirt.VIR_FROM_RPC
        or "keepalive" in str(error)
    )


def is_absent(error: libvirt.libvirtError) -> bool:
    """Whether libvirt says that there is no such domain, or no longer."""
    return error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN or (
        error.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID
        and "domain is not running" in str(error)
    )


def translate(
    error: libvirt.libvirtError, what: str, *, evidence: str | None = None
) -> HostProblem:
    """One of ours for one of libvirt's; `what` is what was tried, as "starting domain x"."""
    said = _QEMU_PREFIX.sub("", str(error)).strip()
    code, hint = _classify(error)
    return HostProblem(code, f"{what}: {said}", hint=hint, evidence=evidence)


def _classify(error: libvirt.libvirtError) -> tuple[str, str | None]:
    if error.get_error_code() in _DENIED:
        return "libvirt_denied", _DOCTOR
    if is_lost(error) or _is_socket(error):
        return "libvirt_unreachable", _DOCTOR
    if is_absent(error):
        return "domain_gone", "vmsandbox status"
    for words, code, hint in _WORDS:
        if re.search(words, str(error)):
            return code, hint
    if _QEMU_SPEAKS.search(str(error)):
        return "qemu_failed", "vmsandbox doctor"
    return "libvirt_failed", "vmsandbox doctor"


def _is_socket(error: libvirt.libvirtError) -> bool:
    """ "Failed to connect socket to '/run/libvirt/libvirt-sock': No such file or directory"."""
    return "connect socket" in str(error)
