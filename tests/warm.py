"""The program, started once and forked for each call: a call costs its own work, and not the
reading of hundreds of modules.

Starting cold is left to the tests with guests, and to those of what may be read at a start.
"""

import gc
import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

from tests.people import ROOT
from tests.sandboxes import PROGRAM, Answer, State

_CALL_BYTES = 1 << 17


class Program:
    """A process that has read everything and waits for calls, one at a time."""

    def __init__(self) -> None:
        self._calls, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-c", "from tests.warm import serve; serve()"]
            self._process = subprocess.Popen(argv, cwd=ROOT, stdin=theirs.fileno())

    def begin(
        self,
        arguments: Sequence[str],
        streams: Sequence[int],
        cwd: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start a call in a session of its own; `streams` are its stdin, stdout and stderr."""
        call = (arguments, str(cwd or Path.cwd()), environment or dict(os.environ))
        socket.send_fds(self._calls, [json.dumps(call).encode()], streams)

    def code(self) -> int:
        """Wait until the call ends; its exit code."""
        return int(self._calls.recv(_CALL_BYTES))

    def close(self) -> None:
        self._calls.close()
        self._process.wait()


@cache
def program() -> Program:
    """The one of this process; :func:`close` ends it."""
    return Program()


def close() -> None:
    if program.cache_info().currsize:
        program().close()
        program.cache_clear()


class WarmState(State):
    """A state folder of its own, and the command line on it, which does not start cold."""

    def __call__(self, *arguments: str | Path, cwd: Path | None = None) -> Answer:
        with (
            open(os.devnull) as nothing,  # noqa: PTH123
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            streams = [stream.fileno() for stream in (nothing, out, err)]
            program().begin(list(map(str, arguments)), streams, cwd, self.environment())
            code = program().code()
            out.seek(0)
            err.seek(0)
            return Answer(code, out.read(), err.read())


# --- what is forked -------------------------------------------------------------------------------


def serve() -> None:
    """Carry out each call that comes in over stdin, and answer with its exit code."""
    _read_everything()
    with socket.socket(fileno=os.dup(0)) as calls:
        while True:
            call, streams, _, _ = socket.recv_fds(calls, _CALL_BYTES, 3)
            if not call:
                return
            child = os.fork()
            if child == 0:
                calls.close()
                _carry_out(streams, *json.loads(call))
            for stream in streams:
                os.close(stream)
            calls.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _read_everything() -> None:
    import vmsandbox.cli

    for name in ("api", "batch", "doctor"):
        importlib.import_module(f"vmsandbox.{name}")
    for module in pkgutil.iter_modules(vmsandbox.cli.__path__, "vmsandbox.cli."):
        importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it looks at


def _carry_out(
    streams: Sequence[int], arguments: list[str], cwd: str, environment: dict[str, str]
) -> NoReturn:
    from vmsandbox.cli import main

    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = [PROGRAM, *arguments]
    main()
    sys.exit()
