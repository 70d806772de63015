"""Owns the folder of images: which there are, what a reference means, and what comes and goes.

The folder holds one folder per image, named by its digest, and ``lock.json``, which says what
digest a name means. Images are immutable (0444) and readable by all: QEMU may run as another user,
and people share an administrator's.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from vmsandbox.errors import HostProblem, NegativeAnswer, UsageProblem
from vmsandbox.images import archive, overlay
from vmsandbox.images.bootstrap import Progress
from vmsandbox.images.build import build
from vmsandbox.images.manifest import MANIFEST, NAME, PARTS, Manifest, folder_name
from vmsandbox.images.programs import disk_full, run
from vmsandbox.images.recipe import builtin_recipes, read_recipe
from vmsandbox.images.verify import check, check_quickly, read_manifest, trust
from vmsandbox.model import Image

_NAMES = "lock.json"
_NAMES_GUARD = ".names.guard"
_BUILD_GUARD = ".build.guard"
_LOG = "build.log"
_SCRATCH = "build-"
_WAITING = "waiting for another build to end"
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{6,64})")
_FOLDER = re.compile(r"[0-9a-f]{16}")
MIB = 1024 * 1024


class _Place(NamedTuple):
    """Where an image lies, before anything of it was read."""

    name: str
    digest: str | None
    folder: Path


def _silent(text: str, share: float | None) -> None:
    """Progress that nobody watches."""


class ImageStore:
    """The images below `root`. A name may come to mean another digest; a digest never another
    content.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    # --- asking ---------------------------------------------------------------------------------

    def list(self) -> "list[Image]":
        """All images by name, then unnamed ones under their digest. Broken ones are left out:
        `resolve` tells why.
        """
        names, found = self._names(), []
        for folder in self._folders():
            with contextlib.suppress(HostProblem):
                manifest = read_manifest(folder)
                digest = manifest.digest()
                called = [name for name, meant in names.items() if meant == digest]
                found += [manifest.image(name, folder) for name in called or [digest]]
        return sorted(found, key=lambda image: (image.name == image.digest, image.name))

    def resolve(self, ref: str, *, verify: Literal["quick", "full"] = "quick") -> Image:
        """The image that `ref` means: ``name``, ``name@sha256:…``, ``sha256:…`` or a unique prefix
        of a digest.

        Raises UsageProblem ``image_unknown``, ``image_ambiguous``; HostProblem
        ``image_digest_mismatch``, ``image_broken``. A quick verification hashes only what changed
        since the last one.
        """
        place = self._locate(ref)
        manifest = read_manifest(place.folder, place.digest)
        (check if verify == "full" else check_quickly)(place.folder, manifest)
        return manifest.image(place.name, place.folder)

    def manifest(self, image: Image) -> Manifest:
        """What the image says about itself."""
        return read_manifest(image.folder, image.digest)

    def verify(self, image: Image) -> None:
        """Hash every part. Raises HostProblem ``image_digest_mismatch``."""
        check(image.folder, self.manifest(image))

    def allocated_bytes(self, image: Image) -> int:
        """What the image takes on disk."""
        return _allocated_bytes(image.folder)

    def holds(self, digest: str) -> bool:
        """Whether the image is there, sound or not, under whatever names."""
        return (self.root / folder_name(digest)).is_dir()

    # --- overlays -------------------------------------------------------------------------------

    def create_overlay(self, image: Image, path: Path, size_mib: int) -> None:
        """Make a guest's disk: an empty qcow2 on the image's root disk.

        Raises UsageProblem ``disk_too_small`` if the image is larger than `size_mib`.
        """
        if size_mib * MIB < image.rootfs_bytes:
            needed = -(-image.rootfs_bytes // MIB)
            raise UsageProblem(
                "disk_too_small",
                f"a disk of {size_mib} MiB is smaller than the image {image.name} ({needed} MiB)",
                hint=f"--disk {needed}M",
            )
        self.create_overlay_on(image.rootfs, image.rootfs_format, path, size_mib)

    def create_overlay_on(
        self, backing: Path, form: overlay.Format, path: Path, size_mib: int
    ) -> None:
        """Make an empty qcow2 on any disk that never changes again."""
        run(overlay.argv(backing, form, path, size_mib))

    # --- making ---------------------------------------------------------------------------------

    def build(
        self, recipe: Path, *, name: str | None = None, progress: Progress = _silent
    ) -> Image:
        """Build the recipe in the folder `recipe` and give the image a name, that of the folder by
        default.

        One build at a time; a second one waits. An interrupted build leaves nothing but its log.
        Raises what :func:`vmsandbox.images.build.build` raises, and UsageProblem ``recipe_unknown``
        or ``recipe_invalid``.
        """
        called = _checked_name(name or recipe.resolve().name)
        read = read_recipe(recipe)
        with self._making(progress) as scratch:
            return self._install(build(read, scratch, self.root / _LOG, progress), called)

    def current(self, recipe: Path, *, name: str | None = None) -> Image | None:
        """The image of that name, if it was built from just this recipe; packages may be older."""
        called, digest = name or recipe.resolve().name, read_recipe(recipe).digest()
        named = (image for image in self.list() if image.name == called)
        return next((one for one in named if self.manifest(one).recipe == digest), None)

    def export(self, ref: str, file: Path) -> Image:
        """Write the image as one compressed file, from which `import_` makes the same digest
        elsewhere.
        """
        image = self.resolve(ref)
        with _translated(file):
            descriptor, name = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
            os.close(descriptor)
            try:
                archive.write(image.folder, Path(name))
                Path(name).chmod(0o644)
                Path(name).replace(file)
            finally:
                Path(name).unlink(missing_ok=True)
        return image

    def import_(self, file: Path, name: str | None = None, progress: Progress = _silent) -> Image:
        """Take in an exported image, named `name` or as the file.

        Raises UsageProblem ``image_archive_missing`` or ``image_archive_refused``; nothing stays of
        a refused one.
        """
        if not file.is_file():
            raise UsageProblem(
                "image_archive_missing", f"no file {file}", hint="vmsandbox image export makes one"
            )
        called = _checked_name(name or file.name.split(".tar")[0])
        with self._making(progress) as scratch:
            folder = scratch / "image"
            folder.mkdir()
            progress("unpacking and checking digests", None)
            archive.read(file, folder)
            return self._install(folder, called)

    def remove(self, ref: str, *, in_use: Collection[str]) -> int:
        """Remove a name and, if it was the last one, the image. Returns the bytes that this really
        freed.

        Raises NegativeAnswer ``image_in_use`` if the image would go and its digest is one of
        `in_use`.
        """
        place = self._locate(ref)
        folder = place.folder.name
        with _translated(self.root), _held(self.root / _NAMES_GUARD):
            names = self._names()
            left = {name: digest for name, digest in names.items() if name != place.name}
            if place.name in names and folder in map(folder_name, left.values()):
                self._write_names(left)
                return 0
            if folder in map(folder_name, in_use):
                raise NegativeAnswer(
                    "image_in_use",
                    f"{place.name} is the disk below existing sandboxes",
                    hint="vmsandbox status shows them; vmsandbox delete frees it",
                )
            self._write_names({n: d for n, d in left.items() if folder_name(d) != folder})
            return self._delete(place.folder)

    def sweep(self, *, dry_run: bool = False) -> int:
        """Free what a killed build left: the bytes that are, or would be, freed. 0 in a build, and
        in a folder that is somebody else's to sweep."""
        freed, guard = 0, self.root / _BUILD_GUARD
        with contextlib.suppress(BlockingIOError, PermissionError), _held(guard, wait=False):
            for folder in self._scratches():
                freed += _allocated_bytes(folder)
                if not dry_run:
                    shutil.rmtree(folder, ignore_errors=True)
        return freed

    # --- within ---------------------------------------------------------------------------------

    def _locate(self, ref: str) -> _Place:
        names = self._names()
        name, pinned, digest = ref.partition("@")
        if not pinned and (meant := names.get(name)):
            return self._existing(ref, _Place(name, meant, self.root / folder_name(meant)))
        found = _DIGEST.fullmatch(digest if pinned else name)
        if found is None or (pinned and len(found[1]) < 64):
            raise self._unknown(ref)
        if len(found[1]) == 64:
            whole = f"sha256:{found[1]}"
            place = _Place(name if pinned else whole, whole, self.root / folder_name(whole))
            return self._existing(ref, place)
        return self._by_prefix(ref, found[1])

    def _by_prefix(self, ref: str, prefix: str) -> _Place:
        folders = [folder for folder in self._folders() if folder.name.startswith(prefix[:16])]
        if len(folders) > 1:
            raise UsageProblem(
                "image_ambiguous", f"{ref} may be {len(folders)} images", hint="give more digits"
            )
        if not folders:
            raise self._unknown(ref)
        with contextlib.suppress(HostProblem):  # a broken one can still be removed
            digest = read_manifest(folders[0]).digest()
            if not digest.startswith(f"sha256:{prefix}"):
                raise self._unknown(ref)
            return _Place(digest, digest, folders[0])
        return _Place(ref, None, folders[0])

    def _existing(self, ref: str, place: _Place) -> _Place:
        if not place.folder.is_dir():
            raise self._unknown(ref)
        return place

    def _unknown(self, ref: str) -> UsageProblem:
        name = ref.partition("@")[0]
        build_it = name in builtin_recipes() and name == ref
        return UsageProblem(
            "image_unknown",
            f"there is no image {ref}",
            hint=f"vmsandbox image build {name}" if build_it else "vmsandbox image list",
        )

    def _names(self) -> dict[str, str]:
        path = self.root / _NAMES
        try:
            names = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise HostProblem(
                "image_names_broken",
                f"{path} cannot be read: {error}",
                hint="move it away, then name the images again: vmsandbox image build",
                evidence=str(path),
            ) from error
        return {str(name): str(digest) for name, digest in names.items()}

    def _write_names(self, names: dict[str, str]) -> None:
        text = json.dumps(names, indent=1, sort_keys=True) + "\n"
        temporary = self.root / f".{_NAMES}"
        with temporary.open("w") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.root / _NAMES)

    def _folders(self) -> Iterator[Path]:
        """Folders of images; who may not list the store still sees those with a name."""
        try:
            entries = sorted(self.root.iterdir())
        except FileNotFoundError:
            return
        except PermissionError:
            entries = sorted({self.root / folder_name(digest) for digest in self._names().values()})
        yield from (entry for entry in entries if _FOLDER.fullmatch(entry.name) and entry.is_dir())

    @contextlib.contextmanager
    def _making(self, progress: Progress) -> Iterator[Path]:
        """A scratch folder for the one image that is being made now; leftovers are gone then."""
        with _translated(self.root):
            self.root.mkdir(mode=0o711, parents=True, exist_ok=True)
            with _held(self.root / _BUILD_GUARD, partial(progress, _WAITING, None)):
                for stale in self._scratches():
                    shutil.rmtree(stale, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=self.root, prefix=_SCRATCH) as scratch:
                    yield Path(scratch)

    def _scratches(self) -> tuple[Path, ...]:
        return tuple(self.root.glob(f"{_SCRATCH}*/"))

    def _install(self, folder: Path, name: str) -> Image:
        """Make a finished image immutable and move it to its place, under its name."""
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        target = self.root / folder_name(manifest.digest())
        for part in (MANIFEST, *PARTS):
            _make_durable(folder / part)
        folder.chmod(0o755)
        with _held(self.root / _NAMES_GUARD):
            if target.exists() and not _is_sound(target, manifest):
                target.rename(folder.with_name("broken"))
            if not target.exists():
                folder.rename(target)
                trust(target)
            self._write_names({**self._names(), name: manifest.digest()})
        return manifest.image(name, target)

    def _delete(self, folder: Path) -> int:
        freed = _allocated_bytes(folder)
        leaving = Path(tempfile.mkdtemp(dir=self.root, prefix=_SCRATCH))
        folder.rename(leaving / folder.name)
        shutil.rmtree(leaving, ignore_errors=True)
        return freed


