"""Pictures of the documentation as SVG text: boxes with arrows, and bars from files of benchmark results.

A picture is one file without scripts or fonts of its own, and readable on light and dark pages.
`python docs/generate.py` writes docs/pictures/.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #1f2430 } .small { font-size: 12px }
.box { fill: #e8eaf6; stroke: #3f51b5 } .native { fill: #e0f2e9; stroke: #2e7d5b }
.eager { fill: #fdf0dd; stroke: #b26a00 }
.arrow { stroke: #5c6370; stroke-width: 1.5; fill: none } .head { fill: #5c6370 }
.ours { fill: #3f51b5 } .peer { fill: #b0b7c3 } .line { stroke: #5c6370; stroke-dasharray: 4 4 }
.page { fill: #ffffff }
</style>"""
LINE = 18
CHARACTER = 7.8
"""Width of a character, in pixels, about."""


class Box(NamedTuple):
    """A box by its middle; its size follows from its text."""

    x: float
    y: float
    text: str
    kind: str = "box"

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    @property
    def half(self) -> tuple[float, float]:
        return max(map(len, self.lines)) * CHARACTER / 2 + 12, len(self.lines) * LINE / 2 + 9

    def edge(self, towards: Box) -> tuple[float, float]:
        """Where a line from the middle of this box to that of another one leaves it."""
        dx, dy = towards.x - self.x, towards.y - self.y
        width, height = self.half
        share = min(width / abs(dx) if dx else 1e9, height / abs(dy) if dy else 1e9)
        return self.x + dx * share, self.y + dy * share


def svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'role="img"><title>{escape(title)}</title>\n{STYLE}\n<rect class="page" width="100%" height="100%" rx="6"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, anchor: str = "middle", small: bool = False) -> str:
    style = ' class="small"' if small else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def drawing(title: str, boxes: Mapping[str, Box], arrows: Iterable[tuple[str, str, str]]) -> str:
    """Boxes by name; arrows are (from, to, what stands beside it)."""
    parts = [
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
    ]
    for start, end, label in arrows:
        (x1, y1), (x2, y2) = boxes[start].edge(boxes[end]), boxes[end].edge(boxes[start])
        parts.append(
            f'<line class="arrow" x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" marker-end="url(#head)"/>'
        )
        beside = abs(y2 - y1) > abs(x2 - x1)
        x, y = (x1 + x2) / 2 + (8 if beside else 0), (y1 + y2) / 2 + (4 if beside else -6)
        parts += [text(x, y, label, "start" if beside else "middle", small=True)] if label else []
    for box in boxes.values():
        (width, height), top = box.half, box.y - len(box.lines) * LINE / 2 + 13
        parts.append(
            f'<rect class="{box.kind}" x="{box.x - width:.0f}" y="{box.y - height:.0f}" '
            f'width="{2 * width:.0f}" height="{2 * height:.0f}" rx="6"/>'
        )
        parts += [text(box.x, top + LINE * number, line) for number, line in enumerate(box.lines)]
    right = max(box.x + box.half[0] for box in boxes.values())
    bottom = max(box.y + box.half[1] for box in boxes.values())
    return svg(right + 16, bottom + 16, title, parts)


class Bars(NamedTuple):
    """A chart: for each row of a file of results, a bar for fusewright and one for torch.compile."""

    title: str
    file: str
    ours: str
    peer: str
    eager: str = ""
    """The column to divide by the others; empty where they hold what is shown."""
    unit: str = ""


def bars(chart: Bars) -> str:
    found: dict[str, Any] = json.loads((RESULTS / f"{chart.file}.json").read_text())
    rows = [row for row in found["rows"] if row.get(chart.ours) and row.get(chart.peer)]

    def speed(row: dict[str, Any], column: str) -> float:
        return float(row[chart.eager] / row[column] if chart.eager else row[column])

    left, width, step, top = 220, 420, 40, 80
    scale = width / max(speed(row, column) for row in rows for column in (chart.ours, chart.peer))
    where = (f"{found['machine']}; {found['date']}", f"commit {found['commit']}: {found['command']}")
    parts = [text(16, 26, chart.title, "start")]
    parts += [text(16, 46 + 17 * number, line, "start", small=True) for number, line in enumerate(where)]
    for number, row in enumerate(rows):
        y = top + number * step
        parts.append(text(left - 10, y + 20, str(next(iter(row.values()))), "end", small=True))
        for offset, kind, column in ((0, "ours", chart.ours), (15, "peer", chart.peer)):
            value = speed(row, column)
            parts.append(
                f'<rect class="{kind}" x="{left}" y="{y + offset}" width="{value * scale:.0f}" height="13" rx="2"/>'
            )
            parts.append(
                text(left + value * scale + 6, y + offset + 11, f"{value:.2f}{chart.unit}", "start", small=True)
            )
    bottom = top + len(rows) * step
    if not chart.unit:
        one = left + scale
        parts.append(f'<line class="line" x1="{one:.0f}" x2="{one:.0f}" y1="{top - 6}" y2="{bottom}"/>')
        parts.append(text(left + 260, bottom + 19, "dashed: eager", "start", small=True))
    for x, kind, name in ((left, "ours", "fusewright"), (left + 130, "peer", "torch.compile")):
        parts.append(f'<rect class="{kind}" x="{x}" y="{bottom + 8}" width="13" height="13" rx="2"/>')
        parts.append(text(x + 19, bottom + 19, name, "start", small=True))
    return svg(left + width + 60, bottom + 34, chart.title, parts)


