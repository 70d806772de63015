"""Small servers on loopback that answer byte for byte what a test says, and keep what they were
asked.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from vmsandbox.outlet import Handler, Outlet

Script = Callable[[bytes], Iterable[bytes]]


class Upstream(NamedTuple):
    """A server that runs, and every request that it got, as it came."""

    port: int
    asked: list[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def upstream(script: Script) -> Iterator[Upstream]:
    """Answers each connection with the pieces of `script`, which is given the whole request."""
    asked: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            request = _request(connection)
            asked.append(request)
            for piece in script(request):
                connection.sendall(piece)

    with _listening(serve) as port:
        yield Upstream(port, asked)


def _request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (piece := connection.recv(65536)):
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            while len(body) < int(line.split(b":")[1]):
                body += connection.recv(65536)
        elif line == b"transfer-encoding: chunked":
            while not body.endswith(b"0\r\n\r\n"):
                body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """A whole HTTP answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def sse(*events: str) -> bytes:
    """A whole stream of events, told by its end."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return head + "".join(f"data: {event}\n\n" for event in events).encode()


@contextlib.contextmanager
def outlet_port(handlers: dict[str, Handler], egress: Handler) -> Iterator[int]:
    """The port of an outlet that guests would reach through SSH, on our own loopback."""
    outlet = Outlet(egress, handlers)
    with _listening(outlet.accept, own_threads=False) as port:
        try:
            yield port
        finally:
            outlet.close()


@contextlib.contextmanager
def _listening(
    serve: Callable[[socket.socket], None], *, own_threads: bool = True
) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    if own_threads:
                        threading.Thread(target=serve, args=(connection,), daemon=True).start()
                    else:
                        serve(connection)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def free_port() -> int:
    """A port of loopback on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def holds(folder: Path, needle: bytes) -> list[str]:
    """The files below a folder that hold `needle`."""
    return [str(f) for f in folder.rglob("*") if f.is_file() and needle in f.read_bytes()]
