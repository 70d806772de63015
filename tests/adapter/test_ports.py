"""Ports published over a real sshd: what a client of the host sends and gets, and when."""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.adapter.loopback_guest import LoopbackGuest
from tests.waiting import wait_until
from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.forwards import Listener, PortMapping
from vmsandbox.guest import Guest
from vmsandbox.ports import Publisher, Relays, check, listen, listen_near, reachable, tables

OURS = "127.91.7.5"
SCRIPT = Path(__file__).parents[2] / "vmsandbox" / "guest_scripts" / "ports"
MIB = 1024 * 1024
WITHOUT_THE_RIGHT = (
    ["setpriv", "--bounding-set=-net_bind_service", "--inh-caps=-net_bind_service", "--"]
    if os.geteuid() == 0
    else []
)
Serve = Callable[[socket.socket], None]


@pytest.fixture
def publisher(guest: Guest) -> Iterator[Publisher]:
    with Publisher(OURS, guest.dial) as publisher:
        yield publisher


@contextlib.contextmanager
def server(serve: Serve, address: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A server in the "guest": each connection is given to `serve` in a thread; its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=256) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    threading.Thread(target=attended, args=(near,), daemon=True).start()

        def attended(near: socket.socket) -> None:
            with near, contextlib.suppress(OSError):
                serve(near)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def echo(near: socket.socket) -> None:
    while data := near.recv(65536):
        near.sendall(data)
    near.shutdown(socket.SHUT_WR)


def everything(near: socket.socket) -> bytes:
    return b"".join(iter(lambda: near.recv(65536), b""))


def at(port: int, address: str = OURS) -> socket.socket:
    return socket.create_connection((address, port), timeout=30)


def here(port: int, bound: str = "127.0.0.1") -> dict[int, Listener]:
    return {port: Listener(port, bound, "server")}


# --- streams --------------------------------------------------------------------------------------


def test_a_port_has_the_same_number_at_the_sandboxs_own_address(publisher: Publisher) -> None:
    with server(echo) as port:
        (found,) = publisher.offer(here(port)).ports
        assert (found.port, found.url) == (port, f"http://{OURS}:{port}")
        assert (found.process, found.bound, found.note) == ("server", "127.0.0.1", "")
        with at(port) as client:
            client.sendall(b"hello")
            client.shutdown(socket.SHUT_WR)
            assert everything(client) == b"hello"


@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_servers_are_reached_wherever_they_are_bound(publisher: Publisher, bound: str) -> None:
    with server(echo, bound) as port:
        publisher.offer(here(port, bound))
        # The stand-in's wildcard address holds all of loopback, so it may be another number here.
        (found,) = publisher.offer(here(port, bound)).ports
        with at(found.host_port) as client:
            client.sendall(b"hello")
            assert client.recv(100) == b"hello"


def test_either_side_may_end_its_half_first(publisher: Publisher) -> None:
    def late(near: socket.socket) -> None:
        near.sendall(b"first")
        near.shutdown(socket.SHUT_WR)
        heard.append(everything(near))

    heard: list[bytes] = []
    with server(late) as port:
        publisher.offer(here(port))
        with at(port) as client:
            assert everything(client) == b"first"
            client.sendall(b"x" * MIB)
        wait_until(lambda: heard == [b"x" * MIB])


def test_a_hundred_megabytes_come_whole(publisher: Publisher) -> None:
    block = os.urandom(MIB)

    def send(near: socket.socket) -> None:
        for _ in range(100):
            near.sendall(block)

    expected = hashlib.sha256(block * 100).hexdigest()
    with server(send) as port:
        publisher.offer(here(port))
        digest = hashlib.sha256()
        with at(port) as client:
            while data := client.recv(MIB):
                digest.update(data)
        assert digest.hexdigest() == expected


def test_two_hundred_connections_at_once(publisher: Publisher) -> None:
    meet = threading.Barrier(200, timeout=60)

    def talk(number: int) -> bool:
        with at(port) as client:
            meet.wait()  # all are open before any of them says something
            said = f"{number}\n".encode() * 1000
            client.sendall(said)
            client.shutdown(socket.SHUT_WR)
            return everything(client) == said

    with server(echo) as port, ThreadPoolExecutor(200) as clients:
        publisher.offer(here(port))
        assert all(clients.map(talk, range(200)))


