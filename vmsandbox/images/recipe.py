"""Owns what a recipe may say and how recipes build on each other. Reads recipe folders; runs
nothing.

A recipe is a folder with ``recipe.toml``. ``extends`` names another one, by its folder or as one of
vmsandbox's own: its packages are joined, its files and finish script come first, and its other
values hold unless the extending recipe gives its own.
"""

import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError

from vmsandbox.errors import UsageProblem
from vmsandbox.model import Value, digest_of

RECIPE = "recipe.toml"

_FOLDER = r"^[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*$"

BUILDER = 2
"""Counts the changes of the builder after which the same recipe gives another image."""


class _Read(Value):
    """A value that holds content of files."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class Initramfs(_Read):
    """Our own initramfs: a script for klibc's shell, the programs it calls, the modules it loads in
    this order.
    """

    init: bytes
    programs: tuple[str, ...]
    modules: tuple[str, ...]


class OverlayFile(_Read):
    """A file that a recipe lays over the root; owned by root, executable if it is a script."""

    path: str
    content: bytes

    @property
    def mode(self) -> int:
        return 0o755 if self.content.startswith(b"#!") else 0o644


class Fetch(_Read):
    """Packages of another registry than the distribution's, locked to their hashes."""

    tool: Literal["npm", "pip"]
    into: str = Field(pattern=_FOLDER, description="folder in the image")
    files: dict[str, bytes] = Field(description="name → content: what the tool is told")
    leave_out: tuple[str, ...] = Field(default=(), description="globs; * also matches /")


class Layer(_Read):
    """What one recipe of a chain adds: first the files and packages, then what its finish script
    does."""

    files: tuple[OverlayFile, ...]
    fetches: tuple[Fetch, ...] = ()
    finish: bytes | None


class Recipe(_Read):
    """A whole chain of recipes, read: all that a build depends on beside the versions."""

    description: str
    suite: str
    sources: str = Field(description="deb822, where packages come from")
    preferences: str = Field(
        default="", description="apt_preferences(5) of the build: what may come from which source"
    )
    packages: tuple[str, ...]
    layers: tuple[Layer, ...]
    initramfs: Initramfs | None
    cmdline: str
    cloud_init: bool
    minimum_memory_mib: int

    def digest(self) -> str:
        """Over every value, every byte of every file, and what the builder makes of them."""
        return digest_of(self.model_dump(mode="json") | {"builder": BUILDER})


class _InitramfsText(Value):
    init: Path
    programs: tuple[str, ...]
    modules: tuple[str, ...]


class _FetchText(Value):
    tool: Literal["npm", "pip"]
    into: str
    files: tuple[Path, ...] = Field(
        description="npm: package.json, package-lock.json; pip: a file of requirements with hashes"
    )
    leave_out: tuple[str, ...] = ()


class _Text(Value):
    """recipe.toml as written; paths are relative to its folder."""

    extends: Path | None = None
    description: str = ""
    suite: str | None = None
    sources: Path | None = None
    preferences: Path | None = None
    packages: tuple[str, ...] = ()
    files: tuple[Path, ...] = Field(default=(), description="folders laid over the root")
    fetch: tuple[_FetchText, ...] = ()
    finish: Path | None = Field(default=None, description="script run in the root at the end")
    initramfs: _InitramfsText | None = Field(default=None, description="none: the stock one")
    cmdline: str | None = None
    cloud_init: bool | None = None
    minimum_memory_mib: int | None = None


def read_recipe(folder: Path) -> Recipe:
    """Read a recipe and all that it extends. Raises UsageProblem ``recipe_unknown`` or
    ``recipe_invalid``.
    """
    texts = list(_chain(folder.absolute()))[::-1]
    values = {
        name: next(
            (value for _, text in texts[::-1] if (value := getattr(text, name)) is not None), None
        )
        for name in ("suite", "cmdline", "cloud_init", "minimum_memory_mib")
    }
    try:
        return Recipe(
            description=texts[-1][1].description,
            packages=tuple(sorted({package for _, text in texts for package in text.packages})),
            sources=_nearest(texts, "sources"),
            preferences=_nearest(texts, "preferences"),
            layers=tuple(_layer(at, text) for at, text in texts),
            initramfs=next(
                (_initramfs(at, text.initramfs) for at, text in texts[::-1] if text.initramfs), None
            ),
            **{name: value for name, value in values.items() if value is not None},
        )
    except (ValidationError, OSError, UnicodeDecodeError) as error:
        raise _invalid(folder, error) from error


