"""Measures published ports beside a plain ``ssh -L`` into the same guest, in turn, in one run.

    python -m benchmarks.ports [--rounds 5] [--mib 16] [--connections 200] [--out FILE]

One server in one guest, bound to the guest's every address; four ways to it: as we publish it,
``ssh -L`` as it comes, the same with the cipher that we use, and a forward of QEMU's own, which
reaches no server that is bound to localhost. Of each: throughput of one download, a new connection
with a first answer, a round trip on an open one, and many connections at once until the last has
its answer (no figure where some are reset, as QEMU's network does). Emits data, asserts nothing.
"""

import argparse
import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.series import Series, conditions, options
from vmsandbox.domain import NETDEV, forward
from vmsandbox.forwards import Listener
from vmsandbox.guest import Guest, ssh_argv
from vmsandbox.model import Endpoint
from vmsandbox.ports import Publisher, listen
from vmsandbox.sandbox import Manager, Quiet, Request, Rooms, create_sandbox, delete_sandbox
from vmsandbox.sandbox.access import open_guest
from vmsandbox.store import SandboxFolder

PORT = 3000
TRIPS = 20
SERVER = r"""
use strict; use IO::Socket::INET; use IO::Select;
my $server = IO::Socket::INET->new(LocalPort => 3000, Listen => 512, ReuseAddr => 1) or die $!;
my $all = IO::Select->new($server);
my $block = 'x' x 65536;
$SIG{PIPE} = 'IGNORE';
while (my @ready = $all->can_read) {
    for my $one (@ready) {
        if ($one == $server) { $all->add($server->accept); next }
        my $asked = '';
        if (!sysread($one, $asked, 64)) { $all->remove($one); close $one; next }
        for (my $left = $asked + 0; $left > 0;) {
            my $sent = syswrite($one, $block, $left < 65536 ? $left : 65536) or last;
            $left -= $sent;
        }
    }
}
"""


LISTENS = f"until grep -q :{PORT:04X} /proc/net/tcp; do sleep 0.1; done"


def ask(client: socket.socket, size: int) -> None:
    """Let the server send so many bytes, and take them all."""
    client.sendall(b"%d\n" % size)
    got = 0
    while got < size:
        data = client.recv(256 * 1024)
        if not data:
            raise EOFError(f"{got} of {size} bytes")
        got += len(data)


def connect(endpoint: Endpoint) -> socket.socket:
    client = socket.create_connection((endpoint.address, endpoint.port), timeout=120)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def one_round(series: Series, subject: str, at: Endpoint, mib: int, connections: int) -> None:
    """Every figure once, of one way to the server."""
    with connect(at) as client:
        ask(client, 1)
        started = time.monotonic()
        ask(client, mib * 1024 * 1024)
        series.add(subject, "download_mib_per_s", mib / (time.monotonic() - started))
        started = time.monotonic()
        for _ in range(TRIPS):
            ask(client, 1)
        series.add(subject, "round_trip_ms", (time.monotonic() - started) / TRIPS * 1000)
    started = time.monotonic()
    for _ in range(TRIPS):
        with connect(at) as client:
            ask(client, 1)
    series.add(subject, "new_connection_ms", (time.monotonic() - started) / TRIPS * 1000)
    with (
        contextlib.suppress(ConnectionResetError),
        series.timed(subject, f"{connections}_connections_s"),
    ):
        at_once(at, connections)


def at_once(at: Endpoint, connections: int) -> None:
    """All are open together, and each gets a kilobyte."""
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(connections) as clients:
        found = [
            opened.enter_context(client) for client in clients.map(connect, [at] * connections)
        ]
        list(clients.map(ask, found, [1024] * connections))


# --- ways to the server ---------------------------------------------------------------------------


