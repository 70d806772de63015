"""Owns how people write sizes, durations and commands in settings, and what that means."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNIT_MIB = {"": 1.0, "k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0 * 1024}
_DURATION = re.compile(
    r"(?:(\d+(?:\.\d+)?)h)?\s*(?:(\d+(?:\.\d+)?)m)?\s*(?:(\d+(?:\.\d+)?)s)?", re.IGNORECASE
)


def parse_size_mib(value: object) -> int:
    """Sizes as people write them, to MiB: ``2G``, ``512M``, ``1.5GiB``, or a bare number of MiB.

    Raises ValueError.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("a size is a number of MiB or text such as 2G or 512M")
    match = _SIZE.fullmatch(str(value).strip())
    if not match:
        raise ValueError(f"not a size: {value!r} (write 2G, 512M or a number of MiB)")
    size = float(match[1]) * _UNIT_MIB[match[2].lower()]
    if size < 1:
        raise ValueError(f"smaller than 1 MiB: {value!r}")
    return round(size)


def parse_duration_s(value: object) -> float:
    """Durations as people write them, to seconds: ``90``, ``90s``, ``5m``, ``1h30m``. Raises
    ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a duration is a number of seconds or text such as 90s, 5m or 1h30m")
    text = str(value).strip()
    try:
        seconds = float(text)
    except ValueError:
        match = _DURATION.fullmatch(text)
        if not match or not text:
            raise ValueError(f"not a duration: {value!r} (write 90s, 5m or 1h30m)") from None
        hours, minutes, rest = (float(part or 0) for part in match.groups())
        seconds = hours * 3600 + minutes * 60 + rest
    if not 0 < seconds < 10**8:
        raise ValueError(f"not a duration above zero: {value!r}")
    return seconds


def parse_words(value: Any) -> Any:
    """A command as a list of words, or as one line for the guest's shell. Raises ValueError."""
    if isinstance(value, str) and value.strip():
        return ("/bin/sh", "-c", value)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("a command is a list of words, or one line of text")
    return value


SizeMib = Annotated[int, BeforeValidator(parse_size_mib)]
DurationS = Annotated[float, BeforeValidator(parse_duration_s)]
Words = Annotated[tuple[str, ...], BeforeValidator(parse_words), Field(min_length=1)]
