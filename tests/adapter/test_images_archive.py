"""Images as one file: a round trip, and archives that nobody should believe."""

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.images import ImageStore
from vmsandbox.images.manifest import MANIFEST, PARTS, Manifest, folder_name, part_of
from vmsandbox.model import digest_of

Members = list[tuple[tarfile.TarInfo, bytes]]
CONTENT = {"kernel": b"kernel", "initramfs": b"initramfs" * 9, "rootfs.ext4": b"root"}


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def members(base: Path, **content: bytes) -> Members:
    """What a good archive holds, ready to be spoilt."""
    base.mkdir()
    for name, data in (CONTENT | content).items():
        (base / name).write_bytes(data)
    manifest = Manifest(
        cmdline="root=/dev/vda",
        recipe=digest_of("recipe"),
        packages={"git": "1"},
        parts={name: part_of(base / name) for name in PARTS},
    )
    (base / MANIFEST).write_bytes(manifest.canonical())
    return [member(name, (base / name).read_bytes()) for name in (MANIFEST, *PARTS)]


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def packed(path: Path, contents: Members) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info, data in contents:
            archive.addfile(info, io.BytesIO(data))
    return compressed(path, buffer.getvalue())


def compressed(path: Path, data: bytes) -> Path:
    done = subprocess.run(["zstd", "-q", "-c"], input=data, capture_output=True, check=True)
    path.write_bytes(done.stdout)
    return path


def left_in(store: ImageStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir() if not path.name.endswith(".guard"))


# --- the round trip -------------------------------------------------------------------------------


def test_export_and_import_keep_the_digest_and_the_holes(tmp_path: Path, store: ImageStore) -> None:
    root_disk = b"a" * 4096 + bytes(24 * 1024 * 1024) + b"z"
    file = packed(
        tmp_path / "mine.tar.zst", members(tmp_path / "parts", **{"rootfs.ext4": root_disk})
    )
    image = store.import_(file)
    assert image.name == "mine"
    assert image.folder.name == folder_name(image.digest)
    out = tmp_path / "out.tar.zst"
    assert store.export("mine", out).digest == image.digest
    assert out.stat().st_size < 100_000
    other = ImageStore(tmp_path / "elsewhere")
    again = other.import_(out, "theirs")
    assert again.digest == image.digest
    assert again.rootfs.read_bytes() == root_disk
    assert again.rootfs.stat().st_blocks * 512 < 8 * 1024 * 1024
    assert all((again.folder / part).stat().st_mode & 0o777 == 0o444 for part in (MANIFEST, *PARTS))
    assert other.resolve("theirs", verify="full").digest == image.digest
    assert left_in(other) == sorted([again.folder.name, "lock.json"])


def test_the_same_image_twice_is_one_image(tmp_path: Path, store: ImageStore) -> None:
    file = packed(tmp_path / "a.tar.zst", members(tmp_path / "parts"))
    assert store.import_(file, "a").digest == store.import_(file, "b").digest
    assert left_in(store) == sorted([store.resolve("a").folder.name, "lock.json"])


def test_a_second_import_mends_a_damaged_image(tmp_path: Path, store: ImageStore) -> None:
    file = packed(tmp_path / "a.tar.zst", members(tmp_path / "parts"))
    image = store.import_(file)
    image.rootfs.chmod(0o600)
    image.rootfs.write_bytes(b"evil")
    with pytest.raises(HostProblem):
        store.resolve("a")
    store.import_(file)
    assert store.resolve("a", verify="full").rootfs.read_bytes() == b"root"


