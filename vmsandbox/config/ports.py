"""Owns the ``[ports]`` table: which ports of a guest the host reaches."""

from pydantic import Field

from vmsandbox.forwards import MappingSpelled
from vmsandbox.model import Value


class PortsSection(Value):
    """The ``[ports]`` table."""

    auto: bool = Field(default=True, description="publish what listens in the guest by itself")
    publish: tuple[MappingSpelled, ...] = Field(
        default=(), max_length=100, description="HOST:GUEST, on 127.0.0.1 of the host"
    )
