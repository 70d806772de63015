"""Templates with real guests: made ahead of time, shown, removed; killed while they are made or
loaded; spoilt; and made where there is no room. Each test has templates of its own: a copy of the
one that all other tests share, or none.
"""

import json
import mmap
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disks import small_disk
from tests.repositories import Repository
from tests.sandboxes import State, short_folder, state_folder
from tests.vm.lives import assert_refused, wait_for
from tests.vm.test_bad_input import owned_domains
from tests.vm.test_clone_hazards import digests_of
from tests.vm.test_crashes import (
    answer_of,
    begin,
    folder_of,
    frozen_at,
    kill_guest,
    killed_at,
    record_of,
)
from vmsandbox.host import daemons
from vmsandbox.hypervisor import DomainState, Hypervisor, processes
from vmsandbox.images.manifest import Manifest, folder_name

IMAGE = "debian-12"
LEAST_MIB = 256
COLD = "starting cold: "
PAGE = 4096
SWAPGS = bytes.fromhex("0f 01 f8")
"""With this instruction the kernel is entered, and left."""


@pytest.fixture(scope="module")
def original(shared_state: State) -> Path:
    """The folder of a whole template, for copies."""
    warmed = shared_state.ok("image", "warm", IMAGE, "--json").data
    return Path(shared_state.path, "templates", warmed["name"])


@pytest.fixture
def own(images: Path, shared: Path) -> Iterator[State]:
    """A state folder with templates of its own: none."""
    with state_folder(images) as state:
        shutil.copytree(shared / "cache", state.path / "cache", dirs_exist_ok=True)
        yield state


@pytest.fixture
def warm(own: State, original: Path) -> Path:
    """The folder of a template in the state folder `own`."""
    return copied(original, own.path / "templates" / original.name)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return Repository.create(tmp_path / "project", {"kept": "1\n"}).path


def copied(template: Path, to: Path) -> Path:
    to.parent.mkdir(mode=0o711, exist_ok=True)
    subprocess.run(["cp", "-a", "--sparse=always", str(template), str(to)], check=True)
    return to


def left(state: State) -> list[str]:
    """What lies below templates/, and guests that run."""
    found = [path.name for path in (state.path / "templates").iterdir()]
    return sorted(found) + owned_domains(state)


# --- made, shown, removed -------------------------------------------------------------------------


@pytest.fixture
def alone(images: Path, shared: Path, original: Path) -> Iterator[State]:
    """A state folder with an image and a template that may be removed."""
    store = short_folder()
    digest = json.loads((images / "lock.json").read_text())[IMAGE]
    copy_image(images / folder_name(digest), store / folder_name(digest))
    (store / "lock.json").write_text(json.dumps({IMAGE: digest, "also": digest}))
    with state_folder(store) as state:
        shutil.copytree(shared / "cache", state.path / "cache", dirs_exist_ok=True)
        copied(original, state.path / "templates" / original.name)
        yield state
    shutil.rmtree(store)


def copy_image(image: Path, to: Path) -> None:
    """All but the root disk, which is linked to."""
    shutil.copytree(image, to, ignore=shutil.ignore_patterns("rootfs.*"))
    (rootfs,) = image.glob("rootfs.*")
    (to / rootfs.name).symlink_to(rootfs)
    to.chmod(0o755)


def spoiled_copy(template: Path, name: str, **fields: object) -> None:
    """A template that says other things of itself."""
    copy = template.with_name(name)
    copy.mkdir()
    record = json.loads((template / "template.json").read_text()) | fields
    (copy / "template.json").write_text(json.dumps(record))


