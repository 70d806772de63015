"""Pictures of an experiment, drawn by matplotlib itself."""

import struct
from pathlib import Path

import pytest

from tests.outcomes import one_pass, outcome
from vmsandbox.density import plots
from vmsandbox.density.report import opened

pytestmark = pytest.mark.xdist_group("pictures")  # matplotlib is read once
NAMES = {"memory.png", "disk.png", "boot.png"}


def size_of(image: bytes) -> tuple[int, int]:
    """Width and height, from the header that every PNG begins with."""
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", image[16:24])
    return width, height


@pytest.mark.parametrize("guests", [1, 16])
def test_pictures_are_drawn(guests: int) -> None:
    drawn = plots.draw(outcome(one_pass(guests), one_pass(guests, start="cold", each_mib=260)))
    assert drawn.keys() == NAMES
    for image in drawn.values():
        width, height = size_of(image)
        assert width > height > 300


def test_no_guest_no_picture() -> None:
    assert plots.draw(outcome(one_pass(0))) == {}


def test_a_report_is_whole(tmp_path: Path) -> None:
    found = outcome(one_pass(4))
    with opened(tmp_path / "out") as folder:
        folder.journal("outcome", found)
        files = folder.finish(found)
    assert {file.name for file in files} == NAMES | {"report.html", "figures.jsonl"}
    assert all(file.stat().st_size for file in files)
    assert (tmp_path / "out" / "report.html").read_text().count("data:image/png;base64,") == 3
