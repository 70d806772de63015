"""What is taken up again where the keys of its gateways are not: nothing of it changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapter.crafted import IMAGE
from tests.repositories import Repository
from vmsandbox.batch import Planned, Unwatched, resume_batch
from vmsandbox.batch.record import Journal, create
from vmsandbox.batch.taskfile import Grants
from vmsandbox.errors import UsageProblem
from vmsandbox.model import BatchMark, Endpoint, Equipment, Gateway, Limits, SandboxRecord, Task
from vmsandbox.sandbox import Manager, Quiet, Rooms
from vmsandbox.store import SandboxFolder, write_value

VARIABLE = "KEY_OF_THE_TEST"
GATEWAY = Gateway(name="model", upstream="http://127.0.0.1:9", from_env=VARIABLE)


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rooms]:
    """Of a user who has set up a gateway, in a shell without its key."""
    config = tmp_path / "config/vmsandbox/config.toml"
    config.parent.mkdir(parents=True)
    lines = ("[gateway.model]", f'upstream = "{GATEWAY.upstream}"', f'from_env = "{VARIABLE}"')
    config.write_text("\n".join(lines))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(VARIABLE, raising=False)
    with Rooms.open(tmp_path / "state") as rooms:
        yield rooms


def sandbox(rooms: Rooms, batch: BatchMark | None = None) -> SandboxFolder:
    """One that was made, and whose task has not begun."""
    folder = rooms.store.folder("0badcafe")
    folder.path.mkdir()
    record = SandboxRecord(
        id=folder.id,
        name="one",
        task=Task(command=("make",), worktree=Path("/w")),
        limits=Limits(),
        image_name="debian-12",
        image_digest=IMAGE,
        libvirt_uri="test:///default",
        domain_uuid=folder.id,
        endpoint=Endpoint(address="127.0.0.2", port=2222),
        equipment=Equipment(gateways=(GATEWAY,)),
        batch=batch,
    )
    write_value(folder.record, record)
    return folder


def test_a_sandbox_stays_as_it_was(rooms: Rooms) -> None:
    folder = sandbox(rooms)
    before = folder.record.read_bytes()
    with Manager.of(rooms, folder, Quiet()) as manager, pytest.raises(UsageProblem) as refused:
        manager.carry_out()
    assert refused.value.code == "gateway_without_key"
    assert folder.record.read_bytes() == before


@pytest.mark.parametrize("made", [False, True])
def test_a_batch_stays_as_it_was(rooms: Rooms, tmp_path: Path, made: bool) -> None:
    top = Repository.create(tmp_path / "project", {"a": "b"}).path
    grants = Grants(gateways=("model",))
    task = Planned(name="one", origin="one", command=("make",), worktree=top, grants=grants)
    with create(rooms.store, [task], None) as batch:
        if made:
            sandbox(rooms, BatchMark(batch=batch.id, task="one"))
    with pytest.raises(UsageProblem) as refused:
        resume_batch(batch.id, watcher=Unwatched(), root=rooms.store.path)
    assert refused.value.code == "gateway_without_key"
    assert VARIABLE in (refused.value.hint or "")
    assert Journal(batch).of("one").ended is None
