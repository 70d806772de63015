"""Egress against a small internet in a network namespace: what gets through, and what does not.

A guest is everybody who can speak to the outlet, so here tests speak to it directly.
"""

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.escapes import CONNECTS, HELLOS, HOST_TRICKS
from tests.hellos import hello
from tests.internet import PLAIN_PORT, Internet, internet, may_make_one
from vmsandbox.deadline import Deadline
from vmsandbox.egress import add_grant, read_entries, summary_of
from vmsandbox.egress.journal import Entry, Journal
from vmsandbox.egress.proxy import Egress
from vmsandbox.outlet import Outlet
from vmsandbox.reach import Net, NetMode, Policy

pytestmark = [
    pytest.mark.skipif(not may_make_one(), reason="only root makes network namespaces"),
    pytest.mark.xdist_group("internet"),
]
ALLOWED = ("www.test", "pypi.test:443", "*.wild.test", f"git.test:{PLAIN_PORT}", "www.test:22")


@pytest.fixture(scope="module")
def net_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    with internet(tmp_path_factory.mktemp("internet")) as running:
        yield running


class Way:
    """The way out of one guest, and what was written down of it."""

    def __init__(self, internet: Internet, folder: Path, net: Net) -> None:
        self.internet = internet
        self.log = folder / "egress.jsonl"
        self.grants = folder / "grants.json"
        self.egress = Egress(net, Journal(self.log), self.grants, "box")
        self.outlet = Outlet(self.egress, {})

    def close(self) -> None:
        self.outlet.close()
        self.egress.close()

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair()
        self.outlet.accept(theirs)
        with ours:
            ours.settimeout(20)
            yield ours

    def answer(self, sent: bytes) -> bytes:
        """All that comes back, when nothing more is sent."""
        with self.connection() as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            return read_all(connection)

    def get(self, url: str, *headers: str, method: str = "GET") -> bytes:
        host = url.partition("://")[2].partition("/")[0]
        lines = [f"{method} {url} HTTP/1.1", *(headers or [f"Host: {host}"]), "", ""]
        return self.answer("\r\n".join(lines).encode())

    @contextlib.contextmanager
    def tunnel(self, target: str) -> Iterator[socket.socket]:
        """After a CONNECT that was agreed to."""
        with self.connection() as connection:
            connection.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                byte = connection.recv(1)
                assert byte, head
                head += byte
            assert head.startswith(b"HTTP/1.1 200"), head
            yield connection

    def entries(self) -> list[Entry]:
        return read_entries(self.log)[0]

    def reasons(self) -> list[str]:
        return [entry.reason for entry in self.entries() if entry.verdict == "denied"]


def read_all(connection: socket.socket) -> bytes:
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def allowing(internet: Internet, **fields: object) -> Net:
    policy = {"mode": NetMode.ALLOW, "allow": ALLOWED} | fields
    hosts = {name: tuple(to) for name, to in internet.hosts.items()}
    hosts |= {"elsewhere.wild.test": (internet.other,)}
    hosts |= {"mixed.wild.test": (internet.server, internet.other)}
    hosts |= {"self.wild.test": (internet.host,), "loop.wild.test": ("127.0.0.1",)}
    hosts |= {"v6.wild.test": ("::1",), "mapped.wild.test": ("::ffff:127.0.0.1",)}
    hosts |= {"nat64.wild.test": ("64:ff9b::a00:1",), "meta.wild.test": ("169.254.169.254",)}
    hosts |= {"cgn.wild.test": ("100.64.0.1",), "any.wild.test": ("0.0.0.0",)}
    hosts |= {"down.wild.test": (internet.server,)}
    return Net(
        layers=(Policy.model_validate(policy),), private=(f"{internet.server}/32",), hosts=hosts
    )


@pytest.fixture
def way(net_of_tests: Internet, tmp_path: Path) -> Iterator[Way]:
    with contextlib.closing(Way(net_of_tests, tmp_path, allowing(net_of_tests))) as way:
        yield way


@pytest.fixture
def public(net_of_tests: Internet, tmp_path: Path) -> Iterator[Way]:
    net = allowing(net_of_tests, mode=NetMode.PUBLIC, allow=(), deny=("evil.test",))
    with contextlib.closing(Way(net_of_tests, tmp_path, net)) as way:
        yield way


# --- what gets through ----------------------------------------------------------------------------


