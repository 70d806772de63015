"""What two clones of one template might have in common and must not: one test per row of
docs/clone-hazards.md, all on the same two guests, each of which is asked once.
"""

import hashlib
import json
import mmap
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.repositories import Repository
from tests.sandboxes import State
from vmsandbox.model import SandboxRecord
from vmsandbox.store import SandboxFolder

MEMORY_MIB = 1024
NAMES = ("clone-a", "clone-b")
DISK_GIB = 20
PARTS = ("ram", "state", "disk.qcow2")
MAC = "52:54:00:76:6d:01"
BY_SEED = {"/etc/hostname", "/etc/hosts", "/etc/machine-id", "/etc/vmsandbox/id"}
BY_SEED |= {"/etc/ssh/vmsandbox_authorized_keys"}

FACTS = """
say() { printf '%s=%s\\n' "$1" "$(eval "$2" 2>&1 | tr '\\n' ' ')"; }
say clock 'date +%s.%N'
say connections 'ss -Htan | grep -v ^LISTEN'
say host_key 'cat /etc/ssh/ssh_host_*_key.pub'
say authorized_key 'cat /etc/ssh/vmsandbox_authorized_keys'
say machine_id 'cat /etc/machine-id'
say hostname 'uname -n; cat /etc/hostname; getent hosts $(uname -n)'
say urandom 'head -c 32 /dev/urandom | base64'
say uuid 'cat /proc/sys/kernel/random/uuid'
say perl 'perl -e "print rand"'
say shell 'echo $RANDOM$RANDOM$RANDOM'
say mktemp 'mktemp -u'
say layout 'grep stack /proc/self/maps'
say python 'python3 -c "import random; print(random.random(), hash(chr(65)))"'
say entropy 'ls /etc/vmsandbox'
say mac 'cat /sys/class/net/eth0/address'
say address 'ip -br -4 address show dev eth0'
IMAGE=/usr/lib/vmsandbox-image/seed SEED=/etc/vmsandbox/id
say written 'find / -xdev -type f -size +0 -newer $IMAGE ! -newer $SEED'
say seeds 'find / -xdev -name random-seed; find / -xdev -name "*.lease*" -type f'
say temporary 'find /tmp /var/tmp -path $WORK -prune -o -type f ! -newer $SEED -print'
say boots 'journalctl -q -o cat --until @$MADE | grep -c "Linux version"'
say logins 'journalctl -q -o cat --until @$MADE | grep -c Accepted'
say disk 'df --output=size -BM / | tail -1'
say memory 'grep -E "^(MemTotal|MemAvailable):" /proc/meminfo'
say clocks 'python3 -c "
import time as t
print(t.monotonic(), t.clock_gettime(t.CLOCK_BOOTTIME))
w, m = t.time(), t.monotonic(); t.sleep(1)
print(t.time() - w, t.monotonic() - m)"'
for address in 10.0.2.2 $OTHER; do
    say to_$address "timeout 3 bash -c 'exec 3<>/dev/tcp/$address/2222' && echo reached || echo not"
done
"""


@dataclass(frozen=True)
class Clone:
    """One of the two, running, and what was found in it."""

    state: State
    name: str
    folder: SandboxFolder
    record: SandboxRecord

    def root(self, script: str) -> str:
        """What a shell of root's prints in the guest."""
        return self.state.ok("exec", self.name, "--", "sudo", "bash", "-c", script).out.strip()

    def ask(self, other: "Clone") -> tuple[dict[str, str], float, float]:
        """The facts, and the host's clock before and after."""
        made = int(self.record.created_at.timestamp())
        before = time.time()
        given = f"MADE={made} WORK={self.record.task.worktree}"
        said = self.root(f"{given} OTHER={other.record.endpoint.address}\n{FACTS}")
        lines = (line.partition("=") for line in said.splitlines())
        return {name: value.strip() for name, _, value in lines}, before, time.time()


@dataclass(frozen=True)
class Pair:
    """Both, what they said, and the template as it was before."""

    a: Clone
    b: Clone
    facts: dict[str, dict[str, str]]
    asked: dict[str, tuple[float, float]]
    template: Path
    digests: dict[str, str]

    def __iter__(self) -> Iterator[Clone]:
        return iter((self.a, self.b))

    def both(self, fact: str) -> tuple[str, str]:
        return self.facts[self.a.name][fact], self.facts[self.b.name][fact]

    def differ(self, fact: str) -> tuple[str, str]:
        """What both said, which must be something and not the same."""
        first, second = self.both(fact)
        assert first
        assert second
        assert first != second
        return first, second


