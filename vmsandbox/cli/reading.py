"""Owns what the verbs of a review ask of a sandbox before they print: whether its task runs, and
its differences.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vmsandbox.review import Review, Selection
    from vmsandbox.store import SandboxFolder

DIFF_BYTES = 256 * 1024


def is_live(folder: "SandboxFolder") -> bool:
    """Whether the task still runs; a guest that is merely kept does not count."""
    from vmsandbox.review import task_runs

    return task_runs(folder, _guest_alive)


def _guest_alive(domain_uuid: str) -> bool | None:
    """Does the guest of a task that nobody manages work on by itself?"""
    from vmsandbox.sandbox import Rooms

    with Rooms.open() as rooms:
        return rooms.guest_alive(domain_uuid)


def difference_of(
    folder: "SandboxFolder",
    shown: "Review",
    selection: "Selection | None" = None,
    max_bytes: int = DIFF_BYTES,
) -> bytes:
    """The chosen differences, all by default; one byte beyond `max_bytes`: there is more."""
    from vmsandbox import review as room
    from vmsandbox.worktree import Quarantine

    change_set = shown.change_set
    if change_set is None:
        return b""
    chosen = room.chosen_paths(change_set, selection) if selection else ()
    with Quarantine(folder.result_git).reading() as results:
        return results.diff(change_set.base_tree, change_set.result_tree, chosen, max_bytes)
