"""Owns what an image says about itself: the manifest, whose canonical JSON is what the digest is
taken of.

A manifest holds the SHA-256 of each part, so the digest covers every byte of the image.
"""

import hashlib
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from vmsandbox.model import Digest, Image, Value, canonical_json, digest_of

MANIFEST = "manifest.json"
KERNEL = "kernel"
INITRAMFS = "initramfs"
ROOTFS = "rootfs.ext4"
PARTS = (KERNEL, INITRAMFS, ROOTFS)

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
"""Names of images: what a file name, a table and a shell take without quotes."""


class Part(Value):
    """One file of an image."""

    sha256: Digest
    size_bytes: int = Field(ge=0, le=64 * 1024**3)


class Manifest(Value):
    """Everything that makes an image what it is; its name is no part of that."""

    version: Literal[1] = 1
    description: str = ""
    architecture: Literal["amd64"] = "amd64"
    cmdline: str
    cloud_init: bool = False
    minimum_memory_mib: int = 256
    recipe: Digest
    packages: dict[str, str] = Field(description="package → version")
    parts: dict[str, Part]

    @field_validator("parts")
    @classmethod
    def _all_parts(cls, parts: dict[str, Part]) -> dict[str, Part]:
        if set(parts) != set(PARTS):
            raise ValueError(f"want the parts {', '.join(PARTS)}")
        return parts

    def canonical(self) -> bytes:
        """The bytes of manifest.json, and of the digest."""
        return canonical_json(self.model_dump(mode="json"))

    def digest(self) -> str:
        return digest_of(self.model_dump(mode="json"))

    def image(self, name: str, folder: Path) -> Image:
        """The value that other rooms work with."""
        return Image(
            name=name,
            digest=self.digest(),
            folder=folder,
            kernel=folder / KERNEL,
            initramfs=folder / INITRAMFS,
            rootfs=folder / ROOTFS,
            rootfs_bytes=self.parts[ROOTFS].size_bytes,
            cmdline=self.cmdline,
            cloud_init=self.cloud_init,
            minimum_memory_mib=self.minimum_memory_mib,
        )


def part_of(path: Path) -> Part:
    """Read a file and say what it is."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Part(sha256=f"sha256:{digest}", size_bytes=path.stat().st_size)


def folder_name(digest: str) -> str:
    """Images lie in folders named by the first 16 hex digits: short enough for a socket's path
    beside them.
    """
    return digest.removeprefix("sha256:")[:16]
