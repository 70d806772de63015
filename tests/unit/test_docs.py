"""What the documents say about files, links and packages is so."""

import ast
import re
from pathlib import Path

import pytest

from tests.unit.test_layers import FLOORS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def file_names_of_the_store() -> list[str]:
    room = (ROOT / "vmsandbox" / "store").glob("*.py")
    return [
        str(call.args[0].value)
        for call in (node for path in room for node in ast.walk(ast.parse(path.read_bytes())))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "File"
        and isinstance(call.args[0], ast.Constant)
    ]


def test_the_layout_names_every_file_of_the_state_folder() -> None:
    layout = (ROOT / "docs" / "layout.md").read_text()
    names = file_names_of_the_store()
    assert len(names) > 20
    assert not [name for name in names if not re.search(rf"`{re.escape(name)}/?`", layout)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_our_own_files_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
    assert not [target for target in targets if not (document.parent / target).exists()]


def package_lists_of_setup() -> dict[str, set[str]]:
    text = (ROOT / "scripts" / "setup").read_text()
    found: dict[str, set[str]] = {}
    pattern = r"^readonly (?:PYTHON|HOST|ALL)_PACKAGES_(\w+)='([^']*)'"
    for family, names in re.findall(pattern, text, re.MULTILINE):
        found.setdefault(family, set()).update(names.split())
    return found


def test_the_readme_names_the_packages_that_setup_names() -> None:
    table = re.search(r"^\| for \|.*?\n\n", (ROOT / "README.md").read_text(), re.M | re.S)
    assert table
    rows = [line.split("|")[2:-1] for line in table[0].strip().splitlines()[2:]]
    for position, family in enumerate(("debian", "fedora", "arch", "opensuse")):
        named = {name for row in rows for name in row[position].replace("`", "").split()}
        assert named == package_lists_of_setup()[family] - {"make"}, family


def test_each_clone_hazard_has_its_test_and_each_test_its_row() -> None:
    table = (ROOT / "docs" / "clone-hazards.md").read_text()
    named = set(re.findall(r"^\|.*\| `(test_\w+)` \|$", table, re.MULTILINE))
    tree = ast.parse((ROOT / "tests" / "vm" / "test_clone_hazards.py").read_bytes())
    written = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert len(named) >= 12
    assert named == {name for name in written if name.startswith("test_")}


def test_the_readme_puts_every_room_on_its_floor() -> None:
    text = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\| (\d) \| (.*) \|$", text, re.MULTILINE))
    unnamed = [
        f"{floor}: {room}"
        for room, floor in FLOORS.items()
        if room not in ("", "__main__") and f"`{room}`" not in rows[str(floor)]
    ]
    assert not unnamed


def test_the_readme_links_to_its_own_headings() -> None:
    text = (ROOT / "README.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", name.lower()).replace(" ", "-") for name in headings}
    assert not set(re.findall(r"\]\(#([^)]*)\)", text)) - anchors
