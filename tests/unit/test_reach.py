"""Which rules are rules, what they fit, and who has the last word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmsandbox import config
from vmsandbox.config import Source
from vmsandbox.config.net import asked_in_vain
from vmsandbox.errors import UsageProblem
from vmsandbox.reach import (
    PRESETS,
    Net,
    NetMode,
    Policy,
    environment,
    host_name,
    parse_rule,
    rules_of,
)


def net(mode: str = "allow", allow: tuple[str, ...] = (), deny: tuple[str, ...] = ()) -> Net:
    return Net(layers=(Policy(mode=NetMode(mode), allow=allow, deny=deny),))


def of(user: str, project: str = "", **flags: object) -> Net:
    """What settings and flags come to, as `run` puts them together."""
    sources = [Source("user", f"[net]\n{user}", True)]
    if project:
        sources.append(Source("project", f"[net]\n{project}", False))
    config.load(sources, {}, flags)
    return config.net_of(sources, flags)


def test_what_a_task_file_says_only_narrows() -> None:
    sources = [Source("user", "[net]\nmode = 'allow'\nallow = ['@python']", True)]
    narrow = config.net_of(sources, {}, {"allow": ("pypi.org", "evil.test")})
    assert narrow.objection("pypi.org", 443) == ""
    assert narrow.objection("files.pythonhosted.org", 443) == "no_rule_allows"
    assert narrow.objection("evil.test", 443) == "no_rule_allows"
    assert config.asked_in_vain(narrow) == ("evil.test",)
    assert config.net_of(sources, {}, {"mode": "none"}).objection("pypi.org", 443) == "net_none"
    assert config.net_of(sources, {}, {"mode": "public"}).objection("evil.test", 443)


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "fits", "not_these"),
    [
        ("pypi.org", ["pypi.org:443", "pypi.org:80"], ["pypi.org:22", "a.pypi.org:443"]),
        ("pypi.org:443", ["pypi.org:443"], ["pypi.org:80"]),
        ("*.github.com", ["a.github.com:443", "a.b.github.com:80"], ["github.com:443"]),
        ("*.github.com:22", ["a.github.com:22"], ["a.github.com:443", "xgithub.com:22"]),
        ("PyPI.org.", ["pypi.org:443"], ["pypi.org.evil.test:443"]),
    ],
)
def test_what_a_rule_fits(rule: str, fits: list[str], not_these: list[str]) -> None:
    parsed = parse_rule(rule)
    assert parse_rule(str(parsed)) == parsed
    for expected, targets in ((True, fits), (False, not_these)):
        for target in targets:
            host, _, port = target.partition(":")
            assert parsed.fits(host, int(port)) is expected, target


@pytest.mark.parametrize(
    "text",
    [
        *("", "*", "*.", "a b", "a..b", "-a.b", "a.b-", "x" * 64 + ".org", "a/b", "a@b", "é.fr"),
        *("pypi.org:", "pypi.org:0", "pypi.org:65536", "pypi.org:http", "pypi.org:443:1", "@nix"),
        *("1.2.3.4", "127.1", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "1.2.3.0x4"),
        *("[::1]", "::1", "[::1]:443", "http://pypi.org", "a.*.org", "**.org", "py\npi.org"),
    ],
)
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(ValueError):
        rules_of([text])


def test_every_preset_is_made_of_rules() -> None:
    for name in PRESETS:
        assert rules_of([f"@{name}"])


@given(st.text(max_size=30))
def test_a_host_name_has_one_spelling(text: str) -> None:
    try:
        name = host_name(text)
    except ValueError:
        return
    assert host_name(name) == name == name.lower()
    assert not set(name) & set("/:@?# []%\\")


# --- who has the last word ------------------------------------------------------------------------


def test_nothing_is_allowed_by_default() -> None:
    assert Net().mode is NetMode.NONE
    assert Net().objection("pypi.org", 443) == "net_none"
    assert of("").objection("pypi.org", 443) == "net_none"
    assert environment(Net()) == {}


def test_allow_lets_through_what_is_named() -> None:
    allowing = net(allow=("pypi.org",))
    assert allowing.objection("pypi.org", 443) == ""
    assert allowing.objection("evil.test", 443) == "no_rule_allows"


def test_deny_beats_allow_and_is_about_every_port_and_all_below() -> None:
    denying = net(allow=("*.corp.test", "corp.test:22"), deny=("*.corp.test",))
    assert denying.objection("a.corp.test", 443) == "rule_denies"
    assert denying.objection("corp.test", 22) == "rule_denies"
    assert net("public", deny=("a.test:80",)).objection("a.test", 443) == ""


def test_public_is_the_web_and_other_ports_need_a_rule() -> None:
    public = net("public", allow=("github.com:22",))
    assert public.objection("any.test", 443) == public.objection("github.com", 22) == ""
    assert public.objection("any.test", 22) == "no_rule_allows"


def test_a_repository_only_narrows() -> None:
    asks = 'mode = "public"\nallow = ["evil.test"]'
    assert of("", asks).objection("evil.test", 443) == "net_none"
    assert of('mode = "allow"\nallow = ["pypi.org"]', asks).objection("evil.test", 443)
    narrow = of('mode = "public"\nallow = ["git.test:22"]', 'allow = ["pypi.org"]')
    assert narrow.mode is NetMode.ALLOW
    assert narrow.objection("pypi.org", 443) == ""
    assert narrow.objection("npm.test", 443) == narrow.objection("git.test", 22) != ""
    denying = of('mode = "public"\nallow = ["git.test:22"]', 'deny = ["*.evil.test"]')
    assert denying.objection("a.evil.test", 443) == "rule_denies"
    assert denying.objection("git.test", 22) == ""
    assert of('mode = "public"', 'mode = "none"').mode is NetMode.NONE


def test_what_a_repository_asks_in_vain_is_told() -> None:
    asks = 'allow = ["pypi.org", "*.github.com:443", "@npm", "git.test:22"]'
    assert asked_in_vain(of("", asks)) == (
        "pypi.org",
        "*.github.com:443",
        "@npm",
        "git.test:22",
    )
    allows = 'mode = "allow"\nallow = ["pypi.org", "*.github.com"]'
    assert asked_in_vain(of(allows, asks)) == ("@npm", "git.test:22")
    assert asked_in_vain(of('mode = "public"', asks)) == ("git.test:22",)


@pytest.mark.parametrize("key", ['allow_private = ["10.0.0.1"]', 'hosts = {"a.b" = ["10.0.0.1"]}'])
def test_a_repository_names_no_address(key: str) -> None:
    with pytest.raises(UsageProblem) as problem:
        of("", key)
    assert problem.value.code == "config_invalid"
    assert "only your own config.toml" in problem.value.message
    of(key)


def test_flags_are_the_users_word() -> None:
    assert of("", mode="allow", allow=("pypi.org",)).objection("pypi.org", 443) == ""
    assert of("", allow=("pypi.org",)).mode is NetMode.ALLOW
    assert of('mode = "public"', mode="none").mode is NetMode.NONE
    denied = of('deny = ["pypi.org"]', allow=("pypi.org",))
    assert denied.objection("pypi.org", 443) == "rule_denies"
    narrowed = of("", 'deny = ["pypi.org"]', allow=("pypi.org",))
    assert narrowed.objection("pypi.org", 443) == "rule_denies"


def test_every_problem_of_every_source_is_told() -> None:
    with pytest.raises(UsageProblem) as problem:
        of('mode = "all"\nallow = ["a b"]\ntypo = 1', 'deny = ["@nix"]', allow=("1.2.3.4",))
    for part in ("net.mode", "net.allow.0", "net.typo", "@python", "an address is not a name"):
        assert part in problem.value.message


def test_a_grant_goes_beyond_every_layer_but_not_beyond_a_deny() -> None:
    both = of('mode = "allow"\ndeny = ["evil.test"]', 'allow = ["pypi.org"]')
    granted = rules_of(["npm.test", "evil.test"])
    assert both.objection("npm.test", 443, granted) == ""
    assert both.objection("evil.test", 443, granted) == "rule_denies"
    assert Net().objection("npm.test", 443, granted) == "net_none"
