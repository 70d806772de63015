"""How an image is put together, as far as nothing has to run: archives, scripts, command lines."""

import io
import re
import tarfile
from pathlib import Path

import pytest

from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.images import bootstrap, ext4, initramfs, overlay
from vmsandbox.images.recipe import Layer, OverlayFile, Recipe
from vmsandbox.images.tree import Entry, Kind, Tree, read_tar

EPOCH = 1_000_000


# --- initramfs ------------------------------------------------------------------------------------

MODULES_DEP = """\
kernel/virtio.ko: kernel/virtio_ring.ko
kernel/virtio_ring.ko:
kernel/virtio_blk.ko: kernel/virtio.ko kernel/virtio_ring.ko
kernel/virtio-rng.ko: kernel/virtio.ko kernel/virtio_ring.ko
"""


def test_modules_come_after_what_they_need_and_only_once() -> None:
    needs = initramfs.module_dependencies(MODULES_DEP)
    assert initramfs.load_order(["virtio_blk", "virtio_rng"], needs) == (
        "kernel/virtio_ring.ko",
        "kernel/virtio.ko",
        "kernel/virtio_blk.ko",
        "kernel/virtio-rng.ko",
    )


def test_a_module_that_the_kernel_lacks_is_a_fault_of_the_recipe() -> None:
    with pytest.raises(UsageProblem, match="nvme") as caught:
        initramfs.load_order(["nvme"], initramfs.module_dependencies(MODULES_DEP))
    assert caught.value.code == "recipe_invalid"


