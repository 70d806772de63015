"""A person's terminal on a guest's command: raw while it lasts, whole again afterwards."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapter.loopback_guest import LoopbackGuest
from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem
from vmsandbox.guest import Guest, Terminal

READY = b"ready"


class Person:
    """Sits at the other end of a pseudo-terminal; acts once the command has said `ready`."""

    def __init__(self, acts: Callable[["Person"], None]) -> None:
        self.keyboard, self.terminal = pty.openpty()
        self.size(80, 24)
        self.seen = b""
        self._acts = acts
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def types(self, text: bytes) -> None:
        os.write(self.keyboard, text)

    def sees(self, text: bytes) -> bool:
        deadline = Deadline(5)
        while text not in self.seen and not deadline.passed():
            time.sleep(0.01)
        return text in self.seen

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.terminal)

    def _read(self) -> None:
        acted = False
        with contextlib.suppress(OSError):
            while data := os.read(self.keyboard, 4096):
                self.seen += data
                if READY in self.seen and not acted:
                    acted = True
                    self._acts(self)

    def at(self, guest: Guest, script: str, *, keys: bytes = b"") -> int:
        self.place = Terminal(tty=True, stdin=self.terminal, stdout=self.terminal, detach_keys=keys)
        return guest.interactive(["sh", "-c", script], self.place)

    def leaves(self) -> None:
        os.close(self.terminal)
        self._reader.join(10)
        os.close(self.keyboard)


@pytest.fixture
def person() -> Iterator[Callable[..., Person]]:
    people: list[Person] = []

    def sits_down(acts: Callable[[Person], None] = lambda person: None) -> Person:
        people.append(Person(acts))
        return people[-1]

    yield sits_down
    for one in people:
        one.leaves()


def test_a_command_gets_a_terminal_of_our_size_and_ours_is_restored(
    guest: Guest, person: Callable[..., Person]
) -> None:
    user = person()
    user.size(101, 37)
    before = user.modes()
    assert user.at(guest, "test -t 0 && test -t 1 && stty size; exit 5") == 5
    assert user.sees(b"37 101\r\n")
    assert user.modes() == before


def test_control_c_reaches_the_guest_and_not_us(
    guest: Guest, person: Callable[..., Person]
) -> None:
    user = person(lambda user: user.types(b"\x03"))
    assert user.at(guest, "trap 'exit 7' INT; echo ready; while :; do sleep 0.05; done") == 7


def test_what_is_typed_arrives(guest: Guest, person: Callable[..., Person]) -> None:
    user = person(lambda user: user.types(b"hello\r"))
    assert user.at(guest, 'stty -echo; echo ready; read line; echo "<$line>"') == 0
    assert user.sees(b"<hello>\r\n")


LEAVE = b"\x10\x11"


def test_a_person_leaves_a_command_that_does_not_even_answer(
    guest: Guest, person: Callable[..., Person]
) -> None:
    user = person(lambda user: user.types(LEAVE))
    before = user.modes()
    script = "stty raw -echo; printf '\\033[?1049hready'; trap '' HUP; sleep 2"
    assert user.at(guest, script, keys=LEAVE) == -1
    assert user.place.left
    assert user.modes() == before
    assert user.sees(b"\x1b[?1049l"), "the screen of before is not shown again"


def test_half_of_the_keys_to_leave_with_is_a_key_like_any_other(
    guest: Guest, person: Callable[..., Person]
) -> None:
    def types(user: Person) -> None:
        user.types(b"a" + LEAVE[:1])
        user.types(b"b" + LEAVE[1:] + b"\r")

    user = person(types)
    read = "stty raw -echo; echo ready; k() { dd bs=1 count=$1 2>/dev/null; }; "
    script = read + 'printf \'<%s>\' "$(k 1)"; test "$(k 4)" = "$(printf \'\\020b\\021\\r\')"'
    assert user.at(guest, script, keys=LEAVE) == 0


def test_the_first_key_alone_arrives_in_the_end(
    guest: Guest, person: Callable[..., Person]
) -> None:
    user = person(lambda user: user.types(LEAVE[:1]))
    key = 'test "$(dd bs=1 count=1 2>/dev/null)" = "$(printf \'\\020\')"'
    assert user.at(guest, f"stty raw -echo; echo ready; {key}", keys=LEAVE) == 0


def test_a_new_window_size_is_passed_on(guest: Guest, person: Callable[..., Person]) -> None:
    def resizes(user: Person) -> None:
        user.size(120, 50)
        os.kill(os.getpid(), signal.SIGWINCH)

    user = person(resizes)
    wait = "while [ \"$(stty size)\" = '24 80' ]; do sleep 0.05; done"
    assert user.at(guest, f"echo ready; {wait}; stty size") == 0
    assert user.sees(b"50 120\r\n")
    assert signal.getsignal(signal.SIGWINCH) == signal.SIG_DFL


def test_being_told_to_end_restores_the_terminal(
    guest: Guest, person: Callable[..., Person]
) -> None:
    user = person(lambda user: os.kill(os.getpid(), signal.SIGTERM))
    before = user.modes()
    with pytest.raises(SystemExit):
        user.at(guest, "echo ready; sleep 1")
    assert user.modes() == before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_lost_connection_restores_the_terminal(
    loopback: LoopbackGuest, guest: Guest, person: Callable[..., Person]
) -> None:
    user = person(lambda user: loopback.cut())
    before = user.modes()
    with pytest.raises(GuestProblem) as raised:
        user.at(guest, "echo ready; sleep 1")
    assert raised.value.code == "connection_lost"
    assert user.modes() == before


def test_without_a_terminal_streams_stay_apart_and_exact(guest: Guest) -> None:
    noise = os.urandom(3_000_000)
    (out_read, out_write), (err_read, err_write), (in_read, in_write) = (
        os.pipe(),
        os.pipe(),
        os.pipe(),
    )
    received: dict[str, bytes] = {}

    def read(name: str, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as file:
            received[name] = file.read()

    def write() -> None:
        with os.fdopen(in_write, "wb") as file:
            file.write(noise)

    threads = [
        threading.Thread(target=read, args=("out", out_read)),
        threading.Thread(target=read, args=("err", err_read)),
        threading.Thread(target=write),
    ]
    for thread in threads:
        thread.start()
    terminal = Terminal(tty=False, stdin=in_read, stdout=out_write, stderr=err_write)
    code = guest.interactive(["sh", "-c", "cat; echo done >&2; exit 4"], terminal)
    os.close(out_write)
    os.close(err_write)
    for thread in threads:
        thread.join(20)
    os.close(in_read)
    assert code == 4
    assert received == {"out": noise, "err": b"done\n"}


def test_a_command_that_reads_nothing_still_ends(guest: Guest) -> None:
    with Path("/dev/zero").open("rb") as endless, Path("/dev/null").open("wb") as nowhere:
        terminal = Terminal(tty=False, stdin=endless.fileno(), stdout=nowhere.fileno())
        assert guest.interactive(["sh", "-c", "exit 6"], terminal) == 6
