"""A collection that is cut short at every single step: the former result stays whole until the new
one is recorded, and the next collection finds nothing in its way.
"""

import io
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from tests.adapter.crafted import IMAGE
from tests.cutting import cut_at
from tests.guestless import Guestless
from tests.repositories import Repository
from vmsandbox import review
from vmsandbox.errors import ReviewRefused
from vmsandbox.guest import Guest
from vmsandbox.model import ChangeSet, Limits, SandboxRecord
from vmsandbox.sandbox import transfer
from vmsandbox.store import SandboxFolder
from vmsandbox.worktree import Quarantine


class Answering:
    """Says what the guest's script `collect` says, again and again."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    @contextmanager
    def stream_out(self, argv: list[str], *, timeout_s: float) -> Iterator[BinaryIO]:
        yield io.BytesIO(self.answer)


class Collecting:
    """A sandbox with one result that is up for review, and a guest that went on working."""

    def __init__(self, root: Path) -> None:
        project = Repository.create(root / "project", {"kept": "1\n", "changed": "2\n"})
        self.guest = Guestless(project.path, root / "guest")
        snapshot = self.guest.send()
        self.folder = SandboxFolder(root / "sandbox")
        self.folder.path.mkdir()
        self.record = SandboxRecord.model_validate(
            {
                "id": self.folder.id,
                "name": "cut",
                "task": {"command": ("make",), "worktree": project.path},
                "limits": Limits(),
                "image_name": "debian-12",
                "image_digest": IMAGE,
                "libvirt_uri": "test:///default",
                "domain_uuid": "00000000-0000-0000-0000-000000000000",
                "endpoint": {"address": "127.0.0.1", "port": 2222},
                "snapshot": snapshot,
            }
        )
        (self.guest.inside / "changed").write_text("first result\n" * 50)
        self.answer = self.guest.collected()
        self.former = self.collect()
        (self.guest.inside / "changed").write_text("second result\n" * 50)
        (self.guest.inside / "new").write_text("second result\n")
        self.answer = self.guest.collected()
        shutil.copytree(self.folder.path, root / "before")
        self._before = root / "before"

    def reset(self) -> None:
        shutil.rmtree(self.folder.path)
        shutil.copytree(self._before, self.folder.path)

    def collect(self) -> ChangeSet:
        guest = cast(Guest, Answering(self.answer))
        return transfer.collect(guest, self.folder, self.record)

    def readable(self) -> ChangeSet:
        """What is up for review, every byte of which must be there."""
        change_set, _ = review.read(self.folder)
        with Quarantine(self.folder.result_git).reading() as results:
            for change in change_set.changes:
                assert change.new_oid
                with results.open_blob(change.new_oid) as blob:
                    assert b"result" in blob.read()
            assert results.diff(change_set.base_tree, change_set.result_tree, [], 1 << 20)
        return change_set

    def packs(self) -> list[Path]:
        return sorted((self.folder.result_git / "objects/pack").iterdir())


@pytest.fixture(scope="module")
def collecting(memory: Path) -> Collecting:
    return Collecting(memory)


def test_killed_at_every_step_a_result_is_there_and_whole(collecting: Collecting) -> None:
    collecting.reset()
    clean = len(collecting.packs())
    step, seen = 1, []
    while cut_at(step, signal.SIGKILL, collecting.collect):
        seen.append(collecting.readable().digest)
        fresh = collecting.collect()
        assert collecting.readable() == fresh
        assert fresh.digest != collecting.former.digest
        assert len(collecting.packs()) == clean, "of the former result nothing may stay"
        assert not list(collecting.folder.result_git.glob("incoming-*"))
        collecting.reset()
        step += 1
    assert step > 20
    assert seen[0] == collecting.former.digest
    assert seen[-1] != collecting.former.digest


def test_a_refused_result_leaves_the_former_one_alone(collecting: Collecting) -> None:
    collecting.reset()
    before = collecting.packs()
    (collecting.guest.inside / "bad").symlink_to("/etc/passwd")
    answer, collecting.answer = collecting.answer, collecting.guest.collected()
    try:
        with pytest.raises(ReviewRefused) as refused:
            collecting.collect()
        assert refused.value.code == "result_hostile"
        assert collecting.readable() == collecting.former
        assert collecting.packs() == before
    finally:
        (collecting.guest.inside / "bad").unlink()
        collecting.answer = answer


def test_the_same_result_again_is_no_loss(collecting: Collecting) -> None:
    """Its packs have the names of those that are there."""
    collecting.reset()
    fresh = collecting.collect()
    again = collecting.collect()
    assert again.digest == fresh.digest
    assert collecting.readable().digest == fresh.digest