def test_who_does_not_read_holds_nobody_up(publisher: Publisher) -> None:
    def flood(near: socket.socket) -> None:
        while True:
            near.sendall(b"x" * MIB)

    with server(flood) as busy, server(echo) as quick:
        publisher.offer(here(busy) | here(quick))
        with at(busy) as deaf, at(quick) as client:
            assert deaf.recv(1)
            for number in range(50):  # as a WebSocket would: little, to and fro
                client.sendall(b"%d" % number)
                assert client.recv(10) == b"%d" % number


def test_who_goes_away_is_missed_by_the_server(publisher: Publisher) -> None:
    gone = threading.Event()

    def wait(near: socket.socket) -> None:
        near.sendall(b"x")
        assert not near.recv(1)
        gone.set()

    with server(wait) as port:
        publisher.offer(here(port))
        with at(port) as client:
            assert client.recv(1)
        assert gone.wait(10)


def test_connections_beyond_the_most_wait_for_their_turn(guest: Guest) -> None:
    relays = Relays(most=1)
    with server(echo) as port, socket.create_server((OURS, 0)) as listener:
        clients = [at(listener.getsockname()[1]) for _ in range(2)]
        accepted = [listener.accept()[0] for _ in range(2)]

        def carry() -> None:
            for near in accepted:
                relays.carry(near, lambda: guest.dial("127.0.0.1", port))

        thread = threading.Thread(target=carry, daemon=True)
        thread.start()
        clients[0].sendall(b"one")
        assert clients[0].recv(3) == b"one"
        clients[1].sendall(b"two")
        clients[1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            clients[1].recv(3)
        clients[0].close()
        clients[1].settimeout(30)
        assert clients[1].recv(3) == b"two"
        clients[1].close()
        thread.join(10)
        relays.close()


# --- what listens ---------------------------------------------------------------------------------


def test_a_port_that_is_gone_is_refused_and_who_was_connected_stays(publisher: Publisher) -> None:
    with server(echo) as port:
        publisher.offer(here(port))
        with at(port) as client:
            client.sendall(b"a")
            assert client.recv(1) == b"a"
            assert publisher.offer({}).ports == ()
            with pytest.raises(ConnectionRefusedError):
                at(port)
            client.sendall(b"b")
            assert client.recv(1) == b"b"
        publisher.offer(here(port))
        with at(port) as client:
            client.sendall(b"c")
            assert client.recv(1) == b"c"


def test_a_server_that_has_just_gone_is_no_empty_answer(publisher: Publisher) -> None:
    with server(echo) as port:
        publisher.offer(here(port))
    with at(port) as client, pytest.raises(ConnectionResetError):
        client.recv(1)


def test_a_port_that_is_taken_moves_and_says_so(publisher: Publisher) -> None:
    with server(echo) as port, socket.create_server((OURS, port)):
        (found,) = publisher.offer(here(port)).ports
        assert found.host_port != port
        assert found.note == f"port {port} is taken on {OURS}"
        with at(found.host_port) as client:
            client.sendall(b"hello")
            assert client.recv(5) == b"hello"


def test_what_was_asked_for_listens_before_the_guest_does(guest: Guest) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    with server(echo) as port:
        asked = PortMapping(host=free, guest=port)
        with Publisher(OURS, guest.dial, asked=[asked], automatic=False) as publisher:
            assert publisher.open_asked() == []
            (found,) = publisher.offer({}).ports
            assert (found.url, found.bound) == (f"http://127.0.0.1:{free}", None)
            with at(free, "127.0.0.1") as client:
                client.sendall(b"hello")
                assert client.recv(5) == b"hello"
            (found,) = publisher.offer(here(port)).ports  # and nothing at the sandbox's own address
            assert (found.address, found.process) == ("127.0.0.1", "server")


def test_all_ends_with_the_publisher(guest: Guest) -> None:
    with server(echo) as port:
        with Publisher(OURS, guest.dial) as publisher:
            publisher.offer(here(port))
            client = at(port)
            client.sendall(b"a")
            assert client.recv(1) == b"a"
        assert client.recv(1) == b""
        client.close()
        with pytest.raises(ConnectionRefusedError):
            at(port)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1"])
def test_nothing_but_loopback_is_ever_bound(address: str) -> None:
    with pytest.raises(ValueError, match="no loopback"):
        listen(address, 0)


MANY_GUESTS = """
import os, resource
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
from vmsandbox.forwards import Listener
from vmsandbox.ports import Publisher
from vmsandbox.ports.listeners import MOST_LISTENERS
from vmsandbox.sandbox import Rooms

ports = range(20000, 20000 + MOST_LISTENERS)
found = {port: Listener(port, "127.0.0.1") for port in ports}
with Rooms.open(Path(os.environ["VMSANDBOX_HOME"])):
    publishers = [Publisher(f"127.94.0.{number}", None) for number in (1, 2, 3)]
    assert [len(one.offer(found).ports) for one in publishers] == [MOST_LISTENERS] * 3
    os.pipe2(0)
"""


def test_guests_that_share_a_manager_do_not_take_each_others_files(tmp_path: Path) -> None:
    """A guest may listen on all that it likes."""
    environment = {**os.environ, "VMSANDBOX_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", MANY_GUESTS], env=environment, check=True)


