"""The set-up script and the build machine's script, run for real."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "scripts" / "setup"
BUILD = ROOT / ".ci" / "run"


def call(*argv: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(word) for word in argv],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_where_nothing_is_missing_setup_is_silent_and_changes_nothing() -> None:
    first = call(SETUP, "--venv")
    assert first.returncode == 0, first.stderr
    before = (ROOT / ".venv/.setup-done").stat()
    second = call(SETUP, "--venv")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert (ROOT / ".venv/.setup-done").stat().st_mtime_ns == before.st_mtime_ns


def test_an_unknown_option_is_a_usage_error() -> None:
    assert call(SETUP, "--everything").returncode == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may put another os-release in place")
@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=fedora\n", "dnf install"),
        ("ID=manjaro\nID_LIKE=arch\n", "pacman -S"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', "zypper install"),
        ("ID=ubuntu\nID_LIKE=debian\n", "apt-get install"),
        ("ID=somelinux\n", "names in Debian"),
    ],
)
def test_other_distributions_are_told_what_to_install(
    tmp_path: Path, release: str, command: str
) -> None:
    (tmp_path / "os-release").write_text(release)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "flock", "tr", "mount"):
        (tools / tool).symlink_to(shutil.which(tool) or pytest.fail(f"no {tool}"))
    script = f"mount --bind {tmp_path}/os-release /etc/os-release && exec {SETUP}"
    unshare = shutil.which("unshare") or pytest.fail("no unshare")
    done = call(unshare, "--mount", "bash", "-c", script, PATH=str(tools))
    assert done.returncode == 3, done.stderr
    assert command in done.stderr
    assert "qemu-system-x86" in done.stderr or "qemu-x86" in done.stderr
    assert done.stdout == ""


def build_machine(folder: Path, recipe: str) -> "subprocess.CompletedProcess[str]":
    """Run a copy of .ci/run whose `make test` does `recipe`."""
    (folder / ".ci").mkdir()
    shutil.copy(BUILD, folder / ".ci" / "run")
    (folder / "Makefile").write_text(f"test:\n\t{recipe}\n")
    return call("bash", folder / ".ci" / "run")


def test_a_build_fails_as_its_tests_fail(tmp_path: Path) -> None:
    done = build_machine(tmp_path, "@echo '1 failed'; exit 1")
    assert done.returncode == 2
    assert done.stdout == "1 failed\n"


def test_a_build_that_leaves_a_process_fails_and_ends_it(tmp_path: Path) -> None:
    left = tmp_path / "sshd"
    shutil.copy(shutil.which("sleep") or pytest.fail("no sleep"), left)
    done = build_machine(tmp_path, f"@setsid {left} 300 >/dev/null 2>&1 & echo '1 passed'")
    assert done.returncode == 1, done.stderr
    assert f"{left} 300" in done.stderr

    def alive() -> bool:
        """Killed is not yet gone."""
        return any(str(left) in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))

    wait_until(lambda: not alive())


# --- make test ------------------------------------------------------------------------------------

PYTEST = """\
#!/bin/sh
echo "$@" >>calls
case "$*" in
*"tests/vm -m alone"*) exit ${LAST:-0} ;;
*tests/vm*) exit ${GUESTS:-0} ;;
*) exit ${QUICK:-0} ;;
esac
"""


def make_test(folder: Path, *arguments: str, **codes: str) -> tuple[int, list[str]]:
    """Run the Makefile's `test` with a pytest that ends as told; its status, and each call."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "scripts").mkdir()
    for script, text in (("scripts/setup", "#!/bin/sh\n"), ("python", PYTEST)):
        (folder / script).write_text(text)
        (folder / script).chmod(0o755)
    done = call("make", "-C", folder, "PYTHON=./python", "test", *arguments, **codes)
    return done.returncode, (folder / "calls").read_text().splitlines()


def test_guests_come_after_all_others_and_what_must_be_alone_last(tmp_path: Path) -> None:
    status, (quick, guests, alone) = make_test(tmp_path)
    assert status == 0
    assert re.fullmatch(r"-m pytest -n \d+ tests/unit tests/adapter", quick.strip())
    assert guests.split() == ["-m", "pytest", "-n", "2", "tests/vm", "-m", "not", "alone"]
    assert alone.split() == ["-m", "pytest", "tests/vm", "-m", "alone"]


@pytest.mark.parametrize(
    ("codes", "fails"),
    [
        ({"QUICK": "1"}, True),
        ({"GUESTS": "1"}, True),
        ({"LAST": "1"}, True),
        ({"QUICK": "5"}, False),
        ({"GUESTS": "5", "LAST": "5"}, False),
        ({"QUICK": "5", "GUESTS": "5", "LAST": "5"}, True),
        ({"QUICK": "5", "GUESTS": "1", "LAST": "5"}, True),
    ],
)
def test_all_parts_run_and_each_fails_the_whole(
    tmp_path: Path, codes: dict[str, str], fails: bool
) -> None:
    """5 is pytest's word for a selection that is empty."""
    status, calls = make_test(tmp_path, "ARGS=-k word", **codes)
    assert (status != 0) is fails
    assert len(calls) == 3
    assert all(line.endswith("-k word") for line in calls)


def test_tests_that_are_named_run_and_no_others(tmp_path: Path) -> None:
    status, calls = make_test(tmp_path, "ARGS=tests/vm/test_run.py -x", GUESTS="1")
    assert status != 0
    assert calls == ["-m pytest tests/vm/test_run.py -x"]
