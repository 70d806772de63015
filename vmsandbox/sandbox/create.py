"""Owns how a request becomes a sandbox: config, image, host, worktree are checked before anything
is made, so that a refusal leaves nothing behind.
"""

import contextlib
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vmsandbox import config, ports, worktree
from vmsandbox.errors import HostProblem, VmsandboxError
from vmsandbox.model import (
    BatchMark,
    Brief,
    Budget,
    Check,
    Endpoint,
    Equipment,
    HostFacts,
    Image,
    LaunchPlan,
    Limits,
    PortMapping,
    SandboxRecord,
    Task,
    Value,
)
from vmsandbox.reach import Net
from vmsandbox.sandbox.equipping import Equipped, check_keys, equipped
from vmsandbox.sandbox.plan import plan_of
from vmsandbox.sandbox.rooms import Rooms, owner_uid
from vmsandbox.store import SandboxFolder, user_config

LEAST_FREE_BYTES = 512 * 1024 * 1024
"""Below this a guest's disk could not even take what a boot writes and a result brings."""


class Request(Value):
    """What a user asks of one run. `overrides` holds the flags of the ``[sandbox]`` table; None
    among them means not given."""

    command: tuple[str, ...] = Field(default=(), description="empty: that of the agent")
    worktree: Path = Field(description="absolute; a folder inside a git worktree means its top")
    name: str | None = None
    env: Mapping[str, str] = Field(default_factory=dict)
    keep: bool = False
    cold: bool = False
    terminal: Literal["no", "kept", "watched"] = "no"
    brief: Brief | None = None
    verify: tuple[Check, ...] = Field(default=(), description="else what the project says")
    batch: BatchMark | None = None
    publish: tuple[PortMapping, ...] = Field(default=(), description="else what settings say")
    publishes: bool | None = Field(
        default=None, description="whether what listens in the guest is published by itself"
    )
    agent: str | None = Field(default=None, description="by name; instead of a command")
    gateways: tuple[str, ...] = Field(default=(), description="beside those that the agent needs")
    budget: Budget = Field(default=Budget(), description="else what settings say")
    within_budget: Budget = Field(default=Budget(), description="narrows either")
    ask: bool = Field(default=False, description="the guest may ask a person")
    net: Mapping[str, Any] = Field(
        default_factory=dict, description="flags of the ``[net]`` table: mode, allow"
    )
    within_net: Mapping[str, Any] = Field(
        default_factory=dict, description="mode, allow: narrow what settings and flags allow"
    )
    overrides: Mapping[str, Any] = Field(default_factory=dict)


class _Prepared(Value):
    task: Task
    limits: Limits
    image: Image
    host: HostFacts
    keep: bool
    cold: bool
    batch: BatchMark | None
    publish: tuple[PortMapping, ...]
    publishes: bool
    net: Net
    equipment: Equipment


def propose(rooms: Rooms, request: Request) -> LaunchPlan:
    """The plan that a run would follow, with an id that is free now; makes nothing."""
    prepared = _prepare(rooms, request)
    id_, name, endpoint = rooms.store.propose(request.name)
    return _plan(rooms, prepared, _record(rooms, prepared, id_, name, endpoint))


def create_sandbox(rooms: Rooms, request: Request) -> SandboxFolder:
    """Make the folder and the record of a new sandbox, state queued.

    Raises before anything is made: UsageProblem (``config_invalid``, ``image_unknown``,
    ``worktree_missing``, ``worktree_empty``, ``name_taken``, …), HostProblem
    (``image_digest_mismatch``, ``host_disk_full``, ``libvirt_unreachable``, …).
    """
    prepared = _prepare(rooms, request)
    ports.check(prepared.publish)

    def make(id_: str, name: str, endpoint: Endpoint) -> SandboxRecord:
        record = _record(rooms, prepared, id_, name, endpoint)
        _plan(rooms, prepared, record)  # refuses what cannot start
        return record

    return rooms.store.create(request.name, make)


