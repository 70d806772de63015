"""What a guest says about a task is hostile until it has matched; and what we tell it is exact."""

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vmsandbox.errors import GuestProblem, HostProblem, UsageProblem
from vmsandbox.guest import Capture, TaskSpec, known_hosts_line, ssh_argv, ssh_config, task
from vmsandbox.guest.channel import command_line
from vmsandbox.guest.task import EndMark, Refused, Report
from vmsandbox.model import Endpoint, Outcome

WORD = b"4f9b59f2-8f5f-43a8-8a55-7a6ae5e9d6c0"
MARK = b"\0\x1e" + WORD + b" "
REPORT = b"failed 3 12.34 15.00 0"
HERE = Endpoint(address="127.9.8.7", port=2222)


def spec(**changes: Any) -> TaskSpec:
    fields = {"id": "t1", "command": ("make", "test"), "folder": "/home/me/my project"}
    return TaskSpec.model_validate(fields | changes)


# --- what it is told ------------------------------------------------------------------------------


def test_start_tells_the_whole_task() -> None:
    argv = task.start_argv(
        spec(env={"B": "two words", "LANG": "de_DE"}, timeout_s=1.5, grace_s=0.31),
        ("/script",),
    )
    assert argv == [
        "/script",
        "start",
        "t1",
        "1.500",
        "7",
        str(64 * 1024 * 1024 // 512 + 2),
        "/home/me/my project",
        "B=two words",
        "HOME=/home/agent",
        "LANG=de_DE",
        "LOGNAME=agent",
        "PATH=/home/agent/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SHELL=/bin/bash",
        "USER=agent",
        "--",
        "/usr/bin/setpriv",
        "--reuid=agent",
        "--regid=agent",
        "--init-groups",
        "--",
        "make",
        "test",
    ]


@pytest.mark.parametrize(("timeout", "told"), [(None, "0"), (10, "10.000"), (0.0004, "0.001")])
def test_no_timeout_is_told_as_zero_and_a_tiny_one_is_not(timeout: float | None, told: str) -> None:
    assert task.start_argv(spec(timeout_s=timeout))[3] == told


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "Ä", "A\n"])
def test_a_name_that_no_shell_exports_is_refused(name: str) -> None:
    with pytest.raises(UsageProblem) as raised:
        task.check_env({name: "x"})
    assert raised.value.code == "env_name_invalid"


@pytest.mark.parametrize("name", ["", "../x", "a b", "A", "a" * 65, "a\n"])
def test_an_id_is_a_plain_word(name: str) -> None:
    with pytest.raises(ValidationError):
        spec(id=name)


def test_a_command_line_quotes_and_changes_the_folder() -> None:
    assert command_line(["echo", "it's"], folder="/a b") == b"""cd '/a b' && exec echo 'it'"'"'s'"""
    with pytest.raises(UsageProblem):
        command_line(["a\0b"])


# --- what it answers ------------------------------------------------------------------------------


def test_a_good_answer_to_start() -> None:
    following = task.parse_following(b"following t1 12.34 " + WORD + b"\n")
    assert following == ("t1", 12.34, MARK)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"following t1 12.34 " + WORD,
        b"following t1 12.34 " + WORD + b" x\n",
        b"following t1 12.34 short\n",
        b"following t1 1e9 " + WORD + b"\n",
        b"following t1 99999999999.0 " + WORD + b"\n",
        b"following ../x 12.34 " + WORD + b"\n",
        b"\x1b[2Jfollowing t1 12.34 " + WORD + b"\n",
        b"refused \x1b[2J\n",
    ],
)
def test_nonsense_is_no_answer(line: bytes) -> None:
    for parse in (task.parse_following, task.parse_status):
        with pytest.raises(GuestProblem) as raised:
            parse(line)
        assert raised.value.code == "guest_answer_invalid"
        assert "\x1b" not in raised.value.message


def test_a_refusal_has_a_word_and_maybe_a_name() -> None:
    with pytest.raises(Refused) as raised:
        task.parse_following(b"refused busy t7\n")
    assert (raised.value.why, raised.value.other) == ("busy", "t7")
    assert task.parse_status(b"refused none\n") is None


def test_a_status_with_and_without_a_report() -> None:
    assert task.parse_status(b"task t1 running 5.00 .\n") == ("t1", "running", 5.0, None)
    ended = task.parse_status(b"task t1 ended 5.00 " + REPORT + b" .\n")
    assert ended
    assert ended.report == Report(Outcome.FAILED, 3, 12.34, 15.0, 0)


@pytest.mark.parametrize(
    "text",
    [
        b"failed 256 1.0 2.0 0",
        b"connection_lost 0 1.0 2.0 0",
        b"fine 0 1.0 2.0 0",
        b"failed -1 1.0 2.0 0",
        b"failed 1 nan 2.0 0",
        b"failed 1 1.0 2.0",
    ],
)
def test_a_report_is_what_the_script_can_write(text: bytes) -> None:
    with pytest.raises(GuestProblem):
        task.parse_report(text)


@given(st.binary(max_size=80))
def test_no_answer_breaks_the_parsers(line: bytes) -> None:
    for parse in (task.parse_following, task.parse_status, task.parse_report):
        with contextlib.suppress(GuestProblem, Refused):
            assert parse(line)


# --- the end mark ---------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([b"x", b"\0", b"\x1e", b"\0\x1e", MARK[:-2], MARK[:5], b"\n", b" "])),
    st.lists(st.integers(1, 12), min_size=1),
)
def test_the_output_is_exact_however_it_is_cut(parts: list[bytes], sizes: list[int]) -> None:
    output = b"".join(parts)
    whole = output + MARK + REPORT + b"\n" + b"left behind"
    mark, received, position = EndMark(MARK), b"", 0
    while position < len(whole):
        size = sizes[position % len(sizes)]
        received += mark.feed(whole[position : position + size])
        position += size
    assert received == output
    assert mark.report == task.parse_report(REPORT)


