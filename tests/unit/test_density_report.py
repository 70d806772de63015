"""The report of a density experiment: whole without other files, and safe whatever a guest said."""

import contextlib
import json
import re
from pathlib import Path

import pytest

from tests.outcomes import conditions, failed, one_pass, outcome
from vmsandbox.cli.density import _data
from vmsandbox.density import page
from vmsandbox.density.plots import running_median
from vmsandbox.density.report import FIGURES, opened
from vmsandbox.errors import HostProblem, UsageProblem

EVIL = "<script>alert(1)</script>\x1b]0;x\x07\u202e"


def test_the_page_needs_no_other_file() -> None:
    text = page.render(outcome(one_pass(4)), {"memory.png": b"\x89PNG"}, "")
    assert "data:image/png;base64,iVBORw==" in text
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)
    assert "matplotlib" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_the_page_shows_costs_conditions_and_each_guest() -> None:
    both = outcome(one_pass(4), one_pass(4, start="cold", each_mib=260))
    text = page.render(both, {}, "")
    for shown in ("80.0 MiB", "260.0 MiB", "would fit on this host", "a CPU", "tcg", "pc-q35-7.2"):
        assert shown in text
    assert text.count("<h2>Guests:") == 2
    assert both.conditions.image_digest in text


def test_without_pictures_the_page_says_how_to_get_them() -> None:
    text = page.render(outcome(one_pass(1)), {}, "pip install 'vmsandbox[density]'")
    assert "<code>pip install &#x27;vmsandbox[density]&#x27;</code>" in text


def test_what_a_guest_said_is_escaped() -> None:
    spoilt = outcome(one_pass(2, failed=(failed("density-001", EVIL),)), workload=EVIL, image=EVIL)
    text = page.render(spoilt, {"<img>": b""}, EVIL)
    assert "<script" not in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_an_experiment_without_a_guest_has_a_page() -> None:
    assert "No guest was measured" in page.render(outcome(one_pass(0)), {}, "")
    assert "No guest was measured" in page.render(outcome(), {}, "")


def test_the_json_document_has_its_shape() -> None:
    both = outcome(one_pass(4), one_pass(2, start="cold", failed=(failed("density-001", "no"),)))
    data = json.loads(json.dumps(_data(both, (Path("/x/report.html"),))))
    assert (data["attempted"], data["completed"], data["stopped_by"]) == (6, 5, "max")
    for start in ("clone", "cold"):
        for figure in ("pss_bytes", "private_bytes", "disk_bytes", "first_command_s"):
            assert data["summary"][start][figure] > 0
    (failure,) = data["failures"]
    assert (failure["name"], failure["failure"]["code"]) == ("density-001", "boot_timeout")
    assert data["files"] == ["/x/report.html"]
    assert "samples" not in data["passes"][0]


def test_figures_are_written_as_they_are_found(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "out") as folder:
        folder.journal("conditions", conditions())
        folder.journal("guest", one_pass(1).samples[0])
        lines = (folder.path / FIGURES).read_text().splitlines()
        assert [json.loads(line)["kind"] for line in lines] == ["conditions", "guest"]
    assert (folder.path / FIGURES).exists()


def test_an_experiment_that_measured_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), opened(tmp_path / "out") as folder:
        folder.journal("conditions", conditions())
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").write_text("kept")
    with opened(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_another_experiment_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / FIGURES).write_text("{}\n")
    with pytest.raises(UsageProblem, match="another experiment") as refused, opened(tmp_path):
        pass
    assert refused.value.code == "out_taken"
    assert (tmp_path / FIGURES).read_text() == "{}\n"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostProblem) as refused, opened(tmp_path / "file" / "out"):
        pass
    assert refused.value.code == "report_unwritable"


def test_a_running_median_follows_and_forgets_outliers() -> None:
    assert running_median([1.0, 1.0, 9.0, 1.0, 1.0]) == [1.0] * 5
    assert running_median([]) == []
