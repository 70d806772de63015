"""What cannot be meant, or cannot be done, is refused by name with a hint, and leaves nothing."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.repositories import Repository, fingerprint
from tests.sandboxes import State, state_folder
from tests.vm.lives import assert_refused

MakeRepository = Callable[..., Repository]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Repository.create(tmp_path_factory.mktemp("bad") / "project", {"README": "hello\n"}).path


@pytest.fixture(autouse=True)
def nothing_is_made(shared_state: State, project: Path) -> Iterator[None]:
    """No sandbox, no domain, no snapshot, and the worktree as it was."""
    before = fingerprint(project, without=frozenset())
    yield
    assert shared_state.ids() == []
    assert list((shared_state.path / "worktrees").iterdir()) == []
    assert owned_domains(shared_state) == []
    assert fingerprint(project, without=frozenset()) == before


def owned_domains(state: State) -> list[str]:
    from vmsandbox.host import daemons
    from vmsandbox.hypervisor import Hypervisor

    with Hypervisor.connect(daemons.default_uri()) as hypervisor:
        return [domain.name for domain in hypervisor.list_owned(state.path)]


FLAGS = {
    "no such image": (["--image", "debian-99"], "image_unknown"),
    "another digest": (["--image", f"debian-12@sha256:{'0' * 64}"], "image_unknown"),
    "no image name": (["--image", "../debian-12"], "image_unknown"),
    "too little memory": (["--memory", "128M"], "memory_too_small"),
    "too small a disk": (["--disk", "512M"], "disk_too_small"),
    "no size": (["--memory", "lots"], "config_invalid"),
    "no CPUs": (["--cpus", "0"], "config_invalid"),
    "no duration": (["--timeout", "soon"], "config_invalid"),
    "no time": (["--timeout", "0s"], "config_invalid"),
    "no history": (["--history", "-1"], "config_invalid"),
    "a variable without name": (["--env", "=x"], "env_invalid"),
    "files outside": (["--include", "../secret"], "include_invalid"),
    "a variable with a space": (["-e", "A B=x"], "env_invalid"),
    "a name with a slash": (["--name", "a/b"], "name_invalid"),
    "a name that means another": (["--name", "last"], "name_taken"),
}


@pytest.mark.parametrize(("options", "code"), FLAGS.values(), ids=FLAGS.keys())
def test_flags(options: list[str], code: str, shared_state: State, project: Path) -> None:
    answer = shared_state("run", "--json", *options, "--", "true", cwd=project)
    assert_refused(answer, code, 125)


def test_a_folder_that_is_no_worktree(shared_state: State, tmp_path: Path) -> None:
    bare = tmp_path / "bare.git"
    Repository.create(bare)
    Repository(bare).git("clone", "--quiet", "--bare", ".", "inner.git")
    file = Repository(bare).write("file", "x")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / ".git").write_text("gitdir: /nowhere\n")
    for path, code in {
        tmp_path / "nowhere": "worktree_missing",
        file: "worktree_missing",
        bare / "inner.git": "worktree_bare",
        bare / ".git": "worktree_inside_git_dir",
        broken: "worktree_broken",
        Repository.create(tmp_path / "empty").path: "worktree_empty",
    }.items():
        answer = shared_state("run", "--json", "--worktree", path, "--", "true")
        assert_refused(answer, code, 125)


def test_a_bad_config_is_told_all_at_once(
    shared_state: State, make_repository: MakeRepository
) -> None:
    text = '[sandbox]\ncpus = "many"\nmemroy = "1G"\ntimeout = -1\n\n[result]\nmax_size = "0"\n'
    project = make_repository("misconfigured", {"vmsandbox.toml": text})
    answer = shared_state("run", "--json", "--memory", "lots", "--", "true", cwd=project.path)
    said = assert_refused(answer, "config_invalid", 125)
    assert "5 problem(s)" in said
    for part in ("sandbox.cpus", "sandbox.memroy: unknown key", "sandbox.timeout", "command line"):
        assert part in said
    assert str(project.path / "vmsandbox.toml") in said
    project.write("vmsandbox.toml", "[sandbox\n")
    answer = shared_state("run", "--json", "--", "true", cwd=project.path)
    assert_refused(answer, "config_invalid", 125)


def test_what_no_guest_could_be_told(shared_state: State, make_repository: MakeRepository) -> None:
    project = make_repository("odd", {"vmsandbox.toml": '[sandbox.env]\n"A B" = "x"\n'})
    answer = shared_state("run", "--json", "--", "true", cwd=project.path)
    assert_refused(answer, "env_name_invalid", 125)
    project.write("vmsandbox.toml", "")
    answer = shared_state("run", "--json", "--", "echo", *["x" * 70_000] * 2, cwd=project.path)
    assert_refused(answer, "command_too_long", 125)


def test_a_selector_that_means_nothing(shared_state: State) -> None:
    for verb in ("status", "review", "approve", "apply", "drop", "sync", "stop", "delete"):
        assert_refused(shared_state(verb, "--json", "nobody"), "sandbox_unknown", 2)
    for selector in ("last", "", "../images"):
        assert_refused(shared_state("delete", "--json", selector), "sandbox_unknown", 2)
    assert_refused(shared_state("resume", "--json", "nobody"), "sandbox_unknown", 125)
    for line in (["logs", "nobody"], ["ssh", "nobody"], ["exec", "nobody", "--", "true"]):
        assert_refused(shared_state(*line), "sandbox_unknown", 2, with_json=False)
    assert_refused(shared_state("stop", "--json"), "nothing_named", 2)


def test_nothing_to_run_is_refused(shared_state: State, project: Path) -> None:
    answer = shared_state("run", "--json", cwd=project)
    assert_refused(answer, "nothing_to_run", 125)


# --- images that are not what they were -----------------------------------------------------------


@pytest.fixture
def copied(images: Path, tmp_path: Path) -> Iterator[State]:
    """A state folder with an image of its own, to be spoilt; only its root disk is borrowed."""
    names = json.loads((images / "lock.json").read_text())
    digest = names["debian-12"].removeprefix("sha256:")[:16]
    copy = tmp_path / "images"
    copy.mkdir(mode=0o755)
    shutil.copytree(images / digest, copy / digest, ignore=shutil.ignore_patterns("rootfs.*"))
    (rootfs,) = (images / digest).glob("rootfs.*")
    (copy / digest / rootfs.name).symlink_to(rootfs)
    (copy / "lock.json").write_text(json.dumps({"debian-12": names["debian-12"]}))
    with state_folder(copy) as state:
        yield state


def test_a_spoilt_image_is_refused(copied: State, project: Path) -> None:
    """Found by whoever uses it, even where size and everything else is the same."""
    pinned = "debian-12@" + json.loads((copied.path / "images/lock.json").read_text())["debian-12"]
    copied.ok("run", "--plan", "--image", pinned, "--", "true", cwd=project)
    (kernel,) = (copied.path / "images").glob("*/kernel")
    kernel.chmod(0o644)
    with kernel.open("r+b") as file:
        file.seek(4096)
        byte = file.read(1)[0]
        file.seek(4096)
        file.write(bytes([byte ^ 1]))
    for image in ("debian-12", pinned):
        answer = copied("run", "--json", "--image", image, "--", "true", cwd=project)
        said = assert_refused(answer, "image_digest_mismatch", 125)
        assert "expected" in said
        assert "found" in said
        assert str(kernel.resolve()) in said
    kernel.unlink()
    answer = copied("run", "--json", "--", "true", cwd=project)
    assert_refused(answer, "image_broken", 125)
    assert copied.ids() == []


def test_a_manifest_of_another_image_is_refused(copied: State, project: Path) -> None:
    (manifest,) = (copied.path / "images").glob("*/manifest.json")
    manifest.chmod(0o644)
    manifest.write_text(manifest.read_text().replace("panic=-1", "panic=-1 init=/bin/sh"))
    answer = copied("run", "--json", "--", "true", cwd=project)
    assert_refused(answer, "image_digest_mismatch", 125)
    assert copied.ids() == []


# --- a plan ---------------------------------------------------------------------------------------


def test_a_plan_is_printed_and_nothing_else(shared_state: State, project: Path) -> None:
    options = ("--name", "planned", "--cpus", "2", "--timeout", "90s", "-e", "SECRET=s3cret")
    plan = shared_state.ok(
        "run", "--plan", "--json", *options, "--", "make", "test", cwd=project
    ).data
    assert (plan["name"], plan["limits"]["cpus"], plan["limits"]["timeout_s"]) == ("planned", 2, 90)
    assert plan["task"]["command"] == ["make", "test"]
    assert plan["image"]["digest"] in shared_state.ok("image", "list", "--json").out
    assert "restrict=on" in plan["domain_xml"]
    shown = shared_state.ok("run", "--plan", *options, "--", "make", "test", cwd=project).out
    assert "make test" in shown
    assert "<domain" in shown
