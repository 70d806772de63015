"""The program `vmsandbox` as ``python -m tests.dying FATE POINT ARGUMENTS…``: at one point of its
work it is killed, or frozen until somebody lets it go on.

The points are what the interpreter's audit events announce before it happens, so no point depends
on how fast the machine is.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Event = tuple[Any, ...]
Fits = Callable[[str, Event], bool]

FATES: Mapping[str, signal.Signals] = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


def replaces(name: str) -> Fits:
    """A file of this name is about to be put in place; it is still what it was."""
    return lambda event, args: event == "os.rename" and Path(os.fsdecode(args[1])).name == name


def records(true: Callable[[Any], object]) -> Fits:
    """A record of which this is true is about to be put in place."""
    put = replaces("record.json")
    return lambda event, args: bool(
        put(event, args) and true(json.loads(Path(os.fsdecode(args[0])).read_bytes()))
    )


def removes(name: str) -> Fits:
    return lambda event, args: event == "os.remove" and Path(os.fsdecode(args[0])).name == name


def opens(part: str, end: str) -> Fits:
    return lambda event, args: (
        event == "open" and part in (path := _text(args[0])) and path.endswith(end)
    )


def connects(true: Callable[[Any], object]) -> Fits:
    return lambda event, args: event == "socket.connect" and bool(true(args[1]))


def runs(word: str) -> Fits:
    """A program with this word among its arguments is about to be run."""
    return lambda event, args: event == "subprocess.Popen" and word in map(_text, args[1])


def _text(argument: object) -> str:
    return os.fsdecode(argument) if isinstance(argument, bytes) else str(argument)


POINTS: Mapping[str, Fits] = {
    "half made": records(lambda record: record["state"] == "queued"),
    "made": records(lambda record: record["state"] == "starting"),
    "keys": replaces("host_ed25519"),
    "template boots": opens("/.making-", "/console.log"),
    "template whole": replaces("template.json"),
    "disk": replaces("domain.xml"),
    "loading": connects(lambda address: str(address).endswith("/incoming/state")),
    "seed": connects(lambda address: str(address).endswith("seed.sock")),
    "booting": connects(lambda address: isinstance(address, tuple) and address[1] == 2222),
    "sending": records(lambda record: record["snapshot"] and not record["base_in_guest"]),
    "sent": records(lambda record: record["base_in_guest"]),
    "begun": records(lambda record: record["task_started"]),
    "ended": records(lambda record: record["exec_result"]),
    "collecting": runs("index-pack"),
    "installed": replaces("changeset.json"),
    "presented": replaces("result.json"),
    "collected": records(lambda record: record["collected"]),
    "stopped": records(lambda record: record["state"] == "stopped"),
    "deleting": removes("record.json"),
    "leaving": lambda event, args: (
        event == "os.rename" and Path(os.fsdecode(args[1])).name.startswith(".gone-")
    ),
    "emptying": removes("overlay.qcow2"),
}
"""In the order of a life, then of a delete."""


def main(fate: str, point: str, *arguments: str) -> None:
    met = False

    def watch(event: str, args: Event) -> None:
        nonlocal met
        if not met and POINTS[point](event, args):
            met = True
            os.kill(os.getpid(), FATES[fate])

    sys.argv = ["vmsandbox", *arguments]
    from vmsandbox.cli import main as program

    sys.addaudithook(watch)
    program()


if __name__ == "__main__":
    main(*sys.argv[1:])
