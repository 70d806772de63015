"""Kills managers and guests at random moments, for as long as it is asked to, and says what came of
it.

    python -m benchmarks.soak_crashes [--rounds 20] [--seed N] [--out FILE]

Each round runs one task in a state folder of its own: up to four times its manager, its QEMU or
both are killed a random while after a random state is reached, `status` is asked, and `resume`
takes it up again. One JSON
line per kill and per round. Figures that should be 0: ``begun_again`` (the task ran twice),
``left`` (folders, guests or ports after `delete` and `cleanup`), ``untold`` (`status` had a state
that ought to name a problem and named none). Emits data, asserts nothing; it ends with the last
round or with Ctrl-C.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.series import Series, options
from vmsandbox.deadline import Deadline
from vmsandbox.hypervisor import processes
from vmsandbox.store import SandboxFolder, state_root

TASK = (
    "echo begun >> runs; sync; for i in $(seq 20); do echo $i; sleep 0.2; done; echo done >> runs"
)
MOST_KILLS = 4
LONGEST_S = 3.0
"""From a state to the kill: without KVM longer than most states last."""

_STATES = ("queued", "starting", "ready", "running", "collecting")
_UNMANAGED = ("queued", "starting", "running", "collecting")


class Round:
    """One task, and what is done to it."""

    def __init__(self, home: Path, chance: random.Random) -> None:
        self.home = home
        self.chance = chance
        self.project = home / "project"
        self.kills: list[dict[str, Any]] = []
        self._make_project()

    def _make_project(self) -> None:
        self.project.mkdir()
        (self.project / "kept").write_text("1\n")
        who = ("-c", "user.name=soak", "-c", "user.email=soak@localhost")
        for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "first")):
            subprocess.run(["git", "-C", self.project, *words], check=True)

    def start(self, *arguments: str | Path) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "vmsandbox", *map(str, arguments)],
            env=os.environ | {"VMSANDBOX_HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def ask(self, *arguments: str | Path) -> Any:
        """The JSON answer of a verb; empty if it gave none."""
        out, _ = self.start(*arguments, "--json").communicate()
        answer = json.loads(out or b"{}")
        return answer.get("data") or answer.get("error") or {}

    # --- the round ----------------------------------------------------------------------------

    def play(self) -> dict[str, Any]:
        run = self.start("run", "--worktree", self.project, "--", "sh", "-c", TASK)
        for _ in range(self.chance.randint(1, MOST_KILLS)):
            if not self._kill_later(run):
                break
            run = self.start("resume", "last") if self._sandboxes() else run
        run.communicate()
        ended = self.ask("resume", "last") if self._sandboxes() else {}
        return self._judge(ended)

    def _kill_later(self, run: "subprocess.Popen[bytes]") -> bool:
        """Wait for a state and a while more, then kill; False if it had ended before."""
        state = self.chance.choice(_STATES)
        after_s = round(self.chance.uniform(0.0, LONGEST_S), 3)
        deadline = Deadline(None)
        while run.poll() is None and not deadline.passed():
            if math.isinf(deadline.seconds) and self._state() == state:
                deadline = Deadline(after_s)
            time.sleep(0.005)
        if run.poll() is not None:
            return False
        victim = self.chance.choice(("manager", "manager", "guest", "host"))
        if victim != "guest":
            run.send_signal(signal.SIGKILL)
        if victim != "manager":
            self._kill_guest()
        run.communicate()
        self.kills.append({"victim": victim, "in": state, "after_s": after_s, **self._told()})
        return True

    def _state(self) -> str:
        return next((folder.read_record().state.value for folder in self._sandboxes()), "")

    def _kill_guest(self) -> None:
        for folder in self._sandboxes():
            if qemu := processes.find(folder.read_record().domain_uuid):
                os.kill(qemu.pid, signal.SIGKILL)

    def _sandboxes(self) -> list[SandboxFolder]:
        folders = map(SandboxFolder, (self.home / "sandboxes").glob("*"))
        return [folder for folder in folders if folder.record.exists()]

    def _told(self) -> dict[str, Any]:
        """What `status` says right after."""
        found = self.ask("status").get("sandboxes", [])
        state = found[0]["state"] if found else "none"
        problems = found[0]["problems"] if found else []
        return {"state": state, "untold": int(state in _UNMANAGED and not problems)}

    def _judge(self, ended: dict[str, Any]) -> dict[str, Any]:
        changed = bool(self.ask("apply", "--yes", "last").get("written"))
        runs = (self.project / "runs").read_text().split() if changed else []
        self.ask("delete", "--all", "--force")
        left = [i for i in self.ask("cleanup").get("items", []) if i["kind"] != "snapshots"]
        return {
            "outcome": ended.get("outcome") or ended.get("code") or "none",
            "begun_again": max(0, runs.count("begun") - 1),
            "finished": runs.count("done"),
            "left": len(left) + len(list((self.home / "sandboxes").iterdir())),
        }


def soak(rounds: int, seed: int, series: Series) -> None:
    chance = random.Random(seed)
    for number in range(rounds):
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="vms-soak-") as folder:
            home = Path(folder)
            home.chmod(0o711)
            for shared in ("images", "templates", "cache"):
                (home / shared).symlink_to(state_root() / shared)
            played = Round(home, chance)
            try:
                result = played.play()
            finally:
                played.ask("delete", "--all", "--force")
        for kill in played.kills:
            print(json.dumps({"round": number, **kill}), file=sys.stderr, flush=True)
        subject = str(result.pop("outcome"))
        for figure, value in {**result, "kills": len(played.kills)}.items():
            series.add(subject, figure, value)
        series.add(subject, "untold", sum(kill["untold"] for kill in played.kills))
        series.add(subject, "seconds", time.monotonic() - started)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = options(__doc__, rounds=20, seed=int(time.time())).parse_args(arguments)
    series = Series.of("soak_crashes", asked, "seed")
    try:
        soak(asked.rounds, asked.seed, series)
    finally:
        series.summary()


if __name__ == "__main__":
    main()
