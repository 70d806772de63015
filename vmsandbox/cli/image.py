"""Owns the verbs about images: build, list, verify, export, import, remove."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmsandbox.cli import output
from vmsandbox.cli.output import JsonFlag, Output

if TYPE_CHECKING:
    from rich.table import Table

    from vmsandbox.images import ImageStore
    from vmsandbox.model import Image

app = typer.Typer(no_args_is_help=True, help="Build, share and remove images.")

DEFAULT_RECIPE = "debian-12"
_MIB = 1024 * 1024

ReferenceArgument = Annotated[
    str, typer.Argument(metavar="IMAGE", help="name, name@sha256:…, or a digest or its beginning")
]
NameOption = Annotated[str | None, typer.Option("--name", help="Name in the store.")]


def _images() -> "ImageStore":
    from vmsandbox.images import ImageStore
    from vmsandbox.store import Store

    return ImageStore(Store().images)


@app.command()
def build(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or its folder.")] = DEFAULT_RECIPE,
    name: NameOption = None,
    if_needed: Annotated[
        bool, typer.Option("--if-needed", help="Not if it was built from just this recipe.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Build an image from Debian packages; as root, or as anybody with ids in /etc/subuid.

    VMSANDBOX_MIRROR names another mirror than the recipe's.

    Example: vmsandbox image build debian-12
    """
    from vmsandbox.images import recipe_folder

    out = output.begin(as_json)
    images, folder = _images(), recipe_folder(recipe)
    if if_needed and (image := images.current(folder, name=name)):
        _show(out, images, image, "there is")
        return
    with _terminable(), _progress(out) as progress:
        image = images.build(folder, name=name, progress=progress)
    _show(out, images, image, "built")


@app.command(name="list")
def list_(as_json: JsonFlag = False) -> None:
    """Show the images: names, digests, what they take on disk.

    Example: vmsandbox image list --json
    """
    out = output.begin(as_json)
    images = _images()
    found = images.list()
    data = {"images": [_described(images, image) for image in found]}
    out.result(data, None if as_json else _table(data["images"]))


@app.command()
def verify(reference: ReferenceArgument, as_json: JsonFlag = False) -> None:
    """Hash every byte of an image again and compare with its digest.

    Example: vmsandbox image verify debian-12
    """
    out = output.begin(as_json)
    images = _images()
    with out.waiting("computing digests"):
        image = images.resolve(reference, verify="full")
    _show(out, images, image, "intact:")


@app.command()
def export(
    reference: ReferenceArgument,
    file: Annotated[Path, typer.Argument(help="The file to write, such as debian-12.tar.zst.")],
    as_json: JsonFlag = False,
) -> None:
    """Write an image as one compressed file; importing it gives the same digest.

    Example: vmsandbox image export debian-12 debian-12.tar.zst
    """
    out = output.begin(as_json)
    images = _images()
    with out.waiting("compressing"):
        image = images.export(reference, file)
    size = file.stat().st_size
    data = _described(images, image) | {"file": str(file.absolute()), "file_bytes": size}
    out.result(data, f"exported {image.name} to {file} ({_mib(size)})\n{image.digest}")


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file made by image export.")],
    name: NameOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Take in an exported image, named as the file unless --name says otherwise.

    Example: vmsandbox image import debian-12.tar.zst
    """
    out = output.begin(as_json)
    images = _images()
    with _terminable(), _progress(out) as progress:
        image = images.import_(file, name, progress)
    _show(out, images, image, "imported")


@app.command()
def remove(reference: ReferenceArgument, as_json: JsonFlag = False) -> None:
    """Remove a name and, if no other is left, the image; refused while a sandbox stands on it.

    Example: vmsandbox image remove debian-12
    """
    from vmsandbox.images import ImageStore
    from vmsandbox.store import Store

    out = output.begin(as_json)
    store = Store()
    in_use = {record.image_digest for record in store.records()}
    freed = ImageStore(store.images).remove(reference, in_use=in_use)
    out.result(
        {"reference": reference, "freed_bytes": freed}, f"removed {reference}, {_mib(freed)} freed"
    )


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that half an image is taken away."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- showing --------------------------------------------------------------------------------------


def _described(images: "ImageStore", image: "Image") -> dict[str, Any]:
    manifest = images.manifest(image)
    return {
        "name": None if image.name == image.digest else image.name,
        "digest": image.digest,
        "description": manifest.description,
        "recipe": manifest.recipe,
        "cloud_init": image.cloud_init,
        "root_disk_bytes": image.rootfs_bytes,
        "disk_bytes": images.allocated_bytes(image),
        "minimum_memory_mib": image.minimum_memory_mib,
        "packages": len(manifest.packages),
        "folder": str(image.folder),
    }


def _show(out: Output, images: "ImageStore", image: "Image", done: str) -> None:
    data = _described(images, image)
    out.result(data, f"{done} {image.name} ({_mib(data['disk_bytes'])})\n{image.digest}")


def _table(images: list[dict[str, Any]]) -> "Table | str":
    if not images:
        return f"no images; build one: vmsandbox image build {DEFAULT_RECIPE}"
    from rich.table import Table

    table = Table("NAME", "DIGEST", "ON DISK", "DESCRIPTION", box=None, pad_edge=False)
    for image in images:
        size = _mib(image["disk_bytes"])
        table.add_row(image["name"] or "-", image["digest"][:19], size, image["description"])
    return table


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.0f} MiB"


@contextlib.contextmanager
def _progress(out: Output) -> Iterator[Callable[[str, float | None], None]]:
    """A bar on a terminal, a line for each new thing to do elsewhere, nothing with --json."""
    if out.as_json:
        yield lambda text, share: None
    elif sys.stderr.isatty():
        with _bar(out) as report:
            yield report
    else:
        yield _Lines(out)


class _Lines:
    def __init__(self, out: Output) -> None:
        self._out = out
        self._last = ""

    def __call__(self, text: str, share: float | None) -> None:
        if text != self._last:
            self._out.note(text)
        self._last = text


@contextlib.contextmanager
def _bar(out: Output) -> Iterator[Callable[[str, float | None], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out.console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda text, share: progress.update(
            task, description=text, total=None if share is None else 1.0, completed=share or 0.0
        )
