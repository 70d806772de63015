"""Ports of real guests on the host: found by themselves, each sandbox at an address of its own, for
as long as the guest runs, whoever dies meanwhile.
"""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.repositories import Repository
from tests.sandboxes import Answer, State
from tests.vm.lives import PATIENCE_S, assert_refused, status_of, wait_for

# perl-base is part of every Debian, and starts quickly where the CPU is emulated.
SERVE = r"""
use strict; use Socket qw(:all);
$SIG{CHLD} = 'IGNORE';
for my $spec (@ARGV) {
    my ($family, $host, $port, $says) = split /,/, $spec;
    next if fork;
    socket(my $server, $family eq '6' ? AF_INET6 : AF_INET, SOCK_STREAM, 0) or die $!;
    setsockopt($server, SOL_SOCKET, SO_REUSEADDR, 1);
    my $to = $family eq '6' ? pack_sockaddr_in6($port, inet_pton(AF_INET6, $host))
                            : pack_sockaddr_in($port, inet_aton($host));
    bind($server, $to) or die $!;
    listen($server, 128) or die $!;
    while (accept(my $client, $server)) {
        next if fork;
        sysread($client, my $asked, 4096);
        syswrite($client, "HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n$says\n");
        exit;
    }
}
sleep 1 while 1;
"""
WITHOUT_THE_RIGHT = (
    ["setpriv", "--bounding-set=-net_bind_service", "--inh-caps=-net_bind_service", "--"]
    if os.geteuid() == 0
    else []
)
"""Before a command: it may not bind ports below 1024, whoever it runs as."""

PROMISED_S = 2.0
"""Within which a change in a guest is to be seen on the host, where the host has time for it."""


