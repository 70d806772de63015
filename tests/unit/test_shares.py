"""Weights of guests: whose control group a process is in, and what a weight is called where."""

import pytest

from vmsandbox.hypervisor.shares import Group, group_of, is_own, nice_of

NAME = "vmsandbox-5ad0c0de"
SCOPE = "/machine.slice/machine-qemu\\x2d7\\x2dvmsandbox\\x2d5ad0c0de.scope/libvirt/emulator"


def test_version_one_has_a_hierarchy_for_the_cpu() -> None:
    text = f"9:name=systemd:/\n2:cpu,cpuacct:/machine/qemu-7-{NAME}.libvirt-qemu\n0::/\n"
    group = group_of(text)
    assert group == Group(f"/machine/qemu-7-{NAME}.libvirt-qemu", 1024)
    assert is_own(group, 7)
    assert not is_own(group, 70)


def test_version_two_has_one_for_everything() -> None:
    group = group_of(f"0::{SCOPE}\n")
    assert group == Group(SCOPE, 100)
    assert is_own(group, 7)


@pytest.mark.parametrize("text", ["0::/user.slice/session-2.scope\n", "", "9:pids:/x\n"])
def test_a_guest_of_a_session_has_none_of_its_own(text: str) -> None:
    assert not is_own(group_of(text), 7)


def test_nice_levels_weigh_as_the_kernel_has_them() -> None:
    assert [nice_of(weight) for weight in (100, 80, 50, 25, 10, 1)] == [0, 1, 3, 6, 10, 19]
    assert nice_of(100 / 4) == 6, "each of four CPUs a quarter"
    assert nice_of(150) == 0
