"""Owns the folder that an experiment leaves: figures as they are found, pictures, one page.

figures.jsonl has one object per line with a `kind`; it is written while the experiment goes on, so
one that is killed leaves what it knew.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from vmsandbox.density import page, plots
from vmsandbox.density.figures import Outcome
from vmsandbox.errors import HostProblem, UsageProblem
from vmsandbox.model import Value

FIGURES, PAGE = "figures.jsonl", "report.html"
INSTALL = "pip install 'vmsandbox[density]'"


def default_folder() -> Path:
    """Below the current folder, named by the time."""
    return Path(f"vmsandbox-density-{time.strftime('%Y%m%d-%H%M%S')}").absolute()


class ReportFolder:
    """Where the files of one experiment go; see :func:`opened`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_figures = False

    def journal(self, kind: str, value: Value) -> None:
        """Add one line. Raises HostProblem ``report_unwritable``."""
        line = json.dumps({"kind": kind, **value.model_dump(mode="json", exclude_none=True)})
        with _translated(self.path), (self.path / FIGURES).open("a") as file:
            file.write(line + "\n")
        self.has_figures = self.has_figures or kind != "conditions"

    def finish(self, outcome: Outcome) -> tuple[Path, ...]:
        """Draw and write the rest; every file that there is now."""
        drawn = plots.draw(outcome) if plots.available() else None
        missing = "" if drawn is not None else INSTALL
        with _translated(self.path):
            for name, image in (drawn or {}).items():
                (self.path / name).write_bytes(image)
            (self.path / PAGE).write_text(page.render(outcome, drawn or {}, missing))
        return tuple(self.path / name for name in (PAGE, FIGURES, *(drawn or {})))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[ReportFolder]:
    """Make the folder. An experiment that fails before it measured anything leaves none.

    Raises UsageProblem ``out_taken`` if figures of another experiment are there, HostProblem
    ``report_unwritable``.
    """
    if (path / FIGURES).exists():
        raise UsageProblem(
            "out_taken", f"{path} holds another experiment", hint="--out with a new folder"
        )
    made = not path.exists()
    with _translated(path):
        path.mkdir(parents=True, exist_ok=True)
        (path / FIGURES).touch()
    folder = ReportFolder(path)
    try:
        yield folder
    finally:
        if not folder.has_figures:
            (path / FIGURES).unlink(missing_ok=True)
            if made:
                with contextlib.suppress(OSError):
                    path.rmdir()


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HostProblem(
            "report_unwritable",
            f"cannot write the report to {path}: {error.strerror}",
            hint="--out with a folder that can be written",
        ) from error
