"""Who may do what with a file that an apply replaced, where its mode does not say all."""

import os
import struct
from pathlib import Path

import pytest

from tests.adapter.crafted import Case

ACL, DEFAULT_ACL = "system.posix_acl_access", "system.posix_acl_default"


def access_list(*entries: tuple[int, int, int]) -> bytes:
    """As the kernel has it: (kind, bits, id) each, see linux/posix_acl_xattr.h."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


SOMEBODY_WRITES = access_list(
    (1, 6, 2**32 - 1), (2, 6, 1234), (4, 4, 2**32 - 1), (16, 6, 2**32 - 1), (32, 0, 2**32 - 1)
)
"""The owner and one other may write, the group read; a mode shows it as 0660."""


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path, {b"a": b"a\n"}, {b"a": b"A\n", b"new": b"n\n"})


def test_a_file_keeps_its_access_list(case: Case) -> None:
    """Else its group could write, and who was on the list could not even read."""
    os.setxattr(case.target / "a", ACL, SOMEBODY_WRITES)
    case.apply()
    assert (case.target / "a").read_bytes() == b"A\n"
    assert os.getxattr(case.target / "a", ACL) == SOMEBODY_WRITES


def test_a_file_without_an_access_list_gets_none(case: Case) -> None:
    (case.target / "a").chmod(0o640)
    os.setxattr(case.target, DEFAULT_ACL, SOMEBODY_WRITES)
    case.apply()
    assert ACL not in os.listxattr(case.target / "a")
    assert (case.target / "a").stat().st_mode & 0o7777 == 0o640
    assert ACL in os.listxattr(case.target / "new"), "a new file is as the folder says"
