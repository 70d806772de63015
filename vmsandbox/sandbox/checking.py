"""Owns how checks are run in a guest: each as a task of the agent's user, with bounds.

Where the guest is the author's, what checks write is kept apart: the worktree is covered by an
overlay in a mount namespace of each check, so that neither a later collection nor a person in the
guest ever meets it. What a guest says is its own word; it is bounded and made safe here.
"""

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vmsandbox import review
from vmsandbox.errors import GuestProblem
from vmsandbox.guest import Capture, Guest, Interrupted, TaskSpec
from vmsandbox.guest.task import as_user, user_environment
from vmsandbox.model import (
    Check,
    CheckResult,
    CheckRun,
    ExecResult,
    HttpCheck,
    Outcome,
    SandboxRecord,
)
from vmsandbox.store import SandboxFolder
from vmsandbox.text import printable

_AGENT = "agent"
_GRACE_S = 5.0
_CAPTURE_BYTES = 16 * 1024 * 1024
_TAIL_BYTES = 4096
_BODY_BYTES = 1024 * 1024
_ASKS_PER_S = 2
_REFUSED = 7
"""Exit code of curl(1): failed to connect to host."""

_PATIENCE_S = 5.0
"""For a server that nobody starts here: perhaps it is just coming up."""
_APART = "/var/lib/vmsandbox-checks"
_GONE = ("connection_lost", "guest_gone")

# Namespace and overlay end with the last process in them. The upper layer is shared by the checks
# of one run, so that the second finds what the first has built.
_KEEP_APART = f"""\
top=$1 kept={_APART}/$2
shift 2
mkdir -p "$kept/upper" "$kept/work" && cd "$top" &&
    chown --reference=. "$kept/upper" && chmod --reference=. "$kept/upper" &&
    layers="lowerdir=.,upperdir=$kept/upper,workdir=$kept/work" &&
    mount -t overlay -o "index=off,$layers" checks "$top" &&
    cd "$top" || {{
    echo 'vmsandbox: what checks write cannot be kept apart in this guest' >&2
    exit 125
}}
exec "$@"
"""
_CLEAR = f'rm -rf "{_APART}/$1"'
_END = """\
for cgroup in /sys/fs/cgroup/vmsandbox.task.check-*/; do
    echo 1 > "$cgroup/cgroup.kill"
done
looks=0
for task in /run/vmsandbox/tasks/check-*/; do
    while [ ! -e "$task/report" ] && [ $((looks += 1)) -le 100 ]; do sleep 0.05; done
done
"""

# First the status, then the body, cut.
_ASK = f"""\
url=$1 asks=$2 server=
shift 2
body=$(mktemp) || exit 125
trap 'rm -f "$body" "$body.err"' EXIT
if [ $# -gt 0 ]; then
    curl -s -o /dev/null --noproxy '*' --globoff --max-time 5 "$url"
    [ $? != {_REFUSED} ] || {{ setsid "$@" >&2 & server=$!; }}
fi
while :; do
    status=$(curl -sS -o "$body" -w '%{{http_code}}' --noproxy '*' --globoff "$url" 2> "$body.err")
    code=$?
    [ $code = {_REFUSED} ] && [ "$asks" -gt 0 ] || break
    asks=$((asks - 1))
    sleep 0.5
done
[ -z "$server" ] || kill -- "-$server" 2> /dev/null
cat "$body.err" >&2
echo "$status"
head -c {_BODY_BYTES} "$body"
exit $code
"""


def due(folder: SandboxFolder, record: SandboxRecord) -> bool:
    """Whether checks were asked for that were never run in the guest of the task, on what lies
    here."""
    change_set, result = review.latest(folder)
    ran = any(not run.fresh for run in result.checks)
    return bool(record.task.verify) and change_set is not None and not ran


def prove(
    guest: Guest, folder: SandboxFolder, check_ending: Callable[[], None], *, again: bool
) -> None:
    """Run the checks in the author's guest on what was just collected there, and write down what
    they came to.

    Raises :class:`Interrupted` only if they were run `again`: then what is known stays.
    """
    record = folder.read_record()
    change_set, _ = review.read(folder)
    try:
        check_ending()
        results = run_checks(guest, folder, record, apart=True)
    except Interrupted:
        if again:
            raise
        results = tuple(_not_run(check, "stopped") for check in record.task.verify)
    review.record_run(folder, change_set.digest, CheckRun(fresh=False, results=results))


def run_checks(
    guest: Guest, folder: SandboxFolder, record: SandboxRecord, *, apart: bool
) -> tuple[CheckResult, ...]:
    """What the checks of a task come to in a guest that holds its result; `apart` keeps what they
    write out of the worktree.

    `folder` takes what they say, for a while. Raises :class:`Interrupted`, and HostProblem if the
    host cannot take it.
    """
    runner = _Runner(guest, folder, record, apart=apart)
    try:
        return tuple(runner.results())
    finally:
        if apart:
            with contextlib.suppress(GuestProblem, Interrupted):
                guest.run(["/bin/sh", "-c", _CLEAR, "clear", runner.id], timeout_s=30.0)


def end_checks(guest: Guest) -> None:
    """End what a run of the checks that was cut short left in a guest that goes on."""
    with contextlib.suppress(GuestProblem):
        guest.run(["/bin/sh", "-c", _END], timeout_s=30.0)


