"""Ports without sockets: which addresses there are, how mappings are written, what a guest says."""

import contextlib
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmsandbox import config
from vmsandbox.addresses import Pool
from vmsandbox.batch import plan_files
from vmsandbox.batch.making import request
from vmsandbox.errors import GuestProblem, HostProblem, UsageProblem
from vmsandbox.forwards import Listener, PortMapping, parse_mapping, url_of
from vmsandbox.ports import parse_line, reachable, tables, target_of

ANY4, LOCAL4 = b"00000000", b"0100007F"
ANY6, LOCAL6 = b"0" * 32, b"00000000000000000000000001000000"


def always(address: str) -> bool:
    return True


# --- addresses ------------------------------------------------------------------------------------


def test_a_small_pool_is_used_to_its_last_address() -> None:
    pool, used = Pool("127.77.0.0/30"), set[str]()
    for _ in range(3):  # .0 looks like a network
        used.add(pool.choose(used, always))
    assert used == {"127.77.0.1", "127.77.0.2", "127.77.0.3"}
    with pytest.raises(HostProblem) as refused:
        pool.choose(used, always)
    assert refused.value.code == "addresses_used_up"
    assert "VMSANDBOX_ADDRESSES" in (refused.value.hint or "")


def test_an_address_where_somebody_listens_is_passed_over() -> None:
    free = "127.77.0.2"
    assert Pool("127.77.0.0/30").choose(set(), lambda address: address == free) == free


def test_what_the_system_uses_is_never_chosen() -> None:
    with pytest.raises(HostProblem):
        Pool("127.0.0.0/24").choose(set(), always)
    chosen = {Pool().choose(set(), always) for _ in range(200)}
    assert not [address for address in chosen if address.startswith("127.0.")]
    assert all(address.rpartition(".")[2] not in ("0", "255") for address in chosen)


@pytest.mark.parametrize("text", ["10.0.0.0/8", "0.0.0.0/0", "127.0.0.1/8", "::1/128", "nonsense"])
def test_a_pool_is_a_network_of_loopback(text: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        Pool(text)
    assert refused.value.code == "addresses_invalid"


# --- what is asked --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address", "host", "guest"),
    [
        ("8080:3000", "127.0.0.1", 8080, 3000),
        ("127.9.8.7:80:3000", "127.9.8.7", 80, 3000),
        ("[::1]:8080:80", "::1", 8080, 80),
        ("localhost:8080:80", "127.0.0.1", 8080, 80),
    ],
)
def test_mappings_are_written_as_people_know_them(
    text: str, address: str, host: int, guest: int
) -> None:
    mapping = parse_mapping(text)
    assert mapping == PortMapping(address=address, host=host, guest=guest)
    assert parse_mapping(mapping.shown) == mapping


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("8080", "HOST:GUEST"),
        ("a:b", "HOST:GUEST"),
        ("0:80", "not a port: 0"),
        ("80:70000", "not a port: 70000"),
        ("0.0.0.0:80:80", "no loopback"),
        ("192.168.1.1:80:80", "no loopback"),
        ("[::]:80:80", "no loopback"),
        ("example.org:80:80", "not an address"),
        ("", "HOST:GUEST"),
    ],
)
def test_a_mapping_that_is_none_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_mapping(text)


def test_a_project_may_say_what_is_published() -> None:
    text = '[ports]\nauto = false\npublish = ["8080:3000"]\n'
    found = config.load([config.Source("vmsandbox.toml", text, False)]).ports
    assert (found.auto, found.publish) == (False, (PortMapping(host=8080, guest=3000),))
    shut = config.Source("config.toml", "[ports]\nauto = false\n")
    opens = config.Source("vmsandbox.toml", "[ports]\nauto = true\n", False)
    assert not config.load([shut, opens]).ports.auto
    wrong = '[ports]\npublish = ["0.0.0.0:80:80"]\n'
    with pytest.raises(UsageProblem, match=r"vmsandbox.toml: ports.publish.*no loopback"):
        config.load([config.Source("vmsandbox.toml", wrong, False)])


