"""Measures what egress costs: throughput, added latency and memory, beside connections without it.

    python -m benchmarks.egress [--megabytes 64] [--requests 30] [--rounds 3] [--out FILE]

One web server on the host's loopback is asked from the host directly, from the host through the
proxy alone, and from a guest through the whole way out. Beside the last stands what the guest's SSH
connection carries without any proxy. Memory is that of managers while their task sleeps, without
egress and with it. Emits data, asserts nothing.
"""

import argparse
import contextlib
import http.client
import http.server
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.series import Series, options
from vmsandbox.deadline import Deadline
from vmsandbox.egress.journal import Journal
from vmsandbox.egress.proxy import Egress
from vmsandbox.model import SandboxRecord
from vmsandbox.outlet import Outlet
from vmsandbox.reach import OUTLET_PORT, Net, NetMode, Policy
from vmsandbox.sandbox import Manager, Request, Rooms, create_sandbox, delete_sandbox
from vmsandbox.sandbox.access import open_guest
from vmsandbox.sandbox.listening import Quiet
from vmsandbox.store import SandboxFolder

NAME = "server.bench"
_MIB = 1 << 20


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        size = int(self.path.strip("/"))
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        block = bytes(_MIB)
        for at in range(0, size, _MIB):
            self.wfile.write(block[: size - at])


