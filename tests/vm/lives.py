"""What tests of whole lives share: patience, what a verb's JSON says, and what a sandbox leaves."""

import json
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import psutil

from tests.sandboxes import Answer, State

PATIENCE_S = 300.0
"""A guest without KVM boots in ten seconds where the machine is idle, in a hundred where not."""


def wait_for(
    what: str, happened: Callable[[], object], process: "subprocess.Popen[Any] | None" = None
) -> None:
    """Wait until it happened; fail if that takes too long, or if `process` ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert process is None or process.poll() is None, f"it ended before {what}"
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.2)


def read_until(
    process: "subprocess.Popen[str]", name: Literal["stdout", "stderr"], text: str
) -> str:
    """What comes on a stream up to and with the line that holds `text`."""
    stream: IO[str] = getattr(process, name)
    lines = ""
    for line in stream:
        lines += line
        if text in line:
            return lines
    raise AssertionError(f"it ended before {text!r}: {lines}{process.communicate()}")


def fed(state: State, stdin: str | bytes, *arguments: str | Path) -> Answer:
    """Call a verb with something on its stdin."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        state.argv(*arguments), env=state.environment(), input=data, capture_output=True
    )
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


def status_of(state: State, selector: str) -> Any:
    """What `status` says about one sandbox."""
    (found,) = state.ok("status", "--json", selector).data["sandboxes"]
    return found


def changes_of(state: State, selector: str) -> dict[str, Any]:
    """The changes that `review` shows, by path (as git quotes it)."""
    changes = state.ok("review", "--json", selector).data["changes"]
    return {change["path"]: change for change in changes}


def kinds_of(state: State, selector: str) -> dict[str, str]:
    """Path and letter of each change."""
    return {path: change["kind"] for path, change in changes_of(state, selector).items()}


def assert_refused(answer: Answer, code: str, exit_code: int, *, with_json: bool = True) -> str:
    """It was refused with this stable code, this exit code, and a hint; returns the message."""
    assert answer.code == exit_code, f"{answer.code}: {answer.out}{answer.err}"
    assert f"[{code}]" in answer.err, answer.err
    assert "hint: " in answer.err
    assert "Traceback" not in answer.err
    if with_json:
        assert answer.error["code"] == code
        assert answer.error["hint"]
    return answer.err


class Trace(NamedTuple):
    """Where a sandbox would be seen if anything of it were left."""

    folder: Path
    domain_uuid: str
    address: tuple[str, int]

    @classmethod
    def of(cls, state: State, id_: str) -> "Trace":
        folder = state.path / "sandboxes" / id_
        record = json.loads((folder / "record.json").read_text())
        address = record["endpoint"]["address"], record["endpoint"]["port"]
        return cls(folder, record["domain_uuid"], address)

    def guest(self) -> list[str]:
        """What runs for it: its domain (for root's libvirt), its processes, its port."""
        from vmsandbox.host import daemons
        from vmsandbox.hypervisor import Hypervisor

        found = []
        with Hypervisor.connect(daemons.default_uri()) as hypervisor:
            if hypervisor.observe(self.domain_uuid).alive:
                found.append("domain")
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) in " ".join(process.info["cmdline"] or ()):
                found.append(f"process {process.pid}")
        with socket.socket() as probe:
            if probe.connect_ex(self.address) == 0:
                found.append(f"port {self.address}")
        return found

    def everything(self) -> list[str]:
        """As `guest`, and its files."""
        return self.guest() + ([str(self.folder)] if self.folder.exists() else [])
