"""Which templates may go: none that a sandbox stands on, none that is being made, and of the others
those that no start would use. The folders are real, what is in them does not matter here."""

from pathlib import Path

import pytest

from tests.adapter.crafted import IMAGE
from tests.adapter.left import Leave, seen
from vmsandbox.host.checks import TEMPLATES_ROOT_MAX_BYTES
from vmsandbox.model import SandboxState
from vmsandbox.sandbox import Rooms, all_templates, clean_up, templates
from vmsandbox.sandbox.templates import Template, TemplateRecord
from vmsandbox.store import locked, write_value

NAME = "0123456789abcdef"


@pytest.fixture
def template(rooms: Rooms) -> Template:
    """A whole one, of an image that is not there."""
    template = Template(rooms.store.templates / NAME)
    template.path.mkdir()
    template.ram.write_bytes(bytes(8192))
    record = TemplateRecord(
        fingerprint=IMAGE,
        image_name="debian-12",
        image_digest=IMAGE,
        cpus=1,
        memory_mib=1024,
        disk_mib=20480,
        qemu_version="7.2.0",
        accelerator="tcg",
        made_in_s=1.0,
    )
    write_value(template.record, record)
    return template


def cleaned(rooms: Rooms, *, whole: bool = False) -> list[tuple[str, str]]:
    items = clean_up(rooms, dry_run=False, whole_templates=whole)
    return [(item.what, item.detail) for item in items if item.kind == "template"]


def test_one_whose_image_is_gone(rooms: Rooms, template: Template) -> None:
    (shown,) = all_templates(rooms)
    assert (shown.name, shown.used_by) == (NAME, ())
    assert shown.disk_bytes >= 8192
    planned = clean_up(rooms, dry_run=True)
    assert seen(planned) == {("template", NAME, "would go")}
    assert template.is_whole()
    (item,) = clean_up(rooms, dry_run=False)
    assert (item.what, item.detail) == (NAME, "its image is gone")
    assert item.freed_bytes == shown.disk_bytes
    assert list(rooms.store.templates.iterdir()) == []


@pytest.mark.parametrize("record", ["whole", "broken"])
def test_one_that_a_sandbox_stands_on(
    rooms: Rooms, leave: Leave, template: Template, record: str
) -> None:
    """Also if all that is left to tell is the header of its disk."""
    left = leave(SandboxState.FAILED, template=NAME)
    if record == "broken":
        left.folder.record.write_text("{")
        left.folder.overlay.write_bytes(b"QFI\xfb" + bytes(500) + bytes(template.disk))
    assert [one.used_by for one in all_templates(rooms)] == [(left.folder.id,)]
    assert cleaned(rooms, whole=True) == []
    assert templates.remove(rooms, template) is None
    assert template.is_whole()
    assert not template.withdrawn.exists()
    left.folder.overlay.write_bytes(b"QFI\xfb")
    left.folder.record.write_text("{")
    assert cleaned(rooms) == [(NAME, "its image is gone")]


def test_one_whose_clones_do_not_get_ready(rooms: Rooms, template: Template) -> None:
    """Twice in a row, that is."""
    templates.strike(rooms, NAME)
    templates.absolve(rooms, NAME)
    templates.strike(rooms, NAME)
    assert template.is_usable()
    notes: list[str] = []
    rooms.note = notes.append
    templates.strike(rooms, NAME)
    assert not template.is_usable()
    assert "thrown away" in notes[0]
    assert cleaned(rooms) == [(NAME, "its clones did not get ready")]
    templates.strike(rooms, NAME)
    templates.absolve(rooms, NAME)
    assert not template.path.exists(), "one that is gone stays so"


def test_what_a_killed_remover_left(rooms: Rooms, leave: Leave, template: Template) -> None:
    """It had withdrawn the template and not yet looked who uses it."""
    template.record.rename(template.withdrawn)
    left = leave(SandboxState.FAILED, template=NAME)
    assert cleaned(rooms, whole=True) == []
    assert templates.remove(rooms, template) is None
    assert template.is_whole(), "whoever looks next puts it back"
    template.record.rename(template.withdrawn)
    left.folder.record.write_text("{")
    assert all_templates(rooms) == []
    assert cleaned(rooms) == [(NAME, "half made")]


def test_one_that_is_being_made_or_removed(rooms: Rooms, template: Template) -> None:
    making = template.making.path
    making.mkdir()
    (making / "ram").write_bytes(bytes(8192))
    with locked(template.lock):
        assert templates.remove(rooms, template) is None
        assert [(what, detail) for what, detail in cleaned(rooms) if what != NAME] == []
        assert making.exists()
    assert {what for what, _ in cleaned(rooms)} == {NAME, making.name}
    assert list(rooms.store.templates.iterdir()) == []


def test_a_record_that_cannot_be_read(rooms: Rooms, template: Template) -> None:
    template.record.write_text("{")
    assert all_templates(rooms) == []
    assert cleaned(rooms) == [(NAME, "its record cannot be read")]


def test_doctor_knows_how_long_a_path_may_be(tmp_path: Path) -> None:
    """The longest socket of a template is the first one that a long path leaves no room for."""
    longest = Template(tmp_path / "templates" / NAME).making.path / "seed.sock"
    below = len(bytes(longest)) - len(bytes(tmp_path))
    assert below + TEMPLATES_ROOT_MAX_BYTES == 107


def test_names() -> None:
    template = Template(Path("/t") / NAME)
    assert template.making.name == template.name == NAME
    assert template.making.lock == template.lock == Path(f"/t/{NAME}.lock")
    assert template.making.is_making()
    assert not template.is_making()
