"""Root file systems with the real mke2fs and debugfs, initramfs with the real cpio."""

import filecmp
import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from vmsandbox.errors import HostProblem
from vmsandbox.images import ext4, initramfs
from vmsandbox.images.tree import Entry, Kind, Tree, read_tar

EPOCH = 1_700_000_000


def tree(folder: Path, *, owner: int = 0) -> Tree:
    """A small root with everything that is special about one."""
    folder.mkdir()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:

        def add(
            name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **more: object
        ) -> None:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.mtime, info.mode = kind, len(content), EPOCH - 5, 0o644
            for field, value in more.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content))

        add("./", tarfile.DIRTYPE, mode=0o755)
        add("./home", tarfile.DIRTYPE, mode=0o755)
        add("./home/agent", tarfile.DIRTYPE, mode=0o700, uid=1000, gid=1000)
        add("./home/agent/two words", content=b"x" * 10_000, uid=1000, gid=1000, mode=0o600)
        add('./home/agent/"quoted" ü', content=b"q")
        add("./bin", tarfile.DIRTYPE, mode=0o755)
        capability = (
            b"\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
        )
        add(
            "./bin/ping",
            content=b"ping",
            mode=0o755,
            pax_headers={"SCHILY.xattr.security.capability": capability.decode()},
        )
        add("./bin/sudo", content=b"sudo", mode=0o4755)
        add("./bin/sudoedit", tarfile.LNKTYPE, linkname="./bin/sudo")
        add("./lib", tarfile.SYMTYPE, linkname="usr/lib", mode=0o777)
        add("./long", tarfile.SYMTYPE, linkname="x/" * 60, mode=0o777)
        add("./empty", mtime=EPOCH + 100)
        add("./dev", tarfile.DIRTYPE, mode=0o755)
        add("./dev/null", tarfile.CHRTYPE, devmajor=1, devminor=3)
        for number in range(300):  # more names than one folder block holds
            add(f"./many-{number:03}", content=b"%d" % number)
    buffer.seek(0)
    return read_tar(buffer, folder, EPOCH)


def make(base: Path, name: str, entries: list[Entry]) -> Path:
    scratch = base / f"scratch-{name}"
    scratch.mkdir()
    image = base / name
    ext4.make(entries, image, scratch, EPOCH)
    return image


def ask(image: Path, command: str) -> str:
    debugfs = shutil.which("debugfs", path="/usr/sbin:/sbin")
    assert debugfs
    done = subprocess.run(
        [debugfs, "-R", command, str(image)], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ext4")
    return make(base, "rootfs.ext4", tree(base / "contents").kept())


def test_content_owners_modes_and_links_arrive(image: Path) -> None:
    assert ask(image, 'cat "/home/agent/two words"') == "x" * 10_000
    assert ask(image, 'cat "/home/agent/""quoted"" ü"') == "q"
    assert ask(image, "cat /bin/sudoedit") == "sudo"
    assert ask(image, "cat /many-299") == "299"
    stat = ask(image, "stat /bin/sudo")
    assert "Mode:  04755" in stat
    assert "Links: 2" in stat
    agent = ask(image, 'stat "/home/agent/two words"')
    assert "User:  1000   Group:  1000" in agent
    assert "Mode:  0600" in agent
    assert 'Fast link dest: "usr/lib"' in ask(image, "stat /lib")
    assert "Size: 120" in ask(image, "stat /long")
    assert "null" not in ask(image, "ls /dev")


def test_capabilities_arrive(image: Path) -> None:
    assert (
        ask(image, "ea_get -x /bin/ping security.capability")
        .split("= ")[1]
        .startswith("01 00 00 02 00 20")
    )


def test_no_time_but_the_epoch_and_older_ones_is_in_it(image: Path) -> None:
    hexadecimal = f"0x{EPOCH:08x}"
    stat = ask(image, "stat /empty")
    times = [line for line in stat.splitlines() if "time:" in line]
    assert len(times) == 4
    assert all(hexadecimal in line for line in times), stat
    assert f"mtime: 0x{EPOCH - 5:08x}" in ask(image, "stat /bin/ping")


def test_made_twice_it_is_the_same_and_sparse(image: Path, tmp_path: Path) -> None:
    again = make(tmp_path, "again", tree(tmp_path / "contents").kept())
    assert filecmp.cmp(again, image, shallow=False)
    assert again.stat().st_blocks * 512 < 16 * ext4.MIB < again.stat().st_size


def test_the_real_e2fsck_and_a_larger_disk_agree_with_it(image: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copyfile(image, copy)
    with copy.open("r+b") as file:
        file.truncate(4 * 1024 * ext4.MIB)
    for argv in (["resize2fs", str(copy)], ["e2fsck", "-f", "-n", str(copy)]):
        program = shutil.which(argv[0], path="/usr/sbin:/sbin")
        assert program
        done = subprocess.run([program, *argv[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_debugfs_cannot_do_is_no_silent_loss(tmp_path: Path) -> None:
    lost = Entry("a/b", Kind.FILE, 0o644, 0, 0, 0, content=tmp_path / "not there")
    with pytest.raises(HostProblem) as caught:
        make(tmp_path, "broken", [lost])
    assert caught.value.code == "image_incomplete"


def test_the_real_cpio_reads_the_initramfs(tmp_path: Path) -> None:
    archive = initramfs.archive({"init": (0o755, b"#!/bin/sh\n"), "bin/sh": (0o755, b"12345")})
    cpio = shutil.which("cpio")
    if cpio is None:
        pytest.skip("cpio is not installed")
    done = subprocess.run(
        [cpio, "--extract", "--quiet", "--make-directories"], input=archive, cwd=tmp_path
    )
    assert done.returncode == 0
    assert (tmp_path / "bin/sh").read_bytes() == b"12345"
    assert (tmp_path / "init").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "root").is_dir()
