"""Owns the verbs that carry out a task: run, resume, fork; and the entry of a detached manager."""

import codecs
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from vmsandbox.cli import granting, output, screen
from vmsandbox.cli.attending import Wish, attended
from vmsandbox.cli.output import JsonFlag, Output, SelectorArgument
from vmsandbox.errors import UsageProblem, VmsandboxError
from vmsandbox.text import printable

if TYPE_CHECKING:
    from vmsandbox.model import LaunchPlan
    from vmsandbox.sandbox import Report, Request, Rooms
    from vmsandbox.store import SandboxFolder

FAILED = 125
TIMED_OUT = 124
CANCELLED = 130
UNPROVEN = 1
"""Exit codes for tasks that did not end by themselves, as docker run,
timeout(1) and shells have them; 125 where the guest never said how it ended; 1 where it ended well
and a check of its result did not."""

ASKED = "asking the task to end; what it did is still collected (again: stop at once)"
AT_ONCE = "stopping at once; the disk is kept: vmsandbox resume collects from it"


OptionalCommand = Annotated[
    list[str] | None, typer.Argument(metavar="-- COMMAND…", help="What to run.")
]
Image = Annotated[
    str | None, typer.Option(metavar="IMAGE", help="NAME or NAME@sha256:… [default: debian-12]")
]
Name = Annotated[str | None, typer.Option(metavar="NAME", help="A name for the sandbox.")]
Worktree = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The folder to work on. [default: the current worktree]"),
]
Cpus = Annotated[int | None, typer.Option(metavar="N", help="Virtual CPUs. [default: 1]")]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="2G, 512M. [default: 1G]")]
Disk = Annotated[str | None, typer.Option(metavar="SIZE", help="40G, 512M. [default: 20G]")]
Timeout = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="End the task after 90s, 5m, 1h30m. [default: never]"),
]
Variables = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Set a variable.")
]
Include = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Bring ignored files along, too.")
]
History = Annotated[
    str | None,
    typer.Option(metavar="full|none|N", help="Commits that the guest sees. [default: full]"),
]
Keep = Annotated[bool, typer.Option("--keep", help="Leave the guest running.")]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Print the id and go on in the background.")
]
Cold = Annotated[
    bool, typer.Option("--cold", help="Boot from the image instead of cloning its template.")
]
Plan = Annotated[
    bool, typer.Option("--plan", help="Print what would be done, and the domain XML; stop.")
]
BriefFile = Annotated[
    Path | None,
    typer.Option("--brief", metavar="FILE", help="Give the command a brief: $VMSANDBOX_BRIEF."),
]
AgentName = Annotated[
    str | None,
    typer.Option("--agent", metavar="NAME", help="Run an agent: codex, aider, claude-code, yours."),
]
Verify = Annotated[
    list[str] | None,
    typer.Option(metavar="LINE", help="What proves the result: a line for the shell. Repeatable."),
]

Publish = Annotated[
    list[str] | None,
    typer.Option("--publish", "-p", metavar="HOST:GUEST", help="A port of 127.0.0.1. Repeatable."),
]
NoPublish = Annotated[
    bool, typer.Option("--no-publish", help="Publish no port that is not asked for.")
]

RUN_HELP = """\
Run a command on a worktree in a virtual machine of its own, and bring back its changes.

The worktree on the host stays as it is until you apply the result. Ctrl-C once asks the task
to end and still collects; twice stops at once. The exit code is the command's; 124 after a
timeout; 125 if vmsandbox itself failed; 1 if the command ended well and a check did not pass.

Examples:

  vmsandbox run -- ./test.sh

  vmsandbox run --timeout 20m -e CI=1 -- sh -c 'npm ci && npm test'

  vmsandbox run --detach --name fix-login -- ./agent.sh

  vmsandbox run -it -- ./agent.sh

  vmsandbox run --agent codex --brief fix-login.md --max-tokens 200000
"""


FORK_HELP = """\
Go on from where a task stopped, in a sandbox of its own: a copy of its disk, everything that
identifies the guest new.

Without COMMAND the same command runs again. The result is all that differs from the base of
SANDBOX, which stays as it is; either can be applied, and where they contradict each other the
second one is refused. The exit code is that of `run`.

Examples:

  vmsandbox fork last -- ./test.sh

  vmsandbox fork fix-login --name fix-2 --detach -- ./agent.sh again
"""


_SIZES = ("image", "cpus", "memory", "disk", "timeout", "include", "history")
"""Keys of the ``[sandbox]`` table that flags override."""


def register(app: typer.Typer) -> None:
    """Add the verbs to the program."""
    app.command(help=RUN_HELP, context_settings={"allow_interspersed_args": False})(run)
    app.command()(resume)
    app.command(help=FORK_HELP, context_settings={"allow_interspersed_args": True})(fork)
    app.command(hidden=True, name="_manage")(manage)


