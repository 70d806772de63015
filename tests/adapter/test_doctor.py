"""`vmsandbox doctor` as a person calls it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes import State, short_folder
from tests.warm import WarmState

pytestmark = pytest.mark.usefixtures("host")


@pytest.fixture(scope="module")
def doctor() -> Iterator[State]:
    """One state folder for all, as the accelerator is probed anew in each."""
    path = short_folder()
    yield WarmState(path)
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def checks(doctor: State) -> Any:
    return doctor.ok("doctor", "--json").data


def test_every_check_is_in_the_json(checks: Any) -> None:
    assert checks["ok"] is True
    assert checks["mended"] == []
    statuses = {check["name"]: check["status"] for check in checks["checks"]}
    assert statuses["libvirt"] == "ok"
    assert set(statuses.values()) <= {"ok", "warn"}
    assert {"programs", "qemu", "accelerator", "state folder", "disk"} <= statuses.keys()


def test_the_text_names_each_check_and_its_hint(doctor: State, checks: Any) -> None:
    answer = doctor.ok("doctor")
    words = " ".join(answer.out.split())
    for check in checks["checks"]:
        assert check["name"] in words
        if check["hint"]:
            assert " ".join(check["hint"].split()) in words


def test_a_host_that_cannot_run_guests_is_1(short_path: Path) -> None:
    deep = short_path / ("d" * 100)
    answer = WarmState(deep)("doctor", "--json")
    assert answer.code == 1
    assert answer.data["ok"] is False
    (failed,) = (check for check in answer.data["checks"] if check["status"] == "fail")
    assert failed["name"] == "state folder"
    assert not deep.exists(), "an examination makes nothing"


def test_mending_again_mends_nothing(doctor: State) -> None:
    assert doctor.ok("doctor", "--fix", "--json").data["mended"] == []


def test_contradicting_flags_are_refused(doctor: State) -> None:
    answer = doctor("doctor", "--fix", "--stop", "--json")
    assert answer.code == 2
    assert answer.error["code"] == "flags_contradict"
