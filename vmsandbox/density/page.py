"""Owns the one page of a report: HTML that needs no other file. Pure.

Whatever a guest or the host said is made printable and escaped here.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from vmsandbox.density.figures import MIB, Conditions, Outcome, Pass, Sample, Summary, Work
from vmsandbox.text import printable

_STYLE = """
:root { color-scheme: light; --ink: #2b2f33; --soft: #667078; --line: #e3e6e8; --clone: #0f7b6c;
  --cold: #c2571a; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; margin: 3rem auto;
  max-width: 60rem; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.6rem 0 .6rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem;
  margin: 1rem 0; }
.card { border: 1px solid var(--line); border-top: 4px solid var(--clone); border-radius: 6px;
  padding: .8rem 1rem; } .cold .card { border-top-color: var(--cold); }
.card b { display: block; font-size: 1.55rem; font-variant-numeric: tabular-nums; }
img { display: block; max-width: 100%; margin: 1rem 0; border: 1px solid var(--line);
  border-radius: 6px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: left; padding: .28rem .8rem .28rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; } td.n, th.n { text-align: right; } .wide { overflow-x: auto; }
code { background: #f3f5f6; padding: .1rem .3rem; border-radius: 3px; }
"""
_REASONS = {
    "max": "the number asked for was reached",
    "memory_guard": "one more step might have used up the memory that the host keeps for itself",
    "swap_guard": "the host began to swap",
    "pressure_guard": "processes of the host waited for memory",
    "failures": "guests failed",
    "interrupted": "it was interrupted",
}


def render(outcome: Outcome, pictures: Mapping[str, bytes], install: str) -> str:
    """The page. `install` is the command that brings what draws pictures, if it is missing."""
    parts = [_head(outcome)]
    parts += [
        _cards(start, outcome.summary[start])
        for start in ("clone", "cold")
        if start in outcome.summary
    ]
    parts += [_picture(name, image) for name, image in pictures.items()]
    if install:
        note = f"Pictures need matplotlib: <code>{_text(install)}</code>"
        parts.append(f'<p class="soft">{note}</p>')
    parts.append(_summary(outcome))
    parts.append(_failures(outcome))
    parts.append(_conditions(outcome.conditions))
    parts += [_steps(one) + _guests(one) for one in outcome.passes if one.samples]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>vmsandbox density</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


# --- parts ----------------------------------------------------------------------------------------


def _head(outcome: Outcome) -> str:
    c = outcome.conditions
    ended = "; ".join(
        f"{one.start}: {one.completed} of {one.attempted} did all that was asked, stopped because"
        f" {_REASONS[one.stopped_by]}"
        for one in outcome.passes
    )
    size = f"{c.guest_cpus} CPU, {c.guest_memory_mib} MiB"
    host = f"{c.cpus} × {c.cpu}, {_gib(c.memory_bytes)}, {c.accelerator}"
    return (
        "<h1>What one more virtual machine costs</h1>"
        f'<p class="soft">{_text(c.image)} ({_text(size)}) on {_text(host)},'
        f" {c.at:%Y-%m-%d %H:%M} UTC</p><p>{_text(ended)}.</p>"
    )


def _cards(start: str, one: Summary) -> str:
    cards = (
        (_mib(one.cost_bytes), f"memory of the host for one more {start}"),
        (f"{one.first_command_s:.2f} s", "from call to first command result, median"),
        (_mib(one.disk_bytes), "disk of a fresh guest"),
        (str(one.fits), f"would fit on this host, limited by {one.limited_by}"),
    )
    inside = "".join(f'<div class="card"><b>{_text(b)}</b>{_text(t)}</div>' for b, t in cards)
    return f'<div class="cards {start}">{inside}</div>'


def _picture(name: str, image: bytes) -> str:
    data = base64.b64encode(image).decode()
    return f'<img alt="{_text(name)}" src="data:image/png;base64,{data}">'


def _summary(outcome: Outcome) -> str:
    names = [name for name in ("clone", "cold") if name in outcome.summary]
    if not names:
        return "<h2>Summary</h2><p>No guest was measured.</p>"
    columns = [summary_rows(outcome.summary[name]) for name in names]
    rows = [
        [label, *(column[position][1] for column in columns)]
        for position, (label, _) in enumerate(columns[0])
    ]
    return "<h2>Summary</h2>" + _table(["", *names], rows)


def summary_rows(one: Summary) -> list[tuple[str, str]]:
    """(what, value) as people read it; medians where nothing else is said."""
    unknown = "not known"
    idle = one.idle_cpu_share
    return [
        ("guests measured", str(one.guests)),
        ("one more takes", f"{_mib(one.cost_bytes)} of the host's memory"),
        (
            "MemAvailable, per guest",
            unknown if one.available_bytes is None else _mib(one.available_bytes),
        ),
        ("PSS of its QEMU", _mib(one.pss_bytes)),
        ("private memory of its QEMU", _mib(one.private_bytes)),
        ("disk", _mib(one.disk_bytes)),
        ("first command", f"{one.first_command_s:.2f} s (p95 {one.first_command_p95_s:.2f} s)"),
        (
            "first command p95, first and last quarter",
            f"{one.first_quarter_p95_s:.2f} s, {one.last_quarter_p95_s:.2f} s",
        ),
        ("the workload takes", _work(one.work) if one.work else "no workload"),
        ("CPU while idle", unknown if idle is None else f"{100 * idle:.2f} % of a core"),
        ("would fit on this host", f"{one.fits} (limited by {one.limited_by})"),
        (
            "CPU of that many, idle",
            unknown
            if one.fits_cpu_share is None
            else f"{100 * one.fits_cpu_share:.0f} % of the host's",
        ),
    ]


def _work(work: Work) -> str:
    memory, disk = _mib(work.private_bytes), _mib(work.disk_bytes)
    return f"{memory} of private memory, {disk} of disk, {work.seconds:.1f} s"


def _failures(outcome: Outcome) -> str:
    if not outcome.failures:
        return ""
    rows = [
        [failed.name, failed.start, failed.failure.phase, failed.failure.code,
         failed.failure.message]
        for failed in outcome.failures
    ]  # fmt: skip
    return "<h2>Failures</h2>" + _table(["guest", "start", "phase", "code", "what"], rows)


def condition_rows(c: Conditions) -> list[tuple[str, str]]:
    """(what, value) as people read it."""
    return [
        ("host", f"{c.cpus} × {c.cpu}, {_gib(c.memory_bytes)}"),
        ("accelerator", c.accelerator),
        ("QEMU", f"{c.qemu}, {c.machine}"),
        ("libvirt", f"{c.libvirt}, {c.libvirt_uri}"),
        ("kernel", c.kernel),
        ("image", f"{c.image} {c.image_digest}"),
        ("guest", f"{c.guest_cpus} CPU, {c.guest_memory_mib} MiB"),
        ("experiment", f"steps of {c.step}, settled for {c.hold_s:g} s"),
        ("workload", c.workload or "none: idle guests"),
        ("vmsandbox", c.vmsandbox),
    ]


def _conditions(c: Conditions) -> str:
    return "<h2>Conditions</h2>" + _table([], [list(row) for row in condition_rows(c)])


def _steps(one: Pass) -> str:
    rows = [
        [
            str(step.alive),
            _mib(step.available_drop_bytes),
            _mib(step.available_drop_bytes // max(step.alive, 1)),
            _gib(step.host.available_bytes),
            "" if step.host.memory_pressure is None else f"{step.host.memory_pressure:.2f} %",
            _mib(step.manager_rss_bytes),
        ]
        for step in one.steps
    ]
    titles = ["alive", "taken of MemAvailable", "per guest", "MemAvailable", "memory pressure"]
    heading = f"<h2>Steps: {one.start}</h2>"
    return heading + _table([*titles, "vmsandbox itself"], rows, numbers=True)


def _guests(one: Pass) -> str:
    titles = ["alive", "first command", "PSS", "private", "disk", "idle CPU", "answered"]
    rows = [_guest(sample) for sample in one.samples]
    return f"<h2>Guests: {one.start}</h2>" + _table(titles, rows, numbers=True)


def _guest(sample: Sample) -> list[str]:
    held, idle = sample.held, sample.idle_cpu_share
    return [
        str(sample.alive),
        f"{sample.first_command_s:.2f} s",
        *(
            [_mib(held.pss_bytes), _mib(held.private_bytes), _mib(held.disk_bytes)]
            if held
            else ["", "", ""]
        ),
        "" if idle is None else f"{100 * idle:.2f} %",
        "yes" if sample.answered else "no",
    ]


# --- spelling -------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return escape(printable(str(value), newlines=False))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    mark = ' class="n"' if numbers else ""
    head = "".join(f"<th{mark}>{_text(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{_text(cell)}</td>" for cell in row) + "</tr>\n"
        for row in rows
    )
    top = f"<tr>{head}</tr>\n" if titles else ""
    return f'<div class="wide"><table>{top}{body}</table></div>'


def _mib(count: int) -> str:
    return f"{count / MIB:.1f} MiB"


def _gib(count: int) -> str:
    return f"{count / MIB / 1024:.1f} GiB"
