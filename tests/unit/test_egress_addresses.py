"""Which addresses are public, in every dress that one can wear."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmsandbox.egress.addresses import Address, objection

PUBLIC = ("93.184.216.34", "8.8.8.8", "2606:4700::1111", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8")
NOT_PUBLIC = (
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1"),
    *("172.31.255.255", "192.168.1.1", "100.64.0.1", "100.127.255.255", "169.254.169.254"),
    *("169.254.0.1", "168.63.129.16", "192.0.0.1", "192.0.0.192", "192.0.2.1", "198.18.0.1"),
    *("198.51.100.1", "203.0.113.1", "192.88.99.1", "224.0.0.1", "239.255.255.250"),
    *("240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1"),
    *("::ffff:169.254.169.254", "::ffff:10.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1"),
    *("64:ff9b:1::1", "fe80::1", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1"),
    *("192.0.0.9", "192.0.0.10", "2001:1::1", "2001:20::1", "::ffff:0:10.0.0.1"),
    *("4000::1", "fe00::1"),
    *("2001::1", "2001:db8::1", "2002:7f00:1::", "2002:a00:1::1", "100::1", "3fff::1", "5f00::1"),
)


@pytest.mark.parametrize("text", PUBLIC)
def test_public_ones(text: str) -> None:
    assert objection(ipaddress.ip_address(text)) == ""


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_those_that_are_not(text: str) -> None:
    assert objection(ipaddress.ip_address(text)) == "address_not_public"


def test_a_scope_makes_it_local() -> None:
    assert objection(ipaddress.ip_address("2606:4700::1111%eth0")) == "address_not_public"


def test_the_hosts_own_public_address_is_not_the_worlds() -> None:
    own: list[Address] = [ipaddress.ip_address("8.8.8.8")]
    for dress in ("8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"):
        assert objection(ipaddress.ip_address(dress), own=own) == "address_of_host"


def test_the_user_may_name_one_that_is_not_public() -> None:
    private = [ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/8")]
    for text in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1"):
        assert objection(ipaddress.ip_address(text), private) == ""
    assert objection(ipaddress.ip_address("10.2.0.1"), private)


@given(st.ip_addresses(v=4))
def test_an_address_in_another_dress_is_judged_alike(address: ipaddress.IPv4Address) -> None:
    dressed = (f"::ffff:{address}", f"64:ff9b::{address}")
    for text in dressed:
        assert objection(ipaddress.ip_address(text)) == objection(address)
