"""Domain XML: the whole of it for a cold start and for a clone, and what must never vary.

After an intended change: ``VMSANDBOX_GOLDEN=write pytest tests/unit/test_domain.py``, then read the
difference.
"""

import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmsandbox.domain import DomainSpec, Layer, SharedMemory, domain_xml, forward
from vmsandbox.errors import HostProblem
from vmsandbox.model import Accelerator, Endpoint

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path("/var/lib/vmsandbox")
FOLDER = ROOT / "sandboxes/5ad0c0de"
IMAGE = ROOT / "images/0123456789abcdef"
TEMPLATE = ROOT / "templates/fedcba98"
ARGUMENT = ".//{http://libvirt.org/schemas/domain/qemu/1.0}arg"


def cold(**changes: Any) -> DomainSpec:
    spec = DomainSpec(
        id="5ad0c0de",
        name="vmsandbox-5ad0c0de",
        uuid="6f1c1b1e-7d1c-4c0e-9a52-3b8f7e1f0a11",
        owner_uid=0,
        state_root=ROOT,
        accelerator=Accelerator.TCG,
        machine="pc-q35-7.2",
        emulator=Path("/usr/bin/qemu-system-x86_64"),
        vcpus=2,
        memory_mib=1024,
        kernel=IMAGE / "kernel",
        initramfs=IMAGE / "initramfs",
        cmdline="root=/dev/vda rw quiet",
        disk_mib=20480,
        disk=FOLDER / "overlay.qcow2",
        backing=(Layer(path=IMAGE / "rootfs.ext4", format="raw"),),
        seed_iso=FOLDER / "seed.iso",
        seed_socket=FOLDER / "seed.sock",
        console=FOLDER / "console.log",
        ssh=Endpoint(address="127.1.2.3", port=2222),
        dac_label="+64055:+64055",
    )
    return spec.model_copy(update=changes)


def clone(**changes: Any) -> DomainSpec:
    """A user's clone under KVM, of a template whose disk has the image's below it."""
    disk = Layer(path=TEMPLATE / "disk.qcow2", format="qcow2")
    memory = SharedMemory(path=TEMPLATE / "ram", shared=False, readonly=True)
    return cold(
        accelerator=Accelerator.KVM,
        owner_uid=1000,
        backing=(disk, *cold().backing),
        seed_iso=None,
        ssh=None,
        dac_label=None,
        memory_file=memory,
        incoming_monitor=FOLDER / "incoming" / "monitor",
    ).model_copy(update=changes)


@pytest.mark.parametrize(("name", "spec"), [("cold", cold()), ("clone", clone())])
def test_the_whole_domain(name: str, spec: DomainSpec) -> None:
    golden = GOLDEN / f"domain-{name}.xml"
    if os.environ.get("VMSANDBOX_GOLDEN") == "write":
        golden.write_text(domain_xml(spec))
    assert domain_xml(spec) == golden.read_text()


def addresses(spec: DomainSpec) -> dict[str, str]:
    """Where each device sits."""
    found = {}
    for device in ET.fromstring(domain_xml(spec)).iterfind("devices/*"):
        address, target = device.find("address"), device.find("target")
        if address is not None:
            name = target.get("dev") or target.get("name") if target is not None else None
            found[name or device.tag] = str(sorted(address.attrib.items()))
    return found


def test_no_device_moves_when_another_is_missing() -> None:
    with_seed, without = addresses(cold()), addresses(clone())
    assert with_seed.keys() - without.keys() == {"vdb"}
    assert without.items() <= with_seed.items()
    assert len(set(with_seed.values())) == len(with_seed)


@pytest.mark.parametrize("spec", [cold(), clone()])
def test_the_network_has_no_way_out(spec: DomainSpec) -> None:
    """The one network device is QEMU's own with restrict=on; libvirt is told of none."""
    root = ET.fromstring(domain_xml(spec))
    arguments = [argument.get("value", "") for argument in root.iterfind(ARGUMENT)]
    (netdev,) = (value for value in arguments if value.startswith("user,"))
    assert "restrict=on" in netdev.split(",")
    assert sum("netdev" in value for value in arguments) == 2  # -netdev, and the device on it
    assert root.find("devices/interface") is None


@pytest.mark.parametrize("spec", [cold(), clone()])
def test_there_is_nothing_to_share_or_to_look_at(spec: DomainSpec) -> None:
    devices = ET.fromstring(domain_xml(spec)).find("devices")
    assert devices is not None
    kinds = {device.tag for device in devices}
    assert not kinds & {"filesystem", "graphics", "video", "hostdev", "redirdev", "shmem", "vsock"}
    assert devices.find("memballoon").attrib == {"model": "none"}  # type: ignore[union-attr]


def test_the_disk_is_throttled_as_asked() -> None:
    plain = ET.fromstring(domain_xml(cold()))
    assert plain.find("devices/disk/iotune") is None
    spec = cold(disk_mib_s=300, disk_iops=20_000)
    (bounds,) = ET.fromstring(domain_xml(spec)).iterfind("devices/disk/iotune")
    assert {one.tag: one.text for one in bounds} == {
        "total_bytes_sec": str(300 * 1024 * 1024),
        "total_iops_sec": "20000",
    }
    (only,) = ET.fromstring(domain_xml(cold(disk_iops=5))).iterfind("devices/disk/iotune")
    assert [one.tag for one in only] == ["total_iops_sec"]


path_text = st.text(
    st.characters(
        min_codepoint=0x20, exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"
    ),
    min_size=1,
    max_size=20,
).map(lambda text: text.replace("/", "_"))


@given(path_text)
def test_any_name_survives_as_it_is(name: str) -> None:
    root = Path("/") / name
    spec = cold(state_root=root, kernel=root / "kernel", disk=root / "disk", seed_socket=Path("/s"))
    parsed = ET.fromstring(domain_xml(spec))
    assert parsed.findtext("os/kernel") == str(root / "kernel")
    source = parsed.find("devices/disk/source")
    assert source is not None
    assert source.get("file") == str(root / "disk")
    mark = parsed.find("metadata/*")
    assert mark is not None
    assert mark.get("state") == str(root)


def test_a_comma_in_a_path_does_not_end_a_qemu_option() -> None:
    memory = SharedMemory(path=Path("/a,share=on/ram"), shared=False)
    root = ET.fromstring(domain_xml(clone(memory_file=memory)))
    (value,) = (
        value
        for argument in root.iterfind(ARGUMENT)
        if (value := argument.get("value", "")).startswith("memory-backend-file")
    )
    assert ",mem-path=/a,,share=on/ram,share=off" in value


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "a\x1bb", "a\udcffb", "a\ufffeb"])
def test_a_path_that_xml_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(HostProblem) as problem:
        domain_xml(cold(disk=Path("/") / name))
    assert problem.value.code == "path_unsuitable"
    below = Layer(path=Path("/") / name, format="raw")
    with pytest.raises(HostProblem):
        domain_xml(cold(backing=(below,)))


def test_a_path_that_a_socket_cannot_have_is_refused() -> None:
    longest = Path("/" + "s" * 106)
    assert str(longest) in domain_xml(cold(seed_socket=longest))
    with pytest.raises(HostProblem) as problem:
        domain_xml(cold(seed_socket=Path(f"{longest}s")))
    assert problem.value.code == "path_unsuitable"
    assert problem.value.hint


def test_forward_is_spelled_as_qemu_wants_it() -> None:
    assert forward(Endpoint(address="127.1.2.3", port=3000), 80) == "tcp:127.1.2.3:3000-:80"
