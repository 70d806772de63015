"""Owns what every value is made of: the frozen base, digests, object names, path names, the clock.

Must know nothing of what values say. Everybody takes these from :mod:`vmsandbox.model`.
"""

import hashlib
import json
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from vmsandbox.text import quote_path, unquote_path

TreePath = Annotated[
    bytes,
    BeforeValidator(lambda value: unquote_path(value) if isinstance(value, str) else value),
    PlainSerializer(lambda value: quote_path(value), return_type=str, when_used="json"),
]
"""A path name inside a worktree, relative, ``/`` between parts, any bytes but NUL."""

Oid = Annotated[str, Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")]
"""A git object name."""

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class Value(BaseModel):
    """Base of all values: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


def now() -> datetime:
    """The current time, UTC."""
    return datetime.now(UTC)


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value that digests cover: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def digest_of(value: Any) -> str:
    """``sha256:…`` of the canonical JSON of `value`."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()
