"""Owns how YAML and TOML text becomes plain values that know where they were written.

The one owner of PyYAML. Knows no schema and reads no file. Aliases are refused: what a few lines of
them expand to has no bound. Scalars mean what YAML 1.2 says, so ``no`` and ``1:30`` stay text.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import yaml

MOST_BYTES = 1024 * 1024
_DEEPEST = 32
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"(?=.*[.eE])[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: Mapping[str, bool | None] = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_MAY_END = ('"""', "'''", "]", "}")
_MOST_LINES_OF_A_STATEMENT = 2000

Place = tuple[str | int, ...]
"""Where a value is in a document: ``("tasks", 0, "name")``."""


class Problem(NamedTuple):
    """What is wrong at a line of a file; line 0: with the file as a whole."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" if self.line else f"{self.file}: {self.text}"


class Unreadable(Exception):
    """The text is no document; holds the problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Document:
    """A parsed file: `value`, and the line of each value in it."""

    def __init__(self, file: str, value: Any, lines: Mapping[Place, int]) -> None:
        self.file = file
        self.value = value
        self._lines = lines

    def replaced(self, change: Callable[[Any], Any]) -> "Document":
        """Another value that was written at the same lines."""
        return Document(self.file, change(self.value), self._lines)

    def line(self, place: Place) -> int:
        """The line where the value at `place`, or the nearest around it, begins."""
        for length in range(len(place), -1, -1):
            if line := self._lines.get(tuple(place[:length])):
                return line
        return 1

    def problem(self, place: Place, text: str) -> Problem:
        """`text` said of the value at `place`."""
        return Problem(self.file, self.line(place), text)


def parse(file: str, data: bytes) -> Document:
    """Read a document; the file's ending says which language. Raises Unreadable."""
    if len(data) > MOST_BYTES:
        raise _unreadable(file, 0, f"larger than {MOST_BYTES // 1024} KiB, it was not read")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _unreadable(file, line, "not UTF-8") from None
    return _toml(file, text) if file.endswith(".toml") else _yaml(file, text)


def _unreadable(file: str, line: int, text: str) -> Unreadable:
    return Unreadable(Problem(file, line, text))


# --- TOML -----------------------------------------------------------------------------------------


def _toml(file: str, text: str) -> Document:
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+)", str(error))
        said = re.sub(r" \(at line.*\)", "", str(error))
        raise _unreadable(file, int(found[1]) if found else 0, said) from None
    except RecursionError:
        raise _unreadable(file, 0, "nested too deep") from None
    return Document(file, value, _TomlLines(text))


class _TomlLines(Mapping[Place, int]):
    """The lines of a TOML document, found when they are first asked for.

    tomllib tells no positions. But each statement alone is a document as well, so tomllib itself
    says which key a line is about.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: dict[Place, int] | None = None

    def _lines(self) -> dict[Place, int]:
        if self._found is None:
            self._found = _toml_lines(self._text)
        return self._found

    def __getitem__(self, place: Place) -> int:
        return self._lines()[place]

    def __iter__(self) -> Iterator[Place]:
        return iter(self._lines())

    def __len__(self) -> int:
        return len(self._lines())


def _toml_lines(text: str) -> dict[Place, int]:
    lines: dict[Place, int] = {}
    counts: dict[Place, int] = {}
    table: Place = ()
    for line, statement, value in _statements(text):
        key = _only_key(value)
        if not statement.lstrip().startswith("["):
            for length in range(1, len(key) + 1):
                lines.setdefault((*table, *key[:length]), line)
            continue
        table = _in_latest(key, counts)
        if statement.lstrip().startswith("[["):
            counts[table] = counts.get(table, -1) + 1
            lines.setdefault(table, line)
            table = (*table, counts[table])
        lines.setdefault(table, line)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line, text, value) of each statement: as many lines as make a document of their own."""
    held: list[str] = []
    first = 0
    for number, line in enumerate(text.split("\n"), 1):
        first = first if held else number
        held.append(line)
        if len(held) > 1 and not any(end in line for end in _MAY_END):
            continue
        statement = "\n".join(held)
        try:
            value = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            if len(held) > _MOST_LINES_OF_A_STATEMENT:
                return
            continue
        if value:
            yield first, statement, value
        held = []


