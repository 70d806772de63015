"""Owns how the system's own SSH client is told about a guest: config text, known_hosts lines, argv.

Pure. Knows no connection; the files themselves are written by whoever owns the state folder. The
config is complete: with ``ssh -F`` neither the user's own config nor the system's is read, so no
agent, key or host key of the user's reaches a guest.
"""

from collections.abc import Sequence
from pathlib import Path

from vmsandbox.errors import HostProblem
from vmsandbox.model import Endpoint


def known_hosts_line(endpoint: Endpoint, host_key: str) -> str:
    """The pinned key as OpenSSH looks it up; `host_key` is a public key line."""
    kind, key = host_key.split()[:2]
    return f"[{endpoint.address}]:{endpoint.port} {kind} {key}\n"


def ssh_config(
    name: str, endpoint: Endpoint, *, key: Path, known_hosts: Path, user: str = "agent"
) -> str:
    """A ``Host`` block under which ``ssh NAME``, scp, rsync, git and editors reach the guest.

    Raises HostProblem ``path_unsuitable`` for paths that OpenSSH's config cannot spell.
    """
    options = {
        "HostName": endpoint.address,
        "Port": str(endpoint.port),
        "User": user,
        "IdentityFile": _path(key),
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "UserKnownHostsFile": _path(known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "CheckHostIP": "no",
        "HostKeyAlgorithms": "ssh-ed25519",
        "PreferredAuthentications": "publickey",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "ControlMaster": "no",
        "ControlPath": "none",
        "ServerAliveInterval": "15",
        "LogLevel": "ERROR",
    }
    return f"Host {name}\n" + "".join(f"  {key} {value}\n" for key, value in options.items())


def _path(path: Path) -> str:
    """Quoted, with OpenSSH's ``%`` tokens switched off. It has no escape for the other three."""
    text = str(path)
    if any(c in text for c in '"\n') or "${" in text:
        raise HostProblem(
            "path_unsuitable",
            f"OpenSSH's config cannot name {text!r}",
            hint="set VMSANDBOX_HOME to a plain path",
        )
    return '"' + text.replace("%", "%%") + '"'


def ssh_argv(
    config: Path, name: str, command: Sequence[str] = (), *, options: Sequence[str] = ()
) -> list[str]:
    """argv of the system's client. `command` is handed to the guest's shell as OpenSSH always does:
    joined by spaces, unquoted."""
    return ["ssh", "-F", str(config), *options, name, *(["--", *command] if command else [])]
