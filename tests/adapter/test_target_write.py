"""How new content gets into a real folder: owners, modes, links, file systems, full disks."""

import contextlib
import errno
import os
import pickle
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.adapter.crafted import Case, Exe, Files, Link, content, fill, put
from tests.repositories import fingerprint
from vmsandbox import review
from vmsandbox.errors import HostProblem, UsageProblem, VmsandboxError
from vmsandbox.model import ResultState
from vmsandbox.review import ApplyConflict
from vmsandbox.target import TargetFolder
from vmsandbox.target.check import ignores_case
from vmsandbox.target.folder import problem

NOBODY = 65534
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes files of other users")
BASE: Files = {b"a": b"a\n", b"sub/b": b"b\n", b"sub/c": b"c\n", b"tool": Exe(b"t\n")}
RESULT: Files = {
    b"a": b"A\n",
    b"sub/b": b"B\n",
    b"new/deep/d": b"d\n",
    b"new/link": Link(b"deep/d"),
    b"tool": Exe(b"T\n"),
    b"tool2": Exe(b"t2\n"),
}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path, BASE, RESULT)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# --- modes and owners -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "file", "executable", "folder"),
    [(0o022, 0o644, 0o755, 0o755), (0o077, 0o600, 0o700, 0o700), (0o002, 0o664, 0o775, 0o775)],
)
def test_the_umask_is_respected(
    case: Case, mask: int, file: int, executable: int, folder: int
) -> None:
    with umask(mask):
        case.apply()
    assert mode(case.target / "new/deep/d") == file
    assert mode(case.target / "tool2") == executable
    assert mode(case.target / "new") == mode(case.target / "new/deep") == folder


@pytest.mark.parametrize("private", [0o600, 0o640, 0o664, 0o666, 0o444])
def test_a_file_keeps_its_own_permissions(case: Case, private: int) -> None:
    (case.target / "a").chmod(private)
    case.apply()
    assert mode(case.target / "a") == private
    assert (case.target / "a").read_bytes() == b"A\n"


@pytest.mark.parametrize(("before", "after"), [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755)])
def test_becoming_executable_follows_who_may_read(tmp_path: Path, before: int, after: int) -> None:
    case = Case(tmp_path, {b"x": b"1"}, {b"x": Exe(b"1")})
    (case.target / "x").chmod(before)
    case.apply()
    assert mode(case.target / "x") == after


@pytest.mark.parametrize(("before", "after"), [(0o755, 0o644), (0o700, 0o600), (0o751, 0o640)])
def test_losing_the_executable_bit_loses_all_three(tmp_path: Path, before: int, after: int) -> None:
    case = Case(tmp_path, {b"x": Exe(b"1")}, {b"x": b"2"})
    (case.target / "x").chmod(before)
    case.apply()
    assert mode(case.target / "x") == after


@ROOT_ONLY
def test_root_writes_as_the_owner_of_the_tree(case: Case) -> None:
    """Who works through sudo must not find files of root's in a worktree of their own."""
    for path in (case.target, *case.target.rglob("*")):
        os.chown(path, 1000, 1001)
    os.chown(case.target / "sub/b", 1234, 1235)
    case.apply()
    owners = {
        str(path.relative_to(case.target)): (path.lstat().st_uid, path.lstat().st_gid)
        for path in case.target.rglob("*")
    }
    assert owners.pop("sub/b") == (1234, 1235)
    assert {"new", "new/deep", "new/deep/d", "new/link", "tool2", "a"} <= owners.keys()
    assert set(owners.values()) == {(1000, 1001)}


# --- links ----------------------------------------------------------------------------------------


def test_a_hard_link_is_not_written_through(case: Case, tmp_path: Path) -> None:
    other = tmp_path / "other-name"
    other.hardlink_to(case.target / "a")
    case.apply()
    assert other.read_bytes() == b"a\n"
    assert (case.target / "a").read_bytes() == b"A\n"


