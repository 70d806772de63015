"""Builds that do not get to their end: a dead mirror, an interrupt, a kill. Nothing stays.

A whole build takes minutes; the guests' tests build the image that they need.
"""

import contextlib
import http.server
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from vmsandbox.deadline import Deadline
from vmsandbox.errors import HostProblem
from vmsandbox.images import ImageStore, builtin_recipes, overlay
from vmsandbox.images.programs import locate, run

SOURCES = """\
Types: deb
URIs: {uri}
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
RECIPE = """\
description = "never finished"
suite = "bookworm"
sources = "sources"
cmdline = "root=/dev/vda"
cloud_init = false
minimum_memory_mib = 256
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], Path]:
    def write(uri: str) -> Path:
        folder = tmp_path / "recipe"
        folder.mkdir()
        (folder / "recipe.toml").write_text(RECIPE)
        (folder / "sources").write_text(SOURCES.format(uri=uri))
        return folder

    return write


@pytest.fixture
def deaf_mirror() -> Iterator[socket.socket]:
    """A mirror that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def uri_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}/debian"


@pytest.fixture(autouse=True)
def scratch(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where mmdebstrap works, so that nobody else's work is taken for ours."""
    short_path.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(short_path))
    return short_path


def mmdebstrap_folders(scratch: Path) -> set[Path]:
    return set(scratch.glob("mmdebstrap.*"))


def left_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".guard"))


@contextlib.contextmanager
def building(recipe: Path, home: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "vmsandbox", "image", "build", str(recipe)],
        env=os.environ | {"VMSANDBOX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def asked(listener: socket.socket) -> None:
    """Wait until apt has asked the mirror, so that mmdebstrap is in the middle of its work."""
    ready, _, _ = select.select([listener], [], [], 60)
    assert ready, "apt never asked the mirror"


class _Nothing(http.server.BaseHTTPRequestHandler):
    """A mirror of nothing at all."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Its own log would only be noise."""


@pytest.fixture
def empty_mirror() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Nothing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield uri_of(server.socket)
        server.shutdown()
        thread.join()


def test_an_empty_mirror_is_told_with_the_log(
    recipe: Callable[[str], Path], empty_mirror: str, tmp_path: Path, scratch: Path
) -> None:
    store = ImageStore(tmp_path / "images")
    seen: list[str] = []
    with pytest.raises(HostProblem) as caught:
        store.build(recipe(empty_mirror), progress=lambda text, share: seen.append(text))
    assert caught.value.code == "program_failed"
    assert "does not have a Release file" in caught.value.message
    assert caught.value.evidence
    assert empty_mirror in Path(caught.value.evidence).read_text()
    assert left_in(store.root) == ["build.log"]
    assert mmdebstrap_folders(scratch) == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing(
    number: signal.Signals,
    recipe: Callable[[str], Path],
    deaf_mirror: socket.socket,
    tmp_path: Path,
    scratch: Path,
) -> None:
    with building(recipe(uri_of(deaf_mirror)), tmp_path / "home") as process:
        asked(deaf_mirror)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        assert mmdebstrap_folders(scratch)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == 128 + number
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
    assert left_in(tmp_path / "home/images") == ["build.log"]
    assert mmdebstrap_folders(scratch) == set()


def test_what_a_killed_build_began_ends_and_is_swept(
    recipe: Callable[[str], Path], deaf_mirror: socket.socket, tmp_path: Path, scratch: Path
) -> None:
    with building(recipe(uri_of(deaf_mirror)), tmp_path / "home") as process:
        asked(deaf_mirror)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, "mmdebstrap outlived the build that it worked for"
    assert mmdebstrap_folders(scratch) == set()
    store = ImageStore(tmp_path / "home/images")
    assert re.fullmatch(r"build-\w+", next(iter(set(left_in(store.root)) - {"build.log"})))
    assert store.sweep() > 0
    assert left_in(store.root) == ["build.log"]


def test_a_second_build_waits_and_says_so(
    recipe: Callable[[str], Path], deaf_mirror: socket.socket, tmp_path: Path
) -> None:
    folder = recipe(uri_of(deaf_mirror))
    with building(folder, tmp_path / "home") as first:
        asked(deaf_mirror)
        assert ImageStore(tmp_path / "home/images").sweep() == 0
        with building(folder, tmp_path / "home") as second:
            assert second.stderr
            assert "waiting for another build" in second.stderr.readline()
            second.send_signal(signal.SIGINT)
            second.communicate(timeout=30)
        assert first.poll() is None
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)


def test_too_little_room_is_told_before_the_work(
    recipe: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vmsandbox.images import build

    monkeypatch.setattr(build, "SCRATCH_BYTES", 2**60)
    deadline = Deadline(5)
    with pytest.raises(HostProblem) as caught:
        ImageStore(tmp_path / "images").build(recipe("http://127.0.0.1:9/debian"))
    assert caught.value.code == "host_disk_full"
    assert caught.value.hint
    assert not deadline.passed()
    assert left_in(tmp_path / "images") == []


def test_a_missing_program_names_its_package() -> None:
    with pytest.raises(HostProblem) as caught:
        locate("newuidmap-of-another-world")
    assert caught.value.code == "program_missing"


# --- overlays -------------------------------------------------------------------------------------


def test_overlays_are_small_and_name_their_backing_file(tmp_path: Path) -> None:
    backing = tmp_path / "rootfs.ext4"
    backing.write_bytes(b"x" * 4096)
    disk = tmp_path / "overlay.qcow2"
    run(overlay.argv(backing, "raw", disk, 20 * 1024))
    info = run(["qemu-img", "info", str(disk)])
    assert f"backing file: {backing}" in info
    assert "virtual size: 20 GiB" in info
    assert disk.stat().st_size < 1024 * 1024


def test_our_recipes_name_only_packages_that_apt_could_take() -> None:
    from vmsandbox.images.recipe import read_recipe

    for folder in builtin_recipes().values():
        for package in read_recipe(folder).packages:
            assert re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", package)
