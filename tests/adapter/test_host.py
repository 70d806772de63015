"""The host room against this host: daemons, the accelerator probe, the doctor's checks."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_guests import kernel
from vmsandbox import host
from vmsandbox.deadline import Deadline
from vmsandbox.errors import HostProblem
from vmsandbox.host import Status, Subject, accelerator, checks, daemons, mending, programs
from vmsandbox.host.accelerator import Verdict
from vmsandbox.host.daemons import Daemon
from vmsandbox.model import Accelerator, LibvirtFacts

QEMU = programs.find("qemu-system-x86_64")
NEEDS_QEMU = pytest.mark.skipif(QEMU is None, reason="no qemu-system-x86_64")

# --- daemons: a stand-in for them, so that nobody's libvirt is disturbed --------------------------

LISTEN = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    listener.accept()[0].close()
"""


@pytest.fixture
def run(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of the test's own, in which it is a session without systemd or reaper."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    yield short_path
    daemons.stop(daemons.SESSION_URI)


@pytest.fixture
def daemon(run: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    path = run / "socket"
    code = f"import os\ntry: os.unlink({str(path)!r})\nexcept OSError: pass\n{LISTEN}"
    standing = Daemon(name="stand-in", argv=(sys.executable, "-c", code, str(path)), socket=path)
    monkeypatch.setattr(daemons, "daemons", lambda uri: (standing,))
    return standing


def main_pid(started: daemons.StartedDaemon) -> int:
    """The daemon below its tini and its shell."""
    (shell,) = _children(started.pid)
    (main,) = _children(shell)
    return main


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_daemon_is_started_once_whoever_asks(daemon: Daemon) -> None:
    names: list[str] = []
    threads = [
        threading.Thread(target=lambda: names.extend(daemons.start(daemons.SESSION_URI)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == ["stand-in"]
    assert daemons.answers(daemon.socket)
    assert daemons.start(daemons.SESSION_URI) == []


def test_a_started_daemon_is_nobodys_child_and_ends_when_asked(daemon: Daemon) -> None:
    daemons.start(daemons.SESSION_URI)
    (started,) = daemons.started_by_us(daemons.SESSION_URI)
    assert os.getsid(started.pid) == started.pid, "it would end with our terminal"
    assert started.log.exists()
    environment = Path(f"/proc/{started.pid}/environ").read_bytes()
    assert b"PYTEST" not in environment
    assert daemons.stop(daemons.SESSION_URI) == ["stand-in"]
    assert not daemons.answers(daemon.socket)
    assert daemons.started_by_us(daemons.SESSION_URI) == []
    assert daemons.stop(daemons.SESSION_URI) == []


def test_a_killed_daemon_comes_back_and_its_reaper_stays(daemon: Daemon) -> None:
    daemons.start(daemons.SESSION_URI)
    (started,) = daemons.started_by_us(daemons.SESSION_URI)
    first = main_pid(started)
    os.kill(first, signal.SIGKILL)
    deadline = Deadline(10)
    while Path(f"/proc/{first}").exists() or not daemons.answers(daemon.socket):
        assert not deadline.passed()
    assert main_pid(started) != first
    assert daemons.started_by_us(daemons.SESSION_URI) == [started]


def test_somebody_elses_process_is_never_ended(daemon: Daemon, run: Path) -> None:
    """A pid that was given to another process since."""
    daemons.start(daemons.SESSION_URI)
    (started,) = daemons.started_by_us(daemons.SESSION_URI)
    daemons.stop(daemons.SESSION_URI)
    with subprocess.Popen(["sleep", "60"]) as bystander:
        record = run / "vmsandbox/stand-in.json"
        record.write_text(started.model_copy(update={"pid": bystander.pid}).model_dump_json())
        assert daemons.stop(daemons.SESSION_URI) == []
        assert bystander.poll() is None
        bystander.kill()


def test_a_daemon_that_cannot_start_says_why(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = daemon.model_copy(
        update={"argv": ("/bin/sh", "-c", "echo no such config >&2; exit 3")}
    )
    monkeypatch.setattr(daemons, "daemons", lambda uri: (broken,))
    monkeypatch.setattr(daemons, "_START_DEADLINE_S", 0.5)
    with pytest.raises(HostProblem) as problem:
        daemons.start(daemons.SESSION_URI)
    assert problem.value.code == "daemon_failed"
    assert "no such config" in problem.value.message
    assert problem.value.evidence
    assert daemons.started_by_us(daemons.SESSION_URI) == []


def test_without_a_login_session_the_cache_folder_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert daemons.session_runtime_dir() == tmp_path


# --- the accelerator ------------------------------------------------------------------------------


@pytest.fixture
def subject(short_path: Path) -> accelerator.Subject:
    """A kernel that prints the marker and resets, as a Linux with our initramfs does."""
    file = short_path / "kernel"
    file.write_bytes(kernel(b"vmsandbox: accelerator works\r\n", "reset"))
    file.chmod(0o444)
    short_path.chmod(0o711)
    return accelerator.Subject(
        kernel=file,
        kernel_digest="one",
        qemu_binary=Path(QEMU or "/nowhere"),
        qemu_uid=os.geteuid(),
        qemu_gid=os.getegid(),
    )


def fake_qemu(folder: Path, script: str) -> Path:
    """What a QEMU does that this host's does not."""
    path = folder / "qemu"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@NEEDS_QEMU
def test_the_probe_guest_boots(subject: accelerator.Subject, short_path: Path) -> None:
    """Emulated, since that works everywhere: the same arguments with another accelerator."""
    argv = accelerator.probe_argv(subject, subject.kernel, "tcg")
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert b"vmsandbox: accelerator works" in done.stdout
    assert done.returncode == 0


@NEEDS_QEMU
def test_the_verdict_comes_with_what_was_seen(subject: accelerator.Subject) -> None:
    verdict = accelerator.probe(subject)
    if verdict.accelerator is Accelerator.KVM:
        assert verdict.reason == "a kernel booted under KVM"
    elif not accelerator.DEVICE.exists():
        assert verdict.reason == "/dev/kvm does not exist"
    else:
        assert verdict.reason.startswith(("QEMU ended with", "a kernel under KVM did not boot"))
        assert "\n" not in verdict.reason


@pytest.fixture
def device(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = short_path / "kvm"
    path.touch(0o600)
    monkeypatch.setattr(accelerator, "DEVICE", path)
    return path


@pytest.mark.parametrize(
    ("script", "kind", "reason"),
    [
        ("echo vmsandbox: accelerator works", Accelerator.KVM, "a kernel booted under KVM"),
        (
            'echo "qemu: error: failed to set MSR 0x10a" >&2; echo later >&2; kill -ABRT $$',
            Accelerator.TCG,
            "QEMU ended with signal 6 under KVM: error: failed to set MSR 0x10a",
        ),
        (
            "printf 'SeaBIOS\\n\\033[2Jbooting\\n'; exec sleep 60",
            Accelerator.TCG,
            "a kernel under KVM did not boot within 0.5 s; its last line was '\\\\x1b[2Jbooting'",
        ),
        (
            "exec sleep 60",
            Accelerator.TCG,
            "a kernel under KVM did not boot within 0.5 s; it said nothing",
        ),
        ("exit 1", Accelerator.TCG, "QEMU ended with status 1 under KVM: nothing"),
    ],
)
def test_each_way_that_kvm_can_fail_is_told(
    subject: accelerator.Subject,
    short_path: Path,
    device: Path,
    script: str,
    kind: Accelerator,
    reason: str,
) -> None:
    qemu = fake_qemu(short_path, f"echo $$ > {short_path}/pid; {script}")
    verdict = accelerator.probe(subject.model_copy(update={"qemu_binary": qemu}), deadline_s=0.5)
    assert verdict == Verdict(accelerator=kind, reason=reason)
    pid = int((short_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists(), "the probe's process must be gone"


def test_an_answer_is_kept_until_the_host_changes(
    subject: accelerator.Subject, short_path: Path, device: Path
) -> None:
    qemu = fake_qemu(short_path, f"echo x >> {short_path}/runs; echo broken >&2; exit 1")
    subject = subject.model_copy(update={"qemu_binary": qemu})
    cache, notes = short_path / "accelerator.json", list[str]()

    def runs(**changes: str) -> int:
        accelerator.choose(subject.model_copy(update=changes), cache, notes.append)
        return len((short_path / "runs").read_text().splitlines())

    assert [runs(), runs()] == [1, 1]
    assert len(notes) == 1
    assert "broken" in notes[0]
    device.chmod(0o660)
    assert [runs(), runs()] == [2, 2]
    assert runs(kernel_digest="two") == 3
    os.utime(qemu)
    assert runs(kernel_digest="two") == 4
    cache.write_text("{")
    assert runs(kernel_digest="two") == 5
    accelerator.choose(subject, cache, notes.append, again=True)
    assert len((short_path / "runs").read_text().splitlines()) == 6


def test_without_a_device_nothing_is_tried(
    subject: accelerator.Subject, device: Path, short_path: Path
) -> None:
    device.unlink()
    qemu = fake_qemu(short_path, f"touch {short_path}/ran")
    verdict = accelerator.probe(subject.model_copy(update={"qemu_binary": qemu}))
    assert verdict.accelerator is Accelerator.TCG
    assert "does not exist" in verdict.reason
    assert not (short_path / "ran").exists()


# --- checks and mending ---------------------------------------------------------------------------


@pytest.fixture
def libvirt() -> LibvirtFacts:
    return LibvirtFacts(
        libvirt_uri=daemons.SYSTEM_URI,
        libvirt_version="9.0.0",
        qemu_version="7.2.22",
        qemu_binary=Path("/usr/bin/qemu-system-x86_64"),
        machine="pc-q35-7.2",
        qemu_uid=64055,
        qemu_gid=64055,
        answered_in_s=0.1,
    )


def subject_of(root: Path, libvirt: LibvirtFacts | None) -> Subject:
    verdict = Verdict(accelerator=Accelerator.TCG, reason="because")
    problem = None if libvirt else HostProblem("libvirt_unreachable", "it is down", hint="up!")
    return Subject(daemons.default_uri(), root, libvirt, problem, verdict)


@pytest.mark.usefixtures("host")
def test_every_question_is_answered_once(short_path: Path, libvirt: LibvirtFacts) -> None:
    short_path.chmod(0o711)
    for facts in (libvirt, None):
        answers = checks.examine(subject_of(short_path, facts))
        assert len({check.name for check in answers}) == len(answers) >= 15
        assert all(check.detail for check in answers)
        failed = {check.name for check in answers if check.status is Status.FAIL}
        assert failed == ({"libvirt"} if facts is None else set())
        json.dumps([check.model_dump(mode="json") for check in answers])


def test_a_libvirt_that_is_down_is_a_failure_with_its_hint(tmp_path: Path) -> None:
    check = checks._libvirt(subject_of(tmp_path, None))
    assert (check.status, check.detail, check.hint) == (Status.FAIL, "it is down", "up!")


def test_a_slow_answer_is_explained(tmp_path: Path, libvirt: LibvirtFacts) -> None:
    slow = libvirt.model_copy(update={"answered_in_s": 9.5})
    assert checks._capabilities(subject_of(tmp_path, libvirt)).status is Status.OK
    check = checks._capabilities(subject_of(tmp_path, slow))
    assert check.status is Status.WARN
    assert "9.50 s" in check.detail


def test_emulation_is_a_warning_with_its_reason(tmp_path: Path, libvirt: LibvirtFacts) -> None:
    check = checks._accelerator(subject_of(tmp_path, libvirt))
    assert check.status is Status.WARN
    assert "because" in check.detail


def test_an_old_qemu_is_refused(tmp_path: Path, libvirt: LibvirtFacts) -> None:
    old = libvirt.model_copy(update={"qemu_version": "6.2.0"})
    assert checks._qemu(subject_of(tmp_path, old)).status is Status.FAIL


def test_a_folder_that_qemu_cannot_get_through_is_named(
    short_path: Path, libvirt: LibvirtFacts
) -> None:
    root = short_path / "closed/state"
    root.mkdir(parents=True)
    short_path.chmod(0o711)
    (short_path / "closed").chmod(0o711)
    assert checks._state_path(subject_of(root, libvirt)).status is Status.OK
    (short_path / "closed").chmod(0o700)
    check = checks._state_path(subject_of(root, libvirt))
    assert check.status is Status.FAIL
    assert check.hint
    assert f"chmod o+x {short_path}/closed" in check.hint


def test_a_state_folder_too_deep_for_sockets_is_refused(
    tmp_path: Path, libvirt: LibvirtFacts
) -> None:
    check = checks._state_path(subject_of(tmp_path / ("d" * 100), libvirt))
    assert check.status is Status.FAIL
    assert "VMSANDBOX_HOME" in (check.hint or "")


def test_missing_programs_are_named_with_their_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "find", lambda name: None if name == "virtlogd" else "/bin/sh")
    monkeypatch.setattr(programs, "distribution", lambda: "debian")
    check = checks._programs()
    assert (check.status, check.detail) == (Status.FAIL, "missing: virtlogd")
    assert check.hint == "apt-get install libvirt-daemon-system"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change a group")
def test_the_device_is_opened_to_its_group_once(
    tmp_path: Path, device: Path, libvirt: LibvirtFacts
) -> None:
    assert checks._device(subject_of(tmp_path, libvirt)).status is Status.WARN
    assert mending.open_to_group(device)
    assert device.stat().st_mode & 0o777 == 0o660
    assert not mending.open_to_group(device)
    device.unlink()
    assert not mending.open_to_group(device)


def test_programs_are_found_where_users_do_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert programs.find("mke2fs")
    assert programs.find("no-such-program") is None


def test_git_says_its_version() -> None:
    assert shutil.which("git")
    assert (programs.git_version() or (0, 0)) >= (2, 0)


def test_a_socket_that_nobody_serves_does_not_answer(short_path: Path) -> None:
    path = short_path / "socket"
    assert not daemons.answers(path)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert not daemons.answers(path)
    assert host.libvirt_uri() == daemons.default_uri()


def test_how_long_an_orphan_stays_is_measured() -> None:
    """Whatever PID 1 is: a bounded answer, and no orphan of ours that never ends."""
    assert 0 < checks._orphan_stays_s() < 5
