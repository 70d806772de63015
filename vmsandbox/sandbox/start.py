"""Owns a cold start: keys, seed, overlay, domain, until SSH answers with the pinned key.

Works from a plan; what is there from an earlier start (keys, overlay) is used again, so a guest
that went away boots again from its own disk.
"""

import os
import secrets
import time
import uuid

from pydantic import SecretBytes, SecretStr

from vmsandbox import seed
from vmsandbox.domain import MAC
from vmsandbox.guest import known_hosts_line, ssh_config
from vmsandbox.model import LaunchPlan
from vmsandbox.sandbox.rooms import Rooms
from vmsandbox.store import SandboxFolder, write_atomic


def prepare(rooms: Rooms, plan: LaunchPlan, folder: SandboxFolder) -> None:
    """Write what the domain needs into the sandbox's folder. Safe to do again."""
    _write_keys(plan, folder)
    spec = _seed_spec(plan, folder)
    write_atomic(folder.seed_iso, seed.nocloud_iso(spec, seed.seed_tar(spec)))
    if not folder.overlay.exists():
        rooms.images.create_overlay(plan.image, folder.overlay, plan.limits.disk_mib)
    write_atomic(folder.domain_xml, plan.domain_xml.encode())
    _hand_to_qemu(plan, folder)


def _write_keys(plan: LaunchPlan, folder: SandboxFolder) -> None:
    """The host key's private half exists only in the seed; ours only in this folder."""
    if folder.client_key.exists() and folder.host_key_private.exists():
        return
    client, host = seed.new_key(), seed.new_key(f"vmsandbox-{plan.id}")
    write_atomic(folder.client_key_public, f"{client.public}\n".encode(), 0o644)
    write_atomic(folder.client_key, client.private.encode())
    write_atomic(folder.host_key, f"{host.public}\n".encode(), 0o644)
    write_atomic(folder.known_hosts, known_hosts_line(plan.endpoint, host.public).encode())
    config = ssh_config(
        plan.name, plan.endpoint, key=folder.client_key, known_hosts=folder.known_hosts
    )
    write_atomic(folder.ssh_config, config.encode())
    write_atomic(folder.host_key_private, host.private.encode())


def _seed_spec(plan: LaunchPlan, folder: SandboxFolder) -> seed.SeedSpec:
    return seed.SeedSpec(
        id=plan.id,
        hostname=seed.hostname_for(plan.name),
        machine_id=uuid.UUID(plan.domain_uuid).hex,
        host_key=SecretStr(folder.host_key_private.read_text()),
        host_key_public=folder.host_key.read_text().strip(),
        authorized_key=folder.client_key_public.read_text().strip(),
        entropy=SecretBytes(secrets.token_bytes(64)),
        now=time.time(),
        mac=MAC,
        scripts=seed.guest_scripts(),
    )


def _hand_to_qemu(plan: LaunchPlan, folder: SandboxFolder) -> None:
    """Under qemu:///system QEMU is another user; libvirt is told not to change owners itself."""
    if plan.host.qemu_uid != os.geteuid():
        for path in (folder.overlay, folder.seed_iso):
            os.chown(path, plan.host.qemu_uid, plan.host.qemu_gid)
