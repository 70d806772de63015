"""Owns what a start will do, decided before anything is done. Pure: touches no file, libvirt or
guest."""

import uuid
from pathlib import Path

from vmsandbox import reach
from vmsandbox.domain import DomainSpec, Layer, domain_xml
from vmsandbox.errors import UsageProblem
from vmsandbox.guest import TaskSpec, check_task, on_screen
from vmsandbox.guest.task import user_environment
from vmsandbox.model import (
    Endpoint,
    HostFacts,
    Image,
    LaunchPlan,
    Limits,
    SandboxRecord,
    Task,
)
from vmsandbox.sandbox import briefing
from vmsandbox.store import SandboxFolder

RULES = "/usr/lib/vmsandbox-rules"
"""In the guest: commands that ask first (``bin``), and the rules that say so (``list``)."""

GRACE_S = 10.0
"""From SIGTERM to SIGKILL for a task that is asked to end, as docker stop has it."""

_SEED = {
    "meta-data": "instance id and host name",
    "user-data": "the same as cloud-config, for images with cloud-init",
    "network-config": "static address 10.0.2.15/24",
    "seed.tar": "host name, machine id, SSH host key, authorized key, guest scripts",
}


def launch_plan(
    *,
    folder: SandboxFolder,
    state_root: Path,
    name: str,
    endpoint: Endpoint,
    domain_uuid: str,
    task: Task,
    limits: Limits,
    image: Image,
    host: HostFacts,
    owner_uid: int,
) -> LaunchPlan:
    """Decide everything about a cold start.

    Raises UsageProblem ``memory_too_small`` or ``disk_too_small`` if the image needs more than is
    asked for.
    """
    check_sizes(limits, image)
    spec = domain_spec(
        folder=folder,
        state_root=state_root,
        endpoint=endpoint,
        domain_uuid=domain_uuid,
        limits=limits,
        image=image,
        host=host,
        owner_uid=owner_uid,
    )
    return LaunchPlan(
        id=folder.id,
        name=name,
        task=task,
        limits=limits,
        image=image,
        host=host,
        endpoint=endpoint,
        domain_uuid=domain_uuid,
        folder=folder.path,
        steps=_steps(folder, task, limits, image, endpoint),
        domain_xml=domain_xml(spec),
        seed=_SEED,
    )


def plan_of(
    record: SandboxRecord,
    folder: SandboxFolder,
    state_root: Path,
    image: Image,
    host: HostFacts,
    owner_uid: int,
) -> LaunchPlan:
    """The plan of a sandbox that has a record.

    Raises also UsageProblem ``env_name_invalid``, ``command_too_long``.
    """
    check_task(task_spec(record))
    return launch_plan(
        folder=folder,
        state_root=state_root,
        name=record.name,
        endpoint=record.endpoint,
        domain_uuid=record.domain_uuid,
        task=record.task,
        limits=record.limits,
        image=image,
        host=host,
        owner_uid=owner_uid,
    )


def task_spec(record: SandboxRecord) -> TaskSpec:
    """The task as the guest is told of it."""
    return TaskSpec(
        id=record.id,
        command=_command(record.task),
        folder=record.task.worktree,
        env={
            **reach.environment(record.net),
            **_path(record),
            **record.task.env,
            **briefing.environment(record),
            "VMSANDBOX_ID": record.id,
            "VMSANDBOX_NAME": record.name,
        },
        timeout_s=record.limits.timeout_s,
        grace_s=GRACE_S,
    )


def _path(record: SandboxRecord) -> dict[str, str]:
    """Where commands are looked for, if some of them ask first."""
    asks = record.equipment.asks
    if asks is None or not asks.commands:
        return {}
    return {"PATH": f"{RULES}/bin:{user_environment('agent')['PATH']}"}


def _command(task: Task) -> tuple[str, ...]:
    if task.terminal == "no":
        return task.command
    return on_screen(task.command, watched=task.terminal == "watched")