def secured(connection: socket.socket, internet: Internet, name: str) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(internet.ca))
    return context.wrap_socket(connection, server_hostname=name)


def test_plain_http_by_name(way: Way) -> None:
    answer = way.get("http://www.test/where")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"www.test\n")
    allowed, closed = way.entries()
    assert (allowed.target, allowed.verdict) == ("http://www.test/where", "allowed")
    assert (closed.verdict, closed.reason, closed.received) == ("closed", "done", 9)


def test_tls_by_name(way: Way) -> None:
    with way.tunnel("pypi.test:443") as raw, secured(raw, way.internet, "pypi.test") as tls:
        tls.sendall(b"GET /where HTTP/1.1\r\nHost: pypi.test\r\nConnection: close\r\n\r\n")
        assert read_all(tls).endswith(b"pypi.test\n")
    wait_for(lambda: way.entries()[-1].verdict == "closed")
    closed = way.entries()[-1]
    assert closed.target == "pypi.test:443"
    assert closed.sent > 300
    assert closed.received > 500
    assert closed.seconds


def test_a_port_that_a_rule_names_may_speak_anything(way: Way) -> None:
    with way.tunnel(f"git.test:{PLAIN_PORT}") as raw:
        raw.sendall(b"hello")
        assert raw.recv(100) == b"hello"
        raw.shutdown(socket.SHUT_WR)
        assert read_all(raw) == b""
    with way.tunnel("www.test:22") as raw:
        assert raw.recv(100).startswith(b"SSH-2.0")


def test_bodies_stream_and_are_counted(way: Way) -> None:
    size = 3_000_000
    with way.connection() as connection:
        head = f"POST http://www.test/ HTTP/1.1\r\nHost: www.test\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode())
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).endswith(f"{size}\n".encode())
    assert len(way.get(f"http://www.test/big/{size}")) > size
    found = summary_of(way.log)
    assert found.sent > size
    assert found.received > size
    assert (found.allowed, found.denied) == (2, 0)


def test_an_answer_comes_as_it_is_made(way: Way) -> None:
    seen = way.internet.folder / "seen"
    seen.mkdir(exist_ok=True)
    with way.connection() as connection:
        connection.sendall(b"GET http://www.test/slow HTTP/1.1\r\nHost: www.test\r\n\r\n")
        data = b""
        for number in range(3):  # the server waits until we have seen each
            while b"piece %d" % number not in data:
                data += connection.recv(65536)
            (seen / str(number)).touch()


def test_one_connection_serves_requests_to_many_hosts(way: Way) -> None:
    asked = b"".join(
        f"GET http://{host}/where HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        for host in ("www.test", "a.wild.test", "evil.test", "www.test")
    )
    answer = way.answer(asked)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.count(b"HTTP/1.1 403") == 1


# --- what does not: at least twenty-five ways to try ----------------------------------------------


@pytest.mark.parametrize("trick", HOST_TRICKS)
def test_escape_by_plain_http(way: Way, trick: str) -> None:
    url, headers, reason = HOST_TRICKS[trick]
    number = int.from_bytes(socket.inet_aton(way.internet.server), "big")
    spellings = {"server": way.internet.server, "decimal": number, "hex": hex(number)}
    before = way.internet.asked()
    answer = way.get(url.format(**spellings), *[h.format(**spellings) for h in headers])
    assert answer.startswith(b"HTTP/1.1 403"), answer
    assert set(way.reasons()) <= set(reason.split("|"))
    assert way.reasons()
    assert way.internet.asked() == before