def test_two_hard_linked_files_of_the_tree_are_no_conflict(tmp_path: Path) -> None:
    case = Case(tmp_path, {b"x": b"1", b"y": b"1", b"z": b"1"}, {b"x": b"2", b"z": b"1"})
    (case.target / "y").unlink()
    (case.target / "y").hardlink_to(case.target / "x")
    case.apply()
    assert case.content() == {b"x": b"2", b"z": b"1"}


def test_a_link_in_place_of_the_file_is_never_followed(case: Case, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"a\n")  # the very bytes of the base
    put(case.target, b"a", Link(os.fsencode(victim)))
    with pytest.raises(ApplyConflict, match="now a link"):
        case.apply()
    assert victim.read_bytes() == b"a\n"


def test_a_dangling_link_in_the_way_is_a_conflict(case: Case, tmp_path: Path) -> None:
    put(case.target, b"tool2", Link(os.fsencode(tmp_path / "would-be-made")))
    put(case.target, b"new", Link(b"nowhere"))
    with pytest.raises(ApplyConflict) as caught:
        case.apply()
    assert {c.path: c.kind for c in caught.value.conflicts} == {
        b"tool2": "exists",
        b"new/deep/d": "way",
        b"new/link": "way",
    }
    assert not (tmp_path / "would-be-made").exists()


def test_the_target_itself_may_be_named_through_a_link(case: Case, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(case.target)
    case.apply(target=tmp_path / "alias")
    assert case.content() == RESULT
    assert case.record.target == case.target


# --- file systems ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 256 KiB, another one than the sandbox's."""
    where = tmp_path / "small"
    where.mkdir()
    options = f"size=256k,mode=0755,uid={os.geteuid()}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "vmsandbox-test", where], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", where], check=True)


def remount(where: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", where], check=True)


def put_on(disk: Path, case: Case) -> Path:
    """A copy of the case's folder on another file system."""
    target = disk / "worktree"
    shutil.copytree(case.target, target, symlinks=True)
    return target


def failing(code: str, call: Callable[[], object]) -> VmsandboxError:
    with pytest.raises(HostProblem) as caught:
        call()
    assert caught.value.code == code
    assert caught.value.hint
    return caught.value


def test_a_target_on_another_file_system_works(case: Case, small_disk: Path) -> None:
    target = put_on(small_disk, case)
    case.apply(target=target)
    assert (target / "new/link").read_bytes() == b"d\n"


def test_another_file_system_within_the_target_works(case: Case, tmp_path: Path) -> None:
    inner = case.target / "new"
    inner.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "vmsandbox-test", inner], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        case.apply()
        assert case.content() == RESULT
    finally:
        subprocess.run(["umount", inner], check=True)


def test_a_read_only_target_is_refused_before_the_first_write(case: Case, small_disk: Path) -> None:
    target = put_on(small_disk, case)
    remount(small_disk, "ro")
    before = fingerprint(target)
    failing("target_read_only", lambda: case.apply(target=target))
    assert fingerprint(target) == before
    assert not case.folder.ledger.exists()
    remount(small_disk, "rw")
    assert case.apply(target=target).state is ResultState.APPLIED


def test_a_full_disk_loses_nothing_and_the_same_apply_goes_on(
    tmp_path: Path, small_disk: Path
) -> None:
    big = {b"big%d" % number: os.urandom(60_000) for number in range(3)}
    case = Case(tmp_path, {b"keep": b"1"}, {b"keep": b"2", **big})
    target = put_on(small_disk, case)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 120_000)
    before = fingerprint(target)
    failing("target_full", lambda: case.apply(target=target))
    assert fingerprint(target) == before
    ballast.unlink()
    assert case.apply(target=target).state is ResultState.APPLIED
    assert (target / "big2").read_bytes() == big[b"big2"]


def test_a_full_state_folder_stops_the_apply_before_it_begins(
    tmp_path: Path, small_disk: Path
) -> None:
    case = Case(tmp_path, BASE, RESULT)
    on_small_disk = small_disk / "sandbox"
    shutil.copytree(case.folder.path, on_small_disk)
    case.folder = type(case.folder)(on_small_disk)
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()
    before = fingerprint(case.target)
    failing("host_disk_full", case.apply)
    assert fingerprint(case.target) == before
    (small_disk / "ballast").unlink()
    case.apply()
    assert case.content() == RESULT


