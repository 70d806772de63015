"""The whole way, on real input and through the command line only.

Two linked worktrees of this repository, two tasks at once in two VMs, each on port 3000 of a
machine of its own; a review of both; one is approved and applied, the other dropped; everything is
freed. Ends with 0 only if each claim was seen to hold.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / ".venv" / "bin" / "vmsandbox"
PATIENCE_S = 300.0


class Broken(Exception):
    """A claim of the demo did not hold."""


class Story:
    """Tells on stdout what is done, with the time since the beginning."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def chapter(self, title: str) -> None:
        print(f"\n=== {title}  [{time.monotonic() - self.began:.1f} s]", flush=True)

    def tell(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def claim(self, holds: bool, text: str) -> None:
        if not holds:
            raise Broken(text)
        self.tell(f"✓ {text}")

    def call(self, *arguments: str, expect: int = 0) -> str:
        """Show a call of vmsandbox and its answer; Broken if the exit code is another."""
        self.tell(f"$ vmsandbox {shlex.join(arguments)}")
        done = subprocess.run(
            [PROGRAM, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        for line in (done.stdout + (done.stderr if done.returncode else "")).splitlines():
            print(f"    {line}".rstrip(), flush=True)
        if done.returncode != expect:
            raise Broken(f"vmsandbox {arguments[0]} ended with {done.returncode}, not {expect}")
        return done.stdout


def ask(*arguments: str) -> Any:
    """The `data` of a verb's JSON answer."""
    done = subprocess.run(
        [PROGRAM, *arguments, "--json"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise Broken(f"vmsandbox {arguments[0]}: {done.stderr.strip()}")
    return json.loads(done.stdout)["data"]


def checksum(folder: Path) -> str:
    """One checksum over every name, mode, link and byte of a worktree."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        whole.update(b"%s\0%o\0" % (os.fsencode(path.relative_to(folder)), path.lstat().st_mode))
        if path.is_symlink():
            whole.update(os.fsencode(path.readlink()))
        elif path.is_file():
            whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16]


def git(*arguments: str) -> None:
    subprocess.run(["git", "-C", ROOT, *arguments], check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def two_worktrees(names: Sequence[str]) -> Iterator[list[Path]]:
    """Linked worktrees of this repository in a temporary folder; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="vmsandbox-demo-"))
    worktrees = [folder / name for name in names]
    try:
        for worktree in worktrees:
            git("worktree", "add", "--quiet", "--detach", str(worktree), "HEAD")
        yield worktrees
    finally:
        shutil.rmtree(folder)
        git("worktree", "prune")


def start_task(worktree: Path, log: BinaryIO) -> "subprocess.Popen[bytes]":
    """Begin `run` on a worktree, in a session of its own so that Ctrl-C meets the demo alone."""
    name = worktree.name
    options = ["--name", name, "--worktree", str(worktree), "--timeout", "10m"]
    return subprocess.Popen(
        [str(PROGRAM), "run", *options, "--", "python3", "demo/task.py", name],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextlib.contextmanager
def two_tasks(worktrees: Sequence[Path]) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Run one task on each worktree, both at once; whatever happens, no sandbox of theirs stays."""
    tasks: list[subprocess.Popen[bytes]] = []
    try:
        for worktree in worktrees:
            with (worktree.parent / f"{worktree.name}.log").open("wb") as log:
                tasks.append(start_task(worktree, log))
        yield tasks
    except Broken:
        for worktree in worktrees:
            print(f"\n--- what {worktree.name} said ---", file=sys.stderr)
            print((worktree.parent / f"{worktree.name}.log").read_text(), file=sys.stderr)
        raise
    finally:
        for task in tasks:
            if task.poll() is None:
                task.terminate()
            task.wait()
        names = [worktree.name for worktree in worktrees]
        left = [name for name in names if name in sandbox_names()]
        if left:
            subprocess.run([PROGRAM, "delete", "--force", *left], stdin=subprocess.DEVNULL)


def sandbox_names() -> set[str]:
    return {sandbox["name"] for sandbox in ask("status")["sandboxes"]}


def wait_for(what: str, happened: Callable[[], bool], tasks: Sequence[Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if any(task.poll() is not None for task in tasks):
            raise Broken(f"a task ended before {what}")
        if time.monotonic() > deadline:
            raise Broken(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(2)


def listens(name: str) -> bool:
    answer = subprocess.run(
        [PROGRAM, "logs", name, "--stdout"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return "listens on port 3000" in answer.stdout


def work(story: Story, worktrees: Sequence[Path]) -> None:
    names = [worktree.name for worktree in worktrees]
    before = [checksum(worktree) for worktree in worktrees]
    for worktree, value in zip(worktrees, before, strict=True):
        story.tell(f"{worktree}  checksum {value}")

    story.chapter("Two tasks at once, each in a VM of its own")
    for worktree in worktrees:
        story.tell(
            f"$ vmsandbox run --name {worktree.name} --worktree {worktree}"
            f" -- python3 demo/task.py {worktree.name} &"
        )
    with two_tasks(worktrees) as tasks:
        wait_for("both listen on port 3000", lambda: all(listens(name) for name in names), tasks)
        story.claim(True, "both listen on port 3000 at the same time")
        for name in names:
            story.call("logs", name, "--stdout")
        story.call("status")
        for name in names:
            story.call("exec", name, "--", "touch", "/tmp/go")
        codes = [task.wait(timeout=PATIENCE_S) for task in tasks]
        story.claim(codes == [0, 0], f"both tasks ended with exit code 0 (seen: {codes})")
        story.claim(
            [checksum(w) for w in worktrees] == before, "no worktree on the host has changed"
        )
        decide(story, worktrees, before)
        free(story, names)


def decide(story: Story, worktrees: Sequence[Path], before: Sequence[str]) -> None:
    (first, second), names = worktrees, [worktree.name for worktree in worktrees]
    story.chapter("Review both")
    for name in names:
        story.call("review", name)

    story.chapter(f"Approve and apply {names[0]}, drop {names[1]}")
    story.call("approve", names[0])
    story.claim(checksum(first) == before[0], "an approval alone changes nothing")
    story.call("apply", names[0])
    story.claim(
        (first / f"{names[0]}.txt").read_text() == f"{names[0]} had port 3000 to itself\n",
        f"{names[0]}.txt is there",
    )
    (first / f"{names[0]}.txt").unlink()
    story.claim(checksum(first) == before[0], "and nothing else changed")
    story.call("drop", names[1])
    story.claim(checksum(second) == before[1], f"the worktree of {names[1]} never changed")
    story.call("apply", names[1], expect=5)
    story.claim(checksum(second) == before[1], "what was dropped cannot be applied")


def free(story: Story, names: Sequence[str]) -> None:
    story.chapter("Free everything")
    ids = [one["id"] for one in ask("status", *names)["sandboxes"]]
    story.call("delete", *names)
    story.claim(not set(names) & sandbox_names(), "status knows neither sandbox")
    story.claim(not processes_naming(ids), "no process of them runs")


def sweep(story: Story) -> None:
    """What is kept per worktree may go now that these worktrees are gone; other things stay."""
    left = ask("cleanup", "--dry-run")["items"]
    if all(item["kind"] == "snapshots" for item in left):
        story.call("cleanup")
        story.claim(not ask("cleanup", "--dry-run")["items"], "nothing is left to clean up")
    else:
        story.tell("there are leftovers of other sandboxes, too: vmsandbox cleanup --dry-run")


def processes_naming(words: Sequence[str]) -> list[str]:
    """Pids whose command line holds one of the words; QEMU's names its sandbox's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = entry.read_bytes()
            if any(word.encode() in command for word in words):
                found.append(entry.parent.name)
    return found


def main() -> int:
    story = Story()
    mark = secrets.token_hex(2)
    names = [f"demo-red-{mark}", f"demo-blue-{mark}"]
    story.chapter("Two worktrees of this repository")
    try:
        with two_worktrees(names) as worktrees:
            work(story, worktrees)
        sweep(story)
    except (Broken, subprocess.SubprocessError, OSError) as problem:
        print(f"\nThe demo failed: {problem}", file=sys.stderr)
        return 1
    story.chapter("Done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
