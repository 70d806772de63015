"""The rules that AppArmor needs for templates: where they go, that they go there once, and, where
AppArmor's parser is installed, that it takes them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from vmsandbox.host import confinement

STATE = Path("/var/lib/vmsandbox")
ABSTRACTION = "abstractions/libvirt-qemu"
INCLUDES = {
    "local": "#include <local/abstractions/libvirt-qemu>",
    "folder": "include if exists <abstractions/libvirt-qemu.d>",
}
ADDED_TO = {"local": f"local/{ABSTRACTION}", "folder": f"{ABSTRACTION}.d/vmsandbox"}


@pytest.fixture(params=INCLUDES)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """AppArmor's folder as distributions have it, old and new."""
    kind = str(request.param)
    for name in (ABSTRACTION, f"local/{ABSTRACTION}"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / ABSTRACTION).write_text(f"  /dev/kvm rw,\n  {INCLUDES[kind]}\n")
    (tmp_path / f"local/{ABSTRACTION}").write_text("  # of the administrator\n")
    return kind


def test_the_rules_go_where_libvirt_reads_them_and_once(kind: str, tmp_path: Path) -> None:
    assert not confinement.admits(STATE, tmp_path)
    file = confinement.admit(STATE, readonly=False, folder=tmp_path)
    assert file == tmp_path / ADDED_TO[kind]
    assert confinement.admits(STATE, tmp_path)
    assert "/var/lib/vmsandbox/templates/*/ram rw,\n" in file.read_text()
    before = file.read_bytes()
    assert confinement.admit(STATE, readonly=True, folder=tmp_path) is None
    assert file.read_bytes() == before
    assert (tmp_path / f"local/{ABSTRACTION}").read_text().startswith("  # of the administrator")
    other = Path("/srv/vmsandbox")
    assert not confinement.admits(other, tmp_path)
    assert not confinement.admits(STATE.parent, tmp_path), "the beginning of a path is another"
    assert confinement.admit(other, readonly=True, folder=tmp_path) == file
    assert "/srv/vmsandbox/templates/*/ram r,\n" in file.read_text()
    assert confinement.admits(STATE, tmp_path)


@pytest.mark.parametrize(
    "odd", ["/srv/a b", "/srv/[ab]", "/srv/{a,b}", "/srv/a*", '/srv/"', "/a\nb"]
)
def test_a_path_that_would_mean_more_than_itself_gets_no_rule(odd: str, tmp_path: Path) -> None:
    assert confinement.admit(Path(odd), readonly=False, folder=tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("readonly", [False, True])
def test_the_parser_takes_them(kind: str, readonly: bool, tmp_path: Path) -> None:
    parser = shutil.which("apparmor_parser", path="/usr/sbin:/sbin:/usr/bin")
    if parser is None:
        pytest.skip("apparmor_parser is not installed")
    confinement.admit(STATE, readonly=readonly, folder=tmp_path)
    profile = tmp_path / "guest"
    profile.write_text(f"profile guest {{\n  #include <{ABSTRACTION}>\n}}\n")
    words = ("--skip-kernel-load", "--skip-cache", "--debug", "--base", str(tmp_path))
    done = subprocess.run([parser, *words, str(profile)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "/var/lib/vmsandbox/templates/*/ram" in done.stdout + done.stderr
