"""Measures real coding agents in real guests, with a stand-in for the model that answers at once.

    python -m benchmarks.agents [--agent NAME…] [--rounds 3] [--image NAME] [--out FILE]

Each agent is run as a user runs it: from its preset, through the gateway, on a project of one file,
which it changes. Told are the whole time of the run, that of the agent alone, its requests, and
what its image takes on disk. Images are built where they are missing.

Emits data, asserts nothing.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.series import Series, options
from tests.model_server import AFTER, BEFORE, FILE, KEY, ModelServer

PROGRAM = str(Path(sys.executable).with_name("vmsandbox"))
CONFIG = '[gateway.openai]\nupstream = "{url}"\nfrom_env = "KEY_OF_THE_BENCHMARK"\n'
MODELS = {"codex": "stand-in", "aider": "openai/stand-in"}


def call(environment: dict[str, str], *arguments: str | Path) -> Any:
    """What a verb says with --json."""
    argv = [PROGRAM, *map(str, arguments)]
    done = subprocess.run(argv, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["data"]


@contextlib.contextmanager
def project(url: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with the file, a brief beside it, and the environment of a user with a gateway."""
    with tempfile.TemporaryDirectory(prefix="vms-agents-") as name:
        top = Path(name)
        (top / "config/vmsandbox").mkdir(parents=True)
        (top / "config/vmsandbox/config.toml").write_text(CONFIG.format(url=url))
        (top / "project").mkdir()
        (top / "project" / FILE).write_text(BEFORE + "\n")
        (top / "brief.md").write_text("Greet everybody.\n")
        own = {"XDG_CONFIG_HOME": str(top / "config"), "KEY_OF_THE_BENCHMARK": KEY}
        yield top, {**os.environ, **own}


def measure(series: Series, agent: str, image: str, server: ModelServer) -> None:
    """One run of an agent."""
    with project(server.url) as (top, environment):
        before, started = len(server.asked), time.monotonic()
        told = call(
            environment,
            *("run", "--json", "--agent", agent, "--image", image),
            *("--brief", top / "brief.md", "--worktree", top / "project"),
            *("-e", f"VMSANDBOX_MODEL={MODELS[agent]}", "-e", f"VMSANDBOX_FILES={FILE}"),
        )
        series.add(agent, "wall_s", time.monotonic() - started)
        series.add(agent, "agent_s", told["timings"]["run"])
        series.add(agent, "requests", len(server.asked) - before)
        call(environment, "apply", "--json", "--yes", told["id"])
        series.add(agent, "changed", float((top / "project" / FILE).read_text() == AFTER + "\n"))
        call(environment, "delete", "--json", "--force", told["id"])


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.set_defaults(image=None)
    parser.add_argument("--agent", action="append", choices=sorted(MODELS))
    asked = parser.parse_args()
    agents = asked.agent or sorted(MODELS)
    own, asked.image = asked.image, asked.image or f"agent-{agents[0]}"
    for agent in agents if own is None else ():
        call(dict(os.environ), "image", "build", "--json", "--if-needed", f"agent-{agent}")
    series = Series.of("agents", asked, "rounds")
    with ModelServer() as server:
        for agent in agents:
            for _ in range(asked.rounds):
                measure(series, agent, own or f"agent-{agent}", server)
    series.summary()


if __name__ == "__main__":
    main()
