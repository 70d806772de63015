"""Owns the verbs about images: build, list, verify, export, import, warm, remove."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmsandbox.cli import output
from vmsandbox.cli.output import JsonFlag, Output
from vmsandbox.cli.run import Cpus, Disk, Memory

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from vmsandbox.images import ImageStore
    from vmsandbox.model import Image
    from vmsandbox.sandbox import TemplateStatus

app = typer.Typer(no_args_is_help=True, help="Build, share and remove images.")

DEFAULT_RECIPE = "debian-12"
_MIB = 1024 * 1024

ReferenceArgument = Annotated[
    str, typer.Argument(metavar="IMAGE", help="name, name@sha256:…, or a digest or its beginning")
]
NameOption = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Name in the store.")
]


def _images() -> "ImageStore":
    from vmsandbox.images import ImageStore
    from vmsandbox.store import Store

    return ImageStore(Store().images)


@app.command()
def build(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe's name or its folder.")
    ] = DEFAULT_RECIPE,
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
    """Show the images and the templates made of them: digests, sizes, what they take on disk.

    Example: vmsandbox image list --json
    """
    from vmsandbox.sandbox import Rooms, all_templates

    out = output.begin(as_json)
    with Rooms.open() as rooms:
        found = [_described(rooms.images, image) for image in rooms.images.list()]
        templates = [_template(one) for one in all_templates(rooms)]
    data = {"images": found, "templates": templates}
    out.result(data, None if as_json else _tables(found, templates))


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
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write, such as debian-12.tar.zst.")
    ],
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file made by image export.")],
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
def warm(
    reference: ReferenceArgument,
    cpus: Cpus = None,
    memory: Memory = None,
    disk: Disk = None,
    as_json: JsonFlag = False,
) -> None:
    """Make the template that starts of an image at this size are cloned from, ahead of time.

    A size that is not given is the one that a run in this folder would have.

    Example: vmsandbox image warm debian-12 --cpus 2 --memory 2G
    """
    from vmsandbox import sandbox

    out = output.begin(as_json)
    with sandbox.Rooms.open() as rooms, _terminable(), _progress(out) as progress:
        asked = {"image": reference, "cpus": cpus, "memory": memory, "disk": disk}
        limits = sandbox.settings_here(Path.cwd(), asked).limits()
        done = sandbox.warm(rooms, rooms.images.resolve(reference), limits, progress)
    outcome, data = "made" if done.made else "already there", _template(done.template)
    out.result(data | {"outcome": outcome}, f"{outcome}: {_template_line(data)}")


@app.command()
def remove(reference: ReferenceArgument, as_json: JsonFlag = False) -> None:
    """Remove a name and, if no other is left, the image and its templates; refused while a sandbox
    stands on it.

    Example: vmsandbox image remove debian-12
    """
    from vmsandbox.sandbox import Rooms, remove_image

    out = output.begin(as_json)
    with Rooms.open() as rooms:
        freed = remove_image(rooms, reference)
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


def _template(one: "TemplateStatus") -> dict[str, Any]:
    record = one.record.model_dump(mode="json", exclude={"version"})
    used_by = list(one.used_by)
    return {"name": one.name, **record, "disk_bytes": one.disk_bytes, "used_by": used_by}


def _template_line(one: dict[str, Any]) -> str:
    size = f"{one['cpus']} CPU, {one['memory_mib']} MiB, disk {one['disk_mib']} MiB"
    return f"template {one['name']} of {one['image_name']} ({size}), {_mib(one['disk_bytes'])}"


def _tables(images: list[dict[str, Any]], templates: list[dict[str, Any]]) -> "Group":
    from rich.console import Group

    nothing = f"no images; build one: vmsandbox image build {DEFAULT_RECIPE}"
    shown: list[RenderableType] = [_table(images) if images else nothing]
    if templates:
        shown += ["", _template_table(templates)]
    return Group(*shown)


def _template_table(templates: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    columns = ("TEMPLATE", "OF", "CPUS", "MEMORY", "DISK", "ON HOST", "MADE", "USED BY")
    table = Table(*columns, box=None, pad_edge=False)
    for one in templates:
        made = one["created_at"][:16].replace("T", " ")
        used = f"{len(one['used_by'])} sandbox(es)" if one["used_by"] else "-"
        size = (str(one["cpus"]), f"{one['memory_mib']} MiB", f"{one['disk_mib']} MiB")
        taken = _mib(one["disk_bytes"])
        table.add_row(one["name"], one["image_name"], *size, taken, made, used)
    return table


def _table(images: list[dict[str, Any]]) -> "Table":
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
