"""First bytes of TLS connections: as OpenSSL makes them, and as nobody should."""

import ssl
import struct

import pytest


def hello(name: str | None) -> bytes:
    """What OpenSSL sends first to a server of this name."""
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def extension(kind: int, body: bytes) -> bytes:
    return struct.pack(">HH", kind, len(body)) + body


def sni(*names: bytes) -> bytes:
    entries = b"".join(b"\0" + struct.pack(">H", len(name)) + name for name in names)
    return extension(0, struct.pack(">H", len(entries)) + entries)


def made(*extensions: bytes) -> bytes:
    """A client hello with just these extensions."""
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0"
    joined = b"".join(extensions)
    body += struct.pack(">H", len(joined)) + joined
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + struct.pack(">H", len(message)) + message
