"""A small internet of the test's own: a network namespace with web servers, an SSH server and a
certificate authority, reached from the host over one pair of interfaces.

Run as a program it is what serves there. Its addresses are from TEST-NET-2 (RFC 5737), which counts
as private: a user's configuration must name them.
"""

import contextlib
import datetime
import hashlib
import http.server
import io
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.repositories import Repository
from vmsandbox import seed
from vmsandbox.deadline import Deadline

NAMES = ("pypi.test", "npm.test", "deb.test", "git.test", "www.test", "*.wild.test", "evil.test")
PLAIN_PORT = 7777
"""Sends back what comes, over TCP and UDP."""


def may_make_one() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


@dataclass(frozen=True)
class Internet:
    """What runs, and where. `server` is the address that names lead to, `other` another one of the
    same servers, `host` the host's own address on that network."""

    folder: Path
    server: str
    other: str
    host: str
    hosts: dict[str, list[str]]
    ssh_key: str
    ssh_host_key: str

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def asked(self) -> list[str]:
        """``host method path`` of every request that a web server got, oldest first."""
        log = self.folder / "asked"
        return log.read_text().splitlines() if log.exists() else []

    def config(self, *lines: str) -> str:
        """A user's own config.toml that lets a guest use it; `lines` go into ``[net]``."""
        hosts = "".join(f'"{name}" = {json.dumps(to)}\n' for name, to in self.hosts.items())
        more = "\n".join(lines)
        return f'[net]\nallow_private = ["{self.server}"]\n{more}\n[net.hosts]\n{hosts}'


@contextlib.contextmanager
def internet(folder: Path) -> Iterator[Internet]:
    """It, for as long as the block runs."""
    network = 16 * (os.getpid() % 15)
    host, server, other = (f"198.51.100.{network + n}" for n in (1, 2, 3))
    names = [name.replace("*", "a") for name in NAMES]
    key, host_key = seed.new_key(), seed.new_key()
    _make_content(folder, key, host_key)
    with _namespace(f"vmst-{os.getpid()}", host, (server, other)) as name:
        inside = ["ip", "netns", "exec", name]
        program = [*inside, sys.executable, "-m", "tests.internet", str(folder)]
        with (
            _sshd(folder, inside),
            subprocess.Popen(program, cwd=Path(__file__).parents[1]) as process,
        ):
            try:
                _wait(server, 443)
                hosts = {each: [server] for each in names}
                yield Internet(folder, server, other, host, hosts, key.private, host_key.public)
            finally:
                process.terminate()


@contextlib.contextmanager
def _namespace(name: str, host: str, addresses: tuple[str, ...]) -> Iterator[str]:
    inside, outside = f"i{name}"[:15], f"o{name}"[:15]
    _ip("netns", "add", name)
    try:
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        _ip("addr", "add", f"{host}/28", "dev", outside)
        _ip("link", "set", outside, "up")
        for address in addresses:
            _ip("-n", name, "addr", "add", f"{address}/28", "dev", inside)
        for device in (inside, "lo"):
            _ip("-n", name, "link", "set", device, "up")
        yield name
    finally:
        _ip("netns", "del", name)  # and with it both interfaces


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _wait(address: str, port: int) -> None:
    deadline = Deadline(20)
    while not deadline.passed():
        with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
            return
        time.sleep(0.05)
    raise AssertionError("the servers of the test did not start")


# --- what there is to get -------------------------------------------------------------------------


