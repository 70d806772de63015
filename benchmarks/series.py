"""Owns how benchmarks are asked and report: conditions first, one JSON line per figure, medians at
the end.

Knows no benchmark. Figures taken without KVM say so in their conditions and are never mixed with
others.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vmsandbox.sandbox import Rooms


def conditions(rooms: Rooms, image: str) -> dict[str, Any]:
    """Everything that a reader needs to compare: host, accelerator, versions, image."""
    found = rooms.images.resolve(image)
    host = rooms.host_facts(found)
    return {
        "cpu": host.cpu_model,
        "cpus": host.cpus,
        "memory_bytes": host.memory_bytes,
        "kernel": host.kernel,
        "accelerator": host.accelerator.value,
        "libvirt": host.libvirt_version,
        "qemu": host.qemu_version,
        "uri": host.libvirt_uri,
        "image": found.digest,
        "git": subprocess.check_output(["git", "--version"], text=True).split()[2],
    }


def options(doc: str | None, **numbers: float) -> argparse.ArgumentParser:
    """What every benchmark may be asked: the image, a file for the figures, and these `numbers`, an
    option of its name for each with this default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--image", default="debian-12")
    parser.add_argument("--out", type=Path)
    return parser


def tell(text: str) -> None:
    """What happens beside the figures: why a guest was started cold, for example."""
    print(text, file=sys.stderr, flush=True)


class Series:
    """Collects figures by (subject, figure) and prints each as a JSON line."""

    def __init__(self, name: str, facts: dict[str, Any], out: Path | None = None) -> None:
        self.name = name
        self._values: dict[tuple[str, str], list[float]] = {}
        self._file = out.open("w") if out else sys.stdout
        self._line({"benchmark": name, "conditions": facts, "at": time.strftime("%F %T")})

    @classmethod
    def of(cls, name: str, asked: argparse.Namespace, *facts: str) -> "Series":
        """A series on this host, with these of the options among its conditions."""
        with Rooms.open() as rooms:
            found = conditions(rooms, asked.image)
        return cls(name, found | {fact: getattr(asked, fact) for fact in facts}, asked.out)

    def add(self, subject: str, figure: str, value: float) -> None:
        """One measured value; the figure's name holds its unit."""
        self._values.setdefault((subject, figure), []).append(value)
        self._line({"subject": subject, "figure": figure, "value": round(value, 6)})

    @contextmanager
    def timed(self, subject: str, figure: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        started = time.monotonic()
        yield
        self.add(subject, figure, time.monotonic() - started)

    def median(self, subject: str, figure: str) -> float:
        """The median of what was added."""
        return statistics.median(self._values[subject, figure])

    def summary(self) -> None:
        """Medians, minima and maxima on stderr, for people."""
        width = max(len(f"{s} {f}") for s, f in self._values) + 2
        for (subject, figure), values in self._values.items():
            middle = statistics.median(values)
            print(
                f"{subject + ' ' + figure:<{width}} median {middle:10.3f}"
                f"  min {min(values):10.3f}  max {max(values):10.3f}  n {len(values)}",
                file=sys.stderr,
            )

    def _line(self, value: dict[str, Any]) -> None:
        print(json.dumps(value), file=self._file, flush=True)
