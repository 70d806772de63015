"""Owns how a recipe becomes the files of an image: packages, tree, initramfs, root file system,
manifest.

Works in a scratch folder that the caller gives and takes away.
"""

import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vmsandbox.errors import HostProblem
from vmsandbox.images import bootstrap, ext4, fetching, initramfs
from vmsandbox.images.bootstrap import Progress
from vmsandbox.images.manifest import INITRAMFS, KERNEL, MANIFEST, PARTS, ROOTFS, Manifest, part_of
from vmsandbox.images.programs import disk_full, require
from vmsandbox.images.recipe import Initramfs, Recipe
from vmsandbox.images.tree import Tree, read_tar

EPOCH = 1_767_225_600
"""2026-01-01: the date that everything in an image bears which would otherwise bear the day of its
build.
"""

SCRATCH_BYTES = 2 * 1024**3
"""What a build takes for a while beside the images, and again in TMPDIR, where mmdebstrap works."""

_KLIBC = "usr/lib/klibc/bin"
_WHOLE_BOOTSTRAP = 0.75
"""The share of the time that mmdebstrap takes."""


def build(recipe: Recipe, scratch: Path, log: Path, progress: Progress) -> Path:
    """Build an image and return its folder, in `scratch`. Takes one to three minutes.

    Raises HostProblem ``program_missing``, ``rootless_unavailable``, ``host_disk_full``,
    ``program_failed`` (evidence: `log`) and ``image_incomplete``.
    """
    require("mmdebstrap", "mke2fs", "debugfs", "e2fsck", "setpriv")
    if os.geteuid() != 0:
        _require_user_namespace()
    _require_space(scratch)
    tree = _bootstrap(recipe, scratch, log, progress)
    folder = scratch / "image"
    folder.mkdir()
    progress("writing the root file system", 0.8)
    (folder / KERNEL).write_bytes(tree.read(tree.only("boot/vmlinuz-*")))
    (folder / INITRAMFS).write_bytes(_initramfs(tree, recipe.initramfs))
    attributes = scratch / "attributes"
    attributes.mkdir()
    ext4.make(tree.neutral().kept(), folder / ROOTFS, attributes, EPOCH)
    progress("computing digests", 0.95)
    (folder / MANIFEST).write_bytes(_manifest(recipe, tree, folder).canonical())
    return folder


def _bootstrap(recipe: Recipe, scratch: Path, log: Path, progress: Progress) -> Tree:
    layers = []
    for number, layer in enumerate(recipe.layers):
        layers.append(scratch / f"layer-{number}.tar")
        layers[-1].write_bytes(bootstrap.layer_tar(layer, EPOCH))
        for fetch in layer.fetches:
            progress(f"fetching packages with {fetch.tool}", None)
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                fetched = fetching.fetch(fetch, Path(folder))
                fetching.add_to_tar(fetched, fetch, layers[-1], EPOCH)
    contents = scratch / "contents"
    contents.mkdir()
    preferences = scratch / "preferences"
    preferences.write_text(recipe.preferences)
    command = bootstrap.argv(
        recipe,
        layers,
        root=os.geteuid() == 0,
        apt=_host_apt_options(),
        preferences=preferences if recipe.preferences else None,
    )
    with bootstrap.running(
        command,
        bootstrap.sources(recipe, os.environ.get(bootstrap.MIRROR)),
        bootstrap.environment(recipe, EPOCH),
        log,
        lambda text, share: progress(text, share and share * _WHOLE_BOOTSTRAP),
    ) as stream:
        return read_tar(stream, contents, EPOCH)


def _host_apt_options() -> list[str]:
    """A host without apt-config has no apt settings to take over."""
    if not (program := shutil.which("apt-config")):
        return []
    dump = subprocess.run([program, "dump"], capture_output=True, text=True, check=False)
    return bootstrap.host_apt_options(dump.stdout)


def _initramfs(tree: Tree, recipe: Initramfs | None) -> bytes:
    if recipe is None:
        return tree.read(tree.only("boot/initrd.img-*"))
    return initramfs.archive(dict(_initramfs_files(tree, recipe)))


def _initramfs_files(tree: Tree, recipe: Initramfs) -> Iterator[tuple[str, tuple[int, bytes]]]:
    yield "init", (0o755, recipe.init)
    for program in recipe.programs:
        yield f"bin/{program}", (0o755, tree.read(f"{_KLIBC}/{program}"))
    library = tree.only("usr/lib/klibc-*.so")
    yield library.removeprefix("usr/"), (0o755, tree.read(library))
    dependencies = tree.only("usr/lib/modules/*/modules.dep")
    base = dependencies.removesuffix("/modules.dep")
    needs = initramfs.module_dependencies(tree.read(dependencies).decode())
    order = initramfs.load_order(recipe.modules, needs)
    names = [path.rpartition("/")[2] for path in order]
    for path, name in zip(order, names, strict=True):
        yield f"modules/{name}", (0o644, tree.read(f"{base}/{path}"))
    yield "modules/order", (0o644, "".join(name + "\n" for name in names).encode())


def _manifest(recipe: Recipe, tree: Tree, folder: Path) -> Manifest:
    return Manifest(
        description=recipe.description,
        cmdline=recipe.cmdline,
        cloud_init=recipe.cloud_init,
        minimum_memory_mib=recipe.minimum_memory_mib,
        recipe=recipe.digest(),
        packages=tree.packages(),
        parts={name: part_of(folder / name) for name in PARTS},
    )


def _require_space(scratch: Path) -> None:
    """Before the work rather than in the middle of it; both folders may lie on one disk."""
    needed: dict[int, int] = {}
    for folder in (scratch, Path(tempfile.gettempdir())):
        device = folder.stat().st_dev
        needed[device] = needed.get(device, 0) + SCRATCH_BYTES
        free = shutil.disk_usage(folder).free
        if free < needed[device]:
            wanted, there = needed[device] // 1024**2, free // 1024**2
            raise disk_full(f"a build needs {wanted} MiB in {folder}, there are {there} MiB")


def _require_user_namespace() -> None:
    """Who is not root needs ids of their own for the users of the new system."""
    require("newuidmap", "unshare")
    user = getpass.getuser()
    for path in (Path("/etc/subuid"), Path("/etc/subgid")):
        lines = path.read_text().splitlines() if path.exists() else []
        if not any(line.partition(":")[0] in (user, str(os.getuid())) for line in lines):
            raise HostProblem(
                "rootless_unavailable",
                f"{user} has no range of ids in {path}, which a build without root needs",
                hint=f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}",
                evidence=str(path),
            )
    tried = subprocess.run(
        ["unshare", "--user", "--map-root-user", "true"], capture_output=True, check=False
    )
    if tried.returncode:
        raise HostProblem(
            "rootless_unavailable",
            f"this host does not let {user} make user namespaces: {tried.stderr.decode().strip()}",
            hint="sudo vmsandbox image build, or: sudo sysctl kernel.unprivileged_userns_clone=1"
            " (on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0)",
        )