def wheel() -> bytes:
    """A Python package of one line."""
    info = "tinything-1.0.dist-info"
    files = {
        "tinything.py": "answer = 42\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return data.getvalue()


def _make_content(folder: Path, key: seed.KeyPair, host_key: seed.KeyPair) -> None:
    _make_certificates(folder)
    (folder / "ssh_host_key").write_text(host_key.private)
    (folder / "ssh_host_key").chmod(0o600)
    (folder / "authorized_keys").write_text(f"{key.public}\n")
    project = Repository.create(folder / "project", {"README": "from elsewhere\n"})
    bare = folder / "git.test" / "project.git"
    project.git("clone", "--quiet", "--bare", str(project.path), str(bare))
    subprocess.run(["git", "-C", str(bare), "update-server-info"], check=True)
    name = "tinything-1.0-py3-none-any.whl"
    packages = (
        "Package: tinything\nVersion: 1.0\nArchitecture: all\nMaintainer: nobody <n@example.org>\n"
        f"Filename: ./none.deb\nSize: 1\nSHA256: {'0' * 64}\nDescription: nothing\n"
    )
    digest = hashlib.sha256(packages.encode()).hexdigest()
    release = f"Origin: test\nSHA256:\n {digest} {len(packages)} Packages\n"
    version = {"name": "tinything", "version": "1.0.0", "dist": {"tarball": "https://npm.test/t"}}
    packument = {
        "name": "tinything",
        "dist-tags": {"latest": "1.0.0"},
        "versions": {"1.0.0": version},
    }
    for path, content in {
        "pypi.test/simple/tinything/index.html": f'<a href="/files/{name}">{name}</a>'.encode(),
        f"pypi.test/files/{name}": wheel(),
        "deb.test/Packages": packages.encode(),
        "deb.test/Release": release.encode(),
        "npm.test/tinything": json.dumps(packument).encode(),
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def _make_certificates(folder: Path) -> None:
    """An authority, and one certificate for all names."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def certificate(subject: str, issuer: str, key: Any, signer: Any, *more: Any) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
        )
        for extension, critical in more:
            builder = builder.add_extension(extension, critical)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = x509.SubjectAlternativeName([x509.DNSName(name) for name in NAMES])
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    is_ca = (x509.BasicConstraints(ca=True, path_length=None), True)
    (folder / "ca.pem").write_bytes(certificate("test", "test", authority, authority, is_ca))
    leaf = certificate("servers", "test", key, authority, (names, False))
    (folder / "server.pem").write_bytes(leaf + private)


# --- what serves it -------------------------------------------------------------------------------


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path

    def log_message(self, *_: Any) -> None:
        with (self.folder / "asked").open("a") as log:
            log.write(f"{self.headers.get('host')} {self.command} {self.path}\n")

    def do_GET(self) -> None:
        host = (self.headers.get("host") or "").partition(":")[0]
        if self.path.startswith("/big/"):
            self._send(int(self.path.removeprefix("/big/")))
        elif self.path == "/slow":
            self._slowly()
        elif self.path == "/where":
            self._whole(f"{host}\n".encode())
        else:
            self._file(self.folder / host / self.path.partition("?")[0].strip("/"))

    def do_POST(self) -> None:
        left = int(self.headers["content-length"])
        size = 0
        while left and (piece := self.rfile.read(min(left, 65536))):
            left, size = left - len(piece), size + len(piece)
        self._whole(f"{size}\n".encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def _file(self, path: Path) -> None:
        path = path / "index.html" if path.is_dir() else path
        if self.folder in path.resolve().parents and path.is_file():
            self._whole(path.read_bytes())
        else:
            self.send_error(404)

    def _whole(self, body: bytes) -> None:
        self.log_message()
        self.send_response(200)
        if self.path.startswith("/simple"):
            self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, size: int) -> None:
        self.log_message()
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        block = bytes(1 << 20)
        for at in range(0, size, len(block)):
            self.wfile.write(block[: size - at])

    def _slowly(self) -> None:
        """Three pieces; the next comes when the client has told that it saw the last."""
        self.log_message()
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        seen = self.folder / "seen"
        for number in range(3):
            self.wfile.write(b"7\r\npiece %d\r\n" % number)
            self.wfile.flush()
            deadline = Deadline(20)
            while not (seen / str(number)).exists() and not deadline.passed():
                time.sleep(0.01)
        self.wfile.write(b"0\r\n\r\n")


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Clients of the test hang up as they like."""


def _serve(folder: Path) -> None:
    _Handler.folder = folder
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    plain, secure = (_Server(("0.0.0.0", port), _Handler) for port in (80, 443))
    secure.socket = context.wrap_socket(
        secure.socket, server_side=True, do_handshake_on_connect=False
    )
    for server in (plain, secure):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    for port in (53, PLAIN_PORT):
        threading.Thread(target=_echo_datagrams, args=(port,), daemon=True).start()
    _echo()


def _echo_datagrams(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("0.0.0.0", port))
        while True:
            sock.sendto(*sock.recvfrom(2000))


def _echo() -> None:
    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    with socket.create_server(("0.0.0.0", PLAIN_PORT)) as listener:
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


@contextlib.contextmanager
def _sshd(folder: Path, inside: list[str]) -> Iterator[None]:
    """For git over ssh."""
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    config = folder / "sshd_config"
    config.write_text(
        f"Port 22\nHostKey {folder}/ssh_host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
    )
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "openssh-server is missing"
    argv = [*inside, program, "-D", "-e", "-f", str(config)]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
        yield
        process.terminate()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
