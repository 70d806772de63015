"""Owns how a checked batch becomes files: written beside, flushed, then renamed one by one.

Every path goes from its old object to its new one in one rename or unlink, so a batch that was cut
short leaves each path either as in the base or as in the result, and doing it again finishes it.
What is written beside has names that the caller knows before, so that it can be found and removed.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import BinaryIO

from vmsandbox.errors import HostProblem, NegativeAnswer, VmsandboxError
from vmsandbox.selection import parents
from vmsandbox.target.check import Batch, Ready
from vmsandbox.target.folder import BlockedError, TargetFolder, lstat, problem, seen
from vmsandbox.text import quote_path

OpenBlob = Callable[[str], AbstractContextManager[BinaryIO]]
"""Gives the bytes of a blob by its git name."""

_CHUNK_BYTES = 1024 * 1024
_FLUSHED_TOGETHER = 64
_ACL = "system.posix_acl_access"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def staging_paths(batch: Batch, token: str) -> dict[bytes, bytes]:
    """Where :func:`write` will put new content first: path → a path beside it."""
    return {
        item.step.path: _join(item.stage_in, f".vmsandbox-{token}-{number}".encode())
        for number, item in enumerate(batch.ready)
        if item.step.new_oid is not None
    }


def stage(
    target: TargetFolder, batch: Batch, staging: Mapping[bytes, bytes], open_blob: OpenBlob
) -> None:
    """Write all new content of a batch beside where it belongs, flushed. Nothing is changed yet.

    Raises HostProblem ``target_full``, ``target_read_only``, ``target_not_writable``,
    ``target_failed`` or ``result_damaged``; then nothing of it is left.
    """
    if batch.conflicts:
        raise ValueError("a batch with conflicts is never written")
    try:
        _ask_permission(target, batch)
        items = iter([item for item in batch.ready if item.step.new_oid is not None])
        while group := tuple(islice(items, _FLUSHED_TOGETHER)):
            _write_beside(target, group, staging, open_blob)
    except BaseException:
        with contextlib.suppress(VmsandboxError):
            discard(target, staging.values())
        raise


def commit(target: TargetFolder, batch: Batch, staging: Mapping[bytes, bytes]) -> None:
    """Put a staged batch in place.

    Raises NegativeAnswer ``apply_conflict`` if somebody edits a path at this very moment, and
    HostProblem as :func:`stage`. What was not put in place is removed; doing the batch again,
    from the check on, finishes it.
    """
    try:
        for item in batch.ready:
            _expect_unchanged(target, item)
        _remove_old(target, batch)
        for item in batch.ready:
            if item.step.new_oid is not None:
                _make_folders(target, item.step.path)
                _rename(target, item, staging[item.step.path])
        _flush_folders(target, batch)
    except BaseException:
        with contextlib.suppress(VmsandboxError):
            discard(target, staging.values())
        raise


def discard(target: TargetFolder, staged: Iterable[bytes]) -> None:
    """Remove what was written beside and never renamed; it may be gone already."""
    for path in staged:
        with (
            contextlib.suppress(BlockedError),
            target.parent(path) as (folder, name),
            target.translated(path),
            contextlib.suppress(FileNotFoundError),
        ):
            os.unlink(name, dir_fd=folder)


def _ask_permission(target: TargetFolder, batch: Batch) -> None:
    """Find out before the first write whether every folder concerned can be written."""
    folders = {_above(item.step.path) for item in batch.ready}
    for path in folders | {item.stage_in for item in batch.ready}:
        with contextlib.suppress(BlockedError), target.folder(path) as folder:
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True):
                read_only = os.fstatvfs(folder).f_flag & os.ST_RDONLY
                code = errno.EROFS if read_only else errno.EACCES
                raise problem(OSError(code, os.strerror(code)), target.path, path or b".")


# --- writing beside -------------------------------------------------------------------------------


def _write_beside(
    target: TargetFolder,
    items: Sequence[Ready],
    staging: Mapping[bytes, bytes],
    open_blob: OpenBlob,
) -> None:
    with contextlib.ExitStack() as stack:
        written: list[int] = []
        for item in items:
            beside = staging[item.step.path]
            with target.parent(beside) as (folder, name), target.translated(item.step.path):
                if stat.S_ISLNK(item.step.new_mode):
                    _stage_link(item, folder, name, open_blob)
                else:
                    descriptor = os.open(name, _CREATE, _new_mode(item), dir_fd=folder)
                    stack.callback(os.close, descriptor)
                    _fill(item, descriptor, open_blob)
                    _dress(item, descriptor, folder)
                    written.append(descriptor)
            if target.look(beside).oid != item.step.new_oid:
                raise HostProblem(
                    "result_damaged",
                    f"what is stored of {quote_path(item.step.path)} is not what was collected",
                    hint="collect the result again, or delete the sandbox",
                )
        _flush(written)


def _stage_link(item: Ready, folder: int, name: bytes, open_blob: OpenBlob) -> None:
    with open_blob(str(item.step.new_oid)) as blob:
        os.symlink(blob.read(), name, dir_fd=folder)
    if os.geteuid() == 0:
        uid, gid = _owner(item, folder)
        os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)


def _fill(item: Ready, descriptor: int, open_blob: OpenBlob) -> None:
    with (
        open_blob(str(item.step.new_oid)) as blob,
        open(descriptor, "wb", closefd=False) as file,
    ):
        shutil.copyfileobj(blob, file, _CHUNK_BYTES)


def _new_mode(item: Ready) -> int:
    """For a new file; the umask (or a default ACL) takes away what it must, as for any program."""
    return 0o777 if item.step.new_mode & 0o100 else 0o666


def _dress(item: Ready, descriptor: int, folder: int) -> None:
    """Give a file beside the owner and mode it shall have; set-id bits are never among them."""
    if os.geteuid() == 0:
        os.fchown(descriptor, *_owner(item, folder))
    old = item.found.status
    if old is None or not stat.S_ISREG(old.st_mode):
        return
    _copy_acl(folder, item.step.path.rpartition(b"/")[2], descriptor)
    mode = old.st_mode & 0o777
    if not _given_to(descriptor, old.st_gid):
        mode = mode & 0o707 | (mode & 0o007) << 3  # another group gains nothing
    if item.step.new_mode & 0o100 and not mode & 0o100:
        mode |= (mode & 0o444) >> 2
    elif not item.step.new_mode & 0o100:
        mode &= ~0o111
    os.fchmod(descriptor, mode)


def _copy_acl(folder: int, name: bytes, descriptor: int) -> None:
    """Without its list, what a mode says of the group is what anybody on the list may do."""
    old = None
    with contextlib.suppress(OSError):  # it has none, or the file system knows none
        old = os.getxattr(b"/proc/self/fd/%d/" % folder + name, _ACL, follow_symlinks=False)
    if old is not None:
        os.setxattr(descriptor, _ACL, old)
        return
    with contextlib.suppress(OSError):
        os.removexattr(descriptor, _ACL)  # that of the folder's default


def _given_to(descriptor: int, group: int) -> bool:
    """Whether a file is of this group now: its owner may choose among their own groups."""
    with contextlib.suppress(OSError):
        os.fchown(descriptor, -1, group)
    return os.fstat(descriptor).st_gid == group


def _owner(item: Ready, folder: int) -> tuple[int, int]:
    """Whose the new object must be: as what it replaces, else as the folder it lies in.

    So a user who works through sudo finds no file of root's in a tree of their own.
    """
    status = item.found.status or os.fstat(folder)
    return status.st_uid, status.st_gid


def _flush(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:  # start all writes before waiting for the first
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    for descriptor in descriptors:
        os.fsync(descriptor)


# --- putting in place -----------------------------------------------------------------------------


def _remove_old(target: TargetFolder, batch: Batch) -> None:
    for item in batch.ready:
        if item.step.new_oid is None:
            with target.parent(item.step.path) as (folder, name):
                _expect_same(item, lstat(folder, name))
                with target.translated(item.step.path):
                    os.unlink(name, dir_fd=folder)
    for path in batch.doomed_dirs:
        _remove_folder(target, path)


def _rename(target: TargetFolder, item: Ready, beside: bytes) -> None:
    with (
        target.parent(beside) as (source, staged),
        target.parent(item.step.path) as (folder, name),
        target.translated(item.step.path),
    ):
        status = lstat(folder, name)
        if item.found.kind == "folder":  # it was removed a moment ago
            _expect(status is None, item)
        else:
            _expect_same(item, status)
        os.rename(staged, name, src_dir_fd=source, dst_dir_fd=folder)


def _expect_unchanged(target: TargetFolder, item: Ready) -> None:
    try:
        with target.parent(item.step.path) as (folder, name):
            _expect_same(item, lstat(folder, name))
    except BlockedError:
        _expect(item.found.kind == "missing", item)


def _expect_same(item: Ready, status: os.stat_result | None) -> None:
    if item.found.kind == "folder":
        _expect(status is not None and stat.S_ISDIR(status.st_mode), item)
    else:
        _expect((seen(status) if status is not None else None) == item.found.seen, item)


def _expect(holds: bool, item: Ready) -> None:
    if not holds:
        raise NegativeAnswer(
            "apply_conflict",
            f"{quote_path(item.step.path)} was edited while it was being applied",
            hint="run the same apply again",
        )


def _remove_folder(target: TargetFolder, path: bytes) -> None:
    with (
        contextlib.suppress(BlockedError),
        target.parent(path) as (folder, name),
        target.translated(path),
    ):
        try:
            os.rmdir(name, dir_fd=folder)
        except OSError as error:  # gone already, or something was put into it at this moment
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY):
                raise


def _make_folders(target: TargetFolder, path: bytes) -> None:
    missing: list[bytes] = []
    for above in parents(path):
        try:
            with target.folder(above):
                break
        except BlockedError:
            missing.append(above)
    for folder_path in reversed(missing):
        with target.parent(folder_path) as (folder, name), target.translated(folder_path):
            os.mkdir(name, 0o777, dir_fd=folder)
            if os.geteuid() == 0:
                owner = os.fstat(folder)
                os.chown(name, owner.st_uid, owner.st_gid, dir_fd=folder, follow_symlinks=False)


def _flush_folders(target: TargetFolder, batch: Batch) -> None:
    """Make renames and removals durable. The first flush of a journal carries all the others."""
    touched = {_above(item.step.path) for item in batch.ready}
    moved = (i.step.path for i in batch.ready if i.found.status is None or i.step.new_oid is None)
    touched |= {above for path in moved for above in (*parents(path), b"")}
    for path in touched:
        with (
            contextlib.suppress(BlockedError, OSError),  # gone, unreadable, or cannot be flushed
            target.folder(path) as folder,
        ):
            readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
            try:
                os.fsync(readable)
            finally:
                os.close(readable)


def _above(path: bytes) -> bytes:
    return path.rpartition(b"/")[0]


def _join(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name
