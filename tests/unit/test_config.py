"""Config: what vmsandbox.toml means, and that every problem is told at once."""

import pytest

from vmsandbox.config import load, parse_duration_s, parse_size_mib
from vmsandbox.errors import UsageProblem


@pytest.mark.parametrize(
    ("text", "mib"),
    [("2G", 2048), ("2GiB", 2048), ("512M", 512), ("512", 512), (768, 768), ("1.5g", 1536)],
)
def test_sizes(text: object, mib: int) -> None:
    assert parse_size_mib(text) == mib


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", True, 1.5, None, "1k"])
def test_bad_sizes(text: object) -> None:
    with pytest.raises(ValueError):
        parse_size_mib(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), (0.5, 0.5)]
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "0", "nan", "inf", True, None])
def test_bad_durations(text: object) -> None:
    with pytest.raises(ValueError):
        parse_duration_s(text)


def test_later_sources_win_and_absent_flags_do_not() -> None:
    config = load(
        [
            ("user", '[sandbox]\ncpus = 2\nmemory = "2G"'),
            ("project", "[sandbox]\ncpus = 3\n[result]\nmax_paths = 7"),
        ],
        {"cpus": None, "timeout": "5m"},
    )
    assert config.sandbox.cpus == 3
    assert config.sandbox.memory == 2048
    assert config.limits().timeout_s == 300
    assert config.limits().result_max_paths == 7


def test_all_problems_at_once() -> None:
    with pytest.raises(UsageProblem) as caught:
        load(
            [
                ("a.toml", "[sandbox]\ncpus = 0\ncolour = 1\n[nets]\nx = 1"),
                ("b.toml", "[sandbox\n"),
            ],
            {"memory": "lots"},
        )
    message = caught.value.message
    assert caught.value.code == "config_invalid"
    for needle in ("sandbox.cpus", "sandbox.colour: unknown key", "nets: unknown key", "b.toml:"):
        assert needle in message
    assert "command line: sandbox.memory: not a size" in message


def test_checks_and_agents_of_a_project() -> None:
    config = load(
        [
            (
                "project",
                '[verify]\nchecks = ["make test", { http = { port = 80 }, serve = "./s" }]\n'
                '[agents.critic]\ncommand = ["claude", "-p"]\n',
            )
        ]
    )
    test, http = config.checks()
    assert (test.command, test.title) == (("/bin/sh", "-c", "make test"), "make test")
    assert (http.title, http.serve) == ("http :80/", ("/bin/sh", "-c", "./s"))
    assert config.agents["critic"].command == ("claude", "-p")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("{ timeout = 3 }", "a check is either a command or http"),
        ('{ command = "x", http = { port = 1 } }', "a check is either a command or http"),
        ('{ command = "x", serve = "y" }', "serve belongs to an http check"),
    ],
)
def test_a_check_that_is_none(entry: str, problem: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        load([("p.toml", f"[verify]\nchecks = [{entry}]\n")])
    assert f"p.toml: verify.checks.0: {problem}" in caught.value.message