@pytest.mark.parametrize("trick", CONNECTS)
def test_escape_by_connect(way: Way, trick: str) -> None:
    target, reason = CONNECTS[trick]
    target = target.format(server=way.internet.server)
    answer = way.answer(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 4"), answer
    assert way.reasons() == [reason]


def test_escape_by_the_host_header_of_a_connect(way: Way) -> None:
    answer = way.answer(b"CONNECT pypi.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403")
    assert way.reasons() == ["host_header_differs"]


@pytest.mark.parametrize("trick", HELLOS)
@pytest.mark.parametrize("target", ["pypi.test:443", "www.test:80"])
def test_escape_inside_a_tunnel(way: Way, trick: str, target: str) -> None:
    sent, reason = HELLOS[trick]
    before = way.internet.asked()
    with way.tunnel(target) as raw:
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        assert read_all(raw) == b""
    wait_for(lambda: bool(way.reasons()))
    assert way.reasons() == [reason]
    assert way.internet.asked() == before
    assert not [entry for entry in way.entries() if entry.verdict == "allowed"]


def test_escape_by_tls_for_another_name_on_a_port_that_may_speak_anything(way: Way) -> None:
    with way.tunnel(f"git.test:{PLAIN_PORT}") as raw:
        raw.sendall(hello("evil.test"))
        assert read_all(raw) == b""
    wait_for(lambda: way.reasons() == ["tls_name_differs"])


def test_escape_by_a_redirect_is_a_request_like_any_other(way: Way) -> None:
    way.get("http://www.test/where")
    assert way.get("http://evil.test/where").startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("evil.test", "rule_denies"), ("loop.wild.test", "address_of_host")],
)
def test_public_is_not_everything(public: Way, name: str, reason: str) -> None:
    assert public.get("http://www.test/where").startswith(b"HTTP/1.1 200")
    answer = public.get(f"http://{name}/")
    assert answer.startswith(b"HTTP/1.1 403")
    assert public.reasons() == [reason]


def test_none_has_no_way_out(net_of_tests: Internet, tmp_path: Path) -> None:
    with contextlib.closing(Way(net_of_tests, tmp_path, Net())) as way:
        assert way.get("http://www.test/").startswith(b"HTTP/1.1 403")
        assert way.reasons() == ["net_none"]


# --- names that answer differently each time ------------------------------------------------------

REBINDING = """
import socket, sys, threading
sys.path.insert(0, {root!r})
from vmsandbox.egress.connecting import Denied, Unreachable, connect
from vmsandbox.reach import Net
good, bad = {good!r}, "127.0.0.1"
answers = iter([good, bad] * 50)
def serve(dns):
    while True:
        query, client = dns.recvfrom(512)
        kind = query[-4:-2]
        found = kind == b"\\0\\1"
        head = query[:2] + b"\\x81\\x80\\0\\1" + (b"\\0\\1" if found else b"\\0\\0") + bytes(4)
        record = b"\\xc0\\x0c\\0\\1\\0\\1" + bytes(4) + b"\\0\\4"
        body = record + socket.inet_aton(next(answers)) if found else b""
        dns.sendto(head + query[12:] + body, client)
dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
dns.bind(("127.0.0.53", 53))
threading.Thread(target=serve, args=(dns,), daemon=True).start()
net = Net(private=(good + "/32",))
seen = []
for _ in range(20):
    try:
        with connect(net, "flips.example.org", 80) as sock:
            seen.append(sock.getpeername()[0])
    except Denied as denied:
        seen.append(str(denied))
print(" ".join(seen))
"""