def digests_of(template: Path) -> dict[str, str]:
    found = {}
    for part in PARTS:
        with (template / part).open("rb") as file:
            found[part] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def holds(file: Path, text: bytes) -> bool:
    """Whether the bytes of a file have this text anywhere."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as content:
        return content.find(text) >= 0


@pytest.fixture(scope="module")
def pair(shared_state: State, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    state = shared_state
    warmed = state.ok("image", "warm", "debian-12", "--json").data
    assert warmed["memory_mib"] == MEMORY_MIB
    template = state.path / "templates" / warmed["name"]
    digests = digests_of(template)
    project = Repository.create(tmp_path_factory.mktemp("hazards") / "project", {"a": "b"}).path
    for name in NAMES:
        state.ok("run", "--keep", "--name", name, "--worktree", project, "--", "true")
    folders = [SandboxFolder(path) for path in (state.path / "sandboxes").iterdir()]
    found = {record.name: folder for folder in folders if (record := folder.read_record())}
    a, b = (Clone(state, name, found[name], found[name].read_record()) for name in NAMES)
    assert a.record.template == b.record.template == warmed["name"]
    assert [a.record.cold, b.record.cold] == [False, False]
    with ThreadPoolExecutor(2) as pool:
        answers = dict(zip(NAMES, pool.map(Clone.ask, (a, b), (b, a)), strict=True))
    facts = {name: facts for name, (facts, _, _) in answers.items()}
    asked = {name: (before, after) for name, (_, before, after) in answers.items()}
    return Pair(a, b, facts, asked, template, digests)


# --- identity -------------------------------------------------------------------------------------


def test_ssh_host_key(pair: Pair) -> None:
    for clone, key in zip(pair, pair.differ("host_key"), strict=True):
        assert key == clone.folder.host_key.read_text().strip()


def ssh(key_of: Clone, to: Clone) -> "subprocess.CompletedProcess[str]":
    options = {
        "IdentitiesOnly": "yes",
        "IdentityFile": key_of.folder.client_key,
        "UserKnownHostsFile": to.folder.known_hosts,
        "BatchMode": "yes",
    }
    given = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    address = ("-p", str(to.record.endpoint.port), f"root@{to.record.endpoint.address}")
    argv = ["ssh", "-F", "none", *given, *address, "echo in"]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def test_authorized_key(pair: Pair) -> None:
    pair.differ("authorized_key")
    for one, other in ((pair.a, pair.b), (pair.b, pair.a)):
        assert ssh(one, one).stdout == "in\n"
        refused = ssh(one, other)
        assert refused.stdout == ""
        assert "Permission denied" in refused.stderr


def test_machine_id(pair: Pair) -> None:
    expected = tuple(clone.record.domain_uuid.replace("-", "") for clone in pair)
    assert pair.differ("machine_id") == expected


def test_hostname(pair: Pair) -> None:
    for clone, shown in zip(pair, pair.differ("hostname"), strict=True):
        assert shown.split() == [clone.name, clone.name, "127.0.1.1", clone.name]


# --- randomness and time --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", ["urandom", "uuid", "python", "perl", "shell", "mktemp", "layout"]
)
def test_randomness(pair: Pair, source: str) -> None:
    """The kernel's, and what a process that starts later makes of it."""
    pair.differ(source)
    assert pair.both("entropy") == ("id", "id"), "what was brought for it is used up"


def test_wall_clock(pair: Pair) -> None:
    for clone in pair:
        before, after = pair.asked[clone.name]
        assert before - 1 < float(pair.facts[clone.name]["clock"]) < after + 1


def test_monotonic_clock(pair: Pair) -> None:
    """It goes on from where the template stopped, at the pace of the wall clock."""
    made_in_s = json.loads((pair.template / "template.json").read_text())["made_in_s"]
    for clone, shown in zip(pair, pair.both("clocks"), strict=True):
        monotonic, boot, wall_step, step = map(float, shown.split())
        age_s = pair.asked[clone.name][1] - clone.record.created_at.timestamp()
        assert 0 < monotonic < made_in_s + age_s
        assert abs(boot - monotonic) < 0.5, "it never slept"
        assert 0.99 < step < 5
        assert abs(wall_step - step) < 0.1


# --- network --------------------------------------------------------------------------------------