def body_of(url: str, timeout_s: float = 20) -> str:
    """What a web server says, asked without a proxy of this machine's."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    return answer.partition(b"\r\n\r\n")[2].decode().strip()


def answers(url: str, says: str) -> bool:
    with contextlib.suppress(OSError):
        return body_of(url) == says
    return False


def ports_of(state: State, selector: str) -> dict[int, Any]:
    """What `ports` says, by port; nothing while it says no."""
    answer = state("ports", "--json", selector)
    return {one["port"]: one for one in answer.data["ports"]} if answer.code == 0 else {}


class Kept(NamedTuple):
    """A guest that runs on after its task."""

    state: State
    id: str
    address: str

    def inside(self, line: str) -> str:
        return self.state.ok("exec", self.id, "--", "sh", "-c", line).out

    def soon_s(self) -> float:
        """What is promised, and what this host takes now for two words with the guest."""
        started = time.monotonic()
        self.inside("true")
        return PROMISED_S + 3 * (time.monotonic() - started)

    def serve(self, *specs: str) -> None:
        """Start servers, each FAMILY,HOST,PORT,WHAT-IT-SAYS."""
        self.inside(f"setsid perl serve.pl {' '.join(specs)} > /dev/null 2>&1 < /dev/null &")

    def contain(self, says: str) -> None:
        """Start a container with a web server on port 8080, made of what the guest has."""
        page = f"/bin/busybox mkdir /www; echo {says} > /www/index.html;"
        serve = f"{page} exec /bin/busybox httpd -f -p 80 -h /www"
        made = "tar -C / -c bin/busybox | docker import - box > /dev/null"
        run = f"docker run -d --name web -p 8080:80 box /bin/busybox sh -c '{serve}'"
        self.state.ok("exec", "--root", self.id, "--", "sh", "-c", f"{made} && {run}")

    def asked(self, address: str, port: int) -> str:
        """What a server says that is asked from inside the guest."""
        return self.inside(
            "perl -MIO::Socket::INET -e '"
            f'$s = IO::Socket::INET->new(PeerAddr => "{address}:{port}", Timeout => 3) or exit;'
            ' print $s "GET / HTTP/1.0\\r\\n\\r\\n"; @lines = <$s>; print $lines[-1]\''
        ).strip()

    def url(self, port: int) -> str:
        return f"http://{self.address}:{port}"

    def answers(self, port: int, says: str) -> bool:
        return answers(self.url(port), says)

    def keepers(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if (process.info["cmdline"] or [])[-2:] == ["_publish", self.id]
        ]


def kept(state: State, project: Path, name: str, *options: str) -> Kept:
    run = state.ok(
        "run", "--json", "--keep", "--name", name, "--worktree", project, *options, "--", "true"
    )
    return Kept(state, run.data["id"], status_of(state, name)["address"])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files: dict[str, str | bytes] = {"serve.pl": SERVE}
    return Repository.create(tmp_path_factory.mktemp("ports") / "project", files).path


@pytest.fixture(scope="module")
def one(shared_state: State, project: Path) -> Kept:
    return kept(shared_state, project, "one")


def within(seconds: float, what: str, happened: Callable[[], object]) -> None:
    started = time.monotonic()
    wait_for(what, happened)
    took = time.monotonic() - started
    assert took < seconds, f"{what}: {took:.1f} s"


# --- found and followed ---------------------------------------------------------------------------


def test_servers_are_found_wherever_they_are_bound(one: Kept) -> None:
    one.serve("4,127.0.0.1,3001,local", "6,::1,3002,six", "4,0.0.0.0,3003,any", "6,::,3004,both")
    said = {3001: "local", 3002: "six", 3003: "any", 3004: "both"}
    for port, text in said.items():
        within(one.soon_s() + PROMISED_S, f"port {port}", partial(one.answers, port, text))
    found = ports_of(one.state, one.id)
    assert {port: found[port]["bound"] for port in said} == {
        3001: "127.0.0.1",
        3002: "::1",
        3003: "0.0.0.0",
        3004: "::",
    }
    assert {found[port]["process"] for port in said} == {"perl"}
    assert found[3001]["url"] == one.url(3001)
    assert 22 not in found
    assert status_of(one.state, one.id)["url"].startswith(f"http://{one.address}:")
    shown = one.state.ok("ports", one.id).out
    assert one.url(3002) in shown
    assert one.url(3001) in one.state.ok("status").out


def test_a_port_that_another_process_takes_over_is_followed(one: Kept) -> None:
    one.serve("4,127.0.0.1,3100,first")
    within(one.soon_s(), "the first", lambda: one.answers(3100, "first"))
    one.inside("pkill -f '[3]100,first'")
    within(one.soon_s(), "nothing", lambda: 3100 not in ports_of(one.state, one.id))
    with pytest.raises(ConnectionRefusedError):
        body_of(one.url(3100))
    one.serve("6,::1,3100,second")
    within(one.soon_s(), "the second", lambda: one.answers(3100, "second"))


def test_a_privileged_port_and_a_taken_one_are_found_and_told(one: Kept) -> None:
    with socket.create_server((one.address, 3200)):
        one.state.ok(
            "exec", "--root", one.id, "--", "sh", "-c",
            f"setsid perl {one.state.ok('exec', one.id, '--', 'pwd').out.strip()}/serve.pl"
            " 4,0.0.0.0,80,web 4,0.0.0.0,3200,moved > /dev/null 2>&1 < /dev/null &",
        )  # fmt: skip
        wait_for("both", lambda: {80, 3200} <= ports_of(one.state, one.id).keys())
        found = ports_of(one.state, one.id)
    assert found[3200]["note"] == f"port 3200 is taken on {one.address}"
    assert answers(found[3200]["url"], "moved")
    assert answers(found[80]["url"], "web")


def test_a_keeper_that_was_killed_is_replaced_by_resume(one: Kept) -> None:
    one.serve("4,127.0.0.1,3300,still")
    within(one.soon_s(), "the server", lambda: one.answers(3300, "still"))
    soon_s = one.soon_s()
    (keeper,) = one.keepers()
    keeper.kill()
    keeper.wait(10)
    refused = one.state("ports", "--json", one.id)
    assert_refused(refused, "not_published", 2)
    assert f"vmsandbox resume {one.id}" in refused.err
    (problem,) = status_of(one.state, one.id)["problems"]
    assert "nobody publishes" in problem
    assert f"vmsandbox resume {one.id}" in problem
    with one.state.start("resume", one.id) as resuming:
        started = time.monotonic()
        wait_for("it again", lambda: one.answers(3300, "still"))
        assert time.monotonic() - started < soon_s + 1
        assert resuming.wait(PATIENCE_S) == 0
    assert ports_of(one.state, one.id)[3300]["process"] == "perl"  # the keeper is awaited
    assert len(one.keepers()) == 1
    assert status_of(one.state, one.id)["problems"] == []
    within(one.soon_s(), "still there", lambda: one.answers(3300, "still"))


# --- several --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(one: Kept, project: Path) -> list[Kept]:
    more = [kept(one.state, project, name) for name in ("two", "three")]
    return [one, *more]


def test_nine_urls_lead_to_three_sandboxes(three: list[Kept]) -> None:
    for number, guest in enumerate(three):
        guest.serve(f"4,127.0.0.1,3000,web-{number}", f"4,0.0.0.0,5432,data-{number}")
        guest.contain(f"box-{number}")
    for number, guest in enumerate(three):
        for port, text in ((3000, "web"), (5432, "data"), (8080, "box")):
            wait_for(text, partial(guest.answers, port, f"{text}-{number}"))
        wait_for("the container's name", partial(contains, guest, 8080, "web"))


def contains(guest: Kept, port: int, container: str) -> bool:
    return bool(ports_of(guest.state, guest.id).get(port, {}).get("container") == container)


def test_no_guest_reaches_the_ports_of_another(three: list[Kept]) -> None:
    for number, guest in enumerate(three[:2]):
        guest.serve(f"4,0.0.0.0,5433,data-{number}")
        wait_for("it", partial(guest.answers, 5433, f"data-{number}"))
    first, second = three[:2]
    # All of 127.x is a guest's own loopback, where its own server answers; 10.0.2.2 is the host's.
    assert first.asked(second.address, 5433) == "data-0"
    assert first.asked("10.0.2.2", 5433) == ""


def test_only_loopback_is_bound_for_them(three: list[Kept]) -> None:
    pids = {keeper.pid for guest in three for keeper in guest.keepers()}
    assert len(pids) == len(three)
    bound = {
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert bound == {guest.address for guest in three}


def test_ports_end_with_their_guest(three: list[Kept]) -> None:
    last = three[-1]
    assert last.keepers()
    last.state.ok("stop", last.id)
    assert not last.keepers()
    with pytest.raises(OSError):
        body_of(last.url(3000))
    assert_refused(last.state("ports", "--json", last.id), "guest_not_running", 2)


# --- while a task runs ----------------------------------------------------------------------------


def test_a_manager_that_was_killed_is_replaced_by_resume(
    shared_state: State, project: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    command = "perl serve.pl 4,127.0.0.1,3000,task & until [ -e stop ]; do sleep 0.2; done; kill $!"
    arguments = ("run", "--name", "killed", "--publish", f"{free}:3000", "--worktree", project)
    with killed(shared_state.start(*arguments, "--", "sh", "-c", command)) as manager:
        wait_for("the port", lambda: ports_of(shared_state, "killed"), manager)
        url = f"http://{status_of(shared_state, 'killed')['address']}:3000"
        asked = f"http://127.0.0.1:{free}"
        wait_for("both ways", lambda: answers(url, "task") and answers(asked, "task"), manager)
        soon_s = Kept(shared_state, "killed", "").soon_s()
        taken = shared_state("run", "--publish", f"{free}:80", "--", "true", cwd=project)
        assert_refused(taken, "port_taken", 125, with_json=False)
    with pytest.raises(OSError):
        body_of(url)
    with killed(shared_state.start("resume", "killed")) as resumed:
        started = time.monotonic()
        wait_for("it again", lambda: answers(url, "task") and answers(asked, "task"), resumed)
        assert time.monotonic() - started < soon_s + 1
        shared_state.ok("exec", "killed", "--", "touch", "stop")
        assert resumed.wait(PATIENCE_S) == 0


@contextlib.contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """It does not outlive the block, whatever happens there."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_without_publishing_nothing_is_published(shared_state: State, project: Path) -> None:
    guest = kept(shared_state, project, "closed", "--no-publish")
    guest.serve("4,127.0.0.1,3000,hidden")
    assert guest.keepers() == []
    assert shared_state.ok("ports", "--json", "closed").data["ports"] == []
    with pytest.raises(ConnectionRefusedError):
        body_of(guest.url(3000))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "code"), [("0.0.0.0:80:80", "publish_invalid"), ("80", "publish_invalid")]
)
def test_a_mapping_that_is_none_makes_nothing(
    shared_state: State, project: Path, mapping: str, code: str
) -> None:
    before = shared_state.ids()
    refused = shared_state("run", "--json", "--publish", mapping, "--", "true", cwd=project)
    assert_refused(refused, code, 125)
    assert shared_state.ids() == before


def test_a_pool_that_is_used_up_is_told(state: State, project: Path) -> None:
    environment = state.environment() | {"VMSANDBOX_ADDRESSES": "127.93.0.0/32"}
    refused = subprocess.run(
        state.argv("run", "--", "true"),
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 125
    assert "[addresses_used_up]" in refused.stderr
    assert "hint: " in refused.stderr
    assert state.ids() == []


def test_a_privileged_port_is_denied_to_who_may_not_bind_it(state: State, project: Path) -> None:
    refused = subprocess.run(
        [*WITHOUT_THE_RIGHT, *state.argv("run", "--json", "--publish", "80:3000", "--", "true")],
        cwd=project,
        env=state.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    answer = Answer(refused.returncode, refused.stdout, refused.stderr)
    assert_refused(answer, "port_denied", 125)
    assert "--publish 20080:3000" in answer.err
    assert state.ids() == []
