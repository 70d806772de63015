"""What a guest is told about itself: golden listings, and every reader's view of the same seed."""

import base64
import gzip
import io
import json
import tarfile
from typing import Any

import pycdlib
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vmsandbox import seed

HOST = seed.KeyPair("-----BEGIN HOST KEY-----\n", "ssh-ed25519 AAAAhost host")
CLIENT = "ssh-ed25519 AAAAclient vmsandbox"


def spec(**changes: Any) -> seed.SeedSpec:
    fields: dict[str, Any] = {
        "id": "4f1c",
        "hostname": "box",
        "machine_id": "0123456789abcdef0123456789abcdef",
        "host_key": HOST.private,
        "host_key_public": HOST.public,
        "authorized_key": CLIENT,
        "entropy": bytes(range(64)),
        "now": 1_700_000_000.25,
        "mac": "52:54:00:00:00:01",
        "scripts": {"task": b"#!/bin/sh\n", "receive": b"#!/bin/sh\nexit\n"},
    }
    return seed.SeedSpec.model_validate(fields | changes)


def members(tar: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return {member.name: member for member in archive}


def content(tar: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        file = archive.extractfile(name)
        assert file
        return file.read()


# --- the tar --------------------------------------------------------------------------------------


def test_the_tar_holds_this_and_no_more() -> None:
    listing = [
        f"{member.type.decode()} {member.mode:04o} {name}"
        for name, member in members(seed.seed_tar(spec())).items()
    ]
    assert listing == [
        "5 0755 run/vmsandbox",
        "5 1777 run/vmsandbox/terminal",
        "5 0700 run/vmsandbox/tasks",
        "5 0700 run/vmsandbox/tasks/first",
        "6 0666 run/vmsandbox/tasks/first/out.fifo",
        "6 0666 run/vmsandbox/tasks/first/err.fifo",
        "5 0755 var/lib/vmsandbox",
        "5 0700 var/lib/vmsandbox/tasks",
        "5 0700 var/lib/vmsandbox/tasks/first",
        "5 0755 sys/fs/cgroup/vmsandbox.supervisor",
        "5 0755 sys/fs/cgroup/vmsandbox.task.first",
        "0 0644 etc/hostname",
        "0 0644 etc/hosts",
        "0 0444 etc/machine-id",
        "0 0600 etc/ssh/ssh_host_ed25519_key",
        "0 0644 etc/ssh/ssh_host_ed25519_key.pub",
        "0 0644 etc/ssh/vmsandbox_authorized_keys",
        "0 0600 etc/vmsandbox/entropy",
        "0 0644 etc/vmsandbox/id",
        "0 0644 etc/vmsandbox/now",
        "0 0755 usr/lib/vmsandbox/receive",
        "0 0755 usr/lib/vmsandbox/task",
    ]


def test_everything_in_the_tar_belongs_to_root_and_has_one_time() -> None:
    found = {(m.uid, m.gid, m.mtime) for m in members(seed.seed_tar(spec())).values()}
    assert found == {(0, 0, 1_700_000_000)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("etc/hostname", b"box\n"),
        ("etc/machine-id", b"0123456789abcdef0123456789abcdef\n"),
        ("etc/vmsandbox/id", b"4f1c\n"),
        ("etc/vmsandbox/now", b"1700000000.250000\n"),
        ("etc/vmsandbox/entropy", bytes(range(64))),
        ("etc/ssh/ssh_host_ed25519_key", HOST.private.encode()),
        ("etc/ssh/ssh_host_ed25519_key.pub", HOST.public.encode() + b"\n"),
        ("etc/ssh/vmsandbox_authorized_keys", CLIENT.encode() + b"\n"),
        ("usr/lib/vmsandbox/task", b"#!/bin/sh\n"),
    ],
)
def test_the_tar_says(name: str, expected: bytes) -> None:
    assert content(seed.seed_tar(spec()), name) == expected


def test_the_name_resolves_in_the_guest() -> None:
    assert b"127.0.1.1\tbox\n" in content(seed.seed_tar(spec()), "etc/hosts")


def test_the_port_message_starts_with_its_length() -> None:
    tar = seed.seed_tar(spec())
    message = seed.port_message(tar)
    assert int.from_bytes(message[:8], "big") == len(tar)
    assert message[8:] == tar


def test_a_spec_that_is_shown_tells_no_secret() -> None:
    assert "BEGIN" in spec().host_key.get_secret_value()
    assert "BEGIN" not in repr(spec())


# --- cloud-init's view ----------------------------------------------------------------------------


def user_data(**changes: Any) -> dict[str, Any]:
    text = seed.user_data(spec(**changes)).decode()
    assert text.startswith("#cloud-config\n")
    loaded = yaml.safe_load(text)
    assert loaded == json.loads(text.partition("\n")[2])
    assert isinstance(loaded, dict)
    return loaded


def test_user_data_has_the_same_identity() -> None:
    data = user_data()
    assert data["hostname"] == "box"
    assert data["ssh_keys"] == {"ed25519_private": HOST.private, "ed25519_public": HOST.public}
    assert data["ssh_deletekeys"] is False
    assert data["disable_root"] is False
    assert data["ssh_pwauth"] is False
    assert {user["name"]: user["ssh_authorized_keys"] for user in data["users"]} == {
        "root": [CLIENT],
        "agent": [CLIENT],
    }
    assert base64.b64decode(data["random_seed"]["data"]) == bytes(range(64))


def test_user_data_brings_the_scripts_and_says_last_that_it_is_done() -> None:
    data = user_data()
    files = {
        entry["path"]: (
            entry["permissions"],
            gzip.decompress(base64.b64decode(entry["content"])),
        )
        for entry in data["write_files"]
    }
    assert files.keys() == {
        "/etc/hosts",
        "/etc/vmsandbox/id",
        "/usr/lib/vmsandbox/receive",
        "/usr/lib/vmsandbox/task",
    }
    assert files["/usr/lib/vmsandbox/task"] == ("0755", b"#!/bin/sh\n")
    assert data["runcmd"][-2] == ["cp", "/etc/vmsandbox/id", "/run/vmsandbox/seeded"]
    assert "vmsandbox: seeded" in data["runcmd"][-1][2]


def test_mounts_are_fstab_lines() -> None:
    mount = seed.Mount(device="/dev/vdc", folder="/data", type="ext4")
    assert "mounts" not in user_data()
    assert user_data(mounts=(mount,))["mounts"] == [
        ["/dev/vdc", "/data", "ext4", "defaults,nofail"]
    ]


def test_meta_data_names_the_instance_after_the_sandbox() -> None:
    assert yaml.safe_load(seed.meta_data(spec())) == {
        "instance-id": "4f1c",
        "local-hostname": "box",
    }


def test_the_network_is_static() -> None:
    card = yaml.safe_load(seed.network_config(spec()))["ethernets"]["sandbox"]
    assert card["match"] == {"macaddress": "52:54:00:00:00:01"}
    assert card["addresses"] == ["10.0.2.15/24"]
    assert card["dhcp4"] is False
    without = yaml.safe_load(seed.network_config(spec(mac="")))["ethernets"]["sandbox"]
    assert without["match"] == {"driver": "virtio_net"}


# --- the disk -------------------------------------------------------------------------------------


def test_the_disk_is_labelled_and_readable_by_every_name() -> None:
    tar = seed.seed_tar(spec())
    iso = pycdlib.PyCdlib()
    iso.open_fp(io.BytesIO(seed.nocloud_iso(spec(), tar)))
    assert iso.pvd.volume_identifier.rstrip() == b"cidata"
    wanted = {
        "seed.tar": ("/SEED.TAR;1", tar),
        "meta-data": ("/META_DATA.;1", seed.meta_data(spec())),
        "user-data": ("/USER_DATA.;1", seed.user_data(spec())),
        "network-config": ("/NETWORK_CONFIG.;1", seed.network_config(spec())),
    }
    for name, (plain, expected) in wanted.items():
        for way in ({"iso_path": plain}, {"rr_path": f"/{name}"}, {"joliet_path": f"/{name}"}):
            out = io.BytesIO()
            iso.get_file_from_iso_fp(out, **way)
            assert out.getvalue() == expected, (name, way)
    iso.close()


def test_the_same_spec_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    tar = seed.seed_tar(spec())
    first = seed.nocloud_iso(spec(), tar)
    monkeypatch.setattr("time.time", lambda: 1.0)
    assert seed.seed_tar(spec()) == tar
    assert seed.nocloud_iso(spec(), tar) == first
    assert seed.nocloud_iso(spec(now=1_800_000_000.0), tar) != first


# --- names and keys -------------------------------------------------------------------------------


def test_keys_are_ed25519_and_fresh() -> None:
    one, two = seed.new_key("me"), seed.new_key()
    assert one.private != two.private
    assert one.private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    kind, data, comment = one.public.split()
    assert (kind, comment) == ("ssh-ed25519", "me")
    assert base64.b64decode(data).startswith(b"\0\0\0\x0bssh-ed25519")


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a.b", "a b", "a\n", "ä", "a" * 64])
def test_a_hostname_is_one_label(name: str) -> None:
    with pytest.raises(ValidationError):
        spec(hostname=name)


@given(st.text())
def test_every_name_has_a_hostname(name: str) -> None:
    assert spec(hostname=seed.hostname_for(name)).hostname


def test_the_packages_own_scripts_are_found() -> None:
    scripts = seed.guest_scripts()
    assert scripts["task"].startswith(b"#!/bin/sh\n")
    assert all("." not in name for name in scripts)
