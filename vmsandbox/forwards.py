"""Owns the values about ports of a guest that the host reaches: what is asked, what listens, what
is published. Must know no socket and no guest."""

import ipaddress
import re
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from vmsandbox.values import Value

LOCALHOST = "127.0.0.1"
_FORM = re.compile(r"(?:(.+):)?([0-9]{1,5}):([0-9]{1,5})")

Port = Annotated[int, Field(ge=1, le=65535)]


class PortMapping(Value):
    """One ``--publish``: a port of a loopback address of the host leads to a port of the guest."""

    address: str = LOCALHOST
    host: Port
    guest: Port

    @property
    def shown(self) -> str:
        """As it is written: ``8080:3000``."""
        where = "" if self.address == LOCALHOST else f"{bracketed(self.address)}:"
        return f"{where}{self.host}:{self.guest}"


def parse_mapping(text: object) -> PortMapping:
    """``[ADDRESS:]HOST:GUEST`` as people write it; ADDRESS is of loopback. Raises ValueError."""
    match = _FORM.fullmatch(str(text).strip())
    if not match:
        raise ValueError(f"not a port mapping: {str(text)!r} (write HOST:GUEST, such as 8080:3000)")
    address, host, guest = match[1] or LOCALHOST, int(match[2]), int(match[3])
    for port in (host, guest):
        if not 1 <= port <= 65535:
            raise ValueError(f"not a port: {port} (1 to 65535)")
    try:
        parsed = ipaddress.ip_address(address.strip("[]").replace("localhost", LOCALHOST))
    except ValueError:
        raise ValueError(f"not an address: {address!r}") from None
    if not parsed.is_loopback:
        raise ValueError(f"{address} is no loopback address: guests are published on those only")
    return PortMapping(address=str(parsed), host=host, guest=guest)


def _spelled(value: Any) -> Any:
    return value if isinstance(value, PortMapping | dict) else parse_mapping(value)


MappingSpelled = Annotated[PortMapping, BeforeValidator(_spelled)]


class Listener(NamedTuple):
    """One listening TCP socket of a guest, in the guest's own words, made safe to show."""

    port: int
    bound: str
    process: str = ""
    container: str = ""


class PublishedPort(Value):
    """A port of a guest and where the host finds it. `bound` is the address that it leads to; it,
    `process` and `container` are unknown while nothing listens, or to the guest."""

    port: Port
    url: str
    process: str | None = None
    container: str | None = None
    bound: str | None = None
    address: str = Field(description="of the host")
    host_port: Port
    note: str = Field(default="", description="why it is another number than in the guest")


class PortTable(Value):
    """What is published of one sandbox, by port."""

    ports: tuple[PublishedPort, ...] = ()


def url_of(address: str, port: int) -> str:
    """Where a browser would look."""
    return f"http://{bracketed(address)}:{port}"


def bracketed(address: str) -> str:
    """An address as it stands before a colon."""
    return f"[{address}]" if ":" in address else address
