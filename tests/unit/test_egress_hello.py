"""The server name in the first bytes of TLS: of hellos that OpenSSL makes, and of broken ones."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hellos import extension, hello, made, sni
from vmsandbox.egress.hello import NotTls, server_name

REAL = hello("pypi.org")


def test_the_name_that_openssl_asks_for() -> None:
    assert server_name(REAL) == "pypi.org"
    assert server_name(hello("WWW.Example.ORG")) == "www.example.org"
    assert server_name(made(sni(b"pypi.org"))) == "pypi.org"


@given(st.integers(0, len(REAL) - 1))
def test_a_part_of_a_hello_asks_for_more(size: int) -> None:
    assert server_name(REAL[:size]) is None


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_a_hello_in_many_records_is_one(sizes: list[int]) -> None:
    message, records = REAL[5:], b""
    for size in [*sizes, len(REAL)]:
        piece, message = message[:size], message[size:]
        if piece:
            records += b"\x16\x03\x01" + struct.pack(">H", len(piece)) + piece
    assert server_name(records) == "pypi.org"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "tls_expected"),
        (b"SSH-2.0-x\r\n", "tls_expected"),
        (b"\x16\x02\x00", "tls_expected"),
        (b"\x80\x2e\x01\x03\x01", "tls_expected"),  # SSL 2
        (b"\x16\x03\x01\x00\x04\x02\x00\x00\x00", "tls_expected"),  # a server hello
        (b"\x16\x03\x01\x00\x00", "tls_malformed"),
        (b"\x16\x03\x01\xff\xff\x01", "tls_malformed"),
        pytest.param(hello(None), "tls_no_name", id="openssl"),  # random: no name for a test
        (made(), "tls_no_name"),
        (made(sni()), "tls_no_name"),
        (made(sni(b"pypi.org", b"evil.test")), "tls_no_name"),
        (made(sni(b"pypi.org"), sni(b"evil.test")), "tls_no_name"),
        (made(sni(b"p\xffpi.org")), "tls_malformed"),
        (made(sni(b"pypi.org"), extension(0xFE0D, b"\0" * 40)), "tls_ech"),
        (made(extension(0xFFCE, b"\0" * 40), sni(b"pypi.org")), "tls_ech"),
        (made(extension(0, b"\x00\xff\x00")), "tls_malformed"),
    ],
)
def test_what_does_not_name_its_server(data: bytes, why: str) -> None:
    with pytest.raises(NotTls, match=f"^{why}$"):
        server_name(data)


@given(st.binary(max_size=600))
def test_no_bytes_do_harm(data: bytes) -> None:
    for body in (data, b"\x16\x03\x01" + struct.pack(">H", len(data)) + data, made(data)):
        with contextlib.suppress(NotTls):
            server_name(body)
