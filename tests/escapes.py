"""Ways to try to get out through a proxy that lets some names through: what is sent, and the word
that refuses it.

Allowed are the names that tests/adapter/test_egress.py says. ``{server}`` is the address that
allowed names lead to, ``{decimal}`` and ``{hex}`` the same as one number.
"""

from tests.hellos import extension, hello, made, sni

HOST_TRICKS = {
    "another name": ("http://evil.test/", ["Host: evil.test"], "no_rule_allows"),
    "a name below": ("http://a.www.test/", ["Host: a.www.test"], "no_rule_allows"),
    "the name above": ("http://wild.test/", ["Host: wild.test"], "no_rule_allows"),
    "a longer name": ("http://www.test.evil.test/", ["Host: www.test.evil.test"], "no_rule_allows"),
    "a glued name": ("http://evilwild.test/", ["Host: evilwild.test"], "no_rule_allows"),
    "another port": ("http://www.test:8080/", ["Host: www.test:8080"], "no_rule_allows"),
    "a port of TLS": ("http://pypi.test/", ["Host: pypi.test"], "no_rule_allows"),
    "host differs": ("http://www.test/", ["Host: evil.test"], "host_header_differs"),
    "host port differs": ("http://www.test/", ["Host: www.test:81"], "host_header_differs"),
    "host is nonsense": ("http://www.test/", ["Host: www.test@evil.test"], "host_header_differs"),
    "user part": ("http://www.test@evil.test/", ["Host: evil.test"], "target_not_a_name"),
    "user part reversed": ("http://evil.test@www.test/", ["Host: www.test"], "target_not_a_name"),
    "backslash": ("http://evil.test\\@www.test/", ["Host: www.test"], "target_not_a_name"),
    "percent": ("http://www%2etest/", ["Host: www.test"], "target_not_a_name"),
    "https scheme": ("https://www.test/", ["Host: www.test"], "target_not_a_name"),
    "ftp scheme": ("ftp://www.test/", ["Host: www.test"], "target_not_a_name"),
    "no host": ("http:///", ["Host: www.test"], "target_not_a_name"),
    "decimal": ("http://{decimal}/", ["Host: www.test"], "target_not_a_name"),
    "hexadecimal": ("http://{hex}/", ["Host: www.test"], "target_not_a_name"),
    "octal": ("http://0306.063.0144.02/", ["Host: www.test"], "target_not_a_name"),
    "short": ("http://127.1/", ["Host: 127.1"], "target_not_a_name"),
    "address": ("http://{server}/", ["Host: {server}"], "target_not_a_name"),
    "address, host of a name": ("http://{server}/", ["Host: www.test"], "target_not_a_name"),
    "IPv6": ("http://[::1]/", ["Host: [::1]"], "target_not_a_name"),
    "mapped": ("http://[::ffff:{server}]/", ["Host: www.test"], "target_not_a_name"),
    "to another address": ("http://elsewhere.wild.test/", [], "address_not_public"),
    "to a good and a bad address": ("http://mixed.wild.test/", [], "address_not_public"),
    "to the host itself": ("http://self.wild.test/", [], "address_of_host"),
    "to loopback": ("http://loop.wild.test/", [], "address_of_host"),
    "to IPv6 loopback": ("http://v6.wild.test/", [], "address_of_host|address_not_public"),
    "to mapped loopback": ("http://mapped.wild.test/", [], "address_of_host"),
    "to NAT64 of a private one": ("http://nat64.wild.test/", [], "address_not_public"),
    "to metadata": ("http://meta.wild.test/", [], "address_not_public"),
    "to carrier-grade": ("http://cgn.wild.test/", [], "address_not_public"),
    "to nowhere": ("http://any.wild.test/", [], "address_not_public"),
}

CONNECTS = {
    "another name": ("evil.test:443", "no_rule_allows"),
    "another port": ("pypi.test:444", "no_rule_allows"),
    "the port of SSH": ("pypi.test:22", "no_rule_allows"),
    "an address": ("{server}:443", "target_not_a_name"),
    "IPv6": ("[::1]:443", "target_not_a_name"),
    "no port": ("pypi.test", "target_not_a_name"),
    "port zero": ("pypi.test:0", "target_not_a_name"),
    "decimal": ("3325256710:443", "target_not_a_name"),
    "user part": ("pypi.test@evil.test:443", "target_not_a_name"),
    "two ports": ("pypi.test:443:443", "target_not_a_name"),
    "to loopback": ("loop.wild.test:443", "address_of_host"),
    "to another address": ("elsewhere.wild.test:443", "address_not_public"),
}

HELLOS = {
    "another server name": (hello("evil.test"), "tls_name_differs"),
    "no server name": (hello(None), "tls_no_name"),
    "two server names": (made(sni(b"pypi.test", b"evil.test")), "tls_no_name"),
    "an encrypted hello": (made(sni(b"pypi.test"), extension(0xFE0D, bytes(9))), "tls_ech"),
    "plain HTTP": (b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n", "tls_expected"),
    "SSH": (b"SSH-2.0-OpenSSH_9\r\n", "tls_expected"),
    "half a hello": (hello("pypi.test")[:60], "tls_expected"),
}
