"""Owns reading the server name out of the first bytes of a TLS connection (RFC 8446, 4.1.2 and
RFC 6066, 3). Pure; verifies nothing else, because client and server do that themselves.

Encrypted Client Hello hides the true name behind another one, so it is refused.
"""

MOST_BYTES = 5 * (16384 + 5)
"""A hello that is longer is none: with post-quantum keys they have two kilobytes."""

_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _ECH = 0, 0xFE0D
_ESNI = 0xFFCE


class NotTls(Exception):
    """These bytes do not begin a TLS connection, or not one that names its server; the text is a
    word for programs."""


class _Reader:
    """Bytes taken from the front; raises NotTls where there are too few."""

    def __init__(self, data: bytes) -> None:
        self._left = data

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self, size: int) -> bytes:
        if len(self._left) < size:
            raise NotTls("tls_malformed")
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> "_Reader":
        """What follows its own length of `size` bytes."""
        return _Reader(self.take(self.number(size)))

    def rest(self) -> bytes:
        return self.take(len(self._left))


def server_name(data: bytes) -> str | None:
    """The server name that a client hello asks for, in lower case; None while more bytes are
    needed. Raises NotTls: ``tls_expected``, ``tls_malformed``, ``tls_no_name``, ``tls_ech``."""
    hello = _handshake(data)
    return None if hello is None else _name_in(_Reader(hello))


def _handshake(data: bytes) -> bytes | None:
    """The body of the client hello, which may lie in several records; None if it is not whole."""
    message = b""
    while data:
        if data[0] != _HANDSHAKE or data[1:2] not in (b"", b"\x03"):
            raise NotTls("tls_expected")
        if len(data) < 5:
            return None
        length = int.from_bytes(data[3:5], "big")
        if not 0 < length <= 16384:
            raise NotTls("tls_malformed")
        message += data[5 : 5 + length]
        if message and message[0] != _CLIENT_HELLO:
            raise NotTls("tls_expected")
        if len(message) >= 4 and len(message) >= 4 + int.from_bytes(message[1:4], "big"):
            return message[4 : 4 + int.from_bytes(message[1:4], "big")]
        if len(message) > MOST_BYTES:
            raise NotTls("tls_malformed")
        data = data[5 + length :]
    return None


def _name_in(hello: _Reader) -> str:
    hello.take(2 + 32)  # version, random
    hello.vector(1)  # session id
    hello.vector(2)  # cipher suites
    hello.vector(1)  # compression methods
    names: list[str] = []
    extensions = hello.vector(2) if hello else hello
    while extensions:
        kind, body = extensions.number(2), extensions.vector(2)
        if kind in (_ECH, _ESNI):
            raise NotTls("tls_ech")
        if kind == _SERVER_NAME:
            names += _names(body)
    if len(names) != 1:
        raise NotTls("tls_no_name")
    return names[0]


def _names(body: _Reader) -> list[str]:
    entries, found = body.vector(2), []
    while entries:
        if entries.number(1) != 0:
            raise NotTls("tls_malformed")
        try:
            found.append(entries.vector(2).rest().decode("ascii").lower())
        except UnicodeDecodeError:
            raise NotTls("tls_malformed") from None
    return found