def test_escape_by_rebinding(net_of_tests: Internet, tmp_path: Path) -> None:
    """A real DNS server that says a public address and loopback in turn: asked once for each
    connection, what it said is checked, and exactly that is connected to."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\noptions timeout:1\n")
    root = str(Path(__file__).parents[2])
    program = REBINDING.format(root=root, good=net_of_tests.server)
    shell = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", shell, str(tmp_path / "resolv.conf")]
    done = subprocess.run(
        [*argv, sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [net_of_tests.server, "address_of_host"] * 10


# --- rules that change, and the record ------------------------------------------------------------


def wait_for(what: Callable[[], object], seconds: float = 20) -> None:
    deadline = Deadline(seconds)
    while not what():
        assert not deadline.passed(), "it did not come to that"
        time.sleep(0.02)


def test_a_grant_holds_from_now_on_and_only_for_its_time(way: Way) -> None:
    assert way.get("http://evil.test/where").startswith(b"HTTP/1.1 403")
    add_grant(way.grants, f"evil.test:{PLAIN_PORT}", 6)
    with way.tunnel(f"evil.test:{PLAIN_PORT}") as raw:
        raw.sendall(b"x")
        assert raw.recv(1) == b"x"
        assert read_all(raw) == b""  # what is open ends with it
    denied = way.answer(
        f"CONNECT evil.test:{PLAIN_PORT} HTTP/1.1\r\nHost: evil.test:{PLAIN_PORT}\r\n\r\n".encode()
    )
    assert denied.startswith(b"HTTP/1.1 403")
    wait_for(lambda: "rule_ended" in [entry.reason for entry in way.entries()])


def test_a_refusal_says_what_would_help(way: Way) -> None:
    answer = way.get("http://evil.test/x")
    said = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert said["code"] == "no_rule_allows"
    assert said["hint"] == "on the host: vmsandbox net box allow evil.test:80 --for 10m"


def test_what_cannot_be_written_down_is_not_let_through(way: Way) -> None:
    way.log.unlink()
    way.log.mkdir()
    before = way.internet.asked()
    assert way.get("http://www.test/where").startswith(b"HTTP/1.1 403")
    assert way.internet.asked() == before


def test_the_guest_cannot_push_out_what_was_let_through(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vmsandbox.egress.journal._REFUSALS_MOST_BYTES", 2000)
    for _ in range(30):
        way.get("http://evil.test/" + "x" * 200)
    way.get("http://www.test/where")
    assert [entry.verdict for entry in way.entries()][-2:] == ["allowed", "closed"]
    assert way.log.stat().st_size < 3000
    assert summary_of(way.log).full


def test_a_target_is_safe_to_show(way: Way) -> None:
    way.answer(b"GET http://\xe2\x80\xae\x85evil/ HTTP/1.1\r\nHost: x\r\n\r\n")
    assert all(entry.target.isprintable() for entry in way.entries())


@pytest.mark.parametrize("said", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_a_server_that_speaks_nonsense(way: Way, said: bytes, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(said)

        threading.Thread(target=serve, daemon=True).start()
        net = Net(
            layers=(Policy(mode=NetMode.ALLOW, allow=(f"odd.test:{port}",)),),
            private=("127.0.0.1",),
            hosts={"odd.test": ("127.0.0.1",)},
        )
        with contextlib.closing(Way(way.internet, tmp_path, net)) as odd:
            answer = odd.get(f"http://odd.test:{port}/")
    assert answer.startswith(b"HTTP/1.1 502")
    assert b"upstream_" in answer


def test_a_host_that_is_down_or_unknown(way: Way) -> None:
    add_grant(way.grants, "www.test:9", None)
    assert b"upstream_unreachable" in way.get("http://www.test:9/")
    add_grant(way.grants, "no-such-name.invalid", None)
    assert b"name_unknown" in way.get("http://no-such-name.invalid/")
    assert [entry.verdict for entry in way.entries()] == ["failed", "failed"]


# --- programs that know proxies -------------------------------------------------------------------


@pytest.fixture
def proxy(way: Way) -> Iterator[str]:
    """A port of the host's that is what 3128 is in a guest."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    way.outlet.accept(listener.accept()[0])

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_git_over_ssh_through_the_guests_own_script(way: Way, proxy: str, tmp_path: Path) -> None:
    world, port = way.internet, proxy.rpartition(":")[2]
    add_grant(way.grants, "git.test:22", None)
    (tmp_path / "key").write_text(world.ssh_key)
    (tmp_path / "key").chmod(0o600)
    for host in ("git.test", "evil.test"):
        with (tmp_path / "known").open("a") as known:
            known.write(f"{host} {world.ssh_host_key}\n")
    script = Path(__file__).parents[2] / "vmsandbox" / "guest_scripts" / "through-outlet"
    ssh = f"ssh -F none -i {tmp_path}/key -o UserKnownHostsFile={tmp_path}/known"
    environment = os.environ | {"GIT_SSH_COMMAND": f"{ssh} -o ProxyCommand='{script} {port} %h %p'"}
    bare = world.folder / "git.test" / "project.git"
    for host, found in (("git.test", True), ("evil.test", False)):
        argv = ["git", "ls-remote", f"root@{host}:{bare}"]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
        assert ("refs/heads/main" in done.stdout) is found, done.stderr
    assert "vmsandbox net box allow evil.test:22" in done.stderr


def test_curl_as_people_call_it(way: Way, proxy: str) -> None:
    environment = os.environ | {"https_proxy": proxy, "http_proxy": proxy, "no_proxy": ""}
    ca = ["--cacert", str(way.internet.ca)]
    for url, code in (
        ("https://pypi.test/where", "200"),
        ("http://www.test/where", "200"),
        ("https://evil.test/where", "000"),
        (f"https://{way.internet.server}/where", "000"),
    ):
        argv = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", *ca, url]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == code, (url, done.stderr)
    hidden = ["--connect-to", "evil.test:443:pypi.test:443"]
    argv = ["curl", "-sS", *ca, *hidden, "https://evil.test/"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode
    wait_for(lambda: "tls_name_differs" in way.reasons())
