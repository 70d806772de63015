"""The folder of images: what references mean, what is believed, what goes."""

import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from vmsandbox.errors import HostProblem, NegativeAnswer, UsageProblem
from vmsandbox.images import ImageStore
from vmsandbox.images.manifest import MANIFEST, PARTS, Manifest, folder_name, part_of
from vmsandbox.images.verify import trust
from vmsandbox.model import Image, digest_of


def manifest_of(folder: Path, **fields: object) -> Manifest:
    values: dict[str, object] = {
        "cmdline": "root=/dev/vda",
        "recipe": digest_of("recipe"),
        "packages": {"git": "1"},
        "parts": {name: part_of(folder / name) for name in PARTS},
    }
    return Manifest.model_validate(values | fields)


def put(root: Path, content: str, *names: str) -> str:
    """An image made by hand; its digest."""
    making = root / "making"
    making.mkdir(parents=True)
    for part in PARTS:
        (making / part).write_text(f"{part} of {content}")
    manifest = manifest_of(making)
    (making / MANIFEST).write_bytes(manifest.canonical())
    making.rename(root / folder_name(manifest.digest()))
    known = json.loads((root / "lock.json").read_text()) if (root / "lock.json").exists() else {}
    (root / "lock.json").write_text(json.dumps(known | dict.fromkeys(names, manifest.digest())))
    return manifest.digest()


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


# --- manifests ------------------------------------------------------------------------------------


def test_the_digest_is_of_the_canonical_manifest_and_covers_the_parts(tmp_path: Path) -> None:
    for part in PARTS:
        (tmp_path / part).write_text(part)
    first = manifest_of(tmp_path, packages={"a": "1", "b": "2"})
    again = Manifest.model_validate_json(first.canonical())
    assert (
        first.digest()
        == again.digest()
        == manifest_of(tmp_path, packages={"b": "2", "a": "1"}).digest()
    )
    (tmp_path / "kernel").write_text("other")
    assert manifest_of(tmp_path, packages={"a": "1", "b": "2"}).digest() != first.digest()


def test_a_manifest_names_exactly_the_parts(tmp_path: Path) -> None:
    for part in PARTS:
        (tmp_path / part).write_text(part)
    parts = manifest_of(tmp_path).parts
    for wrong in (
        {name: parts[name] for name in PARTS[1:]},
        {**parts, "../../etc/passwd": parts["kernel"]},
    ):
        with pytest.raises(ValidationError):
            manifest_of(tmp_path, parts=wrong)


# --- references -----------------------------------------------------------------------------------


def test_every_way_to_name_an_image(store: ImageStore) -> None:
    digest = put(store.root, "one", "debian-12")
    put(store.root, "two", "other")
    hexadecimal = digest.removeprefix("sha256:")
    for reference in (
        "debian-12",
        f"debian-12@{digest}",
        digest,
        digest[:20],
        hexadecimal[:8],
        hexadecimal[:30],
    ):
        assert store.resolve(reference).digest == digest
    image = store.resolve("debian-12")
    assert image.name == "debian-12"
    assert image.rootfs.read_text() == "rootfs.ext4 of one"
    assert image.rootfs_bytes == len("rootfs.ext4 of one")
    assert store.resolve(digest[:20]).name == digest


def test_a_pin_outlives_the_name(store: ImageStore) -> None:
    old = put(store.root, "old", "debian-12")
    new = put(store.root, "new", "debian-12")
    assert store.resolve("debian-12").digest == new
    assert store.resolve(f"debian-12@{old}").digest == old


@pytest.mark.parametrize(
    "reference",
    [
        "nothing",
        "debian-12@sha256:" + "0" * 64,
        "sha256:" + "0" * 64,
        "000000",
        "debian-12@latest",
        "",
        "../images",
        "a/b",
        "0" * 12,
    ],
)
def test_an_unknown_image_is_told_with_a_hint(store: ImageStore, reference: str) -> None:
    put(store.root, "one", "debian-12")
    with pytest.raises(UsageProblem) as caught:
        store.resolve(reference)
    assert (caught.value.code, caught.value.hint) == ("image_unknown", "vmsandbox image list")