def free_port() -> int:
    with listen("127.0.0.1", 0) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def by_ssh(folder: SandboxFolder, name: str, *options: str) -> Iterator[Endpoint]:
    """``ssh -N -L`` with the sandbox's own configuration."""
    at = Endpoint(address="127.0.0.1", port=free_port())
    forward = ["-N", *options, "-L", f"{at.address}:{at.port}:127.0.0.1:{PORT}"]
    with subprocess.Popen(ssh_argv(folder.ssh_config, name, [], options=forward)) as process:
        try:
            ready(lambda: connect(at).close())
            yield at
        finally:
            process.terminate()


def ask_qemu(rooms: Rooms, uuid: str, line: str) -> str:
    """What QEMU's human monitor answers; it reports its errors as text, too."""
    answer: str = rooms.hypervisor.qmp(uuid, "human-monitor-command", command_line=line)
    return answer.strip()


@contextlib.contextmanager
def by_qemu(rooms: Rooms, uuid: str) -> Iterator[Endpoint]:
    """A forward of QEMU's user network."""
    at = Endpoint(address="127.0.0.1", port=free_port())
    if refused := ask_qemu(rooms, uuid, f"hostfwd_add {NETDEV} {forward(at, PORT)}"):
        raise SystemExit(refused)
    try:
        yield at
    finally:
        ask_qemu(rooms, uuid, f"hostfwd_remove {NETDEV} tcp:{at.address}:{at.port}")


@contextlib.contextmanager
def published(guest: Guest, address: str) -> Iterator[Endpoint]:
    """As a manager does it."""
    with Publisher(address, guest.dial) as publisher:
        (port,) = publisher.offer({PORT: Listener(PORT, "0.0.0.0", "perl")}).ports
        yield Endpoint(address=port.address, port=port.host_port)


def ready(attempt: Callable[[], object]) -> None:
    """Try until it works, for a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            attempt()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def all_ways(rooms: Rooms, folder: SandboxFolder, guest: Guest) -> Iterator[Mapping[str, Endpoint]]:
    record = folder.read_record()
    cipher = ("-c", "aes128-gcm@openssh.com")
    with contextlib.ExitStack() as opened:
        yield {
            "published": opened.enter_context(published(guest, record.endpoint.address)),
            "ssh -L": opened.enter_context(by_ssh(folder, record.name)),
            "ssh -L, our cipher": opened.enter_context(by_ssh(folder, record.name, *cipher)),
            "QEMU": opened.enter_context(by_qemu(rooms, record.domain_uuid)),
        }


def measure(rooms: Rooms, series: Series, asked: argparse.Namespace, tree: Path) -> None:
    """One guest, all rounds; each round begins with another way."""
    request = Request(command=("true",), worktree=tree, publishes=False)
    folder = create_sandbox(rooms, request)
    try:
        with Manager.of(rooms, folder, Quiet()) as manager:
            manager.ensure_guest()
            with open_guest(rooms, folder, folder.read_record()) as guest:
                guest.run(["sh", "-c", "cat > /root/server.pl"], stdin=SERVER.encode())
                guest.run(
                    ["sh", "-c", "setsid perl /root/server.pl > /dev/null 2>&1 < /dev/null &"]
                )
                guest.run(["sh", "-c", LISTENS])
                with all_ways(rooms, folder, guest) as ways:
                    for number in range(asked.rounds):
                        order = list(ways)
                        for name in order[number % len(order) :] + order[: number % len(order)]:
                            one_round(series, name, ways[name], asked.mib, asked.connections)
    finally:
        delete_sandbox(rooms, folder, force=True)


def main() -> None:
    asked = options(__doc__, rounds=5, mib=16, connections=200).parse_args()
    with Rooms.open() as rooms, tempfile.TemporaryDirectory(prefix="vms-ports-") as scratch:
        Path(scratch, "README").write_text("nothing\n")
        facts = conditions(rooms, asked.image) | {"mib": asked.mib}
        series = Series("ports", facts, asked.out)
        measure(rooms, series, asked, Path(scratch))
        series.summary()


if __name__ == "__main__":
    main()
