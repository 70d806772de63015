"""A stock image boots from the seed that ours do: real cloud-init reads it. Without KVM this guest
takes its time, most of it for cloud-init's own start."""

from pathlib import Path

import pytest

from tests.repositories import Repository
from tests.sandboxes import State
from tests.vm.lives import kinds_of

IMAGE = "debian-12-cloudinit"


@pytest.fixture
def stock(images: Path, shared_state: State) -> State:
    """The image with cloud-init; built into the everyday state folder like the other one."""
    shared_state.ok("image", "build", "--if-needed", IMAGE)
    return shared_state


def test_cloud_init_reads_the_seed(stock: State, tmp_path: Path) -> None:
    project = Repository.create(tmp_path / "project", {"README": "hello\n"})
    project.write("vmsandbox.toml", '[sandbox]\nboot_timeout = "8m"\n')
    script = """
    cloud-init status > status.txt
    hostname > name.txt
    sudo id -un
    sudo cat /etc/ssh/ssh_host_ed25519_key.pub
    """
    options = ("--image", IMAGE, "--name", "stock")
    answer = stock.ok("run", *options, "--", "sh", "-c", script, cwd=project.path)
    user, key = answer.out.splitlines()
    assert user == "root"
    (pinned,) = stock.path.glob("sandboxes/*/host_ed25519.pub")
    assert pinned.read_text().split()[:2] == key.split()[:2]
    assert kinds_of(stock, "stock") == {"name.txt": "A", "status.txt": "A"}
    stock.ok("apply", "--yes", "stock")
    assert (project.path / "name.txt").read_text() == "stock\n"
    assert "error" not in (project.path / "status.txt").read_text()
    stock.ok("delete", "stock")