def test_ordinary_output_is_not_held_back() -> None:
    mark = EndMark(MARK)
    for piece in (b"line\n", b"prompt> ", b"4f9b59f2", b"\n"):
        assert mark.feed(piece) == piece


def test_an_end_mark_that_never_ends_is_refused() -> None:
    mark = EndMark(MARK)
    with pytest.raises(GuestProblem):
        mark.feed(MARK + b"x" * 200)


@pytest.mark.parametrize(
    ("report", "code", "detail"),
    [
        ("completed 0 1.0 2.0 0", 0, ""),
        ("completed 0 1.0 2.0 2", 0, "killed 2 of its processes for lack of memory"),
        ("failed 2 1.0 2.0 0", 2, "exit code 2"),
        ("failed 127 1.0 2.0 0", 127, "command not found"),
        ("failed 126 1.0 2.0 0", 126, "cannot be executed"),
        ("failed 143 1.0 2.0 0", 143, "ended by SIGTERM"),
        ("failed 255 1.0 2.0 0", 255, "ended by signal 127"),
        ("guest_oom 137 1.0 2.0 1", 137, "killed 1 of its processes for lack of memory"),
        ("guest_disk_full 1 1.0 2.0 0", 1, "no space is left in the guest"),
        ("timeout 143 1.0 3.5 0", None, "after 2.5 s"),
        ("cancelled 143 1.0 2.0 0", None, ""),
    ],
)
def test_results_say_what_a_person_wants_to_know(
    report: str, code: int | None, detail: str
) -> None:
    result = task.exec_result(task.parse_report(report.encode()), booted_at=time.time())
    assert result.exit_code == code
    assert detail in result.detail
    assert result.started_at
    assert result.ended_at
    assert result.ended_at > result.started_at


# --- files ----------------------------------------------------------------------------------------


def test_captured_output_is_bounded_and_goes_on_where_it_was(tmp_path: Path) -> None:
    heard: list[tuple[str, bytes]] = []
    out, err = tmp_path / "out", tmp_path / "err"

    def capture() -> Capture:
        return Capture(out, err, limit_bytes=10, on_output=lambda *what: heard.append(what))

    with capture() as first:
        first.write("stdout", b"12345678")
        first.write("stderr", b"e")
        assert (first.offset("stdout"), first.offset("stderr"), first.full()) == (8, 1, False)
    with capture() as second:
        assert second.offset("stdout") == 8
        second.write("stdout", b"9abc")
        second.write("stdout", b"def")
        assert (second.offset("stdout"), second.full()) == (10, True)
    with capture() as third:
        third.write("stdout", b"more")
        assert (third.offset("stdout"), third.full()) == (10, True)
    marker = b"\n[vmsandbox: dropped all beyond 10 bytes]\n"
    assert out.read_bytes() == b"123456789a" + marker
    assert heard == [("stdout", b"12345678"), ("stderr", b"e"), ("stdout", b"9a" + marker)]


def test_a_stream_of_just_the_limit_has_no_marker(tmp_path: Path) -> None:
    with Capture(tmp_path / "out", tmp_path / "err", limit_bytes=4) as capture:
        capture.write("stdout", b"1234")
        assert not capture.full()
    assert (tmp_path / "out").read_bytes() == b"1234"


def test_output_that_cannot_be_written_is_the_hosts_problem(tmp_path: Path) -> None:
    with pytest.raises(HostProblem) as raised:
        Capture(tmp_path / "no" / "out", tmp_path / "err")
    assert raised.value.code == "state_unwritable"


# --- the system's ssh client ----------------------------------------------------------------------


def test_the_config_pins_and_shares_nothing() -> None:
    config = ssh_config("box", HERE, key=Path("/s/100% key"), known_hosts=Path("/s/known"))
    assert config.splitlines() == [
        "Host box",
        "  HostName 127.9.8.7",
        "  Port 2222",
        "  User agent",
        '  IdentityFile "/s/100%% key"',
        "  IdentitiesOnly yes",
        "  IdentityAgent none",
        '  UserKnownHostsFile "/s/known"',
        "  GlobalKnownHostsFile /dev/null",
        "  StrictHostKeyChecking yes",
        "  UpdateHostKeys no",
        "  CheckHostIP no",
        "  HostKeyAlgorithms ssh-ed25519",
        "  PreferredAuthentications publickey",
        "  ForwardAgent no",
        "  ForwardX11 no",
        "  ControlMaster no",
        "  ControlPath none",
        "  ServerAliveInterval 15",
        "  LogLevel ERROR",
    ]


@pytest.mark.parametrize("path", ['/a"b', "/a\nb", "/a${HOME}"])
def test_a_path_that_openssh_cannot_spell_is_refused(path: str) -> None:
    with pytest.raises(HostProblem) as raised:
        ssh_config("box", HERE, key=Path(path), known_hosts=Path("/s/known"))
    assert raised.value.code == "path_unsuitable"


def test_known_hosts_and_argv() -> None:
    assert known_hosts_line(HERE, "ssh-ed25519 AAAA me") == "[127.9.8.7]:2222 ssh-ed25519 AAAA\n"
    assert ssh_argv(Path("/c"), "box") == ["ssh", "-F", "/c", "box"]
    assert ssh_argv(Path("/c"), "box", ["ls", "-l"], options=["-t"]) == [
        "ssh", "-F", "/c", "-t", "box", "--", "ls", "-l",
    ]  # fmt: skip