def _only_key(value: Any) -> tuple[str, ...]:
    """The dotted key of one statement; what is in an inline table has no line of its own."""
    key: list[str] = []
    while isinstance(value, dict) and len(value) == 1:
        (name,) = value
        key.append(name)
        value = value[name]
        if isinstance(value, list) and value == [{}]:
            break
    return tuple(key)


def _in_latest(key: tuple[str, ...], counts: Mapping[Place, int]) -> Place:
    """A table's key within the latest element of each array of tables on its way."""
    place: Place = ()
    for name in key[:-1]:
        place = (*place, name)
        if place in counts:
            place = (*place, counts[place])
    return (*place, key[-1])


# --- YAML -----------------------------------------------------------------------------------------


def _yaml(file: str, text: str) -> Document:
    import yaml  # takes a while, and only task files and briefs need it

    builder = _Builder(file)
    try:
        value = builder.build(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = error.problem or error.context or "not YAML"
        raise _unreadable(file, mark.line + 1 if mark else 0, f"not YAML: {said}") from None
    except yaml.YAMLError as error:
        said = str(error).splitlines()[0]
        raise _unreadable(file, 0, f"not YAML: {said}") from None
    return Document(file, value, builder.lines)


class _Builder:
    """Makes values of YAML's events, which come with their marks; nothing is copied or expanded."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.lines: dict[Place, int] = {}

    def build(self, events: "Iterator[yaml.Event]") -> Any:
        from yaml import DocumentStartEvent, StreamEndEvent

        value, documents = None, 0
        for event in events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._problem(event, "a second document in one file")
                value = self._value(next(events), events, ())
            elif isinstance(event, StreamEndEvent):
                break
        return value

    def _value(self, event: "yaml.Event", events: "Iterator[yaml.Event]", place: Place) -> Any:
        from yaml import AliasEvent, MappingStartEvent, ScalarEvent, SequenceStartEvent

        self.lines.setdefault(place, _line(event))
        if len(place) > _DEEPEST:
            raise self._problem(event, "nested too deep")
        if isinstance(event, AliasEvent):
            raise self._problem(event, "aliases (*name) are not allowed here: use defaults")
        if isinstance(event, ScalarEvent):
            return _scalar(event.value) if event.implicit[0] else event.value
        if isinstance(event, SequenceStartEvent):
            return self._sequence(events, place)
        assert isinstance(event, MappingStartEvent)
        return self._mapping(events, place)

    def _sequence(self, events: "Iterator[yaml.Event]", place: Place) -> list[Any]:
        from yaml import SequenceEndEvent

        values: list[Any] = []
        while not isinstance(event := next(events), SequenceEndEvent):
            values.append(self._value(event, events, (*place, len(values))))
        return values

    def _mapping(self, events: "Iterator[yaml.Event]", place: Place) -> dict[str, Any]:
        from yaml import MappingEndEvent, ScalarEvent

        values: dict[str, Any] = {}
        while not isinstance(event := next(events), MappingEndEvent):
            if not isinstance(event, ScalarEvent):
                raise self._problem(event, "a key must be plain text")
            if event.value in values:
                raise self._problem(event, f"the key {event.value!r} is there twice")
            inner = (*place, event.value)
            self.lines[inner] = _line(event)
            values[event.value] = self._value(next(events), events, inner)
        return values

    def _problem(self, event: "yaml.Event", text: str) -> Unreadable:
        return _unreadable(self._file, _line(event), text)


def _line(event: "yaml.Event") -> int:
    return event.start_mark.line + 1 if event.start_mark else 0


def _scalar(text: str) -> Any:
    """What a plain scalar means in YAML 1.2's core schema."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) < 20:
        return int(text)
    if _FLOAT.fullmatch(text) and len(text) < 40:
        return float(text)
    return text
