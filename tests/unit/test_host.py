"""What the host room decides without asking the host: packages, modes, the tiny probe guest."""

import os
import struct
from pathlib import Path

import pytest

from vmsandbox.host import programs, tiny_guest
from vmsandbox.host.checks import permits
from vmsandbox.host.programs import INSTALL, PROGRAMS, family_of, install_hint

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("family", INSTALL)
def test_the_readme_names_the_same_packages(family: programs.Family) -> None:
    rows = [line.split("|") for line in README.read_text().splitlines() if line.startswith("|")]
    (head,) = (row for row in rows if "Fedora" in str(row))
    column = next(i for i, title in enumerate(head) if family in title.casefold())
    table = rows[rows.index(head) + 2 :]
    shown = {word for row in table if len(row) > column for word in row[column].split("`")}
    words = {word for cell in shown for word in cell.split()}
    named = {program.packages[family] for program in PROGRAMS if family in program.packages}
    assert not named - words


@pytest.mark.parametrize(
    ("release", "family"),
    [
        ({"ID": "debian"}, "debian"),
        ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, "debian"),
        ({"ID": "fedora"}, "fedora"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "fedora"),
        ({"ID": "arch"}, "arch"),
        ({"ID": "opensuse-tumbleweed", "ID_LIKE": "opensuse suse"}, "opensuse"),
        ({"ID": "nixos"}, None),
        ({}, None),
    ],
)
def test_distributions_are_told_by_os_release(
    release: dict[str, str], family: programs.Family | None
) -> None:
    assert family_of(release) == family


def by_name(*names: str) -> list[programs.Program]:
    return [program for program in PROGRAMS if program.names[0] in names]


def test_a_hint_is_the_command_of_the_distribution() -> None:
    missing = by_name("libvirtd", "virtlogd", "git")
    assert install_hint(missing, "debian") == "apt-get install git libvirt-daemon-system"
    assert install_hint(missing, None) == "install: libvirtd virtlogd git"
    told = install_hint(by_name("mmdebstrap", "zstd"), "arch")
    assert told == "pacman -S zstd    no package known for: mmdebstrap"


@pytest.mark.parametrize(
    ("mode", "wanted", "uid", "groups", "permitted"),
    [
        (0o600, 0o6, 1000, {1000}, True),  # the owner
        (0o060, 0o6, 1000, {7}, False),  # the owner's bits count, though the group has more
        (0o060, 0o6, 1, {7}, True),
        (0o660, 0o6, 1, {8}, False),
        (0o666, 0o6, 1, set(), True),
        (0o711, 0o1, 1, set(), True),
        (0o710, 0o1, 1, {8}, False),
        (0o000, 0o7, 0, set(), True),
    ],
)
def test_mode_bits_are_read_as_the_kernel_does(
    mode: int, wanted: int, uid: int, groups: set[int], permitted: bool
) -> None:
    found = os.stat_result((mode, 0, 0, 1, 1000, 7, 0, 0, 0, 0))
    assert permits(found, uid, groups, wanted) is permitted


def test_an_archive_is_padded_and_ends_with_its_trailer() -> None:
    data = tiny_guest.initramfs()
    assert len(data) % 4 == 0
    assert data.startswith(b"070701")
    assert data.count(b"070701") == 4
    assert b"TRAILER!!!\0" in data[-16:]


def test_the_program_is_one_segment_that_holds_its_entry_point() -> None:
    program = tiny_guest.program(b"text")
    entry = struct.unpack_from("<Q", program, 24)[0]
    offset, address, _, in_file, in_memory = struct.unpack_from("<5Q", program, 64 + 8)
    assert (offset, in_file, in_memory) == (0, len(program), len(program))
    assert address <= entry < address + in_file
    assert program[entry - address :].startswith(b"\xb8\x01\0\0\0")  # mov eax, write
