"""The image in a guest: what tasks find there, and what its short boot must not have cost."""

from pathlib import Path

import pytest

from tests.repositories import Repository
from tests.sandboxes import State

SCRIPT = """
say() { printf '%s=%s\\n' "$1" "$(eval "$2" 2>&1 | tr '\\n' ' ')"; }
say user 'id -un; id -Gn'
say root 'sudo -n id -un'
say size 'df --output=size -BM / | tail -1'
say tools 'for tool in git tmux zstd ip curl docker python3 less; do command -v $tool; done'
say failed 'sudo systemctl --failed --plain --no-legend'
say docker 'sudo systemctl is-active docker.socket docker.service containerd.service'
say socket 'stat -c %A:%G /run/docker.sock'
say machine 'cat /etc/machine-id'
say address 'ip -br -4 address show dev eth0'
say route 'ip -4 route show default'
say language 'echo $LANG; date +%Z'
say sources 'cat /etc/apt/sources.list.d/*.sources | grep -c ^Types'
say keys 'ls /etc/ssh/ssh_host_*'
until sudo systemctl -q is-active vmsandbox-late.target; do sleep 0.2; done
say late 'ls /dev/net/tun'
say tmp 'ls /tmp/kept'
say journal 'sudo journalctl -q -n 1 -o cat | wc -l'
"""


@pytest.fixture(scope="module")
def found(shared_state: State, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a task saw, by the names in the script."""
    project = Repository.create(tmp_path_factory.mktemp("image") / "project", {"README": "hello\n"})
    command = ("sh", "-c", "touch /tmp/kept; " + SCRIPT)
    answer = shared_state.ok("run", "--disk", "7G", "--", *command, cwd=project.path)
    shared_state.ok("delete", "last")
    return {
        name: value.strip()
        for name, _, value in (line.partition("=") for line in answer.out.splitlines())
    }


def test_the_agent_may_do_everything(found: dict[str, str]) -> None:
    assert found["user"].split()[:2] == ["agent", "agent"]
    assert {"sudo", "docker"} <= set(found["user"].split())
    assert found["root"] == "root"
    assert found["socket"] == "srw-rw----:docker"


def test_the_tools_are_there(found: dict[str, str]) -> None:
    names = {Path(path).name for path in found["tools"].split()}
    assert names >= {"git", "tmux", "zstd", "ip", "curl", "docker", "python3", "less"}
    assert found["sources"] == "2"


def test_the_disk_is_as_large_as_was_asked(found: dict[str, str]) -> None:
    assert 0.95 * 7 * 1024 < int(found["size"].rstrip("M")) <= 7 * 1024


def test_docker_waits_for_its_socket(found: dict[str, str]) -> None:
    assert found["docker"].split() == ["active", "inactive", "inactive"]


def test_no_unit_has_failed(found: dict[str, str]) -> None:
    assert found["failed"] == ""


def test_the_network_is_set_without_asking(found: dict[str, str]) -> None:
    assert "10.0.2.15/24" in found["address"]
    assert "via 10.0.2.2" in found["route"]


def test_the_identity_is_the_seeds(found: dict[str, str]) -> None:
    assert len(found["machine"]) == 32
    assert found["keys"] == "/etc/ssh/ssh_host_ed25519_key /etc/ssh/ssh_host_ed25519_key.pub"
    assert found["language"] == "C.UTF-8 UTC"


def test_what_runs_late_takes_nothing_from_a_task_that_has_begun(found: dict[str, str]) -> None:
    assert found["late"] == "/dev/net/tun"
    assert found["tmp"] == "/tmp/kept"
    assert found["journal"] == "1"
