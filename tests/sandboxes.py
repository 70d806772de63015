"""State folders for tests, and the command line as a person would call it on them."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.people import ROOT, Person

PROGRAM = str(ROOT / ".venv/bin/vmsandbox")
_EVIDENCE = ("*.log", "*.json", "*.jsonl", "*.xml", "ssh_config")
_EVIDENCE_MAX_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Answer:
    """What a call of the command line came to."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """`data` of the JSON object on stdout."""
        return json.loads(self.out)["data"]

    @property
    def error(self) -> Any:
        """`error` of the JSON object on stdout."""
        return json.loads(self.out)["error"]


@dataclass(frozen=True)
class State:
    """A state folder of its own, and the command line that uses it."""

    path: Path
    person: Person | None = None

    def argv(self, *arguments: str | Path) -> list[str]:
        program = self.person.program if self.person else (PROGRAM,)
        argv = [*program, *map(str, arguments)]
        return self.person.as_them(argv) if self.person else argv

    def environment(self) -> dict[str, str]:
        inherited = self.person.environment() if self.person else dict(os.environ)
        return inherited | {"VMSANDBOX_HOME": str(self.path)}

    def start(self, *arguments: str | Path, cwd: Path | None = None) -> "subprocess.Popen[str]":
        """Start a verb and return at once; the caller waits for it."""
        return subprocess.Popen(
            self.argv(*arguments),
            cwd=cwd,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str | Path, cwd: Path | None = None) -> Answer:
        """Call a verb, wait for its end, and return its answer whatever that is."""
        with self.start(*arguments, cwd=cwd) as process:
            out, err = process.communicate()
        return Answer(process.returncode, out, err)

    def ok(self, *arguments: str | Path, cwd: Path | None = None) -> Answer:
        """As calling, for a verb that must succeed."""
        answer = self(*arguments, cwd=cwd)
        assert answer.code == 0, f"vmsandbox {arguments}: {answer.code}\n{answer.out}{answer.err}"
        return answer

    def ids(self) -> list[str]:
        """Sandboxes that the folder holds."""
        folder = self.path / "sandboxes"
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def short_folder() -> Path:
    """A new folder whose path is short (socket names may have 107 bytes) and open to the user that
    QEMU runs as."""
    base = os.environ.get("VMSANDBOX_TEST_HOME")
    if base:
        Path(base).mkdir(mode=0o711, parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="vms-", dir=base))
    path.chmod(0o711)
    return path


@contextlib.contextmanager
def state_folder(
    images: Path, person: Person | None = None, shared: Path | None = None
) -> Iterator[State]:
    """A state folder that borrows the images of `images` and is gone afterwards.

    What costs a boot to find or make (templates, facts about the host) is kept in `shared`.
    """
    path = short_folder()
    (path / "images").symlink_to(images)
    if shared:
        for name in ("templates", "cache"):
            (shared / name).mkdir(exist_ok=True)
            (path / name).symlink_to(shared / name)
    if person:
        os.chown(path, person.uid, person.gid)
    state = State(path, person)
    try:
        yield state
        free(state)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def free(state: State) -> None:
    """Delete every sandbox of the folder by the ordinary verb; nothing may stay."""
    if state.ids():
        answer = state("delete", "--all", "--force")
        assert not state.ids(), f"delete left {state.ids()}: {answer.out}{answer.err}"


def keep_evidence(state: State, name: str) -> Path | None:
    """Copy what explains a failure to where it outlives the state folder; None if there is none."""
    target = Path(
        os.environ.get("VMSANDBOX_TEST_EVIDENCE")
        or f"{tempfile.gettempdir()}/vmsandbox-evidence-{os.geteuid()}"
    ).joinpath("".join(c if c.isalnum() else "-" for c in name))
    shutil.rmtree(target, ignore_errors=True)
    for pattern in _EVIDENCE:
        for file in sorted((state.path / "sandboxes").glob(f"*/{pattern}")):
            copy = target / file.parent.name / file.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as source:
                source.seek(-min(_EVIDENCE_MAX_BYTES, file.stat().st_size), os.SEEK_END)
                copy.write_bytes(source.read())
    return target if target.is_dir() else None