def _nearest(texts: Sequence[tuple[Path, _Text]], name: str) -> str:
    """Content of the file that the most special recipe names; empty if none does."""
    named = ((at, getattr(text, name)) for at, text in reversed(texts))
    return next(((at / file).read_text() for at, file in named if file), "")


def _chain(folder: Path) -> Iterator[tuple[Path, _Text]]:
    """The recipe and what it extends, the most special first."""
    seen: set[Path] = set()
    following: Path | None = folder
    while following is not None:
        folder = following.resolve()
        if folder in seen:
            raise _invalid(folder, f"{folder} extends itself")
        seen.add(folder)
        text = _text(folder)
        yield folder, text
        following = text.extends and _extended(folder, text.extends)


def _extended(folder: Path, named: Path) -> Path:
    """The folder that ``extends`` means: seen from the recipe, else one of ours by its name."""
    builtin = builtin_recipes().get(str(named))
    return builtin if builtin and not (folder / named / RECIPE).is_file() else folder / named


def _text(folder: Path) -> _Text:
    path = folder / RECIPE
    try:
        return _Text.model_validate(tomllib.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageProblem(
            "recipe_unknown",
            f"no recipe at {folder}: {RECIPE} is missing",
            hint="name a recipe of vmsandbox (debian-12) or a folder with a recipe.toml",
        ) from error
    except (tomllib.TOMLDecodeError, ValidationError, OSError, UnicodeDecodeError) as error:
        raise _invalid(folder, error) from error


def _invalid(folder: Path, error: Exception | str) -> UsageProblem:
    return UsageProblem(
        "recipe_invalid",
        f"the recipe {folder.name} cannot be used: {error}",
        hint="correct the recipe; docs/images.md says what it may hold",
        evidence=str(folder / RECIPE),
    )


def _initramfs(folder: Path, text: _InitramfsText) -> Initramfs:
    return Initramfs(
        init=(folder / text.init).read_bytes(), programs=text.programs, modules=text.modules
    )


def _layer(folder: Path, text: _Text) -> Layer:
    files = {file.path: file for base in text.files for file in _overlay_files(folder / base)}
    return Layer(
        files=tuple(files[path] for path in sorted(files)),
        fetches=tuple(_fetch(folder, one) for one in text.fetch),
        finish=(folder / text.finish).read_bytes() if text.finish else None,
    )


def _fetch(folder: Path, text: _FetchText) -> Fetch:
    return Fetch(
        tool=text.tool,
        into=text.into,
        files={file.name: (folder / file).read_bytes() for file in text.files},
        leave_out=text.leave_out,
    )


def _overlay_files(base: Path) -> Iterator[OverlayFile]:
    if not base.is_dir():
        raise NotADirectoryError(f"{base} is no folder")
    for path in base.rglob("*"):
        if path.is_file() and not path.name.endswith((".pyc", "~")):
            yield OverlayFile(path=path.relative_to(base).as_posix(), content=path.read_bytes())


def builtin_recipes() -> dict[str, Path]:
    """The recipes that come with vmsandbox: in the installed package, or beside it in the source
    tree.
    """
    package = Path(__file__).parents[1]
    for home in (package.parent / "images", Path(sys.prefix, "share/vmsandbox/images")):
        if home.is_dir():
            return {path.parent.name: path.parent for path in sorted(home.glob(f"*/{RECIPE}"))}
    return {}


def recipe_folder(reference: str) -> Path:
    """The folder that a recipe's name or path means."""
    builtin = builtin_recipes().get(reference)
    return builtin if builtin and not Path(reference, RECIPE).is_file() else Path(reference)