def test_a_task_of_a_batch_may_say_what_is_published(tmp_path: Path) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text(
        'tasks: [{name: a, worktree: ., command: x, publish: ["8080:3000"], auto_publish: false}]'
    )
    (task,) = plan_files([file]).tasks
    asked = request(task, None, None)
    assert (asked.publish, asked.publishes) == ((PortMapping(host=8080, guest=3000),), False)


def test_sandboxes_that_are_alike_cannot_share_a_port(tmp_path: Path) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text(
        'tasks: [{name: a, worktree: ., command: x, repeat: 2, publish: ["8080:3000"]}]'
    )
    with pytest.raises(UsageProblem, match="several sandboxes cannot have the same port"):
        plan_files([file])


# --- what a guest says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "listener"),
    [
        (ANY4 + b":0BB8 - node\n", Listener(3000, "0.0.0.0", "node")),
        (LOCAL4 + b":0BB8 - node\n", Listener(3000, "127.0.0.1", "node")),
        (LOCAL6 + b":1538 - postgres: main\n", Listener(5432, "::1", "postgres: main")),
        (ANY6 + b":1F90 web-1 docker-proxy\n", Listener(8080, "::", "docker-proxy", "web-1")),
        (b"0000000000000000FFFF00000100007F:0050 - java\n", Listener(80, "127.0.0.1", "java")),
        (ANY4 + b":0050 - \n", Listener(80, "0.0.0.0")),
    ],
)
def test_a_listener_is_read_as_the_kernel_spells_it(line: bytes, listener: Listener) -> None:
    assert parse_line(line) == listener


def test_the_words_of_a_guest_are_made_safe() -> None:
    found = parse_line(ANY4 + b":0050 - \x1b[2Jevil\xff" + b"x" * 200 + b"\n")
    assert "\x1b" not in found.process
    assert found.process.startswith("\\x1b[2Jevil\\xff")
    assert len(found.process) <= 64


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"hello\n",
        ANY4 + b":0050 - unfinished",
        ANY4 + b":50 - short\n",
        b"00000000000000000:0050 - odd\n",
        b"0000000000000000:0050 - eight\n",
        ANY4 + b":0050 ../x name\n",
    ],
)
def test_nonsense_of_a_guest_is_an_error(line: bytes) -> None:
    with pytest.raises(GuestProblem) as refused:
        parse_line(line)
    assert refused.value.code == "guest_answer_invalid"


@given(st.binary(max_size=2000))
def test_no_bytes_of_a_guest_are_more_than_an_error(data: bytes) -> None:
    with contextlib.suppress(GuestProblem):
        for table in tables(io.BytesIO(data)):
            reachable(table)


def test_a_table_ends_with_a_dot_and_is_bounded() -> None:
    line = ANY4 + b":0050 - x\n"
    assert [len(t) for t in tables(io.BytesIO(b".\n" + line * 2 + b".\n" + line))] == [0, 2]
    (large,) = tables(io.BytesIO(line * 5000 + b".\n"))
    assert len(large) == 512
    with pytest.raises(GuestProblem):
        list(tables(io.BytesIO(ANY4 + b":0050 - " + b"x" * 5000 + b"\n.\n")))


def test_one_listener_stands_for_a_port() -> None:
    found = reachable(
        [
            Listener(3000, "::", "six"),
            Listener(3000, "127.0.0.1", "four"),
            Listener(3000, "172.17.0.1", "bridge"),
            Listener(5432, "::1", "six"),
            Listener(9000, "10.0.2.15", "nic"),
        ]
    )
    assert {port: one.process for port, one in found.items()} == {
        3000: "four",
        5432: "six",
        9000: "nic",
    }


def test_what_is_ours_in_the_guest_is_not_published() -> None:
    ours = [Listener(22, "::", "systemd"), Listener(3128, "127.0.0.1", "sshd")]
    assert not reachable([*ours, Listener(80, "fe80::1", "of one link")])


def test_where_a_stream_has_to_lead() -> None:
    targets = {"0.0.0.0": "127.0.0.1", "::": "::1", "::1": "::1", "10.0.2.15": "10.0.2.15"}
    assert {bound: target_of(bound) for bound in targets} == targets
    assert url_of("::1", 80) == "http://[::1]:80"
