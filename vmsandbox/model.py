"""Owns the values that travel between rooms: frozen pydantic types.

Must know no file, process or guest. Sizes carry their unit in the name. Times are UTC; durations
are seconds. Path names inside a worktree are bytes (:data:`TreePath`), written to JSON quoted as
:func:`vmsandbox.text.quote_path` does.
"""

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from vmsandbox.asking import AskRules as AskRules
from vmsandbox.forwards import PortMapping as PortMapping
from vmsandbox.proof import Check as Check
from vmsandbox.proof import CheckResult as CheckResult
from vmsandbox.proof import CheckRun as CheckRun
from vmsandbox.proof import Finding as Finding
from vmsandbox.proof import HttpCheck as HttpCheck
from vmsandbox.proof import Opinion as Opinion
from vmsandbox.proof import Severity as Severity
from vmsandbox.provider import Budget as Budget
from vmsandbox.provider import Gateway as Gateway
from vmsandbox.reach import Net
from vmsandbox.states import Outcome as Outcome
from vmsandbox.states import ResultState as ResultState
from vmsandbox.states import SandboxState as SandboxState
from vmsandbox.states import result_may_become as result_may_become
from vmsandbox.states import sandbox_may_become as sandbox_may_become
from vmsandbox.values import Digest as Digest
from vmsandbox.values import Oid as Oid
from vmsandbox.values import TreePath as TreePath
from vmsandbox.values import Value as Value
from vmsandbox.values import canonical_json as canonical_json
from vmsandbox.values import digest_of as digest_of
from vmsandbox.values import now as now

# --- what is asked --------------------------------------------------------------------------------


class Limits(Value):
    """The size of a guest, how long its boot and its task may take, how much may come back."""

    cpus: int = Field(default=1, ge=1, le=256)
    memory_mib: int = Field(default=1024, ge=64, le=4 * 1024 * 1024)
    disk_mib: int = Field(default=20 * 1024, ge=256, le=64 * 1024 * 1024)
    cpu_weight: int = Field(default=100, ge=1, le=100, description="of the guest beside others")
    disk_mib_s: int = Field(default=300, ge=0, description="read and written; 0: no limit")
    disk_iops: int = Field(default=20_000, ge=0, description="reads and writes; 0: no limit")
    timeout_s: float | None = Field(default=None, gt=0, description="None: no limit")
    boot_timeout_s: float = Field(default=180.0, gt=0, description="until SSH answers")
    result_max_paths: int = Field(default=50_000, ge=1)
    result_max_mib: int = Field(default=1024, ge=1, description="after inflation")


class Brief(Value):
    """What an agent is told, good enough to be handed on. Texts are Markdown."""

    goal: str = Field(default="", description="what is true when it is done")
    why: str = ""
    tried: tuple[str, ...] = Field(default=(), description="what was tried and what came of it")
    sources: tuple[str, ...] = Field(default=(), description="where to read")
    allowed: tuple[str, ...] = Field(default=(), description="facts that may be taken as given")
    out_of_scope: tuple[str, ...] = ()
    report_back: tuple[str, ...] = Field(default=(), description="what the report must answer")
    blockers: tuple[str, ...] = Field(default=(), description="what may stop the work, and then")


class Task(Value):
    """One command on one worktree."""

    command: tuple[str, ...] = Field(min_length=1)
    worktree: Path = Field(
        description="absolute path of the folder on the host; the same path in the guest"
    )
    env: dict[str, str] = Field(default_factory=dict)
    include: tuple[str, ...] = Field(
        default=(), description="globs of ignored files to bring along"
    )
    history: str = Field(default="full", pattern=r"^(full|none|[1-9][0-9]{0,6})$")
    terminal: Literal["no", "kept", "watched"] = Field(
        default="no",
        description="run on a screen that can be attached to; watched: begin when it is",
    )
    brief: Brief | None = None
    verify: tuple[Check, ...] = Field(default=(), description="what proves the result")

    def digest(self) -> str:
        """What an approval names as the task: command, worktree, environment names, includes, and
        the brief and the checks if there are any."""
        named: dict[str, Any] = {
            "command": list(self.command),
            "worktree": str(self.worktree),
            "env": sorted(self.env),
            "include": list(self.include),
            "history": self.history,
        }
        if self.terminal != "no":
            named["terminal"] = True
        if self.brief:
            named["brief"] = self.brief.model_dump(mode="json")
        if self.verify:
            named["verify"] = [check.model_dump(mode="json") for check in self.verify]
        return digest_of(named)


