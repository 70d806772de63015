"""Documents: YAML and TOML become the same plain values, each with its line; nothing expands."""

import time

import pytest

from vmsandbox.document import MOST_BYTES, Document, Unreadable, parse

YAML = """\
# tasks
defaults:
  env: {CI: "true"}
tasks:
  - name: a
    command: |
      one
      two
    worktree: .
  - name: b
    verify:
      - make test
      - http:
          port: 80
"""
TOML = '''\
# tasks
[defaults]
env = { CI = "true" }

[[tasks]]
name = "a"
command = """
one
two = 2
"""
worktree = "."

[[tasks]]
name = "b"
verify = [
  "make test",
  "x",
]
[tasks.brief]
goal = "g"
[[tasks.checks]]
port = 1
[[tasks.checks]]
port = 2
'''


def parsed(text: str, file: str = "f.yaml") -> Document:
    return parse(file, text.encode())


def refused(text: str | bytes, file: str = "f.yaml") -> str:
    with pytest.raises(Unreadable) as caught:
        parse(file, text if isinstance(text, bytes) else text.encode())
    return str(caught.value.problem)


def test_every_value_of_yaml_knows_its_line() -> None:
    document = parsed(YAML)
    assert document.value["tasks"][0] == {"name": "a", "command": "one\ntwo\n", "worktree": "."}
    places = {
        (): 2,
        ("defaults", "env", "CI"): 3,
        ("tasks", 0): 5,
        ("tasks", 0, "command"): 6,
        ("tasks", 1, "verify", 1, "http", "port"): 14,
        ("tasks", 1, "verify", 1, "http", "path"): 13,  # not there: the nearest around it
    }
    assert {place: document.line(place) for place in places} == places


def test_every_statement_of_toml_knows_its_line() -> None:
    document = parsed(TOML, "f.toml")
    assert document.value["tasks"][1]["checks"] == [{"port": 1}, {"port": 2}]
    places = {
        ("defaults", "env", "CI"): 3,
        ("tasks", 0): 5,
        ("tasks", 0, "name"): 6,
        ("tasks", 0, "worktree"): 11,
        ("tasks", 1, "verify", 1): 15,
        ("tasks", 1, "brief", "goal"): 20,
        ("tasks", 1, "checks", 1, "port"): 24,
        ("tasks", 1, "nothing"): 13,
    }
    assert {place: document.line(place) for place in places} == places


def test_plain_scalars_are_those_of_yaml_1_2() -> None:
    document = parsed("[yes, no, 1:30, 010, 7, -2, 1.5, true, null, ~, '7', 2026-01-01]")
    assert document.value == [
        *("yes", "no", "1:30", "010", 7, -2, 1.5, True, None, None, "7", "2026-01-01")
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x 1\nb: *x\n", "f.yaml:2: aliases"),
        ("a: 1\nb: [1\n", "f.yaml:3: not YAML"),
        ("a: 1\na: 2\n", "f.yaml:2: the key 'a' is there twice"),
        ("? [1]\n: 2\n", "f.yaml:1: a key must be plain text"),
        ("a: 1\n---\nb: 1\n", "f.yaml:2: a second document"),
        ("[" * 100 + "]" * 100, "f.yaml:1: nested too deep"),
        ("a: \x07\n", "f.yaml: not YAML"),
        (b"a: 1\nb: \xff\n", "f.yaml:2: not UTF-8"),
    ],
)
def test_what_is_no_document(text: str | bytes, said: str) -> None:
    assert refused(text).startswith(said)


def test_toml_problems_have_a_line() -> None:
    assert refused("a = 1\nb = \n", "f.toml").startswith("f.toml:2: Invalid value")
    assert refused("a = " + "[" * 5000, "f.toml").startswith("f.toml")


def test_tags_make_no_objects() -> None:
    assert parsed("!!python/object/apply:os.system ['true']").value == ["true"]


def test_what_is_too_large_or_would_expand_is_refused_at_once() -> None:
    bomb = "a0: &a0 [x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20)
    )
    began = time.process_time()
    assert "f.yaml:2: aliases" in refused(bomb)
    assert "larger than 1024 KiB" in refused(bomb * (10 * MOST_BYTES // len(bomb)))
    assert time.process_time() - began < 10  # what expands never ends
