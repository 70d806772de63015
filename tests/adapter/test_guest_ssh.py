"""The SSH connection to a guest, against a real sshd on loopback."""

import contextlib
import hashlib
import os
import random
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.adapter.loopback_guest import LOGIN, LoopbackGuest, free_port
from vmsandbox import seed
from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem, HostProblem, UsageProblem
from vmsandbox.guest import (
    Guest,
    Interrupted,
    Requirement,
    known_hosts_line,
    ssh_argv,
    ssh_config,
    wait_ready,
)
from vmsandbox.model import Endpoint

NOISE = random.Random(1).randbytes(5_000_001)


def elsewhere(port: int) -> Endpoint:
    return Endpoint(address="127.0.0.1", port=port)


@contextlib.contextmanager
def like_a_host_forward(target: Endpoint, silent: int) -> Iterator[Endpoint]:
    """Accepts at once as QEMU does; the first `silent` connections never hear anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends: list[socket.socket] = []

        def copy(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        def serve() -> None:
            with contextlib.suppress(OSError):
                for number in range(100):
                    near, _ = listener.accept()
                    ends.append(near)
                    if number >= silent:
                        far = socket.create_connection((target.address, target.port))
                        ends.append(far)
                        for pair in ((near, far), (far, near)):
                            threading.Thread(target=copy, args=pair, daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield elsewhere(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for end in ends:
            end.close()


# --- connecting -----------------------------------------------------------------------------------


def test_a_command_gives_code_and_both_streams(guest: Guest) -> None:
    completed = guest.run(["sh", "-c", r"printf 'a\000b'; echo c >&2; exit 9"])
    assert completed == (9, b"a\0b", b"c\n")


def test_arguments_arrive_as_they_are(guest: Guest) -> None:
    arguments = ["it's", "$HOME", "a\nb", "", "*", "\udcff\udcfe", "ä"]
    completed = guest.run(["printf", r"%s\0", *arguments])
    assert completed.stdout.split(b"\0")[:-1] == [os.fsencode(argument) for argument in arguments]


def test_a_command_runs_in_its_folder(guest: Guest, tmp_path: Path) -> None:
    folder = tmp_path / "with 'quotes' and $signs"
    folder.mkdir()
    assert guest.run(["pwd"], folder=str(folder)).stdout == os.fsencode(folder) + b"\n"


def test_another_host_key_is_refused_at_once(loopback: LoopbackGuest) -> None:
    guest = Guest(
        loopback.endpoint, key=loopback.client.private, host_key=seed.new_key().public, user=LOGIN
    )
    deadline = Deadline(30)
    with guest, pytest.raises(GuestProblem) as raised:
        guest.connect(deadline)
    assert raised.value.code == "host_key_mismatch"
    assert deadline.elapsed() < 10


def test_a_key_that_may_not_log_in_is_named(loopback: LoopbackGuest) -> None:
    with (
        loopback.guest(key=seed.new_key().private) as guest,
        pytest.raises(GuestProblem, match=r"login as .* was refused") as raised,
    ):
        guest.connect(Deadline(3))  # a busy machine needs one for a login
    assert raised.value.code == "boot_timeout"


def test_a_closed_port_is_asked_until_the_deadline(loopback: LoopbackGuest) -> None:
    deadline = Deadline(0.5)
    with (
        loopback.guest(endpoint=elsewhere(free_port())) as guest,
        pytest.raises(GuestProblem, match=r"waiting for SSH .*refused") as raised,
    ):
        guest.connect(deadline)
    assert raised.value.code == "boot_timeout"
    assert raised.value.hint
    assert 0.5 <= deadline.elapsed() < 3


def test_an_accepting_port_without_a_server_says_so(loopback: LoopbackGuest) -> None:
    with (
        like_a_host_forward(loopback.endpoint, silent=100) as forward,
        loopback.guest(endpoint=forward) as guest,
        pytest.raises(GuestProblem, match="no SSH server speaks"),
    ):
        guest.connect(Deadline(1))


def test_a_forward_that_swallows_the_first_connection_is_no_obstacle(
    loopback: LoopbackGuest,
) -> None:
    with (
        like_a_host_forward(loopback.endpoint, silent=1) as forward,
        loopback.guest(endpoint=forward) as guest,
    ):
        guest.connect(Deadline(20))
        assert guest.run(["true"]).code == 0


def test_nobody_waits_for_a_dead_domain(loopback: LoopbackGuest) -> None:
    guest = Guest(
        elsewhere(free_port()),
        key=loopback.client.private,
        host_key=loopback.host.public,
        alive=lambda: False,
    )
    deadline = Deadline(30)
    with guest, pytest.raises(GuestProblem) as raised:
        guest.connect(deadline)
    assert raised.value.code == "connection_lost"
    assert deadline.elapsed() < 5


def test_requirements_are_met_in_order_and_the_unmet_one_is_named(
    loopback: LoopbackGuest,
) -> None:
    met: list[str] = []
    with loopback.guest() as guest, pytest.raises(GuestProblem, match="waiting for a miracle"):
        wait_ready(
            [guest.answers(), Requirement("a miracle", "pray", lambda deadline: "none seen")],
            Deadline(1),
            progress=met.append,
            evidence="/console.log",
        )
    assert met == ["SSH"]


def test_a_guest_without_its_seed_is_not_ready(guest: Guest) -> None:
    with pytest.raises(GuestProblem, match="waiting for its seed") as raised:
        wait_ready([guest.answers(), guest.seeded("other")], Deadline(0.1))
    assert raised.value.code == "boot_timeout"


# --- commands -------------------------------------------------------------------------------------


def test_a_command_that_takes_too_long_is_an_error(guest: Guest) -> None:
    with pytest.raises(GuestProblem) as raised:
        guest.run(["sleep", "1"], timeout_s=0.2)
    assert raised.value.code == "guest_command_timeout"


def test_an_endless_answer_is_refused(guest: Guest) -> None:
    with pytest.raises(GuestProblem) as raised:
        guest.run(["yes"], stdout_max_bytes=100_000, timeout_s=20)
    assert raised.value.code == "guest_answer_invalid"


def test_a_command_line_has_a_limit_that_is_told(guest: Guest) -> None:
    assert len(guest.run(["printf", "%s", "x" * 100_000]).stdout) == 100_000
    with pytest.raises(UsageProblem) as raised:
        guest.run(["printf", "%s", "x" * 140_000])
    assert raised.value.code == "command_too_long"


def test_a_stream_in_is_whole_and_told(guest: Guest) -> None:
    told: list[int] = []
    pieces = [NOISE[start : start + 333_333] for start in range(0, len(NOISE), 333_333)]
    answer = guest.stream_in(["sha256sum"], pieces, progress=told.append)
    assert answer.split()[0].decode() == hashlib.sha256(NOISE).hexdigest()
    assert told == sorted(told)
    assert told[-1] == len(NOISE)


def test_both_directions_at_once_do_not_block(guest: Guest) -> None:
    assert guest.run(["cat"], stdin=NOISE).stdout == NOISE


def test_a_command_that_stops_reading_is_told_by_its_code(guest: Guest) -> None:
    with pytest.raises(GuestProblem, match=r"exit code 4.*: enough") as raised:
        guest.stream_in(["sh", "-c", "echo enough >&2; exit 4"], [NOISE] * 4, timeout_s=20)
    assert raised.value.code == "guest_command_failed"


def test_a_source_that_fails_is_not_taken_for_the_guest(guest: Guest) -> None:
    def source() -> Iterator[bytes]:
        yield b"x"
        raise HostProblem("pack_failed", "no more")

    with pytest.raises(HostProblem):
        guest.stream_in(["cat"], source(), timeout_s=20)


def test_a_stream_out_is_a_file(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(NOISE)
    with guest.stream_out(["cat", str(tmp_path / "noise")]) as file:
        assert file.read(7) == NOISE[:7]
        assert file.read() == NOISE[7:]
        assert file.read() == b""


def test_a_cut_off_stream_never_looks_whole(guest: Guest) -> None:
    with guest.stream_out(["sh", "-c", "printf part; echo broken >&2; exit 1"]) as file:
        assert file.read(4) == b"part"
        with pytest.raises(GuestProblem, match="broken"):
            file.read(1)


def test_what_a_guest_says_in_an_error_is_escaped(guest: Guest) -> None:
    with pytest.raises(GuestProblem) as raised:
        guest.stream_in(["sh", "-c", r"printf '\033]0;x\007' >&2; exit 1"], [])
    assert "\x1b" not in raised.value.message


def test_many_threads_share_one_connection(loopback: LoopbackGuest, guest: Guest) -> None:
    connections = loopback.sshd.children()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: guest.run(["echo", str(n)]).stdout, range(24)))
    assert answers == [f"{n}\n".encode() for n in range(24)]
    assert {*loopback.sshd.children()} <= {*connections}


def test_a_lost_connection_is_an_error_now_and_made_again_later(
    loopback: LoopbackGuest, guest: Guest
) -> None:
    timer = threading.Timer(0.3, loopback.cut)
    timer.start()
    with pytest.raises(GuestProblem) as raised:
        guest.run(["sleep", "1"])
    timer.join()
    assert raised.value.code == "connection_lost"
    assert guest.run(["echo", "again"]).stdout == b"again\n"


def test_waiting_can_be_interrupted_from_another_thread(guest: Guest) -> None:
    deadline = Deadline(30)
    timer = threading.Timer(0.2, guest.interrupt)
    timer.start()
    with pytest.raises(Interrupted):
        guest.run(["sleep", "1"])
    timer.join()
    with pytest.raises(Interrupted):
        guest.connect(Deadline(20))
    assert deadline.elapsed() < 10
    guest.resume()
    assert guest.run(["true"]).code == 0


def test_an_interrupt_does_not_wait_for_a_handshake(loopback: LoopbackGuest) -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)) as listener,
        loopback.guest(endpoint=elsewhere(port)) as guest,
    ):

        def speaks_once_and_interrupts() -> None:
            near, _ = listener.accept()
            with near:
                near.sendall(b"SSH-2.0-stuck\r\n")
                near.recv(100)
                guest.interrupt()

        thread = threading.Thread(target=speaks_once_and_interrupts)
        thread.start()
        deadline = Deadline(30)
        with pytest.raises(Interrupted):
            guest.connect(deadline)
        thread.join()
    assert deadline.elapsed() < 10


# --- the system's client --------------------------------------------------------------------------


@pytest.fixture
def config(loopback: LoopbackGuest, tmp_path: Path) -> Path:
    folder = tmp_path / "a folder 100%d"
    folder.mkdir()
    (folder / "key").write_text(loopback.client.private)
    (folder / "key").chmod(0o600)
    (folder / "known").write_text(known_hosts_line(loopback.endpoint, loopback.host.public))
    text = ssh_config(
        "box", loopback.endpoint, key=folder / "key", known_hosts=folder / "known", user=LOGIN
    )
    (folder / "config").write_text(text)
    return folder / "config"


def ssh(config: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    argv = ssh_argv(config, "box", command, options=["-o", "BatchMode=yes"])
    return subprocess.run(argv, capture_output=True, text=True, timeout=20)


def test_the_systems_ssh_uses_the_config(config: Path) -> None:
    answer = ssh(config, "echo", "hello")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "hello\n", "")


def test_scp_works_with_the_config(config: Path, tmp_path: Path) -> None:
    (tmp_path / "original").write_text("content")
    source, target = f"box:{tmp_path}/original", str(tmp_path / "copy")
    copied = subprocess.run(
        ["scp", "-O", "-q", "-F", str(config), source, target],
        timeout=20,
        capture_output=True,
        text=True,
    )
    assert copied.returncode == 0, copied.stderr
    assert (tmp_path / "copy").read_text() == "content"


def test_the_systems_ssh_refuses_another_host_key(loopback: LoopbackGuest, config: Path) -> None:
    config.with_name("known").write_text(known_hosts_line(loopback.endpoint, seed.new_key().public))
    answer = ssh(config, "echo", "hello")
    assert answer.returncode == 255
    assert "hello" not in answer.stdout
