"""Owns the answer to what a guest wants from elsewhere: CONNECT and plain HTTP, judged by name,
connected by checked address, written down.

TLS is not opened: its server name is compared with the name that was judged, and the bytes pass.
"""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from vmsandbox.egress.connecting import Denied, Unreachable, connect
from vmsandbox.egress.fetching import Fetch, UpstreamFailed
from vmsandbox.egress.grants import granted_rules
from vmsandbox.egress.hello import NotTls
from vmsandbox.egress.journal import Entry, Journal
from vmsandbox.egress.tunnelling import Tunnel
from vmsandbox.outlet import Exchange
from vmsandbox.reach import WEB_PORTS, Net, host_name

_AUTHORITY = re.compile(r"([^:@/?#\[\]]{1,255})(?::([0-9]{1,5}))?")
_LOOK_S = 2.0
"""How soon an open connection ends after its rule did."""


class Egress:
    """The egress handler of one sandbox. Answers in many threads at once.

    `grants` is the file of rules that the user adds meanwhile; `name` is what the user calls the
    sandbox, for hints.
    """

    def __init__(self, net: Net, journal: Journal, grants: Path, name: str) -> None:
        self._net = net
        self._journal = journal
        self._grants = grants
        self._name = name
        self._tunnels: set[Tunnel] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._look, name="egress", daemon=True).start()

    def close(self) -> None:
        """End every open connection."""
        self._over.set()
        for tunnel in self._open():
            tunnel.end()

    def __call__(self, exchange: Exchange) -> None:
        try:
            if exchange.head.method == "CONNECT":
                self._connect(exchange)
            else:
                self._fetch(exchange)
        except Denied as denied:
            self._write(Entry(target=exchange.head.target, verdict="denied", reason=str(denied)))
            if not exchange.answered:
                self._say_denied(exchange, str(denied))
        except Unreachable as failed:
            target = exchange.head.target
            self._write(Entry(target=target, verdict="failed", reason=str(failed)))
            exchange.refuse(502, str(failed), f"the host cannot reach {target[:200]}")

    # --- judging --------------------------------------------------------------------------------

    def judge(self, host: str, port: int) -> None:
        """Raises Denied."""
        if why := self._net.objection(host, port, granted_rules(self._grants)):
            raise Denied(why)

    def _write(self, entry: Entry) -> bool:
        return self._journal.write(entry)

    def _let_through(self, target: str) -> None:
        """Nothing leaves that could not be written down."""
        if not self._write(Entry(target=target, verdict="allowed", reason="rule")):
            raise Denied("journal_full")

    def _say_denied(self, exchange: Exchange, why: str) -> None:
        hint = ""
        with contextlib.suppress(ValueError):
            host, port = _target_of(exchange)
            hint = f"on the host: vmsandbox net {self._name} allow {host}:{port} --for 10m"
        message = f"{exchange.head.target[:200]} is not allowed: {why}"
        exchange.refuse(403, why, message, hint if why == "no_rule_allows" else "")

    # --- CONNECT --------------------------------------------------------------------------------

    def _connect(self, exchange: Exchange) -> None:
        host, port = _checked_target(exchange)
        self.judge(host, port)
        upstream = connect(self._net, host, port)
        with contextlib.closing(upstream):
            stream, early = exchange.tunnel()
            tunnel = Tunnel(stream, upstream, host, port)
            with self._known(tunnel):
                try:
                    if port in WEB_PORTS:
                        early = tunnel.greet(early)
                    self._let_through(exchange.head.target)
                    tunnel.carry(early)
                except NotTls as found:
                    raise Denied(str(found)) from None
                self._write(tunnel.entry())

    @contextlib.contextmanager
    def _known(self, tunnel: Tunnel) -> Iterator[None]:
        with self._lock:
            self._tunnels.add(tunnel)
        try:
            yield
        finally:
            with self._lock:
                self._tunnels.discard(tunnel)

    def _open(self) -> list[Tunnel]:
        with self._lock:
            return list(self._tunnels)

    def _look(self) -> None:
        """End what is no longer allowed: a rule may have had an end."""
        while not self._over.wait(_LOOK_S):
            for tunnel in self._open():
                try:
                    self.judge(tunnel.host, tunnel.port)
                except Denied:
                    tunnel.end("rule_ended")

    # --- plain HTTP -----------------------------------------------------------------------------

    def _fetch(self, exchange: Exchange) -> None:
        host, port = _checked_target(exchange)
        self.judge(host, port)
        upstream = connect(self._net, host, port)
        with contextlib.closing(upstream):
            self._let_through(exchange.head.target)
            fetch = Fetch(exchange, upstream)
            try:
                fetch.carry_out()
            except UpstreamFailed as failed:
                if exchange.answered:
                    raise ConnectionError("cut short") from failed
                exchange.refuse(502, str(failed), f"{host} did not answer as HTTP wants")
            finally:
                self._write(fetch.entry())


def _target_of(exchange: Exchange) -> tuple[str, int]:
    """Host and port that a request is about. Raises ValueError."""
    target = exchange.head.target
    if exchange.head.method == "CONNECT":
        return _authority(target, None)
    parts = urlsplit(target)
    if parts.scheme.lower() != "http":
        raise ValueError("not http")
    return _authority(parts.netloc, 80)


def _checked_target(exchange: Exchange) -> tuple[str, int]:
    """As :func:`_target_of`, where the request names one host only. Raises Denied."""
    try:
        host, port = _target_of(exchange)
    except ValueError:
        raise Denied("target_not_a_name") from None
    for value in exchange.head.values("host"):
        try:
            told = _authority(value, port if exchange.head.method == "CONNECT" else 80)
        except ValueError:
            raise Denied("host_header_differs") from None
        if told != (host, port):
            raise Denied("host_header_differs")
    return host, port


def _authority(text: str, default_port: int | None) -> tuple[str, int]:
    match = _AUTHORITY.fullmatch(text)
    port = int(match[2] or default_port or 0) if match else 0
    if not match or not 0 < port < 65536:
        raise ValueError(f"not host:port: {text[:80]!r}")
    return host_name(match[1]), port
