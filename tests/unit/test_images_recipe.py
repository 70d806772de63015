"""Recipes: what ours say, how they build on each other, what is refused."""

import shutil
from pathlib import Path

import pytest

from vmsandbox.errors import UsageProblem
from vmsandbox.images.recipe import Recipe, builtin_recipes, read_recipe, recipe_folder


def write(folder: Path, text: str, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(text)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


BASE = """
suite = "bookworm"
sources = "sources"
packages = ["git", "less"]
files = ["files"]
finish = "finish"
cmdline = "root=/dev/vda"
cloud_init = false
minimum_memory_mib = 512
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(
        tmp_path / "base",
        BASE,
        sources="URIs: http://mirror.invalid/debian\n",
        finish="#!/bin/sh\n",
        **{"files/etc/motd": "hello", "files/usr/bin/tool": "#!/bin/sh\n"},
    )


def test_our_own_recipes_can_be_read() -> None:
    recipes = {name: read_recipe(folder) for name, folder in builtin_recipes().items()}
    assert {"debian-12", "debian-12-cloudinit"} <= recipes.keys()
    assert recipes["debian-12"].initramfs
    assert not recipes["debian-12"].cloud_init
    assert recipes["debian-12-cloudinit"].cloud_init
    assert "cloud-init" in recipes["debian-12-cloudinit"].packages
    assert not _files(recipes["debian-12-cloudinit"]) & {
        "etc/systemd/system/vmsandbox-seed.service"
    }
    for recipe in recipes.values():
        assert "root=/dev/vda" in recipe.cmdline.split()
        assert {"git", "sudo", "openssh-server", "docker.io"} <= set(recipe.packages)


def test_another_release_gives_what_is_named_and_nothing_else() -> None:
    recipe = read_recipe(builtin_recipes()["debian-12"])
    assert "docker-compose" in recipe.packages
    assert "Suites: trixie" in recipe.sources
    assert "Package: *\nPin: release n=trixie\nPin-Priority: -1\n" in recipe.preferences
    kept = (file.content for layer in recipe.layers for file in layer.files if "apt/" in file.path)
    assert not [content for content in kept if b"trixie" in content]


def test_the_plain_system_to_compare_with_has_the_same_packages() -> None:
    base, ours = (read_recipe(builtin_recipes()[name]) for name in ("debian-12-base", "debian-12"))
    assert base.packages == ours.packages
    assert base.initramfs is None


def _files(recipe: Recipe) -> set[str]:
    return {file.path for layer in recipe.layers for file in layer.files}


def test_an_extending_recipe_adds_packages_and_layers_and_overrides_values(
    tmp_path: Path, base: Path
) -> None:
    child = write(
        tmp_path / "child",
        'extends = "../base"\npackages = ["nodejs", "git"]\nminimum_memory_mib = 768\n'
        'finish = "late"\n',
        late="#!/bin/sh\ntrue\n",
    )
    recipe = read_recipe(child)
    assert recipe.packages == ("git", "less", "nodejs")
    assert [layer.finish for layer in recipe.layers] == [b"#!/bin/sh\n", b"#!/bin/sh\ntrue\n"]
    assert (recipe.suite, recipe.minimum_memory_mib) == ("bookworm", 768)
    assert recipe.sources.startswith("URIs:")
    assert recipe.preferences == ""


def test_a_recipe_anywhere_extends_one_of_ours_by_name(tmp_path: Path, base: Path) -> None:
    child = write(tmp_path / "child", 'extends = "debian-12"\npackages = ["make"]\n')
    ours = read_recipe(builtin_recipes()["debian-12"])
    assert read_recipe(child).packages == tuple(sorted({*ours.packages, "make"}))
    shutil.copytree(base, child / "debian-12")  # what lies beside it comes first
    assert read_recipe(child).packages == ("git", "less", "make")


def test_files_are_sorted_and_executable_if_they_are_scripts(base: Path) -> None:
    (layer,) = read_recipe(base).layers
    assert [(file.path, file.mode) for file in layer.files] == [
        ("etc/motd", 0o644),
        ("usr/bin/tool", 0o755),
    ]


def test_the_digest_covers_every_byte(base: Path) -> None:
    first = read_recipe(base).digest()
    assert read_recipe(base).digest() == first
    (base / "files/etc/motd").write_text("hallo")
    second = read_recipe(base).digest()
    (base / "finish").write_text("#!/bin/sh\nfalse\n")
    third = read_recipe(base).digest()
    write(base, BASE.replace("512", "513"))
    assert len({first, second, third, read_recipe(base).digest()}) == 4


def test_content_that_is_no_text_is_fine(base: Path) -> None:
    (base / "files/etc/motd").write_bytes(b"\xff\x00\xfe")
    assert read_recipe(base).digest()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour = 3", "colour"),
        ("packages = 3", "packages"),
        ("packages = [", "nvalid"),
        ('suite = "bookworm"', "cmdline"),
        (BASE + 'extends = "."', "extends itself"),
        (BASE.replace('"finish"', '"missing"'), "missing"),
        (BASE.replace('["files"]', '["missing"]'), "missing"),
    ],
)
def test_a_bad_recipe_is_refused_with_its_fault(base: Path, text: str, said: str) -> None:
    write(base, text)
    with pytest.raises(UsageProblem, match=said) as caught:
        read_recipe(base)
    assert caught.value.code == "recipe_invalid"
    assert caught.value.evidence == str(base / "recipe.toml")


def test_no_recipe_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem) as caught:
        read_recipe(tmp_path / "nothing")
    assert caught.value.code == "recipe_unknown"


def test_a_recipe_is_meant_by_name_or_by_folder(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe_folder("debian-12") == builtin_recipes()["debian-12"]
    assert recipe_folder("base") == Path("base")
    write(tmp_path / "debian-12", BASE)
    assert recipe_folder("debian-12") == Path("debian-12")
