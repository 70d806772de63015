"""Owns the keys: read from the host's environment when a gateway opens, kept in memory alone, and
taken out of whatever a guest may see.
"""

from collections.abc import Iterable, Iterator, Mapping

from vmsandbox.errors import UsageProblem
from vmsandbox.provider import Gateway

KEY_PROBLEMS = ("gateway_without_key", "gateway_key_unusable")
"""What :func:`keys_of` raises, by code."""
_SHORTEST = 8
"""Shorter ones could not be told from ordinary text, and so not be kept out of it."""


class Key:
    """A secret that shows itself to nobody by accident: not in text, not in a traceback."""

    def __init__(self, text: str) -> None:
        self._bytes = text.encode("ascii")

    def __repr__(self) -> str:
        return "Key(…)"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a key is not written down")

    def header(self, gateway: Gateway) -> tuple[bytes, bytes]:
        """What proves to the upstream that we may ask."""
        return gateway.header.encode(), gateway.before_key.encode() + self._bytes

    def within(self, text: str) -> bool:
        """Whether a text holds it."""
        return self._bytes.decode() in text

    def kept_out_of(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The pieces with stars in its place, also where it is spread over several of them.

        Nothing is held back but an end that may be its beginning.
        """
        held = b""
        for piece in pieces:
            data = self.starred(held + piece)
            keep = self._begun_at_the_end_of(data)
            held = data[len(data) - keep :]
            if keep < len(data):
                yield data[: len(data) - keep]
        if held:
            yield held

    def starred(self, data: bytes) -> bytes:
        return data.replace(self._bytes, b"*" * len(self._bytes))

    def _begun_at_the_end_of(self, data: bytes) -> int:
        longest = min(len(data), len(self._bytes) - 1)
        sizes = range(longest, 0, -1)
        return next((size for size in sizes if data.endswith(self._bytes[:size])), 0)


def keys_of(gateways: Iterable[Gateway], environment: Mapping[str, str]) -> dict[str, Key]:
    """The keys of these gateways by name.

    Raises UsageProblem ``gateway_without_key``, ``gateway_key_unusable``; neither says a key.
    """
    return {gateway.name: _key(gateway, environment) for gateway in gateways}


def _key(gateway: Gateway, environment: Mapping[str, str]) -> Key:
    text = environment.get(gateway.from_env, "").strip()
    if not text:
        raise UsageProblem(
            "gateway_without_key",
            f"gateway {gateway.name} takes its key from {gateway.from_env}, which is not set here",
            hint=f"export {gateway.from_env}=…    (in the shell that calls vmsandbox)",
        )
    if len(text) < _SHORTEST or not all("!" <= character <= "~" for character in text):
        raise UsageProblem(
            "gateway_key_unusable",
            f"what {gateway.from_env} holds cannot be a key for gateway {gateway.name}:"
            f" it is shorter than {_SHORTEST} characters, or has some that no header may have",
            hint=f"set {gateway.from_env} again, to the key alone",
        )
    return Key(text)