# --- facts ----------------------------------------------------------------------------------------


class Accelerator(StrEnum):
    KVM = "kvm"
    TCG = "tcg"


class LibvirtFacts(Value):
    """What one libvirt says about itself and the QEMU it would run."""

    libvirt_uri: str
    libvirt_version: str
    qemu_version: str
    qemu_binary: Path
    machine: str = Field(description="the machine type with its version, e.g. pc-q35-7.2")
    qemu_uid: int = Field(description="uid that QEMU runs as; our own with qemu:///session")
    qemu_gid: int
    security_models: tuple[str, ...] = Field(default=(), description="e.g. dac, apparmor, selinux")
    answered_in_s: float = Field(description="how long it took to ask about QEMU's capabilities")


class HostFacts(Value):
    """What the host is, as far as a launch depends on it."""

    libvirt_uri: str
    accelerator: Accelerator
    accelerator_reason: str = Field(description="what the probe saw, for doctor")
    libvirt_version: str
    qemu_version: str
    qemu_binary: Path
    machine: str = Field(description="the machine type with its version, e.g. pc-q35-7.2")
    qemu_uid: int = Field(description="uid that QEMU runs as; our own with qemu:///session")
    qemu_gid: int
    cpus: int
    cpu_model: str
    memory_bytes: int
    kernel: str


class Image(Value):
    """A verified, immutable image in the store. Paths are absolute."""

    name: str
    digest: Digest
    folder: Path
    kernel: Path
    initramfs: Path
    rootfs: Path = Field(description="raw ext4, or qcow2 if rootfs_format says so; never written")
    rootfs_format: Literal["raw", "qcow2"] = "raw"
    rootfs_bytes: int = Field(description="virtual size of the root disk")
    cmdline: str = Field(
        description="kernel command line that the image needs, e.g. root=/dev/vda rw"
    )
    cloud_init: bool = Field(
        default=False, description="the seed is read by cloud-init, not by our unit"
    )
    minimum_memory_mib: int = 256


# --- a worktree's snapshot and what comes back ----------------------------------------------------


class Snapshot(Value):
    """A worktree as it was: a commit in our own git dir, made without touching the user's."""

    git_dir: Path = Field(description="bare repository of ours that holds (or borrows) the objects")
    commit: Oid
    tree: Oid
    parent: Oid | None = Field(description="the worktree's HEAD; None if unborn or not git")
    branch: str | None = None
    object_format: Literal["sha1", "sha256"] = "sha1"
    files: int = 0
    content_bytes: int = 0
    excludes: tuple[TreePath, ...] = Field(
        default=(), description="ignore patterns that live outside the tree, for the guest"
    )
    shallow: tuple[Oid, ...] = Field(
        default=(), description="commits whose parents the guest does not get"
    )
    user_name: str | None = Field(default=None, description="who commits, by the host's git config")
    user_email: str | None = None


class TreeEntry(NamedTuple):
    """One entry of a whole tree's listing, directories included; plain, as trees are large."""

    path: bytes
    mode: int
    oid: str


class ChangeKind(StrEnum):
    ADDED = "A"
    MODIFIED = "M"
    DELETED = "D"
    TYPE = "T"
    RENAMED = "R"