def run(
    command: OptionalCommand = None,
    image: Image = None,
    name: Name = None,
    worktree: Worktree = None,
    cpus: Cpus = None,
    memory: Memory = None,
    disk: Disk = None,
    timeout: Timeout = None,
    env: Variables = None,
    include: Include = None,
    history: History = None,
    keep: Keep = False,
    detach: Detach = False,
    interactive: screen.Interactive = False,
    tty: screen.Tty = False,
    cold: Cold = False,
    plan: Plan = False,
    brief: BriefFile = None,
    agent: AgentName = None,
    gateway: granting.Gateways = None,
    max_cost: granting.MaxCost = None,
    max_tokens: granting.MaxTokens = None,
    ask: granting.Ask = False,
    verify: Verify = None,
    publish: Publish = None,
    no_publish: NoPublish = False,
    net: granting.NetFlag = None,
    allow: granting.Allow = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a command on a worktree in a VM of its own; RUN_HELP tells the user how."""
    from vmsandbox.model import Budget, Check
    from vmsandbox.sandbox import Request, read_brief

    out = output.begin(as_json)
    request = Request(
        command=tuple(command or ()),
        worktree=(worktree or Path()).absolute(),
        name=name,
        env=environment(env or []),
        keep=keep,
        cold=cold,
        terminal=screen.wanted(interactive, tty, detach=detach, as_json=as_json),
        brief=read_brief(brief) if brief else None,
        agent=agent,
        gateways=tuple(gateway or ()),
        budget=Budget(max_cost=max_cost or None, max_tokens=max_tokens),
        ask=ask,
        verify=tuple(Check(command=("/bin/sh", "-c", line)) for line in verify or ()),
        **_published(publish or [], no_publish=no_publish),
        net={"mode": net, "allow": tuple(allow or ())},
        overrides=dict(
            zip(_SIZES, (image, cpus, memory, disk, timeout, include or None, history), strict=True)
        ),
    )
    _begin(out, request, plan=plan, detach=detach)


def _begin(out: Output, request: "Request", *, plan: bool, detach: bool) -> None:
    from vmsandbox.sandbox import Rooms, create_sandbox, propose

    person = screen.terminal_here() if request.terminal == "watched" and not plan else None
    with Rooms.open(note=out.note) as rooms:
        if plan:
            _show_plan(out, propose(rooms, request))
            return
        folder = create_sandbox(rooms, request)
        if detach:
            _detach(out, folder)
        elif person:
            if report := screen.begin_and_stay(out, rooms, folder, person):
                conclude(out, report)
        else:
            _carry_out(out, rooms, folder)


def resume(
    selector: SelectorArgument,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the guest running, also if its result is refused.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="In the background.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Take up a sandbox again whose manager, guest or host went away, and bring it to its end.

    Example: vmsandbox resume last
    """
    from vmsandbox.sandbox import Rooms, keep_guest

    out = output.begin(as_json)
    with Rooms.open(note=out.note) as rooms:
        folder = rooms.store.resolve(selector)
        if keep:
            keep_guest(rooms, folder)
        if detach:
            _detach(out, folder)
            return
        _carry_out(out, rooms, folder)


def fork(
    selector: SelectorArgument,
    command: OptionalCommand = None,
    name: Name = None,
    keep: Keep = False,
    detach: Detach = False,
    as_json: JsonFlag = False,
) -> None:
    """Go on from a stopped sandbox's disk; FORK_HELP tells the user how."""
    from vmsandbox.sandbox import Rooms, fork_sandbox

    out = output.begin(as_json)
    with Rooms.open(note=out.note) as rooms:
        source = rooms.store.resolve(selector)
        folder = fork_sandbox(rooms, source, command=command or (), name=name, keep=keep)
        if detach:
            _detach(out, folder)
            return
        _carry_out(out, rooms, folder)


def manage(id_: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Carry out a sandbox in the background (started by --detach)."""
    from vmsandbox.sandbox import Rooms

    out = output.begin(False)
    with Rooms.open(note=out.note) as rooms:
        _carry_out(out, rooms, rooms.store.resolve(id_), quiet=True)


def environment(pairs: list[str]) -> dict[str, str]:
    """``K=V`` sets; ``K`` alone takes the value from our own environment, as docker run does."""
    import os

    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key.isidentifier() or not key.isascii():
            raise UsageProblem("env_invalid", f"not a variable: {pair!r}", hint="--env NAME=VALUE")
        if equals:
            values[key] = value
        elif key in os.environ:
            values[key] = os.environ[key]
    return values


def _published(publish: list[str], *, no_publish: bool) -> dict[str, Any]:
    """What a request says about ports."""
    from vmsandbox.forwards import parse_mapping

    try:
        asked = tuple(parse_mapping(text) for text in publish)
    except ValueError as error:
        raise UsageProblem("publish_invalid", str(error), hint="--publish 8080:3000") from error
    return {"publish": asked, "publishes": False if no_publish else None}


def _show_plan(out: Output, plan: "LaunchPlan") -> None:
    out.result(plan.model_dump(mode="json"), "\n".join([*plan.steps, "", plan.domain_xml]))


def _detach(out: Output, folder: "SandboxFolder") -> None:
    from vmsandbox.sandbox import spawn_manager

    spawn_manager(folder)
    out.result({"id": folder.id}, folder.id)


def _carry_out(
    out: Output, rooms: "Rooms", folder: "SandboxFolder", *, quiet: bool = False
) -> None:
    """Bring a sandbox to its end while signals are listened to; exits with the task's code."""
    from vmsandbox.sandbox import Manager

    on_screen = folder.read_record().task.terminal != "no"  # its bytes are for `attach`
    listener = Printer(out, quiet=quiet or on_screen)
    with Manager.of(rooms, folder, listener) as manager:
        wishes = (Wish(ASKED, manager.ask_to_end), Wish(AT_ONCE, manager.end_now))
        report = attended(out, manager.carry_out, wishes)
    listener.close()
    out.result(report.model_dump(mode="json"), None)
    conclude(out, report, quiet=quiet)


def conclude(out: Output, report: "Report", *, quiet: bool = False) -> NoReturn:
    """Say what a life came to, and exit with its code."""
    if not out.as_json and not quiet:
        _say(out, report)
    code = exit_code(report.outcome, report.exit_code)
    raise typer.Exit(code or (UNPROVEN if report.result and report.result.unproven else 0))


def exit_code(outcome: str, code: int | None) -> int:
    """The task's own exit code, or the customary one where it did not end by itself, or not well
    whatever it says of itself."""
    if outcome == "timeout":
        return TIMED_OUT
    if outcome == "cancelled":
        return CANCELLED
    if code == 0 and outcome != "completed":
        return UNPROVEN
    return FAILED if code is None else code


def _say(out: Output, report: "Report") -> None:
    changes = f"{report.changes} change(s)" if report.changes else "no changes"
    code, why = output.code_and_why(report.exit_code, report.detail)
    out.note(f"{report.id}: {report.outcome}{code}, {changes}")
    if why:
        out.note(why)
    if report.usage:
        out.note(f"used: {report.usage}")
    if report.result and (proof := report.result.proof()):
        out.note(proof)
    for line in _shut_out(report):
        out.note(line)
    if report.changes:
        out.note(f"next: vmsandbox review {report.id}")


def _shut_out(report: "Report") -> Iterator[str]:
    """What a task wanted to reach and could not, which its own programs rarely tell."""
    from vmsandbox.sandbox.reaching import net_status
    from vmsandbox.store import Store

    try:
        status = net_status(Store().resolve(report.id))
    except VmsandboxError:  # deleted meanwhile
        return
    if status.summary.denied:
        yield f"{status.summary.denied} request(s) denied: vmsandbox net {report.id}"
    elif status.mode == "none" and report.outcome == "failed":
        yield "it could reach no network; if it has to: vmsandbox run --allow RULE, or --net public"


class Printer:
    """Prints a life as it goes on: output where it belongs, phases on stderr."""

    def __init__(self, out: Output, *, quiet: bool, to_stderr: bool = False) -> None:
        self._out = out
        self._quiet = quiet
        self._to_stderr = to_stderr or out.as_json
        self._decoders: dict[str, Any] = {}
        self._status: Any = None

    def phase(self, name: str) -> None:
        if self._quiet or self._out.as_json:
            return
        self.close()
        if name == "run":
            return
        if sys.stderr.isatty():
            self._status = self._out.console(stderr=True).status(f"{name} …")
            self._status.start()
        else:
            self._out.note(f"{name} …")

    def note(self, text: str) -> None:
        self._out.note(text)

    def output(self, stream: str, data: bytes) -> None:
        if self._quiet:
            return
        # With --json stdout holds the one object, so what the task says goes to stderr.
        target = sys.stdout if stream == "stdout" and not self._to_stderr else sys.stderr
        if target.isatty():
            make = codecs.getincrementaldecoder("utf-8")
            decoder = self._decoders.setdefault(stream, make("surrogateescape"))
            target.write(printable(decoder.decode(data)).replace("\\x0d\n", "\n"))
        else:
            target.buffer.write(data)
        target.flush()

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