def unpacked(archive: bytes) -> dict[str, tuple[int, bytes]]:
    """A cpio archive read by the letter of its format."""
    found: dict[str, tuple[int, bytes]] = {}
    at = 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = archive[at + 110 : at + 110 + name_size - 1].decode()
        content = -(-(at + 110 + name_size) // 4) * 4
        at = -(-(content + size) // 4) * 4
        if name == "TRAILER!!!":
            assert at == len(archive)
            return found
        found[name] = mode, archive[content : content + size]


def test_the_archive_holds_files_and_the_folders_around_them() -> None:
    files = {"init": (0o755, b"#!/bin/sh\n"), "modules/a.ko": (0o644, b"12345")}
    found = unpacked(initramfs.archive(files))
    assert found["init"] == (0o100755, b"#!/bin/sh\n")
    assert found["modules/a.ko"] == (0o100644, b"12345")
    assert found["modules"] == (0o40755, b"")
    names = list(found)
    assert names.index("modules") < names.index("modules/a.ko")


def test_the_archive_does_not_depend_on_the_order_of_files() -> None:
    files = {"a": (0o644, b"1"), "b": (0o755, b"2")}
    assert initramfs.archive(files) == initramfs.archive(dict(reversed(files.items())))


# --- the tree -------------------------------------------------------------------------------------


def member(
    name: str, content: bytes | None = None, **fields: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    info.size = len(content or b"")
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content or b""


def tree_of(folder: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Tree:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    buffer.seek(0)
    return read_tar(buffer, folder, EPOCH)


def test_a_tree_keeps_owners_modes_links_and_attributes(tmp_path: Path) -> None:
    attributes = {"SCHILY.xattr.security.capability": "\x01"}
    tree = tree_of(
        tmp_path,
        member("./", type=tarfile.DIRTYPE, mode=0o755),
        member("./bin/sudo", b"x", mode=0o4755, uid=0, gid=27, pax_headers=attributes),
        member("./bin/sudoedit", type=tarfile.LNKTYPE, linkname="./bin/sudo"),
        member("./sbin", type=tarfile.SYMTYPE, linkname="usr/sbin"),
        member("./dev/null", type=tarfile.CHRTYPE),
    )
    sudo = tree.entries["bin/sudo"]
    assert (sudo.kind, sudo.mode, sudo.gid, sudo.size) == (Kind.FILE, 0o4755, 27, 1)
    assert sudo.links == ("bin/sudoedit",)
    assert sudo.xattrs == {"security.capability": b"\x01"}
    assert tree.entries["sbin"].target == "usr/sbin"
    assert [entry.path for entry in tree.kept()] == ["", "bin/sudo", "sbin"]


def test_no_time_is_newer_than_the_epoch(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, member("old", b"", mtime=5), member("new", b"", mtime=EPOCH + 9))
    assert (tree.entries["old"].mtime, tree.entries["new"].mtime) == (5, EPOCH)


def test_what_only_this_build_knew_is_left_out(tmp_path: Path) -> None:
    names = (
        "etc/ssh/ssh_host_rsa_key",
        "etc/shadow-",
        "var/log/apt/term.log",
        "var/cache/ldconfig/aux-cache",
        "var/lib/apt/lists/x_Packages",
        "boot/vmlinuz-6.1.0-1-cloud-amd64",
        "etc/apt/sources.list.d/0000stdin.sources",
        "etc/apt/preferences.d/0000recipe",
    )
    kept = ("etc/ssh/sshd_config", "etc/apt/sources.list.d/debian.sources", "boot/config-6.1.0-1")
    folders = [member("var/log/apt", type=tarfile.DIRTYPE)]
    files = [member(name, b"x") for name in names + kept]
    tree = tree_of(tmp_path, *folders, *files)
    assert [entry.path for entry in tree.kept()] == sorted([*kept, "var/log/apt"])


def test_the_day_and_the_machine_of_a_build_are_taken_out_of_files(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        member("etc/machine-id", b"0123456789abcdef\n"),
        member("etc/shadow", b"root:*:20405:0:99999:7:::\nagent:*:20405:0:99999:7:::\n"),
    ).neutral()
    assert tree.read("etc/machine-id") == b""
    assert tree.entries["etc/machine-id"].size == 0
    assert tree.read("etc/shadow") == b"root:*::0:99999:7:::\nagent:*::0:99999:7:::\n"
    assert tree.entries["etc/shadow"].size == len(tree.read("etc/shadow"))


def test_packages_are_those_that_are_installed(tmp_path: Path) -> None:
    status = b"""\
Package: git
Status: install ok installed
Version: 1:2.39.5-0

Package: gone
Status: deinstall ok config-files
Version: 1
"""
    tree = tree_of(tmp_path, member("var/lib/dpkg/status", status))
    assert tree.packages() == {"git": "1:2.39.5-0"}


def test_a_file_that_must_be_there_is_asked_for_by_name(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, member("usr/lib/a.so", b"1"), member("usr/lib/b.so", b"2"))
    assert tree.read("lib/a.so") == b"1"  # /lib is a link to /usr/lib
    for look in (lambda: tree.read("lib/c.so"), lambda: tree.only("usr/lib/*.so")):
        with pytest.raises(HostProblem) as caught:
            look()
        assert caught.value.code == "image_incomplete"


# --- ext4 -----------------------------------------------------------------------------------------


def entry(path: str, kind: Kind = Kind.FILE, **fields: object) -> Entry:
    defaults = {"mode": 0o644, "uid": 0, "gid": 0, "mtime": 7}
    return Entry(path=path, kind=kind, **{**defaults, **fields})  # type: ignore[arg-type]


def test_the_script_says_everything_and_in_order() -> None:
    entries = [
        entry("", Kind.FOLDER, mode=0o755),
        entry("bin", Kind.FOLDER, mode=0o755),
        entry("bin/a b", mode=0o4755, gid=27, content=Path("/tmp/1"), links=("bin/c",)),
        entry("bin/sh", Kind.SYMLINK, mode=0o777, target='da"sh', uid=5),
    ]
    assert list(ext4.script(entries, Path("/values"))) == [
        'mkdir "/bin"',
        'write "/tmp/1" "/bin/a b"',
        'ln "/bin/a b" "/bin/c"',
        'symlink "/bin/sh" "da""sh"',
        'sif "/" mode 040755',
        'sif "/" mtime @7',
        'sif "/bin" mode 040755',
        'sif "/bin" mtime @7',
        'sif "/bin/a b" mode 0104755',
        'sif "/bin/a b" mtime @7',
        'sif "/bin/a b" gid 27',
        'sif "/bin/a b" links_count 2',
        'sif "/bin/sh" mode 0120777',
        'sif "/bin/sh" mtime @7',
        'sif "/bin/sh" uid 5',
    ]


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "a\udcffb"])
def test_names_that_debugfs_cannot_be_told_are_refused(name: str) -> None:
    with pytest.raises(HostProblem, match="cannot be stored"):
        list(ext4.script([entry(name, content=Path("/x"))], Path("/values")))


def test_the_file_system_has_whole_block_groups_and_room() -> None:
    content = 600 * ext4.MIB
    size = ext4.image_size([entry("big", size=content)])
    assert size % (128 * ext4.MIB) == 0
    assert content * 1.2 < size < content * 1.6


# --- mmdebstrap -----------------------------------------------------------------------------------

SOURCES = "Types: deb\nURIs: http://a.invalid/debian https://b.invalid/x\nSuites: bookworm\n"


def recipe(*layers: Layer) -> Recipe:
    return Recipe(
        description="",
        suite="bookworm",
        sources=SOURCES,
        packages=("git", "less"),
        layers=layers,
        initramfs=None,
        cmdline="",
        cloud_init=False,
        minimum_memory_mib=256,
    )


def test_root_and_everybody_else_differ_in_one_word() -> None:
    root, user = (bootstrap.argv(recipe(), [], root=is_root) for is_root in (True, False))
    assert set(root) ^ set(user) == {"--mode=root", "--mode=unshare"}
    assert root[-3:] == ["bookworm", "-", "-"]
    assert "--include=usr-is-merged,git,less" in root


def test_preferences_are_there_before_apt_chooses() -> None:
    plain = bootstrap.argv(recipe(), [], root=True)
    pinned = bootstrap.argv(recipe(), [], root=True, preferences=Path("/s/preferences"))
    assert not [word for word in plain if word.startswith("--setup-hook=")]
    assert [word for word in pinned if word not in plain] == [
        '--setup-hook=mkdir -p "$1/etc/apt/preferences.d"',
        "--setup-hook=upload /s/preferences /etc/apt/preferences.d/0000recipe",
    ]


def test_each_layer_brings_its_files_before_its_script_runs() -> None:
    with_script = Layer(files=(), finish=b"#!/bin/sh\n")
    hooks = [
        word.removeprefix("--customize-hook=")
        for word in bootstrap.argv(
            recipe(with_script, Layer(files=(), finish=None)),
            [Path("/s/0.tar"), Path("/s/1.tar")],
            root=True,
        )
        if word.startswith("--customize-hook=")
    ]
    assert hooks == [
        "tar-in /s/0.tar /",
        'chroot "$1" /.vmsandbox/finish',
        'rm -r "$1/.vmsandbox"',
        "tar-in /s/1.tar /",
    ]


def test_a_layer_belongs_to_root() -> None:
    layer = Layer(files=(OverlayFile(path="etc/motd", content=b"hi"),), finish=b"#!/bin/sh\n")
    with tarfile.open(fileobj=io.BytesIO(bootstrap.layer_tar(layer, EPOCH))) as archive:
        members = archive.getmembers()
    assert [(m.name, m.mode, m.uid, m.mtime) for m in members] == [
        ("etc/motd", 0o644, 0, EPOCH),
        (".vmsandbox/finish", 0o755, 0, EPOCH),
    ]


def test_a_mirror_takes_the_place_of_every_host() -> None:
    assert bootstrap.sources(recipe(), None) == SOURCES
    assert "URIs: https://c.invalid/m/debian https://c.invalid/m/x" in bootstrap.sources(
        recipe(), "https://c.invalid/m/"
    )


def test_how_the_host_reaches_its_mirrors_is_taken_over_and_nothing_else() -> None:
    dump = """\
APT::Architecture "amd64";
Acquire::http::Proxy "http://proxy.invalid:3128";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
DPkg::Post-Invoke:: "rm -rf /";
"""
    assert bootstrap.host_apt_options(dump) == [
        'Acquire::http::Proxy "http://proxy.invalid:3128"',
        'Acquire::Check-Valid-Until "false"',
    ]


LOG = """\
I: chroot architecture amd64 is equal to the host's architecture
I: running apt-get update...
I: downloading packages with apt...
0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.
I: extracting archives...
I: installing essential packages...
Unpacking libc6 (2.36) ...
Setting up libc6 (2.36) ...
I: installing remaining packages inside the chroot...
0 upgraded, 4 newly installed, 0 to remove and 0 not upgraded.
Unpacking git ...
Unpacking less ...
Setting up less ...
I: running --customize-hook in shell
I: creating tarball...
I: done
"""


def test_progress_only_goes_forward_and_names_each_phase() -> None:
    phases = bootstrap.Phases()
    seen = [news for line in LOG.splitlines() if (news := phases.read(line))]
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1
    texts = list(dict.fromkeys(text for text, _ in seen))
    assert texts[0] == "reading package lists"
    assert texts[-1] == "packing the system"
    installing = [share for text, share in seen if text == "installing packages"]
    assert len(set(installing)) == 4


# --- overlays -------------------------------------------------------------------------------------


def test_an_overlay_names_its_backing_file_and_format() -> None:
    argv = overlay.argv(Path("/i/rootfs.ext4"), "raw", Path("/s/overlay.qcow2"), 20480)
    line = " ".join(argv)
    assert argv[:2] == ["qemu-img", "create"]
    assert re.search(r"-F raw -b /i/rootfs.ext4 /s/overlay.qcow2 20480M$", line)
