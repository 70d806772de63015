"""Made-up outcomes of density experiments."""

from vmsandbox.density.figures import (
    MIB,
    Conditions,
    Failed,
    Held,
    HostReading,
    Outcome,
    Pass,
    Sample,
    Start,
    Step,
    StoppedBy,
    summarize,
)
from vmsandbox.model import Failure

GIB = 1024 * MIB
DIGEST = f"sha256:{'0' * 64}"
HOST = HostReading(
    available_bytes=20 * GIB, total_bytes=24 * GIB, swap_used_bytes=0, memory_pressure=0.0
)


def conditions(*, image: str = "debian-12", workload: str | None = None) -> Conditions:
    return Conditions(
        vmsandbox="0",
        cpu="a CPU",
        cpus=2,
        memory_bytes=24 * GIB,
        kernel="6.1",
        accelerator="tcg",
        qemu="7.2.0",
        libvirt="9.0.0",
        libvirt_uri="qemu:///session",
        machine="pc-q35-7.2",
        image=image,
        image_digest=DIGEST,
        guest_cpus=1,
        guest_memory_mib=512,
        step=4,
        hold_s=5,
        workload=workload,
    )


def sample(
    alive: int, *, start: Start = "clone", each_mib: int = 80, idle: float = 0.004
) -> Sample:
    held = Held(
        pss_bytes=(each_mib + 20) * MIB,
        private_bytes=(each_mib - 10) * MIB,
        rss_bytes=200 * MIB,
        disk_bytes=MIB,
    )
    return Sample(
        start=start,
        id=f"{alive:08x}",
        name=f"density-{alive:03}",
        alive=alive,
        first_command_s=1.0 + alive / 100,
        settled=held,
        idle_cpu_share=idle,
        answered=True,
    )


def one_pass(
    guests: int,
    *,
    start: Start = "clone",
    each_mib: int = 80,
    idle: float = 0.004,
    stopped_by: StoppedBy = StoppedBy.MAX,
    failed: tuple[Failed, ...] = (),
) -> Pass:
    """As many guests, of which each took `each_mib` of the host's memory."""
    taken = guests * each_mib * MIB
    step = Step(
        start=start,
        alive=guests,
        available_drop_bytes=taken,
        host=HOST.model_copy(update={"available_bytes": HOST.available_bytes - taken}),
        manager_rss_bytes=60 * MIB,
    )
    return Pass(
        start=start,
        attempted=guests,
        stopped_by=stopped_by,
        before=HOST,
        samples=tuple(
            sample(number, start=start, each_mib=each_mib, idle=idle)
            for number in range(1, guests + 1)
        ),
        steps=(step,) if guests else (),
        failures=failed,
    )


def failed(name: str, message: str) -> Failed:
    failure = Failure(code="boot_timeout", message=message, phase="start")
    return Failed(start="clone", name=name, failure=failure)


def outcome(*passes: Pass, image: str = "debian-12", workload: str | None = None) -> Outcome:
    summaries = {
        one.start: summary
        for one in passes
        if (summary := summarize(one, cpus=2, disk_free_bytes=100 * GIB))
    }
    return Outcome(
        conditions=conditions(image=image, workload=workload),
        passes=passes,
        summary=summaries,
        manager_rss_bytes=60 * MIB,
    )
