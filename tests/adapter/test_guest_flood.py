"""A guest whose sshd is the attacker's own: it sends more than anybody asked for."""

import contextlib
import io
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import paramiko
import pytest
from paramiko.common import cMSG_CHANNEL_DATA, cMSG_CHANNEL_EXTENDED_DATA, cMSG_CHANNEL_OPEN
from paramiko.message import Message

from vmsandbox import seed
from vmsandbox.deadline import Deadline
from vmsandbox.errors import GuestProblem
from vmsandbox.guest import Guest
from vmsandbox.guest.flood import PacketSocket
from vmsandbox.model import Endpoint

PIECE, PIECES = b"x" * 32_000, 4_000
WAIT_S = 30.0


class Server(paramiko.ServerInterface):
    """Lets everybody in, and says when a command was asked for."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.channel: paramiko.Channel | None = None

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.common.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.common.OPEN_SUCCEEDED

    def check_port_forward_request(self, address: str, port: int) -> int:
        return port

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self.channel = channel
        self.asked.set()
        return True


Attack = Callable[[paramiko.Transport, socket.socket, int], None]
"""Sends one piece to the channel of that number."""


def beyond_the_window(kind: bytes, extended: bool) -> Attack:
    def send(transport: paramiko.Transport, sock: socket.socket, number: int) -> None:
        message = Message()
        message.add_byte(kind)
        message.add_int(number)
        if extended:
            message.add_int(1)
        message.add_string(PIECE)
        transport._send_user_message(message)  # type: ignore[attr-defined]
        if not transport.is_active():
            raise ConnectionError

    return send


def within_one_packet(transport: paramiko.Transport, sock: socket.socket, number: int) -> None:
    """Pieces of a packet that claims two gigabytes: AES-GCM leaves its length in clear."""
    sock.settimeout(WAIT_S)
    sock.sendall(struct.pack(">I", 0x7FFFFFF0) + PIECE)


def coming_and_going() -> Attack:
    numbers = itertools.count(1000)

    def open_one(transport: paramiko.Transport, sock: socket.socket, _: int) -> None:
        number = next(numbers)
        transport.channels_seen[number] = True  # so that what the host says of it is no surprise
        message = Message()
        message.add_byte(cMSG_CHANNEL_OPEN)
        message.add_string("forwarded-tcpip")
        for field in (number, 2**21, 2**15):
            message.add_int(field)
        for address, port in (("127.0.0.1", 3128), ("127.0.0.1", 1)):
            message.add_string(address)
            message.add_int(port)
        transport._send_user_message(message)  # type: ignore[attr-defined]

    return open_one


@contextlib.contextmanager
def attacked(attack: Attack) -> Iterator[tuple[Guest, list[int]]]:
    """A guest that attacks when it is asked for a command, and the pieces that it got rid of."""
    client, host = seed.new_key(), seed.new_key()
    sent: list[int] = []

    def serve() -> None:
        sock, _ = listener.accept()
        transport, server = paramiko.Transport(sock), Server()
        transport.add_server_key(paramiko.Ed25519Key(file_obj=io.StringIO(host.private)))
        transport.start_server(server=server)
        assert server.asked.wait(WAIT_S)
        assert server.channel
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while len(sent) < PIECES:
                attack(transport, sock, server.channel.remote_chanid)
                sent.append(1)
            transport.global_request("done@test", wait=True)  # answered after all that was sent
        transport.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint(address="127.0.0.1", port=listener.getsockname()[1])
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with Guest(endpoint, key=client.private, host_key=host.public) as guest:
            yield guest, sent
        thread.join(WAIT_S)


def read_when_it_is_over(guest: Guest) -> None:
    """Ask for a command, and look at what it says only when the connection has ended."""
    with guest.follow(["watch"]) as lines:
        guest._connection.check().join(WAIT_S)
        lines.read()


@pytest.mark.parametrize(
    "attack",
    [
        beyond_the_window(cMSG_CHANNEL_DATA, False),
        beyond_the_window(cMSG_CHANNEL_EXTENDED_DATA, True),
        within_one_packet,
    ],
    ids=["stdout", "stderr", "packet"],
)
def test_a_flood_ends_the_connection_and_is_not_kept(attack: Attack) -> None:
    with attacked(attack) as (guest, sent):
        with pytest.raises(GuestProblem) as problem:
            read_when_it_is_over(guest)
        assert problem.value.code == "connection_lost"
    assert len(sent) < PIECES / 4


def test_channels_that_come_and_go_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmsandbox.guest.flood._CHANNELS_REMEMBERED", PIECES // 10)
    with attacked(coming_and_going()) as (guest, sent):
        guest.connect(Deadline(WAIT_S))
        guest.forward(3128, lambda stream: stream.close()).await_open(Deadline(WAIT_S))
        transport = guest._connection.check()
        with pytest.raises(GuestProblem):  # once all have come
            read_when_it_is_over(guest)
        assert len(sent) == PIECES
        assert len(transport.channels_seen) <= PIECES // 10 + 10


def test_a_connection_that_takes_nothing_any_more_ends() -> None:
    ours, theirs = socket.socketpair()
    with theirs, PacketSocket.of(ours) as taken:
        taken.settimeout(0.05)
        taken.patience_s = 0.3
        with pytest.raises(BrokenPipeError):
            insist(taken)
        assert taken.fileno() == -1


def test_a_connection_that_is_only_slow_goes_on() -> None:
    ours, theirs = socket.socketpair()
    with theirs, PacketSocket.of(ours) as taken:
        taken.settimeout(0.05)
        taken.patience_s = 0.3
        for _ in range(10):  # longer than its patience, and each time something is taken
            fill(taken)
            assert theirs.recv(2**20)
        assert taken.fileno() != -1


def insist(sock: socket.socket) -> None:
    """Send as paramiko does."""
    for _ in range(200):
        with contextlib.suppress(TimeoutError):
            sock.send(PIECE)


def fill(sock: socket.socket) -> None:
    with contextlib.suppress(TimeoutError):
        while True:
            sock.send(PIECE)
