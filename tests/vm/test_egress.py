"""Egress from real guests: nothing from one without, and from one with it exactly what is allowed,
by programs that nobody told of a proxy.
"""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.internet import PLAIN_PORT, Internet, internet, may_make_one
from tests.repositories import Repository
from tests.sandboxes import State
from tests.vm.lives import assert_refused, status_of, wait_for

pytestmark = pytest.mark.skipif(not may_make_one(), reason="only root makes network namespaces")
PROBE = Path(__file__).with_name("probe.pl")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    """The small internet, and a user's own configuration that knows it."""
    with (
        internet(tmp_path_factory.mktemp("internet")) as running,
        pytest.MonkeyPatch.context() as m,
    ):
        home = tmp_path_factory.mktemp("config")
        (home / "vmsandbox").mkdir()
        (home / "vmsandbox" / "config.toml").write_text(running.config('deny = ["evil.test"]'))
        m.setenv("XDG_CONFIG_HOME", str(home))
        yield running


@pytest.fixture(scope="module")
def listener() -> Iterator[tuple[int, list[str]]]:
    """A service of the host on all its addresses, TCP and UDP: its port, and who came."""
    came: list[str] = []
    with (
        socket.create_server(("", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        port = tcp.getsockname()[1]
        udp.bind(("", port))

        def serve_tcp() -> None:
            with contextlib.suppress(OSError):
                while True:
                    came.append(f"tcp {tcp.accept()[1]}")

        def serve_udp() -> None:
            with contextlib.suppress(OSError):
                while True:
                    data, who = udp.recvfrom(2000)
                    if who is None:  # closed meanwhile
                        return
                    came.append(f"udp {who}")
                    udp.sendto(data, who)

        for serve in (serve_tcp, serve_udp):
            threading.Thread(target=serve, daemon=True).start()
        yield port, came
        for sock in (tcp, udp):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


# --- none -----------------------------------------------------------------------------------------


def escapes(world: Internet, port: int) -> list[str]:
    """What a probe tries from a guest."""
    loopback = "10.0.2.2"  # which user networks lead to the host's loopback
    hosts = (loopback, "10.0.2.3", world.host, world.server, "169.254.169.254", "100.64.0.1")
    tcp = [(host, at) for host in hosts for at in (port, 22, 53, 80)]
    tcp += [(loopback, 2222), (loopback, 16509), ("127.0.0.1", 3128), (world.server, PLAIN_PORT)]
    tcp += [(name, port) for name in ("fec0::2", "::ffff:10.0.2.2", "fe80::2")]
    udp = [(host, port) for host in (loopback, world.host, "255.255.255.255", "10.0.2.255")]
    udp += [(world.server, PLAIN_PORT), ("239.255.255.250", 1900), ("fec0::3", 53)]
    return [
        *(f"tcp,{host},{at}" for host, at in tcp),
        *(f"udp,{host},{at}" for host, at in udp),
        *(f"dns,{host},53" for host in ("10.0.2.3", loopback, world.server, "8.8.8.8", "fec0::3")),
        *(f"icmp,{host},0" for host in (world.host, world.server, "8.8.8.8")),
        *(f"vsock,{cid},{port}" for cid in (1, 2)),
    ]


def probed(out: str) -> dict[str, bool]:
    lines = (line.split(" ", 1) for line in out.splitlines() if line.split(" ")[0] in _SAID)
    return {what: _SAID[said] for said, what in lines}


_SAID = {"reached": True, "failed": False}


def test_the_probe_and_the_places_are_real(
    world: Internet, listener: tuple[int, list[str]]
) -> None:
    """From the host, what a guest must not reach is there."""
    port, _ = listener
    places = [
        f"{kind},{host},{port}" for kind in ("tcp", "udp") for host in ("127.0.0.1", world.host)
    ]
    places += [f"{kind},{world.server},{PLAIN_PORT}" for kind in ("tcp", "udp")]
    places += [f"tcp,{world.server},80", f"dns,{world.server},53", f"icmp,{world.server},0"]
    found = probed(subprocess.run([PROBE, *places], capture_output=True, text=True).stdout)
    assert found == dict.fromkeys(places, True)


def test_nothing_leaves_a_guest_without_egress(
    world: Internet,
    listener: tuple[int, list[str]],
    shared_state: State,
    tmp_path: Path,
) -> None:
    port, came = listener
    before = world.asked(), list(came)
    project = Repository.create(tmp_path / "project", {"README": "hello\n"})
    shutil.copy(PROBE, project.path)
    places = escapes(world, port)
    assert len(places) >= 25
    script = (
        f"sudo ./probe.pl {' '.join(places)}; getent hosts www.test || echo failed name;"
        f" sudo ip address add {world.server[:-1]}9/24 dev eth0;"
        f" sudo ./probe.pl tcp,{world.server},80 udp,{world.server},{PLAIN_PORT};"
        " env | grep -i proxy; ls /etc/profile.d; for port in /dev/virtio-ports/*; do"
        " echo GET / | sudo timeout 2 tee $port; done"
    )
    answer = shared_state("run", "--json", "--", "sh", "-c", script, cwd=project.path)
    said = (Path(answer.data["stdout"])).read_text()
    found = probed(said)
    assert found.keys() >= set(places), said
    assert not [place for place, reached in found.items() if reached]
    assert "vmsandbox-outlet" not in said
    assert (world.asked(), came) == before
    status = shared_state.ok("net", "--json", answer.data["id"]).data
    assert (status["mode"], status["open"], status["summary"]["allowed"]) == ("none", False, 0)
    refused = shared_state("net", answer.data["id"], "allow", "pypi.org", "--json")
    assert_refused(refused, "net_none", 2)


def test_a_task_that_was_shut_out_is_told_of_it(shared_state: State, tmp_path: Path) -> None:
    project = Repository.create(tmp_path / "project", {"README": "hello\n"})
    failed = shared_state("run", "--", "false", cwd=project.path)
    assert "vmsandbox run --allow RULE" in failed.err
    assert failed.err.count("exit code 1") == 1
    fetch = ("curl", "-s", "http://b.test/")
    denied = shared_state("run", "--allow", "a.test", "--", *fetch, cwd=project.path)
    (known,) = re.findall(r"1 request\(s\) denied: vmsandbox net (\w+)", denied.err)
    assert "denied     1 x b.test:80" in shared_state.ok("net", known).out


# --- allow ----------------------------------------------------------------------------------------

WORK = r"""
try() { # NAME COMMAND…
    name=$1; shift
    timeout 120 "$@" > "out/$name" 2>&1 < /dev/null
    echo "$name $?" >> out/codes
}
mkdir out
chmod 600 key
until [ -e /tmp/go ]; do sleep 0.2; done
try curl-http curl -sS http://www.test/where
try curl-https curl -sS https://www.test/where
try pip python3 -m pip download --no-deps --no-cache-dir tinything
try npm npm view tinything version
try apt sudo apt-get update -o Dir::Etc::sourcelist="$PWD/deb.list" -o Dir::Etc::sourceparts=/none
try git-https git ls-remote https://git.test/project.git
try git-ssh git ls-remote "root@git.test:$BARE"
printf '[Service]\nType=oneshot\nExecStart=curl -sS -o /run/said http://www.test/where\n' |
    sudo tee /run/systemd/system/asking.service > /dev/null
try unit sudo sh -c 'systemctl start asking && cat /run/said'
try login env -i bash -lc 'curl -sS http://www.test/where'
try sudo sudo curl -sS http://www.test/where
try docker sudo docker pull registry.test/thing:1
try by-address curl -sSf --max-time 9 "http://$SERVER/where"
try direct curl -sS --max-time 5 --noproxy '*' "http://$SERVER/where"
try denied curl -sSf http://evil.test/where
try other-name curl -sS --connect-to evil.test:443:www.test:443 https://evil.test/where
try host-loopback curl -sS --noproxy none -f "http://127.0.0.1:$PORT/"
try host-header curl -sSf -H 'Host: evil.test' http://www.test/where
try gateway-address curl -sSf "http://10.0.2.2:$PORT/"
sudo ./probe.pl $PLACES > out/probe 2>&1
until [ -e /tmp/stop ]; do
    curl -sS --max-time 5 http://www.test/beat
    sleep 0.1
done > /dev/null 2>&1
"""
REACHES = {
    "curl-http": "www.test",
    "curl-https": "www.test",
    "pip": "tinything-1.0-py3-none-any.whl",
    "npm": "1.0.0",
    "apt": "Packages",
    "git-https": "refs/heads/main",
    "git-ssh": "refs/heads/main",
    "unit": "www.test",
    "login": "www.test",
    "sudo": "www.test",
}
REFUSED = [
    *("docker", "by-address", "direct", "denied", "other-name", "host-loopback"),
    *("host-header", "gateway-address"),
]


class Work(NamedTuple):
    """A task that works, and what it said so far."""

    state: State
    id: str
    world: Internet
    manager: "subprocess.Popen[str]"
    codes: dict[str, int]
    out: dict[str, str]

    def beats(self) -> int:
        return _beats(self.world)


def _beats(world: Internet) -> int:
    """How often the task has asked since its work is done: it goes on with that."""
    return sum(line.endswith("/beat") for line in world.asked())


def python_for_guests() -> list[str]:
    """The standard library and pip of this host's Python, for a guest that has the least of it."""
    library = Path(sysconfig.get_path("stdlib"))
    pip = next(
        Path(p) for p in ("/usr/lib/python3/dist-packages/pip", _OWN_PIP) if Path(p).exists()
    )
    without = ("test", "idlelib", "turtledemo", "lib2to3", "config-*", "__pycache__")
    exclude = [f"--exclude={name}" for name in without]
    aside = f"--transform=s,^{pip.parent},/usr/lib/python3/dist-packages,"
    return [*exclude, aside, str(library), str(pip)]


_OWN_PIP = str(Path(sysconfig.get_path("purelib")) / "pip")


def bring(state: State, id_: str) -> None:
    """What a guest of the plain image lacks: all of Python, and npm."""
    node = Path(shutil.which("node") or pytest.skip("no node"))
    npm = Path(shutil.which("npm") or pytest.skip("no npm")).resolve().parents[1]
    script = "/usr/local/bin/npm"
    argv = ["tar", "-c", "--zstd", "-P", *python_for_guests()]
    argv += [f"--transform=s,^{node},/usr/local/bin/node,", str(node), str(npm)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as tar:
        unpack = f"tar -x --zstd -P -C / && ln -s {npm}/bin/npm-cli.js {script}"
        subprocess.run(
            state.argv("ssh", "--root", id_, "--", unpack),
            env=state.environment(),
            stdin=tar.stdout,
            check=True,
        )


@pytest.fixture(scope="module")
def work(
    world: Internet,
    listener: tuple[int, list[str]],
    shared_state: State,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Work]:
    project = Repository.create(tmp_path_factory.mktemp("work") / "project", {"work.sh": WORK})
    shutil.copy(PROBE, project.path)
    shutil.copy(world.ca, project.path / "ca.pem")
    project.write("deb.list", "deb [trusted=yes] http://deb.test/ ./\n")
    project.write("key", world.ssh_key).chmod(0o600)
    project.write("known", f"git.test {world.ssh_host_key}\n")
    ca = str(project.path / "ca.pem")
    ssh = f"ssh -i {project.path}/key -o UserKnownHostsFile={project.path}/known"
    variables = {
        **dict.fromkeys(("CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT", "npm_config_cafile"), ca),
        "PIP_INDEX_URL": "https://pypi.test/simple",
        "npm_config_registry": "https://npm.test",
        "GIT_SSH_COMMAND": ssh,
        "BARE": str(world.folder / "git.test" / "project.git"),
        "SERVER": world.server,
        "PORT": str(listener[0]),
        "PLACES": " ".join(escapes(world, listener[0])),
    }
    argv = ["run", "--memory", "2G", "--name", "work"]
    for name in ("www.test", "pypi.test", "npm.test", "deb.test", "git.test", "git.test:22"):
        argv += ["--allow", name]
    argv += [f"--env={name}={value}" for name, value in variables.items()]
    manager = shared_state.start(*argv, "--", "sh", "work.sh", cwd=project.path)
    try:
        wait_for("the task runs", lambda: _state(shared_state) == "running", manager)
        bring(shared_state, "work")
        shared_state.ok("exec", "work", "--", "touch", "/tmp/go")
        wait_for("its work is done", lambda: _beats(world), manager)
        out = _said(shared_state)
        codes = {name: int(code) for name, code in map(str.split, out["codes"].splitlines())}
        id_ = status_of(shared_state, "work")["id"]
        yield Work(shared_state, id_, world, manager, codes, out)
    finally:
        manager.kill()
        manager.communicate()


def _state(state: State) -> str:
    answer = state("status", "--json", "work")
    return str(answer.data["sandboxes"][0]["state"]) if answer.code == 0 else ""


def _said(state: State) -> dict[str, str]:
    """What each attempt said, by its name."""
    every = 'cd out && for name in *; do echo "@@ $name"; cat "$name"; done'
    parts = state.ok("exec", "work", "--", "sh", "-c", every).out.split("@@ ")[1:]
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


@pytest.mark.parametrize("name", REACHES)
def test_programs_reach_what_is_allowed_with_nothing_configured(work: Work, name: str) -> None:
    assert work.codes[name] == 0, work.out[name]
    assert REACHES[name] in work.out[name]


@pytest.mark.parametrize("name", REFUSED)
def test_programs_do_not_reach_the_rest(work: Work, name: str) -> None:
    assert work.codes[name] != 0, work.out[name]


def test_nothing_leaves_beside_the_proxy(
    work: Work, listener: tuple[int, list[str]], world: Internet
) -> None:
    found = probed(work.out["probe"])
    places = set(escapes(world, listener[0])) - {"tcp,127.0.0.1,3128"}
    assert found.keys() >= places, work.out["probe"]
    assert not [place for place in places if found[place]]


def test_docker_asks_the_proxy(work: Work) -> None:
    targets = work.state.ok("net", "--json", "work").data["summary"]["targets"]
    assert [t for t in targets if t["target"] == "registry.test:443" and t["verdict"] == "denied"]


def test_what_it_reached_is_shown(work: Work) -> None:
    status = work.state.ok("net", "--json", "work").data
    assert (status["mode"], status["open"]) == ("allow", True)
    seen = {target["target"]: target for target in status["summary"]["targets"]}
    assert seen["pypi.test:443"]["verdict"] == "allowed"
    assert seen["git.test:22"]["received"] > 1000
    assert seen["evil.test:80"]["reason"] == "rule_denies"
    reasons = {(t["target"], t["reason"]) for t in status["summary"]["targets"]}
    assert ("www.test:443", "tls_name_differs") in reasons
    text = work.state.ok("net", "work").out
    assert "allow www.test" in text
    assert "denied" in text


def test_a_rule_can_be_added_while_it_runs(work: Work) -> None:
    argv = ["exec", "work", "--", "curl", "-sSf", "http://a.wild.test/where"]
    assert work.state(*argv).code != 0
    answer = work.state.ok("net", "work", "allow", "*.wild.test", "--for", "10m", "--json")
    assert answer.data["until"]
    assert work.state.ok(*argv).out == "a.wild.test\n"
    bad = work.state("net", "work", "allow", "1.2.3.4", "--json")
    assert "address" in assert_refused(bad, "rule_invalid", 2)


def test_no_manager_no_egress_and_resume_restores_it(work: Work) -> None:
    wait_for("a beat", lambda: work.beats() > 2)
    work.manager.send_signal(signal.SIGKILL)
    work.manager.wait()
    stopped = work.beats()
    time_passes(3.0)
    assert work.beats() <= stopped + 1  # one that was on its way
    assert work.state.ok("net", "--json", "work").data["open"] is False
    before = work.beats()
    began = time.monotonic()
    manager = work.state.start("resume", "--json", "work")
    try:
        wait_for("egress is back", lambda: work.beats() > before, manager)
        took = time.monotonic() - began
        print(f"resume restored egress in {took:.2f} s")
        work.state.ok("exec", "work", "--", "touch", "/tmp/stop")
        out, _ = manager.communicate(timeout=300)
    finally:
        manager.kill()
    assert json.loads(out)["data"]["outcome"] == "completed"
    assert took < 10
    shown = work.state.ok("review", "work").out
    assert "egress" in shown
    assert "pypi.test:443" in shown
    data: Any = work.state.ok("review", "--json", "work").data
    assert data["net"] == "allow"
    assert data["egress"]["denied"] >= 5


def time_passes(seconds: float) -> None:
    """Let the guest go on for a while: that nothing happens cannot be waited for."""
    threading.Event().wait(seconds)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--allow", "1.2.3.4"], "an address is not a name"),
        (["--allow", "pypi.org:http"], "not a rule"),
        (["--allow", "@nix"], "@python"),
        (["--net", "all"], "net.mode"),
    ],
)
def test_a_rule_that_is_none_starts_nothing(
    state: State, tmp_path: Path, flags: list[str], part: str
) -> None:
    project = Repository.create(tmp_path / "project", {"README": "hello\n"})
    answer = state("run", *flags, "--json", "--", "true", cwd=project.path)
    assert answer.code == 125
    assert answer.error["code"] == "config_invalid"
    assert part in answer.error["message"]
    assert state.ids() == []
