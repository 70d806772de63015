"""Measures how long a build takes and whether two builds of one recipe are the same image.

    python -m benchmarks.image [--recipe debian-12] [--rounds 2] [--out FILE]

Each round builds into a store of its own. Where the digests differ, it tells in which packages and
parts. Emits data, asserts nothing.
"""

import argparse
import platform
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.series import Series
from vmsandbox.images import ImageStore, recipe_folder
from vmsandbox.images.manifest import Manifest


def built(recipe: Path) -> tuple[float, str, Manifest, int]:
    """Seconds, digest, manifest and bytes on disk of one build, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="vms-image-") as folder:
        store = ImageStore(Path(folder))
        started = time.monotonic()
        image = store.build(recipe)
        seconds = time.monotonic() - started
        return seconds, image.digest, store.manifest(image), store.allocated_bytes(image)


def differences(first: Manifest, second: Manifest) -> list[str]:
    """Names of packages and parts that are not the same in both."""
    packages = first.packages.items() ^ second.packages.items()
    parts = [name for name in first.parts if first.parts[name] != second.parts[name]]
    return sorted({name for name, _ in packages}) + parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="debian-12")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    facts = {"recipe": asked.recipe, "kernel": platform.release()}
    series = Series("image", facts, asked.out)
    first: tuple[str, Manifest] | None = None
    for _ in range(asked.rounds):
        seconds, digest, manifest, size = built(recipe_folder(asked.recipe))
        series.add(asked.recipe, "build_s", seconds)
        series.add(asked.recipe, "disk_mib", size / 2**20)
        if first is None:
            first = digest, manifest
            continue
        series.add(asked.recipe, "same_digest", float(digest == first[0]))
        if changed := differences(first[1], manifest):
            print(f"{first[0]} and {digest} differ in: {', '.join(changed)}", file=sys.stderr)
    series.summary()


if __name__ == "__main__":
    main()
