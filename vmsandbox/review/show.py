"""Owns what a reviewer is told: outcome, changes, risks, conflicts, evidence, next commands."""

import contextlib
from pathlib import Path

from pydantic import Field

from vmsandbox import approvals, spending
from vmsandbox.asking import Approval
from vmsandbox.egress import Summary, summary_of
from vmsandbox.errors import NegativeAnswer, UsageProblem
from vmsandbox.model import (
    Brief,
    ChangeSet,
    Digest,
    ExecResult,
    Failure,
    Limits,
    Opinion,
    Origin,
    Outcome,
    ResultRecord,
    ResultState,
    SandboxRecord,
    Value,
)
from vmsandbox.provider import Usage
from vmsandbox.reach import NetMode
from vmsandbox.review.applying import conflicts
from vmsandbox.review.checks import unproven
from vmsandbox.review.decisions import short, stale
from vmsandbox.review.opinions import disagreements, opinions
from vmsandbox.review.record import read
from vmsandbox.review.told import told
from vmsandbox.store import SandboxFolder
from vmsandbox.target import Conflict


class Review(Value):
    """All that a decision rests on. `problems` are sentences for people."""

    id: str
    name: str
    live: bool
    worktree: Path
    command: tuple[str, ...]
    exec_result: ExecResult | None
    failure: Failure | None
    limits: Limits
    image_name: str
    image_digest: Digest
    result: ResultRecord
    change_set: ChangeSet | None
    conflicts: tuple[Conflict, ...] = ()
    problems: tuple[str, ...] = ()
    brief: Brief | None = None
    forked_from: Origin | None = None
    agent: str = Field(default="", description="the agent that the task was, by name")
    usage: Usage = Field(default=Usage(), description="of its gateways")
    approvals: tuple[Approval, ...] = Field(default=(), description="what it asked a person")
    agent_status: str = Field(default="", description="the agent's own words, made safe to show")
    report: str = Field(default="", description="likewise")
    unproven: tuple[str, ...] = Field(default=(), description="checks that did not pass, by name")
    opinions: tuple[Opinion, ...] = Field(default=(), description="of reviewers in other guests")
    disagreements: tuple[str, ...] = ()
    net: NetMode = NetMode.NONE
    egress: Summary | None = Field(default=None, description="None: it had no way out")
    evidence: dict[str, Path]
    next: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome | None:
        """How the task ended, all told."""
        if self.failure and self.failure.outcome:
            return self.failure.outcome
        return self.exec_result.outcome if self.exec_result else None


def show(folder: SandboxFolder, *, live: bool, target: Path | None = None) -> Review:
    """Gather the review of a sandbox; nothing is written, no guest is asked.

    Raises HostProblem ``record_missing`` or ``record_broken``.
    """
    record = folder.read_record()
    change_set, result = None, ResultRecord()
    with contextlib.suppress(NegativeAnswer):  # not collected: the rest is worth showing as well
        change_set, result = read(folder)
    failed = unproven(record.task.verify, result) if change_set else ()
    problems = _problems(folder, change_set, result, live)
    found: tuple[Conflict, ...] = ()
    if change_set is not None and result.state is not ResultState.DROPPED:
        try:
            found = conflicts(folder, target or record.task.worktree)
        except UsageProblem as problem:
            problems.append(problem.message)
    said, others = told(folder), opinions(folder)
    return Review(
        id=record.id,
        name=record.name,
        live=live,
        worktree=record.task.worktree,
        command=record.task.command,
        exec_result=record.exec_result,
        failure=record.failure,
        limits=record.limits,
        image_name=record.image_name,
        image_digest=record.image_digest,
        result=result,
        change_set=change_set,
        conflicts=found,
        problems=tuple(problems),
        brief=record.task.brief,
        forked_from=record.forked_from,
        agent=record.equipment.agent,
        usage=spending.used(folder),
        approvals=approvals.questions(folder),
        agent_status=said.status,
        report=said.report,
        unproven=failed,
        opinions=others,
        disagreements=disagreements(record.outcome, result, others),
        net=record.net.mode,
        egress=summary_of(folder.egress_log) if record.net.mode is not NetMode.NONE else None,
        evidence=_evidence(folder),
        next=_next(record, result, change_set, live, proven=not failed),
    )


def _problems(
    folder: SandboxFolder, change_set: ChangeSet | None, result: ResultRecord, live: bool
) -> list[str]:
    problems = []
    if live:
        problems.append("the task still runs: the result may change, apply and drop are refused")
    if change_set is None:
        problems.append("no result was collected")
    elif (old := stale(change_set, result)) is not None:
        same = old.digest == change_set.digest
        what = "other check results" if same else old.digest
        problems.append(f"the approval by {old.who} is stale: it names {what}")
    if folder.ledger.exists():
        problems.append("an apply was cut short; the next apply finishes it")
    return problems


def _evidence(folder: SandboxFolder) -> dict[str, Path]:
    files = {
        "stdout": folder.stdout,
        "stderr": folder.stderr,
        "console": folder.console,
        "former_console": folder.former_console,
        "events": folder.events,
        "report": folder.report,
        "change_set": folder.change_set,
        "result_git": folder.result_git,
    }
    return {name: path for name, path in files.items() if path.exists()}


def _next(
    record: SandboxRecord,
    result: ResultRecord,
    change_set: ChangeSet | None,
    live: bool,
    *,
    proven: bool,
) -> tuple[str, ...]:
    if live:
        return (f"vmsandbox logs -f {record.name}", f"vmsandbox stop {record.name}")
    if change_set is None:
        return (f"vmsandbox logs {record.name}", f"vmsandbox delete {record.name}")
    if result.state in (ResultState.APPLIED, ResultState.DROPPED, ResultState.NONE):
        return (f"vmsandbox delete {record.name}",)
    drop = f"vmsandbox drop {record.name}"
    if result.state is ResultState.APPROVED:
        return (f"vmsandbox apply {record.name}", drop)
    named = short(change_set, result)
    return (
        f"vmsandbox review {record.name} --diff",
        *(() if proven else (f"vmsandbox verify {record.name}",)),
        f"vmsandbox approve {record.name} --digest {named}"
        + ("" if proven else " --despite-checks"),
        f"vmsandbox apply {record.name}",
        drop,
    )
