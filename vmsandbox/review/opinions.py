"""Owns what other reviewers said of a result: read strictly, kept with it, held against each other.

What they wrote came out of a guest: it is bounded, parsed by one schema, and made safe to show
before it is kept. It decides nothing; where it contradicts what else is known, a person is told.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vmsandbox.errors import NegativeAnswer
from vmsandbox.model import Finding, Opinion, Outcome, ResultRecord, Severity, Value
from vmsandbox.review.record import note, read
from vmsandbox.store import SandboxFolder, locked, read_value, write_value
from vmsandbox.text import printable

FINDINGS_MOST_BYTES = 256 * 1024
_MOST = 200
_PROBLEMS_SHOWN = 3


class _Written(BaseModel):
    """A finding as a reviewer writes it; nothing is guessed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str = Field(default="", max_length=4096)
    line: int | None = Field(default=None, ge=1, le=2**31)
    severity: Literal["info", "low", "medium", "high", "blocker"]
    text: str = Field(min_length=1, max_length=8192)

    def safe(self) -> Finding:
        return Finding(
            path=printable(self.path, newlines=False),
            line=self.line,
            severity=Severity(self.severity),
            text=printable(self.text),
        )


_LIST = TypeAdapter(Annotated[list[_Written], Field(max_length=_MOST)])


def parse_findings(data: bytes) -> tuple[Finding, ...]:
    """The findings in a JSON list, made safe; nothing at all is none.

    Raises ValueError that says what is wrong with it, made safe as well.
    """
    if not data.strip():
        return ()
    if len(data) > FINDINGS_MOST_BYTES:
        raise ValueError(f"more than {FINDINGS_MOST_BYTES // 1024} KiB")
    try:
        value = json.loads(data.decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {printable(str(error), newlines=False)[:200]}") from None
    try:
        return tuple(written.safe() for written in _LIST.validate_python(value))
    except ValidationError as error:
        raise ValueError("; ".join(_told(error))) from None


def _told(error: ValidationError) -> Iterator[str]:
    problems = error.errors(include_input=False, include_url=False)
    for problem in problems[:_PROBLEMS_SHOWN]:
        place = printable(".".join(map(str, problem["loc"])), newlines=False)[:100]
        yield f"{place or 'the whole'}: {problem['msg']}"
    if len(problems) > _PROBLEMS_SHOWN:
        yield f"and {len(problems) - _PROBLEMS_SHOWN} more problems"


# --- kept with the result -------------------------------------------------------------------------


class _Opinions(Value):
    version: Literal[1] = 1
    opinions: tuple[Opinion, ...] = ()


def attach(folder: SandboxFolder, opinion: Opinion) -> None:
    """Keep an opinion; a former one by the same reviewer, or of a former result, goes."""
    with locked(folder.result_lock):
        kept = _read(folder, opinion.digest)
        others = tuple(one for one in kept if one.by != opinion.by)
        write_value(folder.opinions, _Opinions(opinions=(*others, opinion)))
    grave = len(opinion.grave)
    note(folder, f"reviewed by {opinion.by}: {len(opinion.findings)} findings, {grave} grave")


def opinions(folder: SandboxFolder) -> tuple[Opinion, ...]:
    """What was said of the result that lies here now, the oldest first."""
    with contextlib.suppress(NegativeAnswer):
        change_set, _ = read(folder)
        return _read(folder, change_set.digest)
    return ()


def _read(folder: SandboxFolder, digest: str) -> tuple[Opinion, ...]:
    kept = read_value(folder.opinions, _Opinions) or _Opinions()
    return tuple(one for one in kept.opinions if one.digest == digest)


# --- held against each other ----------------------------------------------------------------------


def disagreements(
    author: Outcome | None, record: ResultRecord, said: Sequence[Opinion]
) -> tuple[str, ...]:
    """Where author, checks and reviewers contradict each other, in sentences for a person."""
    return (*_with_author(author, record, said), *_among(said))


def _with_author(
    author: Outcome | None, record: ResultRecord, said: Sequence[Opinion]
) -> Iterator[str]:
    proven = bool(record.checks) and all(run.passed for run in record.checks)
    claims = [claim for claim, so in _claims(author, proven) if so]
    for opinion in said:
        if claims and opinion.grave:
            yield f"{' and '.join(claims)}, but {opinion.by} has {_weight(opinion)}"


def _claims(author: Outcome | None, proven: bool) -> Iterator[tuple[str, bool]]:
    yield "the author completed", author is Outcome.COMPLETED
    yield "all checks passed", proven


def _among(said: Sequence[Opinion]) -> Iterator[str]:
    heard = [one for one in said if one.outcome is Outcome.COMPLETED and not one.problem]
    content = [one.by for one in heard if not one.grave]
    for opinion in heard:
        if opinion.grave and content:
            yield f"{opinion.by} has {_weight(opinion)}, {' and '.join(content)} has none"


def _weight(opinion: Opinion) -> str:
    count = len(opinion.grave)
    worst = "blocking" if any(f.severity is Severity.BLOCKER for f in opinion.grave) else "high"
    return f"{count} grave finding{'s' if count > 1 else ''} (up to {worst})"
