"""Several results in one state folder, made as :mod:`tests.adapter.crafted` makes one."""

from pathlib import Path
from typing import Any

from tests.adapter.crafted import BASE, RESULT, Case, Files
from vmsandbox.store import write_value


class Several:
    """Makes sandboxes with results; all of one worktree unless told otherwise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "state"
        self._made = 0

    def __call__(
        self, result: Files = RESULT, *, base: Files = BASE, host: str = "host", **fields: Any
    ) -> Case:
        """A sandbox of which `fields` of its record are set."""
        self._made += 1
        id_ = f"{self._made:x}b12cd34"
        case = Case(self.root / host, base, result, sandbox=self.state / "sandboxes" / id_)
        record = case.folder.read_record().model_copy(update={"name": f"task-{self._made}"})
        write_value(case.folder.record, record.model_copy(update=fields))
        return case