def _allocated_bytes(folder: Path) -> int:
    """What really lies on the disk, not what files claim to hold."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _is_sound(folder: Path, manifest: Manifest) -> bool:
    try:
        check(folder, read_manifest(folder, manifest.digest()))
    except HostProblem:
        return False
    return True


def _make_durable(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.chmod(0o444)


def _checked_name(name: str) -> str:
    if not NAME.fullmatch(name) or _DIGEST.fullmatch(name):
        raise UsageProblem(
            "image_name_invalid",
            f"{name!r} is no name for an image: want a-z, 0-9, '.', '_', '-', and no digest",
            hint="--name NAME",
        )
    return name


@contextlib.contextmanager
def _held(
    path: Path, waiting: Callable[[], None] = lambda: None, *, wait: bool = True
) -> Iterator[None]:
    """Hold a ``flock``. If somebody else has it now, `waiting` is called before the wait begins, or
    BlockingIOError raised.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (28, 122):  # ENOSPC, EDQUOT
            raise disk_full(f"no space left while writing below {path}", str(path)) from error
        raise HostProblem(
            "images_unwritable",
            f"cannot write {error.filename or path}: {error.strerror}",
            hint="images belong to whoever built them; VMSANDBOX_HOME names another state folder",
            evidence=str(path),
        ) from error
