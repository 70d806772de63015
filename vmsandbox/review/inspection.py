"""Owns how a collected result becomes a change set: compared, inspected, flagged."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO, Literal, Protocol

from vmsandbox import hostile
from vmsandbox.model import AgentCommit, Change, ChangeSet, Limits, TreeEntry

_MAX_LINK_BYTES = 1 << 16


class ResultStore(Protocol):
    """What a review needs of a sandbox's quarantined objects; `vmsandbox.worktree` provides it."""

    def entries(self, tree: str) -> Iterable[TreeEntry]:
        """Every entry of a tree, recursively, folders included, with the modes as stored."""

    def changes(self, base: str, result: str) -> tuple[Change, ...]:
        """The net difference of two trees, renames found, with line counts and sizes."""

    def open_blob(self, oid: str) -> AbstractContextManager[BinaryIO]:
        """One blob's bytes, streamed; many in a row must not start a process each."""

    def diff(self, base: str, result: str, paths: Sequence[bytes], max_bytes: int) -> bytes:
        """A unified diff of these exact paths (none: all), cut after `max_bytes`."""


def inspect_result(
    results: ResultStore,
    *,
    base: tuple[str, str],
    result: tuple[str, str],
    task_digest: str,
    image_digest: str,
    limits: Limits,
    object_format: Literal["sha1", "sha256"] = "sha1",
    agent_commits: tuple[AgentCommit, ...] = (),
    pack_bytes: int = 0,
) -> ChangeSet:
    """Make the change set of a collected result; `base` and `result` are (commit, tree).

    Raises ReviewRefused ``result_hostile`` that names the paths.
    """
    changes = results.changes(base[1], result[1])

    def read_link(oid: str) -> bytes:
        with results.open_blob(oid) as blob:
            return blob.read(_MAX_LINK_BYTES)

    findings = hostile.inspect(
        changes,
        results.entries(result[1]) if changes else (),
        read_link,
        max_paths=limits.result_max_paths,
        max_bytes=limits.result_max_mib * 1024 * 1024,
    )
    hostile.raise_refusals(findings.refusals)
    return ChangeSet(
        digest=ChangeSet.digest_for(base[1], result[1], image_digest, task_digest),
        task_digest=task_digest,
        image_digest=image_digest,
        object_format=object_format,
        base_commit=base[0],
        base_tree=base[1],
        result_commit=result[0],
        result_tree=result[1],
        changes=findings.changes,
        removed_dirs=findings.removed_dirs,
        agent_commits=agent_commits,
        pack_bytes=pack_bytes,
    )