def test_address(pair: Pair) -> None:
    """The same in both, each alone on a network of its own; on the host they are two."""
    assert pair.both("mac") == (MAC, MAC)
    assert all("10.0.2.15/24" in shown for shown in pair.both("address"))
    a, b = (clone.record.endpoint for clone in pair)
    assert a.address != b.address
    for clone, other in ((pair.a, b), (pair.b, a)):
        for address in ("10.0.2.2", other.address):
            assert pair.facts[clone.name][f"to_{address}"].endswith("not")
        assert ssh(clone, clone).stdout == "in\n", "from the host it is reached"


def test_open_connections(pair: Pair) -> None:
    """Only those that began after the start: SSH from the host."""
    for shown in pair.both("connections"):
        words = shown.replace("[::ffff:", "").replace("]", "").split()
        ends = set(zip(words[3::5], (peer.rpartition(":")[0] for peer in words[4::5]), strict=True))
        assert ends == {("10.0.2.15:22", "10.0.2.2")}, shown


# --- what a boot leaves ---------------------------------------------------------------------------


def test_leftovers_of_the_boot(pair: Pair) -> None:
    """Nothing was written to the disk between the image and the seed, and nobody had logged in."""
    ours = ("/usr/lib/vmsandbox/", "/usr/bin/vmsandbox-ask", "/etc/ssh/ssh_host_")
    for shown in pair.both("written"):
        written = {path for path in shown.split() if not path.startswith(ours)}
        assert written == BY_SEED
    assert pair.both("seeds") == pair.both("temporary") == ("", "")
    assert pair.both("boots") == ("1", "1"), "the log begins with the boot of the template"
    assert pair.both("logins") == ("0", "0")


def test_disk_capacity(pair: Pair) -> None:
    """As asked; another size is another template's, see test_images."""
    for shown in pair.both("disk"):
        assert 0.95 * DISK_GIB * 1024 < int(shown.rstrip("M")) <= DISK_GIB * 1024


def test_free_memory(pair: Pair) -> None:
    """As asked, less what the kernel keeps; most of it free."""
    for shown in pair.both("memory"):
        words = shown.split()
        total, available = int(words[1]) / 1024, int(words[4]) / 1024
        assert 0.9 * MEMORY_MIB < total < MEMORY_MIB
        assert available > 0.75 * MEMORY_MIB


# --- between clones and their template ------------------------------------------------------------


def secrets_of(clone: Clone) -> dict[str, bytes]:
    """What only this clone may hold. Of a private key the second line: the first are all alike."""
    private = clone.folder.host_key_private.read_bytes().splitlines()
    client = clone.folder.client_key.read_bytes().splitlines()
    return {
        "host key": private[2],
        "client key": client[2],
        "public host key": clone.folder.host_key.read_bytes().split()[1],
        "authorized key": clone.folder.client_key_public.read_bytes().split()[1],
        "machine id": clone.record.domain_uuid.replace("-", "").encode(),
        "host name": clone.name.encode(),
    }


def test_secrets_of_the_template(pair: Pair) -> None:
    """It has none: it was frozen before there were any."""
    files = [pair.template / part for part in PARTS]
    assert holds(pair.template / "ram", b"waiting for the seed"), "what is there is found"
    for clone in pair:
        for what, secret in secrets_of(clone).items():
            assert len(secret) >= 7
            assert not [file.name for file in files if holds(file, secret)], what
    private = b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA"
    assert not [file.name for file in files if holds(file, private)]


def test_writes_of_the_other(pair: Pair) -> None:
    """What one writes, in memory and on disk, is seen by neither the other nor the template."""
    marks = {clone.name: f"mark-of-{clone.name}-{os.urandom(8).hex()}" for clone in pair}
    write = "yes {} | head -n 9999 | tee /dev/shm/mark > /mark; sync; echo done"
    assert [clone.root(write.format(marks[clone.name])) for clone in pair] == ["done", "done"]
    for clone, other in ((pair.a, pair.b), (pair.b, pair.a)):
        own, theirs = marks[clone.name], marks[other.name]
        files = "/mark /dev/shm/mark"
        counted = clone.root(f"cat {files} | grep -c {own}; cat {files} | grep -c {theirs} || :")
        assert counted.split() == ["19998", "0"]
        assert holds(clone.folder.overlay, own.encode())
        assert not holds(clone.folder.overlay, theirs.encode())
    frozen = [pair.template / part for part in PARTS]
    assert not any(holds(file, mark.encode()) for file in frozen for mark in marks.values())


def test_the_template_is_as_it_was(pair: Pair) -> None:
    """After all that its clones did above."""
    assert digests_of(pair.template) == pair.digests