def test_a_template_is_shown_used_and_goes_with_its_image(alone: State, project: Path) -> None:
    (template,) = (alone.path / "templates").iterdir()
    again = alone.ok("image", "warm", IMAGE, "--json").data
    assert (again["outcome"], again["name"]) == ("already there", template.name)
    assert "already there" in alone.ok("image", "warm", "also", "--cpus", "1").out
    (shown,) = alone.ok("image", "list", "--json").data["templates"]
    assert (shown["cpus"], shown["memory_mib"], shown["used_by"]) == (1, 1024, [])
    assert 50 << 20 < shown["disk_bytes"] < 1 << 30
    assert template.name in alone.ok("image", "list").out

    spoiled_copy(template, "0" * 16, fingerprint=f"sha256:{'0' * 64}")
    spoiled_copy(template, "1" * 16, image_digest=f"sha256:{'1' * 64}")
    alone.ok("run", "--keep", "--worktree", project, "--", "touch", "new")
    with Hypervisor.connect(daemons.default_uri()) as hypervisor:
        observed = hypervisor.observe(record_of(alone).domain_uuid)
    assert observed.state is DomainState.RUNNING, "libvirt has it as it is"
    listed = alone.ok("image", "list", "--json").data["templates"]
    assert {one["name"]: one["used_by"] for one in listed}[template.name] == alone.ids()
    alone.ok("image", "remove", "also")
    assert alone("image", "remove", IMAGE, "--json").error["code"] == "image_in_use"
    gone = {i["what"]: i["detail"] for i in cleaned(alone, "--templates")}
    assert gone == {
        "0" * 16: "made on another host, QEMU, kernel or vmsandbox",
        "1" * 16: "its image is gone",
    }
    alone.ok("delete", "--all", "--force")
    assert cleaned(alone) == [], "it is worth its space"
    (would,) = cleaned(alone, "--templates", "--dry-run")
    assert (would["what"], would["outcome"]) == (template.name, "would go")
    freed = alone.ok("image", "remove", IMAGE, "--json").data["freed_bytes"]
    assert freed >= shown["disk_bytes"]
    assert left(alone) == []


def cleaned(state: State, *options: str) -> list[dict[str, str]]:
    items = state.ok("cleanup", "--json", *options).data["items"]
    return [item for item in items if item["kind"] == "template"]


def test_what_cannot_be_warmed(alone: State) -> None:
    def refused(*words: str) -> str:
        answer = alone("image", "warm", *words, "--json")
        return f"{answer.code} {answer.error['code']}"

    assert refused("debian-99") == "2 image_unknown"
    assert refused(IMAGE, "--memory", f"{LEAST_MIB - 1}M") == "2 memory_too_small"
    assert refused(IMAGE, "--cpus", "0") == "2 config_invalid"
    assert refused(IMAGE, "--memory", "lots") == "2 config_invalid"
    stock = without_template_support(alone)
    assert refused(stock) == "4 template_unsupported"
    assert_refused(alone("image", "warm", stock, "--json"), "template_unsupported", 4)
    assert len(left(alone)) == 1


def without_template_support(state: State) -> str:
    """The same image, but cloud-init would read its seed; its reference."""
    (image,) = (path for path in (state.path / "images").resolve().iterdir() if path.is_dir())
    manifest = Manifest.model_validate_json((image / "manifest.json").read_bytes())
    stock = manifest.model_copy(update={"cloud_init": True})
    folder = image.with_name(folder_name(stock.digest()))
    copy_image(image, folder)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(stock.model_dump_json())
    return stock.digest()


# --- killed ---------------------------------------------------------------------------------------


def test_killed_while_it_is_made(own: State, project: Path) -> None:
    """The manager at two points, and QEMU: nothing half-made is used, the next start works."""
    killed_at(own, "template boots", "image", "warm", IMAGE)
    half_made = left(own)
    assert [name[:8] for name in half_made if name.startswith(".")] == [".making-"]
    assert len(owned_domains(own)) == 1
    assert own.ok("image", "list", "--json").data["templates"] == []

    (of_the_killed,) = pids_below(own.path)
    warm = frozen_at(own, "template boots", "image", "warm", IMAGE, "--json")
    (pid,) = pids_below(own.path)
    assert pid != of_the_killed
    os.kill(pid, signal.SIGKILL)
    os.kill(warm.pid, signal.SIGCONT)
    answer = answer_of(warm)
    assert (answer.code, answer.error["code"]) == (4, "template_failed"), answer
    assert left(own) == []

    killed_at(own, "template whole", "run", "--worktree", project, "--", "true")
    assert owned_domains(own) == []
    assert own.ok("image", "list", "--json").data["templates"] == []
    own.ok("resume", "last")
    template = record_of(own).template
    assert template
    assert left(own) == [template]
    assert own.ok("image", "list", "--json").data["templates"][0]["used_by"] == own.ids()