@contextlib.contextmanager
def web_server() -> Iterator[int]:
    """Answers ``/N`` with N bytes; a process of its own, as threads here would share our time."""
    program = [sys.executable, "-c", "import benchmarks.egress as e; e.serve()"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def serve() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def reaching(port: int) -> Net:
    """What lets a guest reach the server, which lives where no guest may look."""
    policy = Policy(mode=NetMode.ALLOW, allow=(f"{NAME}:{port}",))
    return Net(layers=(policy,), private=("127.0.0.1/32",), hosts={NAME: ("127.0.0.1",)})


@contextlib.contextmanager
def proxy(net: Net, folder: Path) -> Iterator[int]:
    """The proxy without any SSH, on a port of the host."""
    egress = Egress(net, Journal(folder / "egress.jsonl"), folder / "grants.json", "bench")
    outlet = Outlet(egress, {})
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    outlet.accept(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    outlet.close()
    egress.close()


def ask(series: Series, subject: str, to: int, url: str, host: str, asked: Any) -> None:
    """One large answer and many small ones, from this process."""
    for size, times, figure in (
        (asked.megabytes * _MIB, 1, ""),
        (100, asked.requests, "request_s"),
    ):
        for _ in range(times):
            began = time.monotonic()
            client = http.client.HTTPConnection("127.0.0.1", to, timeout=600)
            client.request("GET", f"{url}/{size}", headers={"Host": host})
            answer = client.getresponse()
            while answer.read(_MIB):
                pass
            client.close()
            seconds = time.monotonic() - began
            series.add(
                subject, figure or "mib_per_s", seconds if figure else asked.megabytes / seconds
            )


def on_the_host(series: Series, port: int, asked: argparse.Namespace) -> None:
    host = f"{NAME}:{port}"
    with tempfile.TemporaryDirectory() as folder, proxy(reaching(port), Path(folder)) as at:
        for _ in range(asked.rounds):
            ask(series, "host, direct", port, "", host, asked)
            ask(series, "host, proxy", at, f"http://{host}", host, asked)


# --- from a guest ---------------------------------------------------------------------------------

CURL = "curl -sS -o /dev/null -w '%{time_starttransfer} %{time_total}\\n'"


@contextlib.contextmanager
def sandbox(rooms: Rooms, tree: Path, net: Net, *command: str) -> Iterator[SandboxFolder]:
    folder = create_sandbox(rooms, Request(command=command, worktree=tree))

    def with_net(record: SandboxRecord) -> SandboxRecord:
        return record.model_copy(update={"net": net})

    rooms.store.update(folder, with_net)
    try:
        yield folder
    finally:
        delete_sandbox(rooms, folder, force=True)


def from_a_guest(rooms: Rooms, series: Series, tree: Path, port: int, asked: Any) -> None:
    with (
        sandbox(rooms, tree, reaching(port), "true") as folder,
        Manager.of(rooms, folder, Quiet()) as manager,
    ):
        guest = manager.ensure_guest()
        manager.services.await_ready()
        url = f"http://{NAME}:{port}"
        proxied = f"{CURL} -x http://127.0.0.1:{OUTLET_PORT}"
        size = asked.megabytes * _MIB // 4
        for _ in range(asked.rounds):
            small = guest.run(
                ["sh", "-c", f"for i in $(seq {asked.requests}); do {proxied} {url}/100; done"]
            )
            for line in small.stdout.decode().split("\n")[:-1]:
                series.add("guest, egress", "request_s", float(line.split()[0]))
            for subject, flags in (("guest, egress", ""), ("guest, tunnel", " -p")):
                large = guest.run(["sh", "-c", f"{proxied}{flags} {url}/{size}"], timeout_s=600)
                seconds = float(large.stdout.split()[1])
                series.add(subject, "mib_per_s", size / _MIB / seconds)
            began = time.monotonic()
            guest.stream_in(["sh", "-c", "cat > /dev/null"], [bytes(_MIB)] * (size // _MIB))
            series.add("guest, ssh alone", "mib_per_s", size / _MIB / (time.monotonic() - began))


def memory(rooms: Rooms, series: Series, tree: Path, port: int) -> None:
    """Of managers as people have them: processes of their own."""
    for subject, net in (("manager, none", Net()), ("manager, allow", reaching(port))):
        with sandbox(rooms, tree, net, "sleep", "600") as folder:
            program = [sys.executable, "-m", "vmsandbox", "resume", folder.id]
            with subprocess.Popen(
                program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as p:
                deadline = Deadline(300)
                try:
                    while not folder.read_record().task_started and not deadline.passed():
                        time.sleep(0.2)
                    pss = psutil.Process(p.pid).memory_full_info().pss
                    series.add(subject, "pss_mib", pss / _MIB)
                    if net.layers:
                        with many_tunnels(rooms, folder, port):
                            pss = psutil.Process(p.pid).memory_full_info().pss
                            series.add("manager, 20 connections", "pss_mib", pss / _MIB)
                finally:
                    p.kill()


@contextlib.contextmanager
def many_tunnels(rooms: Rooms, folder: SandboxFolder, port: int) -> Iterator[None]:
    """Twenty connections of the guest that stay open."""
    script = (
        f"for i in $(seq 20); do exec {{fd}}<>/dev/tcp/127.0.0.1/{OUTLET_PORT}; "
        f'printf "CONNECT {NAME}:{port} HTTP/1.1\\r\\nHost: {NAME}:{port}\\r\\n\\r\\n" >&$fd; '
        "read -r line <&$fd; done; echo open; sleep 60"
    )
    with open_guest(rooms, folder, folder.read_record()) as guest:
        guest.connect(Deadline(60))
        with guest.stream_out(["bash", "-c", script]) as out:
            out.read(4)
            yield


def main() -> None:
    asked = options(__doc__, megabytes=64, requests=30, rounds=3).parse_args()
    series = Series.of("egress", asked, "megabytes", "requests", "rounds")
    with (
        Rooms.open() as rooms,
        tempfile.TemporaryDirectory(prefix="vms-egress-") as scratch,
        web_server() as port,
    ):
        tree = Path(scratch, "tree")
        tree.mkdir()
        (tree / "file").write_text("hello\n")
        on_the_host(series, port, asked)
        from_a_guest(rooms, series, tree, port, asked)
        memory(rooms, series, tree, port)
        series.summary()


if __name__ == "__main__":
    main()