class Change(Value):
    """One path that differs between base and result."""

    kind: ChangeKind
    path: TreePath
    old_path: TreePath | None = Field(default=None, description="only for renames")
    old_mode: int = Field(default=0, description="git mode as a number, 0 where there is none")
    new_mode: int = 0
    old_oid: Oid | None = None
    new_oid: Oid | None = None
    added: int | None = Field(default=None, description="lines; None for a binary file or a link")
    removed: int | None = None
    size_bytes: int = Field(default=0, description="of the new content; of the old for a deletion")
    flags: tuple[str, ...] = Field(default=(), description="reasons to look twice")


class AgentCommit(Value):
    """A commit made by the agent in the guest; text as the guest wrote it, escape to show it."""

    oid: Oid
    subject: str


class ChangeSet(Value):
    """What a task did to its worktree; `digest` is what a decision names."""

    digest: Digest
    task_digest: Digest
    image_digest: Digest
    object_format: Literal["sha1", "sha256"] = "sha1"
    base_commit: Oid
    base_tree: Oid
    result_commit: Oid
    result_tree: Oid
    changes: tuple[Change, ...] = ()
    removed_dirs: tuple[TreePath, ...] = Field(
        default=(), description="every directory of the base that the result no longer has"
    )
    agent_commits: tuple[AgentCommit, ...] = ()
    pack_bytes: int = 0
    collected_at: datetime = Field(default_factory=now)

    @staticmethod
    def digest_for(base_tree: str, result_tree: str, image_digest: str, task_digest: str) -> str:
        return digest_of(
            {
                "base_tree": base_tree,
                "result_tree": result_tree,
                "image": image_digest,
                "task": task_digest,
            }
        )


class Verdict(StrEnum):
    APPROVED = "approved"
    DROPPED = "dropped"


class Decision(Value):
    """Who decided what about which change set, and when."""

    verdict: Verdict
    digest: Digest
    who: str
    when: datetime = Field(default_factory=now)
    paths: tuple[TreePath, ...] = Field(default=(), description="empty: all of it")
    checks: Digest | None = Field(
        default=None, description="of all check results that lay there; None: there were none"
    )
    despite: tuple[str, ...] = Field(
        default=(), description="checks that had not passed, and it was approved all the same"
    )


class ResultRecord(Value):
    """The result's own small record, written by review alone."""

    version: Literal[1] = 1
    state: ResultState = ResultState.NONE
    digest: Digest | None = None
    decisions: tuple[Decision, ...] = ()
    checks: tuple[CheckRun, ...] = Field(
        default=(), description="what the checks of this very result came to: by kind, the latest"
    )
    applied_paths: tuple[TreePath, ...] = ()
    applied_at: datetime | None = None
    target: Path | None = Field(default=None, description="the folder that was written")

    @property
    def checks_digest(self) -> str | None:
        """What an approval names beside the change set; None if no check was ever run."""
        return digest_of([run.named() for run in self.checks]) if self.checks else None


# --- a run ----------------------------------------------------------------------------------------


class ExecResult(Value):
    """What a command in the guest came to."""

    exit_code: int | None = Field(description="None if it never ended by itself (timeout, lost)")
    outcome: Outcome
    detail: str = ""
    started_at: datetime | None = None
    ended_at: datetime | None = None


class Failure(Value):
    """The first cause of a failed sandbox; kept even if later steps fail as well."""

    code: str
    message: str
    hint: str | None = None
    evidence: str | None = None
    phase: str = ""
    outcome: Outcome | None = Field(
        default=None, description="what the task counts as because of it, however it ended itself"
    )
    at: datetime = Field(default_factory=now)


class Event(Value):
    """One line of events.jsonl."""

    at: datetime = Field(default_factory=now)
    phase: str
    text: str = ""
    seconds: float | None = None


class Endpoint(Value):
    """Where a guest's SSH is reached from the host: a loopback address of the sandbox's own."""

    address: str
    port: int


