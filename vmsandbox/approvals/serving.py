"""Owns the conversation with a guest that asks: ``POST /ask`` puts a question, ``GET /ask/NUMBER``
waits a while for its answer, ``POST /ask/NUMBER/withdraw`` takes it back.

A guest may ask again after a connection was lost: questions outlive the manager that took them.
Everything that comes in is hostile text: bounded, and made safe to show at once.
"""

import re
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vmsandbox.approvals import record
from vmsandbox.asking import Answer, Approval
from vmsandbox.deadline import Deadline
from vmsandbox.errors import NegativeAnswer, UsageProblem
from vmsandbox.store import SandboxFolder
from vmsandbox.text import printable

if TYPE_CHECKING:
    from vmsandbox.outlet import Exchange

WAIT_S = 25.0
"""How long one GET waits: shorter than any connection is kept idle."""

_LOOK_EVERY_S = 0.2
_MOST_BYTES = 64 * 1024
_RULE_MOST, _TEXT_MOST, _COMMAND_MOST = 200, 2000, 4000
"""Characters. All that was ever asked is read to show what waits."""
_PATH = re.compile(r"(?:http://[^/]*)?/ask(?:/([0-9]{1,4})(/withdraw)?)?")


class AskServer:
    """Answers one guest; called in many threads at once."""

    def __init__(self, folder: SandboxFolder, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s

    def __call__(self, exchange: "Exchange", /) -> None:
        match = _PATH.fullmatch(exchange.head.target)
        asks = exchange.head.method, bool(match and match[1]), bool(match and match[2])
        if match and asks == ("POST", False, False):
            self._put(exchange)
        elif match and asks == ("GET", True, False):
            self._wait(exchange, int(match[1]))
        elif match and asks == ("POST", True, True):
            self._withdraw(exchange, int(match[1]))
        else:
            exchange.refuse(404, "ask_unknown", "POST /ask, GET /ask/NUMBER")

    def _put(self, exchange: "Exchange") -> None:
        body = _bounded(exchange.body())
        rule, text, *command = _texts(body)
        if not text:
            hint = "RULE NUL TEXT NUL and each word of the command with a NUL"
            exchange.refuse(400, "ask_invalid", "no question, or a very long one", hint)
            return
        try:
            asked = record.ask(self._folder, text, command, rule, self._timeout_s)
        except record.TooMany:
            exchange.refuse(429, "ask_too_often", "this sandbox has asked too much")
            return
        _say(exchange, 201, asked.id.rpartition("-")[2])

    def _wait(self, exchange: "Exchange", number: int) -> None:
        deadline = Deadline(WAIT_S)
        while True:
            asked = record.question(self._folder, number)
            if asked is None:
                exchange.refuse(404, "ask_unknown", "that was never asked")
                return
            if asked.answer is not Answer.PENDING or deadline.passed():
                _say(exchange, 200, _told(asked))
                return
            time.sleep(_LOOK_EVERY_S)

    def _withdraw(self, exchange: "Exchange", number: int) -> None:
        try:
            record.answer(self._folder, number, Answer.WITHDRAWN, who="")
        except (NegativeAnswer, UsageProblem) as problem:
            exchange.refuse(409, problem.code, problem.message)
            return
        _say(exchange, 200, Answer.WITHDRAWN.value)


def _told(asked: Approval) -> str:
    """In one line; the first word is for programs."""
    by = f" by {asked.who}" if asked.who else ""
    why = f": {asked.reason}" if asked.reason else ""
    return f"{asked.answer}{by}{why}"


def _say(exchange: "Exchange", status: int, line: str) -> None:
    data = printable(line, newlines=False).encode() + b"\n"
    headers = [
        (b"Content-Type", b"text/plain; charset=utf-8"),
        (b"Content-Length", str(len(data)).encode()),
    ]
    exchange.respond(status, headers, [data])


def _bounded(pieces: Iterator[bytes]) -> bytes:
    """All of a body, or nothing if there is too much of it."""
    data = b""
    for piece in pieces:
        data += piece
        if len(data) > _MOST_BYTES:
            return b""
    return data


def _texts(body: bytes) -> tuple[str, ...]:
    """Rule, question and the words of a command, safe to show and not too long."""
    parts = [printable(part, newlines=False) for part in body.removesuffix(b"\0").split(b"\0")]
    if len(parts) < 2:
        return "", ""
    rule, text, *words = parts
    return _cut(rule, _RULE_MOST), _cut(text, _TEXT_MOST), *_cut_words(words)


def _cut(text: str, most: int) -> str:
    """Whoever is to allow it must see that there was more."""
    return text if len(text) <= most else f"{text[:most]} […]"


def _cut_words(words: Iterable[str]) -> Iterator[str]:
    left = _COMMAND_MOST
    for word in words:
        yield _cut(word, left)
        left -= len(word) + 1
        if left <= 0:
            yield "[…]"
            return