CHARTS = {
    "training-intel": Bars(
        "Training step on a CPU, bfloat16: times eager's speed",
        "cpu-training-speed-intel",
        "bfloat16, fusewright",
        "bfloat16, torch.compile",
    ),
    "inference-h200": Bars(
        "Inference on a GPU, bfloat16: times eager's speed",
        "gpu-inference-h200",
        "default, fusewright",
        "default, torch.compile",
        "eager",
    ),
    "training-h200": Bars(
        "Training step on a GPU, bfloat16: times eager's speed",
        "gpu-training-h200",
        "fusewright",
        "torch.compile",
        "eager",
    ),
    "first-calls-zen5": Bars(
        "First call on a CPU, empty caches: seconds",
        "cpu-first-call-zen5",
        "fusewright cold",
        "torch.compile cold",
        unit=" s",
    ),
    "small-calls-zen5": Bars(
        "Calls with little work on a CPU: times eager's speed",
        "cpu-call-zen5",
        "fusewright",
        "torch.compile",
        "eager",
    ),
}

DRAWINGS: dict[str, tuple[str, dict[str, Box], list[tuple[str, str, str]]]] = {
    "stages": (
        "From Python to machine code",
        {
            "python": Box(90, 50, "your function's\nbytecode"),
            "graph": Box(280, 50, "graph of\nATen operators"),
            "loops": Box(470, 50, "loops"),
            "kernels": Box(640, 50, "fused kernels"),
            "code": Box(640, 160, "machine code\n(LLVM or Triton)", "native"),
            "library": Box(420, 160, "library calls: large products\nand convolutions", "native"),
            "guards": Box(130, 160, "guards: when the\ngraph may be used again", "native"),
        },
        [
            ("python", "graph", "capture"),
            ("graph", "loops", "lowering"),
            ("loops", "kernels", "fusion"),
            ("kernels", "code", ""),
            ("graph", "library", ""),
            ("python", "guards", ""),
        ],
    ),
    "call": (
        "One compiled call",
        {
            "call": Box(70, 50, "f(x)"),
            "guards": Box(230, 50, "check guards of\neach version", "native"),
            "plan": Box(430, 50, "run the call plan:\nkernels, library calls", "native"),
            "result": Box(640, 50, "result,\nside effects"),
            "compile": Box(230, 160, "compile one more version"),
            "eager": Box(430, 160, "run eagerly\nfrom the start", "eager"),
        },
        [
            ("call", "guards", ""),
            ("guards", "plan", "pass"),
            ("plan", "result", ""),
            ("guards", "compile", "none passes"),
            ("compile", "plan", ""),
            ("plan", "eager", "error"),
            ("eager", "result", ""),
        ],
    ),
    "break": (
        "A graph break",
        {
            "function": Box(110, 110, "y = x * 2\nopen('f').write('1')\nreturn y + 1"),
            "first": Box(380, 40, "graph 1: x * 2", "native"),
            "middle": Box(380, 110, "open('f').write('1')", "eager"),
            "second": Box(380, 180, "graph 2: y + 1", "native"),
            "told": Box(640, 110, "explain: code, line,\ncause, remedy"),
        },
        [
            ("function", "first", ""),
            ("function", "middle", ""),
            ("function", "second", ""),
            ("middle", "told", ""),
        ],
    ),
    "training": (
        "A training step",
        {
            "joint": Box(110, 110, "joint graph:\nforward and backward"),
            "forward": Box(360, 50, "forward kernels", "native"),
            "saved": Box(580, 110, "saved tensors"),
            "backward": Box(360, 170, "backward kernels", "native"),
            "grad": Box(580, 190, ".grad"),
            "loss": Box(580, 40, "loss"),
        },
        [
            ("joint", "forward", ""),
            ("joint", "backward", ""),
            ("forward", "loss", ""),
            ("forward", "saved", ""),
            ("saved", "backward", ""),
            ("backward", "grad", ""),
        ],
    ),
    "debugging": (
        "What to do when something is wrong or slow",
        {
            "start": Box(110, 40, "what is wrong?"),
            "error": Box(110, 130, "an error that\neager does not raise"),
            "wrong": Box(310, 130, "another result"),
            "slow": Box(500, 130, "slow calls"),
            "first": Box(690, 130, "slow first call,\nor many compiles"),
            "minify": Box(210, 240, "fusewright.minify(f, args)\nprints a small program", "native"),
            "explain": Box(500, 240, "fusewright.explain(f)(x)\nbreaks, hints", "native"),
            "logs": Box(720, 240, "FUSEWRIGHT_LOGS=\nrecompiles,timings", "native"),
            "report": Box(210, 330, "report it, with\nfusewright env", "eager"),
            "page": Box(500, 330, "fusewright report\ntime of each kernel", "native"),
            "mark": Box(720, 330, "mark_dynamic, or\nread the cache's page", "native"),
        },
        [
            ("start", "error", ""),
            ("start", "wrong", ""),
            ("start", "slow", ""),
            ("start", "first", ""),
            ("error", "minify", ""),
            ("wrong", "minify", ""),
            ("slow", "explain", ""),
            ("first", "logs", ""),
            ("minify", "report", ""),
            ("explain", "page", "no breaks"),
            ("logs", "mark", ""),
        ],
    ),
}


def pictures() -> dict[str, str]:
    """The text of each picture, by file name."""
    drawn = {f"{name}.svg": drawing(*parts) for name, parts in DRAWINGS.items()}
    return drawn | {f"{name}.svg": bars(chart) for name, chart in CHARTS.items()}
