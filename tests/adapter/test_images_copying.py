"""A disk becomes two: the same bytes, holes kept, and nothing half done."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.disks import small_disk
from vmsandbox.errors import HostProblem
from vmsandbox.images import copy_disk

MIB = 1 << 20


def sparse(path: Path) -> Path:
    """Two MiB of data in a file of 64."""
    with path.open("wb") as file:
        for at in (0, 32 * MIB):
            file.seek(at)
            file.write(os.urandom(MIB))
        file.truncate(64 * MIB)
    return path


def test_a_copy_has_the_same_bytes_and_the_same_holes(tmp_path: Path) -> None:
    source, target = sparse(tmp_path / "source"), tmp_path / "target"
    copy_disk(source, target, spare_bytes=0)
    assert subprocess.run(["cmp", source, target]).returncode == 0
    assert target.stat().st_size == 64 * MIB
    assert target.stat().st_blocks * 512 < 3 * MIB
    with target.open("r+b") as file:
        file.write(b"changed")
    assert source.read_bytes()[:7] != b"changed"


def test_a_qcow2_and_its_copy_stand_on_the_same_file(tmp_path: Path) -> None:
    backing, source, target = (tmp_path / name for name in ("backing", "source", "target"))
    backing.write_bytes(b"b" * MIB)
    create = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b"]
    subprocess.run([*create, backing, source], check=True)
    write = ["qemu-io", "-f", "qcow2", "-c", "write -P 7 0 64k"]
    subprocess.run([*write, source], check=True, stdout=subprocess.DEVNULL)
    copy_disk(source, target, spare_bytes=0)
    source.unlink()
    raw = tmp_path / "raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", target, raw], check=True)
    assert raw.read_bytes() == b"\7" * (64 << 10) + b"b" * (MIB - (64 << 10))


def test_nothing_is_copied_where_too_little_would_be_left(tmp_path: Path) -> None:
    with small_disk(tmp_path, "8m"):
        source = tmp_path / "source"
        source.write_bytes(os.urandom(2 * MIB))
        with pytest.raises(HostProblem) as caught:
            copy_disk(source, tmp_path / "target", spare_bytes=5 * MIB)
        assert caught.value.code == "host_disk_full"
        assert caught.value.hint
        assert not (tmp_path / "target").exists()
        copy_disk(source, tmp_path / "target", spare_bytes=3 * MIB)


def test_a_copy_that_finds_no_space_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path, "8m") as disk:
        source = tmp_path / "source"
        source.write_bytes(os.urandom(2 * MIB))
        disk.fill(leave_bytes=MIB)
        with pytest.raises(HostProblem) as caught:
            copy_disk(source, tmp_path / "target", spare_bytes=-4 * MIB)
        assert caught.value.code == "host_disk_full"
        assert not (tmp_path / "target").exists()