class BatchMark(Value):
    """Which task of which batch a sandbox was made for: written before anything of it starts."""

    batch: str
    task: str


class Equipment(Value):
    """What a task is given to work with beside its guest."""

    agent: str = Field(default="", description="the agent that the task is, by name")
    report_from: Literal["file", "stdout"] = Field(
        default="file", description="where a report is taken from that the agent did not write"
    )
    gateways: tuple[Gateway, ...] = Field(default=(), description="open to the guest; no key")
    budget: Budget = Budget()
    asks: AskRules | None = Field(default=None, description="None: it cannot ask")


class Origin(Value):
    """The sandbox that a fork was made of, as it was then; it may be gone by now."""

    id: str
    name: str
    digest: Digest | None = Field(default=None, description="of its change set, if it had one")


class SandboxRecord(Value):
    """Intent, as written to record.json before each effect; only `vmsandbox.sandbox` writes it."""

    version: Literal[1] = 1
    id: str
    name: str
    created_at: datetime = Field(default_factory=now)
    state: SandboxState = SandboxState.QUEUED
    task: Task
    batch: BatchMark | None = None
    forked_from: Origin | None = None
    scratch_of: str | None = Field(
        default=None, description="the sandbox whose result it holds for a while; then it is gone"
    )
    limits: Limits
    image_name: str
    image_digest: Digest
    libvirt_uri: str
    domain_uuid: str
    endpoint: Endpoint
    net: Net = Field(default=Net(), description="what the guest may reach")
    publish: tuple[PortMapping, ...] = Field(
        default=(), description="ports that lead to the guest's whether or not one listens there"
    )
    publishes: bool = Field(default=True, description="what listens in the guest is published")
    equipment: Equipment = Equipment()
    keep: bool = False
    cold: bool = Field(default=False, description="boot from the image, use no template")
    template: str | None = Field(default=None, description="what the guest was cloned from")
    snapshot: Snapshot | None = None
    guest_made: bool = Field(default=False, description="its guest runs and was sent its seed")
    base_in_guest: bool = Field(default=False, description="the worktree was unpacked in the guest")
    task_started: bool = Field(default=False, description="the guest has said that the task runs")
    collected: bool = Field(default=False, description="what the task did is up for review")
    exec_result: ExecResult | None = None
    failure: Failure | None = None
    timings: dict[str, float] = Field(default_factory=dict)
    cancelled: bool = False

    @property
    def outcome(self) -> Outcome | None:
        """How the task ended, all told; None while it has not."""
        if self.failure and self.failure.outcome:
            return self.failure.outcome
        return self.exec_result.outcome if self.exec_result else None

    @property
    def heard(self) -> bool:
        """Whether the agent is told where to leave a report and a status, and both are fetched."""
        return bool(self.task.brief or self.batch or self.forked_from or self.equipment.agent)


class MeasuredCost(Value):
    """What one more guest of this size took of this host; medians over `guests` of them."""

    image_digest: Digest
    cpus: int
    memory_mib: int
    start: Literal["clone", "cold"]
    workload: str | None = Field(default=None, description="what each ran first; None: idle")
    accelerator: str
    guests: int
    memory_bytes: int = Field(description="the larger of MemAvailable's drop and private memory")
    pss_bytes: int
    private_bytes: int
    disk_bytes: int
    first_command_s: float
    idle_cpu_share: float | None = Field(default=None, description="of one core")
    measured_at: datetime = Field(default_factory=now)


class LaunchPlan(Value):
    """All that a start will do, decided before anything is done; `run --plan` prints it."""

    id: str
    name: str
    task: Task
    limits: Limits
    image: Image
    host: HostFacts
    endpoint: Endpoint
    domain_uuid: str
    folder: Path
    steps: tuple[str, ...]
    domain_xml: str
    seed: dict[str, str] = Field(
        description="file in the seed → what it is for; never the secret itself"
    )
