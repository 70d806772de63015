"""Packages of other registries: what npm and pip are told, and what of theirs gets into a layer."""

import io
import tarfile
from pathlib import Path

import pytest

from vmsandbox.errors import UsageProblem
from vmsandbox.images.fetching import add_to_tar, npm_argv, pip_argv
from vmsandbox.images.recipe import Fetch, read_recipe

RECIPES = Path(__file__).parents[2] / "images"


def test_nothing_of_a_package_is_run_and_all_is_checked_by_hash() -> None:
    assert npm_argv()[:2] == ["npm", "ci"]
    assert "--ignore-scripts" in npm_argv()
    told = pip_argv(Path("lock"), Path("target"))
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:", "--no-compile"} <= set(told)
    assert "--python-version=3.11" in told


@pytest.mark.parametrize("name", ["agent-codex", "agent-aider", "agent-claude-code"])
def test_locks_name_versions_and_hashes_and_no_registry(name: str) -> None:
    (fetch,) = (one for layer in read_recipe(RECIPES / name).layers for one in layer.fetches)
    for content in fetch.files.values():
        assert b"://" not in content
    if fetch.tool == "pip":
        lines = fetch.files["requirements.lock"].decode().splitlines()
        assert all(" --hash=sha256:" in line and "==" in line for line in lines if line[0] != "#")
    else:
        assert fetch.files["package-lock.json"].count(b'"integrity"') >= 2
        assert b'"^' not in fetch.files["package.json"]


def test_a_layer_says_nothing_of_who_made_it_where_and_when(tmp_path: Path) -> None:
    folder = tmp_path / "fetched"
    for name, text in {
        "bin/tool": "#!/home/somebody/python",
        "tool/__init__.py": "",
        "tool/tests/big": "x",
        "tool-1.dist-info/RECORD": "x",
        "tool-1.dist-info/METADATA": "x",
        "tool/run": "x",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "tool/run").chmod(0o700)
    (folder / "tool/link").symlink_to("run")
    wanted = Fetch(tool="pip", into="opt/tool", files={}, leave_out=("*/tests/*",))
    made = []
    for name in ("one.tar", "two.tar"):
        tar = tmp_path / name
        with tarfile.open(tar, "w") as archive:
            archive.addfile(tarfile.TarInfo("etc/first"), io.BytesIO())
        add_to_tar(folder, wanted, tar, 1_000_000)
        made.append(tar.read_bytes())
        (folder / "tool/run").touch()
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "one.tar") as archive:
        members = {member.name: member for member in archive}
    names = [name for name in members if not members[name].isdir()]
    assert names == [
        "etc/first",
        "opt/tool/tool/__init__.py",
        "opt/tool/tool/link",
        "opt/tool/tool/run",
        "opt/tool/tool-1.dist-info/METADATA",
    ]
    assert (members["opt/tool/tool/run"].mode, members["opt/tool/tool/run"].uid) == (0o755, 0)
    assert members["opt/tool/tool/__init__.py"].mode == 0o644


@pytest.mark.parametrize("into", ["/opt/x", "../x", "opt/../../x", ""])
def test_packages_stay_within_the_image(tmp_path: Path, into: str) -> None:
    (tmp_path / "lock").write_text("")
    (tmp_path / "recipe.toml").write_text(
        'suite = "x"\n[[fetch]]\ntool = "pip"\nfiles = ["lock"]\n' + f'into = "{into}"\n'
    )
    with pytest.raises(UsageProblem) as caught:
        read_recipe(tmp_path)
    assert caught.value.code == "recipe_invalid"