# --- permissions ----------------------------------------------------------------------------------


def as_nobody(call: Callable[[], object], groups: Sequence[int] = ()) -> VmsandboxError | None:
    """Call in a child process that is nobody; the error that it ended with."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setgroups(groups)
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            error: BaseException | None = None
            try:
                call()
            except BaseException as caught:
                error = caught
            os.write(writer, pickle.dumps(error))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        result = pickle.loads(file.read())
    os.waitpid(child, 0)
    assert result is None or isinstance(result, VmsandboxError), result
    return result


@pytest.fixture
def nobodys(short_path: Path) -> Iterator[Case]:
    made = Case(short_path, BASE, RESULT)
    for path in (short_path, *short_path.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    yield made
    for path in short_path.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)


@ROOT_ONLY
@pytest.mark.parametrize("folder", [".", "sub"])
def test_a_folder_that_may_not_be_written_is_refused_before_the_first_write(
    nobodys: Case, folder: str
) -> None:
    (nobodys.target / folder).chmod(0o555)
    before = fingerprint(nobodys.target)
    error = as_nobody(nobodys.apply)
    assert error is not None
    assert error.code == "target_not_writable"
    assert fingerprint(nobodys.target) == before
    assert not nobodys.folder.ledger.exists()
    (nobodys.target / folder).chmod(0o755)
    assert as_nobody(nobodys.apply) is None
    assert nobodys.content() == RESULT


@ROOT_ONLY
def test_a_file_that_may_not_be_read_is_refused(nobodys: Case) -> None:
    (nobodys.target / "a").chmod(0)
    error = as_nobody(nobodys.apply)
    assert error is not None
    assert error.code == "target_not_writable"
    assert "a in" in error.message


@ROOT_ONLY
def test_a_user_can_apply_over_a_file_of_somebody_else(nobodys: Case) -> None:
    os.chown(nobodys.target / "a", 1234, 1234)
    assert as_nobody(nobodys.apply) is None
    assert nobodys.content() == RESULT


@ROOT_ONLY
@pytest.mark.parametrize(
    ("before", "in_it", "after"),
    [(0o640, True, 0o640), (0o660, False, 0o600), (0o664, False, 0o644), (0o644, False, 0o644)],
)
def test_a_file_of_a_group_stays_that_groups_or_nobody_gains(
    nobodys: Case, before: int, in_it: bool, after: int
) -> None:
    """A new file is of its owner's first group, which must not see what was not for it."""
    shared = 1234
    os.chown(nobodys.target / "a", NOBODY, shared)
    (nobodys.target / "a").chmod(before)
    assert as_nobody(nobodys.apply, groups=[shared] if in_it else []) is None
    assert mode(nobodys.target / "a") == after
    assert (nobodys.target / "a").stat().st_gid == (shared if in_it else NOBODY)


@ROOT_ONLY
def test_an_immutable_file_stops_the_batch_and_the_same_apply_goes_on(case: Case) -> None:
    """Found out only in the middle: what was written counts, the rest follows."""
    stuck = case.target / "sub/c"
    if subprocess.run(["chattr", "+i", stuck], capture_output=True).returncode:
        pytest.skip("this file system knows no immutable files")
    try:
        failing("target_not_writable", case.apply)
        assert not list(case.target.rglob(".vmsandbox-*"))
        assert "cut short" in " ".join(review.show(case.folder, live=False).problems)
    finally:
        subprocess.run(["chattr", "-i", stuck], check=True)
    case.apply()
    assert case.content() == RESULT


# --- case -----------------------------------------------------------------------------------------

COLLIDING: Files = {b"dir/name": b"1", b"dir/NAME": b"2"}