def _not_run(check: Check, why: str) -> CheckResult:
    return CheckResult(name=check.title, ok=False, exit_code=None, detail=f"not run: {why}")


class _Runner:
    """One run of the checks."""

    def __init__(
        self, guest: Guest, folder: SandboxFolder, record: SandboxRecord, *, apart: bool
    ) -> None:
        self.id = secrets.token_hex(4)
        self._guest = guest
        self._folder = folder
        self._record = record
        self._apart = apart

    def results(self) -> Iterator[CheckResult]:
        gone = ""
        for number, check in enumerate(self._record.task.verify):
            if gone:
                yield _not_run(check, gone)
                continue
            try:
                ended, result = self._alone(number, check)
            except GuestProblem as problem:
                gone = problem.message if problem.code in _GONE else ""
                yield _not_run(check, problem.message)
            else:
                gone = ended.detail if ended.outcome is Outcome.CONNECTION_LOST else ""
                yield result

    def _alone(self, number: int, check: Check) -> tuple[ExecResult, CheckResult]:
        """A check may still run whose manager was killed; nobody waits for it any more."""
        try:
            return self._run(number, check)
        except GuestProblem as problem:
            if problem.code != "task_running":
                raise
        end_checks(self._guest)
        return self._run(number, check)

    def _run(self, number: int, check: Check) -> tuple[ExecResult, CheckResult]:
        tail = _Tail()
        with tempfile.TemporaryDirectory(prefix="check-", dir=self._folder.path) as kept:
            out, err = Path(kept, "out"), Path(kept, "err")
            started = time.monotonic()
            with Capture(out, err, limit_bytes=_CAPTURE_BYTES, on_output=tail.add) as capture:
                ended = self._guest.run_task(self._spec(number, check), capture)
            seconds = round(time.monotonic() - started, 3)
            why = ended.detail if ended.outcome is not Outcome.COMPLETED else ""
            if check.http:
                with out.open("rb") as file:
                    why = _wrong_with(check.http, ended, file.read(_BODY_BYTES + 16))
        return ended, CheckResult(
            name=printable(check.title, newlines=False),
            ok=ended.outcome is Outcome.COMPLETED and not why,
            exit_code=ended.exit_code,
            detail=printable(why, newlines=False),
            tail=tail.text(),
            seconds=seconds,
        )

    def _spec(self, number: int, check: Check) -> TaskSpec:
        record = self._record
        command = asking(check, check.http) if check.http else check.command
        named = {"VMSANDBOX_ID": record.id, "VMSANDBOX_NAME": record.name}
        spec = TaskSpec(
            id=f"check-{self.id}-{number}",
            command=command,
            folder=record.task.worktree,
            env={**record.task.env, **named},
            timeout_s=check.timeout_s,
            grace_s=_GRACE_S,
            capture_bytes=_CAPTURE_BYTES,
        )
        return self._kept_apart(spec) if self._apart else spec

    def _kept_apart(self, spec: TaskSpec) -> TaskSpec:
        """As root into the namespace, and there as the agent's user as ever."""
        into = ("/usr/bin/unshare", "--mount", "--", "/bin/sh", "-c", _KEEP_APART, "check")
        where = (str(spec.folder), self.id)
        command = (*into, *where, *as_user(_AGENT, _AGENT), *spec.command)
        env = {**user_environment(_AGENT), **spec.env}
        root = {"user": "root", "group": "root"}
        return spec.model_copy(update={**root, "command": command, "env": env})


def asking(check: Check, http: HttpCheck) -> tuple[str, ...]:
    """The command that asks a server, or starts one to ask it; it prints a line with the status of
    the answer, then the body, and its exit code is curl's."""
    patience_s = check.timeout_s if check.serve else min(_PATIENCE_S, check.timeout_s)
    url = f"http://localhost:{http.port}{http.path}"
    asks = str(int(patience_s * _ASKS_PER_S))
    return ("/bin/sh", "-c", _ASK, "ask", url, asks, *check.serve)


def _wrong_with(http: HttpCheck, ended: ExecResult, answer: bytes) -> str:
    if ended.exit_code == _REFUSED:
        return f"nothing listens on port {http.port}"
    return wrong_answer(http, answer) if ended.outcome is Outcome.COMPLETED else ended.detail


def wrong_answer(http: HttpCheck, answer: bytes) -> str:
    """What is wrong with an answer (a line with the status, then the body), or an empty text."""
    status, _, body = answer.partition(b"\n")
    if status != str(http.status).encode():
        return f"status {status[:20].decode('ascii', 'backslashreplace')}, not {http.status}"
    if lacking := [text for text in http.contains if text.encode() not in body]:
        return f"the answer does not contain {lacking[0]!r}"
    if present := [text for text in http.not_contains if text.encode() in body]:
        return f"the answer contains {present[0]!r}"
    return ""


class _Tail:
    """The end of what a check said, both streams as they came."""

    def __init__(self) -> None:
        self._kept = b""
        self._cut = False

    def add(self, stream: str, data: bytes) -> None:
        whole = self._kept + data
        self._cut = self._cut or len(whole) > _TAIL_BYTES
        self._kept = whole[-_TAIL_BYTES:]

    def text(self) -> str:
        """Safe to show; what was cut off is told."""
        return ("[…]\n" if self._cut else "") + printable(self._kept)
