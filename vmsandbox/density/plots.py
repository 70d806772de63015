"""Owns the pictures of an experiment. Knows matplotlib, which is optional, and nothing of guests.

Every picture has the number of guests alive on its x axis, and clone and cold in their own colours.
"""

import importlib.util
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vmsandbox.density.figures import MIB, Outcome, Pass

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"clone": "#0f7b6c", "cold": "#c2571a"}
_INK = "#2b2f33"
_DPI = 144
_WINDOW = 9
_GIB = 1024 * MIB


def available() -> bool:
    """Whether pictures can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(outcome: Outcome) -> Mapping[str, bytes]:
    """File name → PNG. Empty if nothing was measured."""
    if not any(one.samples for one in outcome.passes):
        return {}
    return {
        "memory.png": _picture(outcome, [_host_memory, _guest_memory]),
        "disk.png": _picture(outcome, [_disk]),
        "boot.png": _picture(outcome, [_boot]),
    }


def _picture(outcome: Outcome, panels: Sequence[Callable[["Axes", Pass], None]]) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.8 * len(panels) + 1.6, 4.2), layout="constrained")
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        _dress(axes)
        for one in outcome.passes:
            if one.samples:
                panel(axes, one)
        low, high = axes.get_ylim()
        bottom = low if axes.dataLim.ymin < 0 else 0.0
        axes.set_ylim(bottom, high + 0.08 * (high - bottom))
        axes.set_xlim(0, 1.04 * axes.get_xlim()[1])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=9)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=_DPI, metadata={"Software": None})
    return image.getvalue()


def _dress(axes: "Axes") -> None:
    axes.set_xlabel("guests alive", color=_INK)
    axes.grid(axis="y", color="#e3e6e8", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b8bec4")
    axes.tick_params(colors=_INK, labelsize=9)


def _title(axes: "Axes", text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=_INK, pad=12)


def _host_memory(axes: "Axes", one: Pass) -> None:
    _title(axes, "Memory that the host gave (GiB)")
    alive = [0, *(step.alive for step in one.steps)]
    taken = [0.0, *(step.available_drop_bytes / _GIB for step in one.steps)]
    axes.plot(alive, taken, color=COLOURS[one.start], marker="o", markersize=4, label=one.start)


def _guest_memory(axes: "Axes", one: Pass) -> None:
    _title(axes, "Memory of each guest, settled (MiB)")
    held = [(sample.alive, sample.settled) for sample in one.samples if sample.settled]
    alive = [number for number, _ in held]
    for name, marker, values in (
        ("PSS", "o", [figures.pss_bytes / MIB for _, figures in held]),
        ("private", "x", [figures.private_bytes / MIB for _, figures in held]),
    ):
        axes.plot(
            alive,
            values,
            linestyle="none",
            marker=marker,
            markersize=4,
            alpha=0.8,
            color=COLOURS[one.start],
            label=f"{one.start} {name}",
        )


def _disk(axes: "Axes", one: Pass) -> None:
    _title(axes, "Disk that all guests take (MiB)")
    total, sums = 0, []
    for sample in one.samples:
        total += sample.held.disk_bytes if sample.held else 0
        sums.append(total / MIB)
    alive = [sample.alive for sample in one.samples]
    axes.plot(alive, sums, color=COLOURS[one.start], marker="o", markersize=3, label=one.start)


def _boot(axes: "Axes", one: Pass) -> None:
    _title(axes, "From call to first command result (s)")
    colour = COLOURS[one.start]
    alive = [sample.alive for sample in one.samples]
    seconds = [sample.first_command_s for sample in one.samples]
    axes.plot(alive, seconds, "o", color=colour, markersize=4, alpha=0.45)
    axes.plot(alive, running_median(seconds), color=colour, label=f"{one.start} (running median)")


def running_median(values: Sequence[float]) -> list[float]:
    """Of the values around each, fewer at both ends."""
    half = _WINDOW // 2
    return [
        statistics.median(values[max(0, position - half) : position + half + 1])
        for position in range(len(values))
    ]