def test_two_at_once_wait_for_each_other(tmp_path: Path, store: ImageStore) -> None:
    files = [
        packed(tmp_path / f"{n}.tar.zst", members(tmp_path / f"parts-{n}", kernel=b"%d" % n))
        for n in range(4)
    ]
    threads = [
        threading.Thread(target=store.import_, args=(file, f"n{n}")) for n, file in enumerate(files)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [image.name for image in store.list()] == ["n0", "n1", "n2", "n3"]


# --- archives that nobody should believe ----------------------------------------------------------


def without(name: str) -> Callable[[Members], Members]:
    return lambda good: [pair for pair in good if pair[0].name != name]


def replaced(name: str, *new: tuple[tarfile.TarInfo, bytes]) -> Callable[[Members], Members]:
    return lambda good: [
        each for pair in good for each in (new if pair[0].name == name else (pair,))
    ]


def manifest_saying(**fields: object) -> Callable[[Members], Members]:
    def spoil(good: Members) -> Members:
        said = json.loads(good[0][1]) | fields
        return [member(MANIFEST, json.dumps(said).encode()), *good[1:]]

    return spoil


LINK = tarfile.SYMTYPE
HOSTILE: dict[str, Callable[[Members], Members]] = {
    "empty": lambda good: [],
    "no manifest": without(MANIFEST),
    "manifest last": lambda good: [*good[1:], good[0]],
    "manifest as link": replaced(MANIFEST, member(MANIFEST, type=LINK, linkname="/etc/passwd")),
    "manifest too large": lambda good: [member(MANIFEST, b" " * (5 * 1024 * 1024)), *good[1:]],
    "manifest no JSON": replaced(MANIFEST, member(MANIFEST, b"{")),
    "manifest with more": manifest_saying(colour="red"),
    "manifest of tomorrow": manifest_saying(version=2),
    "manifest with huge part": manifest_saying(
        parts={name: {"sha256": digest_of(1), "size_bytes": 2**60} for name in PARTS}
    ),
    "part missing": without("kernel"),
    "part twice": lambda good: [*good, good[-1]],
    "part as link": replaced("kernel", member("kernel", type=LINK, linkname="/etc/passwd")),
    "part as hard link": replaced(
        "kernel", member("kernel", type=tarfile.LNKTYPE, linkname=MANIFEST)
    ),
    "part as folder": replaced("kernel", member("kernel", type=tarfile.DIRTYPE)),
    "part as device": replaced("kernel", member("kernel", type=tarfile.CHRTYPE)),
    "part too short": replaced("kernel", member("kernel", b"kerne")),
    "part too long": replaced("kernel", member("kernel", b"kernel ")),
    "part of other content": replaced("kernel", member("kernel", b"KERNEL")),
    "climbing": lambda good: [*good, member("../evil", b"x")],
    "absolute": lambda good: [*good, member("/tmp/evil", b"x")],
    "stranger": lambda good: [good[0], member("verified.json", b"{}"), *good[1:]],
    "name with dot": replaced("kernel", member("./kernel", b"kernel")),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(
    case: str, tmp_path: Path, store: ImageStore
) -> None:
    good = members(tmp_path / "parts")
    file = packed(tmp_path / "evil.tar.zst", HOSTILE[case](good))
    with pytest.raises(UsageProblem) as caught:
        store.import_(file)
    assert caught.value.code == "image_archive_refused"
    assert caught.value.hint
    assert left_in(store) == []
    assert not (tmp_path / "evil").exists()


def test_broken_files_are_refused(tmp_path: Path, store: ImageStore) -> None:
    good = packed(tmp_path / "good.tar.zst", members(tmp_path / "parts", kernel=os.urandom(99_999)))
    whole = good.read_bytes()
    spoilt = {
        "short": whole[: len(whole) // 2],
        "flipped": whole[:50_000] + bytes([whole[50_000] ^ 1]) + whole[50_001:],
        "text": b"hello",
        "nothing": b"",
    }
    for name, data in spoilt.items():
        file = tmp_path / f"{name}.tar.zst"
        file.write_bytes(data)
        with pytest.raises(UsageProblem) as caught:
            store.import_(file)
        assert caught.value.code == "image_archive_refused"
    compressed(tmp_path / "noise.tar.zst", b"noise" * 999)
    with pytest.raises(UsageProblem):
        store.import_(tmp_path / "noise.tar.zst")
    assert left_in(store) == []


def test_a_missing_file_and_a_folder_are_told(tmp_path: Path, store: ImageStore) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(UsageProblem) as caught:
            store.import_(path, "name")
        assert caught.value.code == "image_archive_missing"


# --- where it cannot be written -------------------------------------------------------------------


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, store: ImageStore) -> None:
    store.import_(packed(tmp_path / "a.tar.zst", members(tmp_path / "parts")))
    with pytest.raises(HostProblem) as caught:
        store.export("a", tmp_path / "no such folder" / "a.tar.zst")
    assert caught.value.code == "images_unwritable"
    before = sorted(tmp_path.iterdir())
    (tmp_path / "folder.tar.zst").mkdir()
    with pytest.raises(HostProblem):
        store.export("a", tmp_path / "folder.tar.zst")
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "folder.tar.zst"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_is_told_and_nothing_stays(tmp_path: Path) -> None:
    content = {"rootfs.ext4": os.urandom(4 * 1024 * 1024)}
    file = packed(tmp_path / "big.tar.zst", members(tmp_path / "parts", **content))
    small = tmp_path / "small"
    small.mkdir()
    # The mount lives in a namespace of its own and is gone with it.
    script = """
    mount -t tmpfs -o size=2m small "$1"
    "$2" -m vmsandbox image import "$3"
    ls -A "$1/images"
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(small), sys.executable, str(file)],
        env=os.environ | {"VMSANDBOX_HOME": str(small)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "[host_disk_full]" in done.stderr
    assert "hint:" in done.stderr
    assert set(done.stdout.split()) == {".build.guard"}
