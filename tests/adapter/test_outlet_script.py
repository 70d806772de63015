"""What the guest is told of its way out, read by the real programs that it is meant for.

The script runs in a mount namespace of its own, over a copy of this machine's /etc.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from vmsandbox.reach import NO_PROXY, OUTLET_PORT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mount namespaces")
SCRIPT = Path(__file__).parents[2] / "vmsandbox" / "guest_scripts" / "outlet"
PROXY = f"http://127.0.0.1:{OUTLET_PORT}"


@pytest.fixture(scope="module")
def etc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of /etc after the script ran, twice."""
    copy = tmp_path_factory.mktemp("told") / "etc"
    shutil.copytree("/etc", copy, symlinks=True, ignore_dangling_symlinks=True)
    for _ in range(2):
        inside(copy, str(SCRIPT), str(OUTLET_PORT), NO_PROXY)
    return copy


def inside(etc: Path, *argv: str) -> str:
    """What a program says that sees this /etc, and hardly any environment."""
    shell = 'mount --bind "$0" /etc && mount -t tmpfs none /run && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", shell, str(etc), *argv],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_login_shells_and_those_for_one_command_know_it(etc: Path) -> None:
    for flags in ("-lc", "-ic"):
        told = inside(etc, "bash", flags, "env").splitlines()
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            assert f"{name}={PROXY}" in told, (flags, name)
        assert f"no_proxy={NO_PROXY}" in told
    assert (etc / "bash.bashrc").read_text().count("vmsandbox-outlet.sh") == 2  # in one line


def test_apt_knows_it(etc: Path) -> None:
    said = inside(etc, "apt-config", "dump", "--format", "%f=%v%n")
    assert f"Acquire::http::Proxy={PROXY}\n" in said
    assert f"Acquire::https::Proxy={PROXY}\n" in said


def test_ssh_knows_it_but_for_the_guest_itself(etc: Path) -> None:
    command = f"proxycommand /usr/lib/vmsandbox/through-outlet {OUTLET_PORT} git.test 22"
    told = inside(etc, "ssh", "-G", "git.test")
    assert command.replace(" git.test 22", " %h %p") in told or command in told
    for host in ("localhost", "127.0.0.1", "::1"):
        assert "proxycommand" not in inside(etc, "ssh", "-G", host)


@pytest.mark.skipif(shutil.which("visudo", path="/usr/sbin") is None, reason="no sudo")
def test_sudo_keeps_it(etc: Path) -> None:
    assert "OK" in inside(etc, "visudo", "-c", "-f", "/etc/sudoers.d/vmsandbox-outlet")


def test_systemd_is_told_in_its_own_words(etc: Path) -> None:
    lines = (etc / "systemd/system.conf.d/vmsandbox-outlet.conf").read_text().splitlines()
    assert lines[0] == "[Manager]"
    assert f'DefaultEnvironment="https_proxy={PROXY}"' in lines