def pids_below(folder: Path) -> set[int]:
    return {process.pid for process in processes.with_disks_below(folder)}


def test_killed_while_a_clone_loads_it(own: State, warm: Path, project: Path) -> None:
    before = digests_of(warm)
    killed_at(own, "loading", "run", "--worktree", project, "--", "true")
    own.ok("resume", "last")
    assert record_of(own).template == warm.name
    own.ok("delete", "last")

    run = frozen_at(own, "loading", "run", "--worktree", project, "--", "true")
    kill_guest(own)
    os.kill(run.pid, signal.SIGCONT)
    answer = answer_of(run)
    assert answer.code == 0, answer
    assert COLD in answer.err
    assert record_of(own).template is None
    assert (warm / "strikes").exists()
    own.ok("delete", "last")

    own.ok("run", "--worktree", project, "--", "true")
    assert record_of(own).template == warm.name
    assert not (warm / "strikes").exists(), "one alone does not count against it"
    assert digests_of(warm) == before


def without_memory(ram: Path) -> None:
    """QEMU sees that the device state is not of this guest."""
    size = ram.stat().st_size
    os.truncate(ram, 0)
    os.truncate(ram, size)


def without_interrupts(ram: Path) -> None:
    """No page is left by which the kernel could be entered; QEMU cannot see that."""
    with ram.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        found = -1
        while (found := memory.find(SWAPGS, found + 1)) >= 0:
            page = found - found % PAGE
            memory[page : page + PAGE] = bytes(PAGE)
            found = page + PAGE - 1


def test_clones_that_never_get_ready(own: State, warm: Path, project: Path) -> None:
    """Each starts cold instead; after two in a row the template is thrown away."""
    (project / "vmsandbox.toml").write_text('[sandbox]\nboot_timeout = "90s"\n')
    for spoil, told in (
        (without_interrupts, "the clone did not get ready"),
        (without_memory, "no template could be used: QEMU did not take the state"),
    ):
        spoil(warm / "ram")
        answer = answer_of(begin(own, project, "echo it ran"))
        assert (answer.code, answer.out) == (0, "it ran\n"), answer
        assert f"{COLD}{told}" in answer.err
        assert ("is thrown away" in answer.err) == (spoil is without_memory)
        assert record_of(own).template is None
        assert folder_of(own).seed_iso.exists()
        assert folder_of(own).former_console.exists(), "evidence of the clone that was given up"
        own.ok("delete", "last", "--force")
    (gone,) = cleaned(own)
    assert gone["detail"] == "its clones did not get ready"
    assert left(own) == []


# --- no room --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["100m", "600m"])
def test_a_disk_that_is_full(own: State, size: str) -> None:
    """Before it begins, or while the guest boots: QEMU dies of the first page that has no room."""
    templates = own.path / "templates"
    templates.mkdir(mode=0o711, exist_ok=True)
    with small_disk(templates, size) as disk:
        warm = own.start("image", "warm", IMAGE, "--json")
        if size == "600m":
            consoles = disk.path.glob
            wait_for("its guest", lambda: list(consoles(".making-*/console.log")), warm)
            disk.fill(leave_bytes=4 << 20)
        answer = answer_of(warm)
        assert (answer.code, answer.error["code"]) == (3, "host_disk_full"), answer
        assert "vmsandbox cleanup" in answer.error["hint"]
        assert set(left(own)) <= {"ballast"}
