"""The report as one HTML page: what was captured, what broke, what was compiled again and why, kernels, memory, time.

Takes a record of events with their times; gives the text of the page. Always holds: the page needs no network and no
script, every text of the program is escaped, and colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise

from fusewright.base import events
from fusewright.base.location import Location
from fusewright.base.records import dataclass, field
from fusewright.tools.bench import milliseconds
from fusewright.tools.bundle import bytes_text
from fusewright.tools.plan_figures import PlanFigures, Step, figures

Record = Sequence[tuple[float, events.Event]]

STYLE = """
:root{color-scheme:light dark;--back:#fff;--card:#f5f6f8;--text:#1b1f24;--dim:#5b6470;--line:#d5d9df;--bar:#3b6fd4;
--bar2:#8aa9e6;--on:#fff;--on2:#1b1f24;--bad:#b3261e;--code:#eef0f4}
@media (prefers-color-scheme:dark){:root{--back:#14171b;--card:#1d2127;--text:#e6e9ee;--dim:#9aa4b1;--line:#363c45;
--bar:#7aa2f7;--bar2:#3d5a99;--on:#14171b;--on2:#fff;--bad:#ff8a80;--code:#23282f}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1100px;padding:16px;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}h1{font-size:1.5em;margin:.2em 0}
h2{font-size:1.15em;margin:1.6em 0 .5em;border-bottom:1px solid var(--line)}a{color:var(--bar)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(120px,1fr));gap:8px;margin:12px 0}
.tile{background:var(--card);border-radius:8px;padding:8px 12px;text-decoration:none}
.tile b{display:block;font-size:1.4em}
.dim{color:var(--dim)}.bad{color:var(--bad)}
.card{background:var(--card);border-radius:8px;padding:10px 12px;
margin:8px 0}pre{background:var(--code);padding:8px;border-radius:6px;overflow-x:auto;overflow-wrap:normal;margin:6px 0;
font:12px/1.45 ui-monospace,monospace}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:4px 10px 4px 0;
border-bottom:1px solid var(--line);vertical-align:top}td.n,th.n{text-align:right;white-space:nowrap}
.step,.step>summary{display:grid;grid-template-columns:minmax(0,1fr) 80px 80px 52px 52px;gap:2px 8px;padding:3px 0}
.step{border-bottom:1px solid var(--line)}details.step{display:block;padding:0}.step b{font-weight:600}
.step>summary>:first-child::before{content:"▸ "}.step[open]>summary>:first-child::before{content:"▾ "}
.step :not(:first-child).n{text-align:right}
.two{display:grid;grid-template-columns:1fr 1fr;gap:10px}.two>*{min-width:0}
.two pre{max-height:420px;overflow:auto}summary{cursor:pointer}
svg{width:100%;height:auto;display:block}svg text{fill:var(--on2);font:11px system-ui,sans-serif}
svg .on{fill:var(--on)}svg.flame{min-width:900px}
@media (max-width:640px){body{padding:10px;font-size:14px}.two{grid-template-columns:1fr}
.step,.step>summary{grid-template-columns:repeat(4,1fr)}.step>:first-child:not(summary),
.step>summary>:first-child{grid-column:1/-1}}
"""
LINES = 400
"""Lines of one code that the page shows."""
WIDTH = 1000.0


@dataclass(slots=True)
class Loaded:
    """A plan of a function, and its kernels by name: another version's have the same names."""

    function: str
    figures: PlanFigures
    kernels: dict[str, events.KernelMade] = field(default_factory=dict)


@dataclass(slots=True)
class Contents:
    """The events by what they tell."""

    record: Record
    captured: list[events.Captured] = field(default_factory=list)
    breaks: list[events.Broken | events.Skipped] = field(default_factory=list)
    recompiles: list[events.Recompiling | events.LimitReached] = field(default_factory=list)
    kernels: list[events.KernelMade] = field(default_factory=list)
    plans: list[Loaded] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    compiles: list[tuple[float, events.Compiled]] = field(default_factory=list)


def contents(record: Record) -> Contents:
    """The events sorted, and the plans measured."""
    made = Contents(record)
    for at, event in record:
        if isinstance(event, events.Captured):
            made.captured.append(event)
        elif isinstance(event, (events.Broken, events.Skipped)):
            made.breaks.append(event)
        elif isinstance(event, (events.Recompiling, events.LimitReached)):
            made.recompiles.append(event)
        elif isinstance(event, events.KernelMade):
            made.kernels.append(event)  # it comes after its plan
            own = next((plan for plan in reversed(made.plans) if plan.function == event.function), None)
            if own is not None:
                own.kernels[event.name] = event
        elif isinstance(event, events.PlanLoaded):
            made.plans.append(Loaded(event.function, figures(event.call_plan, event.plan)))
        elif isinstance(event, events.Compiled):
            made.compiles.append((at, event))
        elif type(event) in NOTES:
            kind, text = NOTES[type(event)]
            made.notes.append((kind, f"{event.function}: {text(event)}"))
    return made


NOTES: dict[type[events.Event], tuple[str, Callable[..., str]]] = {
    events.Hint: ("hint", lambda event: event.text),
    events.FellBack: ("repeated eagerly", lambda event: event.reason),
    events.InternalError: ("internal error", lambda event: event.trace),
    events.Autotuned: ("measured", lambda event: event.text),
    events.Reused: ("no new code", lambda event: event.reason),
}


def render(record: Record, title: str = "fusewright report") -> str:
    """The whole page."""
    found = contents(record)
    sections = [
        ("breaks", "Graph breaks", _breaks(found)),
        ("recompiles", "Recompiles", _recompiles(found)),
        ("time", "Compile time", _flame(found)),
        ("memory", "Memory", _memory(found)),
        ("kernels", "Kernels and library calls", _kernels(found)),
        ("graphs", "Frames and graphs", _graphs(found)),
        ("notes", "Notes", "".join(_card(f"<b>{escape(kind)}</b>", _pre(text)) for kind, text in found.notes)),
    ]
    body = "".join(
        f'<section id="{name}"><h2>{heading}</h2>{text or "<p class=dim>none</p>"}</section>'
        for name, heading, text in sections
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{_tiles(found)}{body}</body></html>"
    )


def _tiles(found: Contents) -> str:
    seconds = sum(event.seconds for _, event in found.compiles)
    cache = [event.hit for _, event in found.record if isinstance(event, events.CacheUse)]
    tiles = [
        ("frames", len(found.compiles), "graphs"),
        ("graphs", sum(event.graph is not None for event in found.captured), "graphs"),
        ("graph breaks", len(found.breaks), "breaks"),
        ("recompiles", len(found.recompiles), "recompiles"),
        ("kernels", len(found.kernels), "kernels"),
        ("compiling", f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms", "time"),
        ("from the cache", f"{sum(cache)} of {len(cache)}", "time"),
    ]
    cells = (f'<a class="tile" href="#{to}"><b>{value}</b>{escape(name)}</a>' for name, value, to in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _card(head: str, body: str) -> str:
    return f'<div class="card">{head}{body}</div>'


def _pre(text: str) -> str:
    lines = text.splitlines()
    more = f"\n... {len(lines) - LINES} more lines" if len(lines) > LINES else ""
    return f"<pre>{escape(chr(10).join(lines[:LINES]) + more)}</pre>"


def _folded(head: str, body: str) -> str:
    return f"<details><summary>{head}</summary>{body}</details>"


def _source(places: Iterable[Location]) -> str:
    """The user's lines around some places."""
    parts = []
    for place in list(dict.fromkeys(places))[:6]:
        around = range(max(1, place.line - 2), place.line + 3)
        lines = [(number, linecache.getline(place.file, number).rstrip("\n")) for number in around]
        text = "\n".join(f"{'>' if n == place.line else ' '} {n:5} {line}" for n, line in lines if line)
        parts.append(f'<div class="dim">{escape(str(place))}</div>{_pre(text) if text else ""}')
    return "".join(parts)


def _breaks(found: Contents) -> str:
    """Each break once, with the frames that met it: a function that is captured again breaks again."""
    met: dict[tuple[str, str, Location | None], list[events.Broken | events.Skipped]] = {}
    for event in found.breaks:
        report = event.report
        met.setdefault((report.code, report.reason, report.stack[-1] if report.stack else None), []).append(event)
    cards = []
    for (code, reason, _), same in met.items():
        report = max((event.report for event in same), key=lambda report: len(report.stack))
        what = "runs eagerly" if isinstance(same[0], events.Skipped) else "graph break"
        names = ", ".join(dict.fromkeys(event.function for event in same))
        times = f", met {len(same)} times" if len(same) > 1 else ""
        head = f'<b class="bad">{escape(reason)}</b> <span class="dim">[{escape(code)}] {what} in '
        head += f"{escape(names)}{times}</span>"
        cards.append(_card(head, f"<p>What to do: {escape(report.hint)}</p>{_source(reversed(report.stack))}"))
    return "".join(cards)


def _recompiles(found: Contents) -> str:
    cards = []
    for event in found.recompiles:
        limit = f": recompile_limit={event.limit} is reached" if isinstance(event, events.LimitReached) else ""
        head = f"<b>{escape(event.function)}</b>{limit}<div class=dim>the guard that failed, by version</div>"
        cards.append(_card(head, _pre("\n".join(event.failures))))
    return "".join(cards)


def _graphs(found: Contents) -> str:
    cards = []
    for event in found.captured:
        count = f"{event.op_count} operators, {len(event.guards)} guards, {milliseconds(event.seconds * 1e3)}"
        parts = _folded("graph", _pre(str(event.graph))) if event.graph is not None else ""
        parts += _folded("guards", _pre("\n".join(event.guards)))
        if event.finish_text:
            parts += _folded("what runs after the graph", _pre(event.finish_text))
        cards.append(_card(f'<b>{escape(event.function)}</b> <span class="dim">{count}</span>', parts))
    return "".join(cards)


def _kernels(found: Contents) -> str:
    parts = []
    shown: set[int] = set()
    for loaded in found.plans:
        plan = loaded.figures
        total = sum(step.seconds or 0.0 for step in plan.steps)
        rows = "".join(_step_row(step, total, loaded.kernels) for step in plan.steps)
        shown.update(id(loaded.kernels[step.name]) for step in plan.steps if step.name in loaded.kernels)
        head = _step("div", "<b>step</b>", ["<b>bytes</b>", "<b>time</b>", "<b>share</b>", "<b>GB/s</b>"])
        note = f"{len(plan.steps)} steps" + (f", {milliseconds(total * 1e3)} on zeros" if total else "")
        parts.append(_card(f'<b>{escape(plan.name)}</b> <span class="dim">{note}</span>', head + rows))
    loose = [kernel for kernel in found.kernels if id(kernel) not in shown]
    return "".join(parts) + "".join(_card("", _kernel(kernel)) for kernel in loose)


def _step_row(step: Step, total: float, texts: dict[str, events.KernelMade]) -> str:
    moved = bytes_text(step.moved) if step.moved is not None else "–"
    spent = milliseconds(step.seconds * 1e3) if step.seconds is not None else "–"
    share = f"{step.seconds / total:.0%}" if step.seconds is not None and total else "–"
    rate = f"{step.moved / step.seconds / 1e9:.1f}" if step.seconds and step.moved else "–"
    numbers = [moved, spent, share, rate]
    if not step.is_kernel or step.name not in texts:
        return _step("div", escape(step.name), numbers)
    kernel = texts[step.name]
    return f'<details class="step">{_step("summary", _named(kernel), numbers)}{_code(kernel)}</details>'


def _step(tag: str, name: str, numbers: Sequence[str]) -> str:
    cells = "".join(f"<span class=n>{each}</span>" for each in numbers)
    return f"<{tag}{' class=step' if tag == 'div' else ''}><span>{name}</span>{cells}</{tag}>"


def _kernel(kernel: events.KernelMade) -> str:
    return _folded(_named(kernel), _code(kernel))


def _named(kernel: events.KernelMade) -> str:
    return f"{escape(kernel.name)} <span class=dim>{escape(', '.join(kernel.origins[:4]))}</span>"


def _code(kernel: events.KernelMade) -> str:
    return f'<div class="two"><div>{_pre(kernel.text().strip())}</div><div>{_source(kernel.locations)}</div></div>'


# --- pictures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """One piece of work: from when to when, how deep it lies, its name, and of which function it is a stage."""

    start: float
    end: float
    depth: int
    name: str
    function: str = ""


def bars(record: Record) -> list[Bar]:
    """The compiles and their stages on one axis without the time between them. A stage outside of any compile (a
    backward that is compiled when it is first wanted) counts as a compile of its own."""
    frames = [(at - event.seconds, at, event.function) for at, event in record if isinstance(event, events.Compiled)]
    stages = [
        (at - event.seconds, at, event.function, event.stage if isinstance(event, events.StageDone) else "capture")
        for at, event in record
        if isinstance(event, (events.StageDone, events.Captured))
    ]
    loose = [stage for stage in stages if not any(a - 1e-4 <= stage[0] and stage[1] <= b + 1e-4 for a, b, _ in frames)]
    frames += [stage[:3] for stage in loose]
    made: list[Bar] = []
    shift, last = 0.0, 0.0
    for start, end, name in sorted(frames):
        inside = start < last  # a frame that is compiled while another one is
        shift = shift if inside or not made else shift + start - last
        shift = start if not made else shift
        last = max(last, end)
        depth = 1 if inside else 0
        made.append(Bar(start - shift, end - shift, depth, name))
        made += [
            Bar(max(a, start) - shift, min(b, end) - shift, depth + 1, stage, name)
            for a, b, function, stage in stages
            if function == name and start - 1e-4 <= a and b <= end + 1e-4
        ]
    return made


def _flame(found: Contents) -> str:
    drawn = bars(found.record)
    if not drawn:
        return ""
    total = max(bar.end for bar in drawn) or 1e-9
    row = 22
    shapes = []
    for bar in drawn:
        x, width = bar.start / total * WIDTH, max((bar.end - bar.start) / total * WIDTH, 0.5)
        text = f"{bar.name}: {milliseconds((bar.end - bar.start) * 1e3)}"
        colour = "var(--bar)" if bar.depth == 0 else "var(--bar2)"
        label, where = (bar.name[: int(width / 7)] if width > 30 else ""), f'x="{x + 3:.2f}" y="{bar.depth * row + 14}"'
        shapes.append(
            f'<g><title>{escape(text)}</title><rect x="{x:.2f}" y="{bar.depth * row}" width="{width:.2f}" '
            f'height="{row - 2}" rx="2" fill="{colour}" stroke="var(--back)"/>'
            f'<text class="{"" if bar.depth else "on"}" {where}>{escape(label)}</text></g>'
        )
    height = (max(bar.depth for bar in drawn) + 1) * row
    slowest = sorted((bar for bar in drawn if bar.depth), key=lambda bar: bar.start - bar.end)[:8]
    rows = "".join(
        f"<tr><td>{escape(bar.name)} <span class=dim>{escape(bar.function)}</span>"
        f"<td class=n>{milliseconds((bar.end - bar.start) * 1e3)}</tr>"
        for bar in slowest
    )
    box = f'class="flame" viewBox="0 0 {WIDTH:.0f} {height}"'
    picture = f'<svg {box} role="img" aria-label="flame chart">{"".join(shapes)}</svg>'
    note = f"{milliseconds(total * 1e3)} in all; the longest stages:"
    return f"<div class=wide>{picture}</div><p class=dim>{note}</p><table>{rows}</table>"


def _memory(found: Contents) -> str:
    parts = []
    for plan in (loaded.figures for loaded in found.plans):
        levels = [step.memory for step in plan.steps if step.memory is not None]
        if len(levels) != len(plan.steps) or not levels or not plan.peak:
            continue
        if min(levels) == max(levels):  # nothing to plot
            text = f'<b>{escape(plan.name)}</b> <span class="dim">{bytes_text(plan.peak)} throughout a call</span>'
            parts.append(_card(text, ""))
            continue
        spent = [step.seconds or 0.0 for step in plan.steps]
        lengths = [each / sum(spent) for each in spent] if all(spent) else [1 / len(levels)] * len(levels)
        edges = [0.0]
        for length in lengths:
            edges.append(edges[-1] + length * WIDTH)
        height = 120
        corners = [f"0,{height}"]
        for (left, right), level in zip(pairwise(edges), levels):
            y = height - level / plan.peak * (height - 10)
            corners += [f"{left:.2f},{y:.2f}", f"{right:.2f},{y:.2f}"]
        corners.append(f"{WIDTH:.0f},{height}")
        names = "".join(
            f'<rect x="{left:.2f}" y="0" width="{max(right - left, 0.5):.2f}" height="{height}" fill="transparent">'
            f"<title>{escape(step.name)}: {bytes_text(level)}</title></rect>"
            for (left, right), level, step in zip(pairwise(edges), levels, plan.steps)
        )
        axis = "time" if all(spent) else "steps"
        picture = (
            f'<svg viewBox="0 0 {WIDTH:.0f} {height}" role="img" aria-label="memory over {axis}">'
            f'<polygon points="{" ".join(corners)}" fill="var(--bar2)" stroke="var(--bar)"/>{names}</svg>'
        )
        head = (
            f'<b>{escape(plan.name)}</b> <span class="dim">peak {bytes_text(plan.peak)}, over {axis} of a call</span>'
        )
        parts.append(_card(head, picture))
    return "".join(parts)