def test_what_keeps_a_port_from_being_published_is_told() -> None:
    with socket.create_server((OURS, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HostProblem) as refused:
            check([PortMapping(address=OURS, host=port, guest=80)])
        assert refused.value.code == "port_taken"
        assert "--publish" in (refused.value.hint or "")
    twice = PortMapping(address=OURS, host=port, guest=80)
    with pytest.raises(UsageProblem) as wrong:
        check([twice, twice])
    assert wrong.value.code == "port_twice"
    check([twice])


def test_a_port_near_a_taken_one_is_one_that_people_recognize() -> None:
    with socket.create_server((OURS, 8080)), listen_near(OURS, 8080).socket as near:
        assert near.getsockname()[1] == 28080


def test_a_port_that_is_not_ours_to_bind_moves_and_says_so() -> None:
    """In a process that lacks the right, be it root's."""
    probe = (
        "from vmsandbox.ports import listen_near\n"
        f"found = listen_near({OURS!r}, 80)\n"
        "print(found.port, found.note)\n"
    )
    said = subprocess.run(
        [*WITHOUT_THE_RIGHT, sys.executable, "-c", probe],
        cwd=SCRIPT.parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "20080 ports below 1024 are not ours to bind\n"


# --- what the guest says --------------------------------------------------------------------------


class Watched:
    """What the guest's script says, as it says it."""

    def __init__(self, guest: Guest, pid_file: Path) -> None:
        self.latest: dict[int, Listener] = {}
        self.tables = 0
        self._guest = guest
        self._argv = ["env", "VMSANDBOX_TRACING=/nonexistent", f"VMSANDBOX_PORTS_PID={pid_file}"]
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with (
            contextlib.suppress(Exception),
            self._guest.follow([*self._argv, str(SCRIPT), "watch"]) as lines,
        ):
            for table in tables(lines):
                self.latest = reachable(table)
                self.tables += 1

    def sees(self, port: int) -> str:
        found = self.latest.get(port)
        return found.bound if found else ""


@pytest.fixture
def watched(guest: Guest, tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(guest, tmp_path / "pid")
    wait_until(lambda: watched.tables > 0)
    yield watched
    guest.close()
    watched.thread.join(10)


def within(seconds: float, happened: Callable[[], object]) -> float:
    started = time.monotonic()
    wait_until(happened)
    took = time.monotonic() - started
    assert took < seconds
    return took


@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_a_server_is_found_and_missed(watched: Watched, bound: str) -> None:
    with server(echo, bound) as port:
        within(4, lambda: watched.sees(port) == bound)
        assert watched.latest[port].process.startswith(("python", "pytest"))
    within(4, lambda: not watched.sees(port))


def test_a_watcher_ends_when_nobody_listens_to_it(loopback: LoopbackGuest, tmp_path: Path) -> None:
    with loopback.guest() as guest:
        watched = Watched(guest, tmp_path / "pid")
        wait_until(lambda: watched.tables > 0)
        process = Path("/proc", (tmp_path / "pid").read_text().strip())
        assert process.exists()
    wait_until(lambda: not process.exists())
    watched.thread.join(10)


def test_a_new_watcher_ends_a_former_one(loopback: LoopbackGuest, tmp_path: Path) -> None:
    with loopback.guest() as one, loopback.guest() as other:
        former = Watched(one, tmp_path / "pid")
        wait_until(lambda: former.tables > 0)
        later = Watched(other, tmp_path / "pid")
        former.thread.join(10)
        assert not former.thread.is_alive()
        wait_until(lambda: later.tables > 0)
        one.close()
        other.close()
        later.thread.join(10)