def _prepare(rooms: Rooms, request: Request) -> _Prepared:
    found = worktree.locate(request.worktree)
    sources = _sources(found.top)
    settings = config.load(sources, request.overrides, request.net)
    net = config.net_of(sources, request.net, request.within_net)
    if vain := config.asked_in_vain(net):
        flags = " ".join(f"--allow '{rule}'" for rule in vain)
        rooms.note(f"the project asks to reach more than you allow; to allow it: {flags}")
    worktree.check_sendable(found, settings.sandbox.include)
    given = equipped(
        settings,
        command=request.command,
        agent=request.agent,
        gateways=request.gateways,
        budget=request.budget,
        within=request.within_budget,
        ask=request.ask,
        brief=request.brief,
    )
    env = {**settings.sandbox.env, **given.env, **request.env}
    check_keys(given.equipment, (*given.command, *env.values()))
    named = given.image if request.overrides.get("image") is None else None
    image = rooms.images.resolve(named or settings.sandbox.image)
    _check_free_space(rooms.store.path)
    return _Prepared(
        task=Task(
            command=given.command,
            worktree=found.top,
            env=env,
            include=settings.sandbox.include,
            history=settings.sandbox.history,
            terminal=_terminal(request, given),
            brief=request.brief,
            verify=request.verify or settings.checks(),
        ),
        limits=settings.limits(),
        image=image,
        host=rooms.host_facts(image),
        keep=request.keep,
        cold=request.cold,
        batch=request.batch,
        publish=request.publish or settings.ports.publish,
        publishes=settings.ports.auto if request.publishes is None else request.publishes,
        net=net,
        equipment=given.equipment,
    )


def settings_here(folder: Path, overrides: Mapping[str, Any]) -> config.Config:
    """The settings that a run in this folder would have, be it a worktree or not."""
    top = folder
    with contextlib.suppress(VmsandboxError):
        top = worktree.locate(folder).top
    return config.load(_sources(top), overrides)


def _sources(top: Path) -> list[config.Source]:
    """The user's own config, then the project's; a file that is not there says nothing."""
    found = []
    for path, own in ((user_config(), True), (top / "vmsandbox.toml", False)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                found.append(config.Source(str(path), path.read_text(), own))
            except (UnicodeDecodeError, PermissionError, IsADirectoryError) as error:
                raise HostProblem(
                    "config_unreadable", f"cannot read {path}: {error}", hint=f"look at {path}"
                ) from error
    return found


def _terminal(request: Request, given: Equipped) -> Literal["no", "kept", "watched"]:
    return "kept" if given.on_a_terminal and request.terminal == "no" else request.terminal


def agents_at(folder: Path) -> Mapping[str, config.AgentSection]:
    """The agents that the settings of a folder's worktree name; asks no git."""
    top = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), folder)
    return config.load(_sources(top)).agents


def _check_free_space(root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < LEAST_FREE_BYTES:
        raise HostProblem(
            "host_disk_full",
            f"{free // 2**20} MiB are free below {root}, a sandbox needs at least"
            f" {LEAST_FREE_BYTES // 2**20}",
            hint="vmsandbox cleanup",
        )


def _record(
    rooms: Rooms, prepared: _Prepared, id_: str, name: str, endpoint: Endpoint
) -> SandboxRecord:
    return SandboxRecord(
        id=id_,
        name=name,
        task=prepared.task,
        limits=prepared.limits,
        image_name=prepared.image.name,
        image_digest=prepared.image.digest,
        libvirt_uri=rooms.uri,
        domain_uuid=str(uuid.uuid4()),
        endpoint=endpoint,
        keep=prepared.keep,
        cold=prepared.cold,
        batch=prepared.batch,
        publish=prepared.publish,
        publishes=prepared.publishes,
        net=prepared.net,
        equipment=prepared.equipment,
    )


def _plan(rooms: Rooms, prepared: _Prepared, record: SandboxRecord) -> LaunchPlan:
    return plan_of(
        record,
        rooms.store.folder(record.id),
        rooms.store.path,
        prepared.image,
        prepared.host,
        owner_uid(),
    )