def domain_spec(
    *,
    folder: SandboxFolder,
    state_root: Path,
    endpoint: Endpoint,
    domain_uuid: str,
    limits: Limits,
    image: Image,
    host: HostFacts,
    owner_uid: int,
) -> DomainSpec:
    """The machine of a cold start: the image's kernel, an overlay on its root disk, the seed."""
    spec = DomainSpec(
        id=folder.id,
        name=f"vmsandbox-{folder.id}",
        uuid=domain_uuid,
        owner_uid=owner_uid,
        state_root=state_root,
        accelerator=host.accelerator,
        machine=host.machine,
        emulator=host.qemu_binary,
        vcpus=limits.cpus,
        memory_mib=limits.memory_mib,
        kernel=image.kernel,
        initramfs=image.initramfs,
        cmdline=image.cmdline,
        disk=folder.overlay,
        disk_mib=limits.disk_mib,
        disk_mib_s=limits.disk_mib_s,
        disk_iops=limits.disk_iops,
        backing=(Layer(path=image.rootfs, format=image.rootfs_format),),
        seed_iso=folder.seed_iso,
        seed_socket=folder.seed_socket,
        console=folder.console,
        ssh=endpoint,
        dac_label=(
            f"+{host.qemu_uid}:+{host.qemu_gid}" if host.libvirt_uri == "qemu:///system" else None
        ),
    )
    return _for_stock(spec) if image.cloud_init else spec


def _for_stock(spec: DomainSpec) -> DomainSpec:
    """What a system needs that takes its seed through cloud-init.

    Without KVM it boots through more code than the cache of a lean guest holds: it takes two thirds
    of the time when all of it stays translated. cloud-init knows no machine id, so the disk of a
    fork would bring that of its source: systemd is told (kernel-command-line(7)).
    """
    machine_id = f"systemd.machine_id={uuid.UUID(spec.uuid).hex}"
    return spec.model_copy(
        update={"tb_cache_mib": 256, "cmdline": f"{spec.cmdline} {machine_id}".lstrip()}
    )


def check_sizes(limits: Limits, image: Image) -> None:
    """Raises UsageProblem ``memory_too_small`` or ``disk_too_small``."""
    if limits.memory_mib < image.minimum_memory_mib:
        raise UsageProblem(
            "memory_too_small",
            f"{image.name} needs {image.minimum_memory_mib} MiB of memory,"
            f" {limits.memory_mib} were asked for",
            hint=f"--memory {image.minimum_memory_mib}M",
        )
    needed_mib = -(-image.rootfs_bytes // 2**20)
    if limits.disk_mib < needed_mib:
        raise UsageProblem(
            "disk_too_small",
            f"the root disk of {image.name} is {needed_mib} MiB, {limits.disk_mib} were asked for",
            hint=f"--disk {needed_mib}M",
        )


def _steps(
    folder: SandboxFolder, task: Task, limits: Limits, image: Image, endpoint: Endpoint
) -> tuple[str, ...]:
    timeout = f"at most {limits.timeout_s:g} s" if limits.timeout_s else "no time limit"
    return (
        f"write Ed25519 keys and the seed to {folder.path}",
        f"make an overlay of {limits.disk_mib} MiB on {image.name} ({image.digest[:19]})",
        f"start a transient domain: {limits.cpus} CPU, {limits.memory_mib} MiB;"
        f" SSH at {endpoint.address}:{endpoint.port}",
        "wait until the domain runs, SSH answers with the pinned key and the seed is done"
        f" (at most {limits.boot_timeout_s:g} s)",
        f"take a snapshot of {task.worktree} and send it (history: {task.history})",
        f"run as agent in {task.worktree}: {' '.join(task.command)} ({timeout})",
        f"collect the change set (at most {limits.result_max_paths} paths,"
        f" {limits.result_max_mib} MiB)",
        "stop the guest; nothing on the host is changed before approve and apply",
    )
