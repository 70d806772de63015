"""Owns what an answer says about the tokens that it took: JSON or server-sent events, as OpenAI's
and Anthropic's interfaces have them. Pure.

What an answer does not say is guessed by its size, so that no budget is got round by not asking.
"""

import json
from typing import Any, NamedTuple

from vmsandbox.provider import Tokens

_MOST_BYTES = 16 * 1024 * 1024
"""Of one event, or of a whole answer that is no stream."""

_MOST_TOKENS = 10**9
_BYTES_PER_TOKEN = 4


class Taken(NamedTuple):
    """What an answer took; `guessed` if it did not say so, or not to its end."""

    model: str
    tokens: Tokens
    guessed: bool


class Meter:
    """Reads an answer as it passes by."""

    def __init__(self, content_type: str) -> None:
        self._streams = "event-stream" in content_type
        self._rest = b""
        self._skipping = False
        self._bytes = self._events = 0
        self._model = ""
        self._said = Tokens()
        self._final = False

    def feed(self, data: bytes) -> None:
        """Take the next piece."""
        self._bytes += len(data)
        self._rest += data
        if self._streams:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                self._line(line)
        if len(self._rest) > _MOST_BYTES:
            self._rest, self._skipping = b"", True

    def taken(self, *, sent_bytes: int, whole: bool) -> Taken:
        """The sum, once it has ended, or (not `whole`) was cut off."""
        if not self._streams and not self._skipping:
            self._read(self._rest)
        guessed = not (self._final and whole)
        if not guessed:
            return Taken(self._model, self._said, guessed)
        output = self._events if self._streams else self._bytes // _BYTES_PER_TOKEN
        known_input = self._said.input + self._said.cached
        tokens = Tokens(
            input=self._said.input if known_input else sent_bytes // _BYTES_PER_TOKEN,
            cached=self._said.cached,
            output=max(self._said.output, output),
        )
        return Taken(self._model, tokens, guessed)

    def _line(self, line: bytes) -> None:
        if self._skipping:  # the end of one that was too long
            self._skipping = False
        elif line.startswith(b"data:"):
            self._events += 1
            if b'"usage"' in line or (not self._model and b'"model"' in line):
                self._read(line[5:])

    def _read(self, data: bytes) -> None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return
        for part in _parts(value):
            model = part.get("model")
            self._model = self._model or (model[:200] if isinstance(model, str) else "")
            if isinstance(part.get("usage"), dict):
                self._said = _larger(self._said, _tokens(part["usage"]))
                self._final = self._final or not _is_beginning(value)


def _parts(value: Any) -> list[dict[str, Any]]:
    """Where a usage may stand: in the event itself, or in the answer or message it is about."""
    if not isinstance(value, dict):
        return []
    inner = (value.get("response"), value.get("message"))
    return [part for part in (value, *inner) if isinstance(part, dict)]


def _is_beginning(value: dict[str, Any]) -> bool:
    """What Anthropic's first event says is not the end of it."""
    return value.get("type") == "message_start"


def _tokens(usage: dict[str, Any]) -> Tokens:
    """Anthropic counts what comes from a cache apart; OpenAI as a part of the input."""
    cached = _number(usage, "cache_read_input_tokens")
    whole = _number(usage, "input_tokens") + _number(usage, "cache_creation_input_tokens")
    whole = whole or _number(usage, "prompt_tokens")
    for details in ("input_tokens_details", "prompt_tokens_details"):
        part = _number(usage.get(details), "cached_tokens")
        cached, whole = cached + min(part, whole), whole - min(part, whole)
    output = _number(usage, "output_tokens") or _number(usage, "completion_tokens")
    return Tokens(input=whole, cached=cached, output=output)


def _number(holder: Any, name: str) -> int:
    value = holder.get(name) if isinstance(holder, dict) else None
    sound = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS
    return int(value or 0) if sound else 0


def _larger(one: Tokens, other: Tokens) -> Tokens:
    """Events repeat what was counted so far."""
    return Tokens(
        input=max(one.input, other.input),
        cached=max(one.cached, other.cached),
        output=max(one.output, other.output),
    )