def test_a_recipe_that_was_not_built_yet_has_its_own_hint(store: ImageStore) -> None:
    with pytest.raises(UsageProblem) as caught:
        store.resolve("debian-12")
    assert caught.value.hint == "vmsandbox image build debian-12"


def test_a_prefix_of_two_is_ambiguous(store: ImageStore) -> None:
    digest = put(store.root, "one")
    twin = store.root / (folder_name(digest)[:8] + "0" * 8)
    twin.mkdir()
    with pytest.raises(UsageProblem) as caught:
        store.resolve(digest[:15])
    assert caught.value.code == "image_ambiguous"


def test_the_list_has_names_first_and_leaves_broken_ones_out(store: ImageStore) -> None:
    assert store.list() == []
    unnamed = put(store.root, "three")
    put(store.root, "one", "b", "a")
    broken = put(store.root, "two", "broken")
    (store.root / folder_name(broken) / MANIFEST).write_text("{}")
    assert [image.name for image in store.list()] == ["a", "b", unnamed]


# --- what is believed -----------------------------------------------------------------------------


def tamper(image: Image) -> None:
    content = image.rootfs.read_text()
    image.rootfs.write_text(content.swapcase())


def test_changed_content_is_refused_with_expected_found_and_path(store: ImageStore) -> None:
    put(store.root, "one", "debian-12")
    image = store.resolve("debian-12")
    expected = part_of(image.rootfs).sha256
    tamper(image)
    found = part_of(image.rootfs).sha256
    for check in (lambda: store.resolve("debian-12"), lambda: store.verify(image)):
        with pytest.raises(HostProblem) as caught:
            check()
        assert caught.value.code == "image_digest_mismatch"
        assert expected in caught.value.message
        assert found in caught.value.message
        assert caught.value.evidence == str(image.rootfs)


def test_a_quick_check_believes_what_was_seen_and_a_full_one_does_not(store: ImageStore) -> None:
    digest = put(store.root, "one", "debian-12")
    image = store.resolve("debian-12")
    tamper(image)
    trust(image.folder)  # as if the last full check had seen this content
    assert store.resolve("debian-12").digest == digest
    with pytest.raises(HostProblem):
        store.resolve("debian-12", verify="full")


def test_a_touched_part_is_hashed_again_and_remembered(store: ImageStore) -> None:
    put(store.root, "one", "debian-12")
    image = store.resolve("debian-12")
    before = (image.folder / "verified.json").read_bytes()
    os.utime(image.rootfs)
    store.resolve("debian-12")
    after = (image.folder / "verified.json").read_bytes()
    assert after != before
    store.resolve("debian-12")
    assert (image.folder / "verified.json").read_bytes() == after


def test_what_was_remembered_of_another_file_is_not_believed(store: ImageStore) -> None:
    put(store.root, "one", "debian-12")
    image = store.resolve("debian-12")
    replacement = image.folder / "new"
    replacement.write_text(image.rootfs.read_text().swapcase())
    times = image.rootfs.stat()
    os.utime(replacement, ns=(times.st_atime_ns, times.st_mtime_ns))
    replacement.rename(image.rootfs)
    with pytest.raises(HostProblem):
        store.resolve("debian-12")


def test_a_changed_manifest_is_refused(store: ImageStore) -> None:
    digest = put(store.root, "one", "debian-12")
    path = store.root / folder_name(digest) / MANIFEST
    path.write_text(path.read_text().replace("root=/dev/vda", "root=/dev/vdb"))
    with pytest.raises(HostProblem) as caught:
        store.resolve("debian-12")
    assert caught.value.code == "image_digest_mismatch"
    assert digest in caught.value.message


