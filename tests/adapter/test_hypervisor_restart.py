"""Domains while libvirt is killed, down or without memory; in a libvirt that nobody else uses."""

import sys

import pytest

from tests.people import ROOT, Person

STORY = ROOT / "tests/adapter/private_libvirt.py"
CONFIGURATION = "max_size = 16384\nmax_backups = 3\n"


def test_what_happens_when_libvirt_dies(person: Person) -> None:
    """Runs :mod:`tests.adapter.private_libvirt` as an ordinary user with a home of their own."""
    if person.run(["test", "-x", sys.executable]).returncode != 0:
        pytest.skip(f"{person.name} may not run {sys.executable}")
    virtlogd = person.home / ".config/libvirt/virtlogd.conf"
    made = person.run(["mkdir", "-p", str(virtlogd.parent)])
    assert made.returncode == 0
    virtlogd.write_text(CONFIGURATION)
    ran = person.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(STORY),
        ],
        PYTHONPATH=str(ROOT),
        LIBVIRT_AUTOSTART="0",  # down must mean down
        PYTHONDONTWRITEBYTECODE="1",
    )
    print(ran.stdout, ran.stderr)
    assert ran.returncode == 0, ran.stdout
    assert "skipped" not in ran.stdout