def test_names_that_differ_only_in_case_are_flagged_and_written_where_case_counts(
    tmp_path: Path,
) -> None:
    case = Case(tmp_path, {b"x": b"1"}, {b"x": b"1", **COLLIDING})
    assert {c.flags for c in case.change_set.changes} == {("case-collision",)}
    case.apply()
    assert case.content() == {b"x": b"1", **COLLIDING}


@pytest.fixture
def caseless(tmp_path: Path) -> Iterator[Path]:
    """A folder whose names are compared without regard to case."""
    image, where = tmp_path / "disk.img", tmp_path / "caseless"
    where.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 16 * 1024 * 1024)
    ways: list[tuple[list[str | Path], list[str | Path]]] = [
        (["mkfs.vfat", image], ["mount", "-o", "loop,fmask=0133", image, where]),
        (["mkfs.ext4", "-q", "-O", "casefold", image], ["mount", "-o", "loop", image, where]),
        (["mkfs.ntfs", "-qF", image], ["lowntfs-3g", "-o", "ignore_case,fmask=0133", image, where]),
    ]
    for make, mount in ways:
        with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
            subprocess.run(make, check=True, capture_output=True)
            subprocess.run(mount, check=True, capture_output=True)
            break
    else:
        pytest.skip("no file system that ignores case: none of vfat, ext4 casefold, lowntfs-3g")
    try:
        folder = where / "worktree"
        folder.mkdir()
        subprocess.run(["chattr", "+F", folder], capture_output=True)  # ext4 wants to be asked
        yield folder
    finally:
        subprocess.run(["umount", where], check=True)


def test_names_that_differ_only_in_case_are_refused_where_case_does_not_count(
    tmp_path: Path, caseless: Path
) -> None:
    case = Case(tmp_path, {b"x": b"1"}, {b"x": b"2", **COLLIDING})
    fill(caseless, {b"x": b"1"})
    before = fingerprint(caseless)
    with pytest.raises(ApplyConflict) as caught:
        case.apply(target=caseless)
    assert {(c.path, c.kind) for c in caught.value.conflicts} == {
        (b"dir/NAME", "case"),
        (b"dir/name", "case"),
    }
    assert fingerprint(caseless) == before
    case.apply(b"x", target=caseless)


@pytest.mark.parametrize("names", [[], [b"123"], [b"letters"], [b"both", b"BOTH", b"more"]])
def test_whether_case_counts_is_asked_of_the_folder_itself(
    tmp_path: Path, names: list[bytes]
) -> None:
    fill(tmp_path / "t", dict.fromkeys(names, b""))
    with TargetFolder(tmp_path / "t") as target:
        assert not ignores_case(target, b"")
    assert len(list((tmp_path / "t").iterdir())) == len(names)


def test_to_look_writes_nothing_even_for_a_moment(tmp_path: Path) -> None:
    case = Case(tmp_path, {b"1": b"1"}, {b"1": b"1", b"x": b"1", b"X": b"2"})
    os.utime(case.target, ns=(0, 0))
    assert review.conflicts(case.folder, case.target) == ()
    assert case.target.stat().st_mtime_ns == 0


# --- at the same moment ---------------------------------------------------------------------------


def test_two_applies_to_one_folder_wait_for_each_other(case: Case) -> None:
    """The second cannot even look while the first is at work."""
    second = threading.Thread(target=case.apply)
    with TargetFolder(case.target):
        second.start()
        second.join(timeout=0.3)
        assert second.is_alive()
        assert case.content() == BASE
    second.join()
    assert case.content() == RESULT


def test_a_target_that_cannot_be_written_down_is_refused(case: Case, tmp_path: Path) -> None:
    target = tmp_path / os.fsdecode(b"t\xff")
    fill(target, BASE)
    with pytest.raises(UsageProblem) as caught:
        case.apply(target=target)
    assert caught.value.code == "target_name"
    assert r"t\xff" in caught.value.message
    assert content(target) == BASE


def test_errors_of_the_target_are_typed() -> None:
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO):
        error = problem(OSError(code, os.strerror(code)), Path("/tree"), b"a\nb")
        assert error.code.startswith("target_")
        assert '"a\\nb" in /tree' in error.message
        assert error.hint