@pytest.mark.parametrize("part", [MANIFEST, "rootfs.ext4"])
def test_a_missing_file_is_told(store: ImageStore, part: str) -> None:
    digest = put(store.root, "one", "debian-12")
    (store.root / folder_name(digest) / part).unlink()
    with pytest.raises(HostProblem) as caught:
        store.resolve("debian-12")
    assert caught.value.code == "image_broken"


def test_a_broken_list_of_names_is_told(store: ImageStore) -> None:
    put(store.root, "one", "debian-12")
    (store.root / "lock.json").write_text("{")
    with pytest.raises(HostProblem) as caught:
        store.resolve("debian-12")
    assert caught.value.code == "image_names_broken"


# --- removal --------------------------------------------------------------------------------------


def test_removal_frees_what_lay_on_the_disk(store: ImageStore) -> None:
    digest = put(store.root, "one", "debian-12")
    image = store.resolve("debian-12")
    expected = store.allocated_bytes(image)
    assert store.remove("debian-12", in_use=()) == expected > 0
    assert not (store.root / folder_name(digest)).exists()
    assert store.list() == []
    with pytest.raises(UsageProblem):
        store.remove("debian-12", in_use=())


def test_an_image_below_a_sandbox_stays(store: ImageStore) -> None:
    digest = put(store.root, "one", "debian-12")
    with pytest.raises(NegativeAnswer) as caught:
        store.remove("debian-12", in_use={digest})
    assert caught.value.code == "image_in_use"
    assert store.resolve("debian-12")


def test_one_name_of_two_goes_alone_even_while_in_use(store: ImageStore) -> None:
    digest = put(store.root, "one", "a", "b")
    assert store.remove("a", in_use={digest}) == 0
    assert [image.name for image in store.list()] == ["b"]


def test_removal_by_digest_takes_all_names(store: ImageStore) -> None:
    digest = put(store.root, "one", "a", "b")
    assert store.remove(digest[:20], in_use=()) > 0
    assert json.loads((store.root / "lock.json").read_text()) == {}


@pytest.mark.parametrize("by", ["name", "folder", "digest"])
def test_a_broken_image_can_be_removed(store: ImageStore, by: str) -> None:
    digest = put(store.root, "one", "debian-12")
    (store.root / folder_name(digest) / MANIFEST).write_text("{}")
    with pytest.raises(HostProblem) as caught:
        store.resolve(folder_name(digest))
    assert caught.value.hint
    assert f"image remove {folder_name(digest)}" in caught.value.hint
    reference = {"name": "debian-12", "folder": folder_name(digest), "digest": digest}[by]
    with pytest.raises(NegativeAnswer):
        store.remove(reference, in_use={digest})
    assert store.remove(reference, in_use=()) > 0
    assert not (store.root / folder_name(digest)).exists()
    assert json.loads((store.root / "lock.json").read_text()) == {}


# --- what a killed build left ---------------------------------------------------------------------


def test_leftovers_are_swept_and_counted(store: ImageStore) -> None:
    digest = put(store.root, "one", "debian-12")
    left = store.root / "build-abc" / "image"
    left.mkdir(parents=True)
    (left / "rootfs.ext4").write_bytes(b"x" * 10_000)
    assert store.sweep(dry_run=True) > 10_000
    assert left.exists()
    assert store.sweep() > 10_000
    assert not left.parent.exists()
    assert store.sweep() == 0
    assert store.resolve("debian-12").digest == digest


@pytest.mark.parametrize(
    "name", ["", "A", "a b", "../x", "a/b", "sha256:abcdef", "abcdef12", "x" * 64]
)
def test_names_that_could_mean_something_else_are_refused(
    store: ImageStore, tmp_path: Path, name: str
) -> None:
    (tmp_path / "a.tar.zst").write_bytes(b"")
    with pytest.raises(UsageProblem) as caught:
        store.import_(tmp_path / "a.tar.zst", name or "-")
    assert caught.value.code == "image_name_invalid"
