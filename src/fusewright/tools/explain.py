"""`fusewright.explain`: one run of a function under a listening ear, as a report that prints as a table.

Takes a callable and its arguments; gives a `Report`. Always holds: the run uses a compile of its own (nothing compiled
before is used), and its result is what the function returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch.fx

from fusewright import _native, api
from fusewright.base import events
from fusewright.base.errors import BreakReport
from fusewright.base.location import Location
from fusewright.base.records import dataclass, field
from fusewright.graph.collectives import Collective, collectives_of
from fusewright.tools import page
from fusewright.tools.overlaps import Overlap, overlaps
from fusewright.tools.report import framed


@dataclass(frozen=True, slots=True)
class KernelReport:
    """A generated kernel: its name, the operators in it, and the user's lines that it came from."""

    name: str
    origins: tuple[str, ...]
    locations: tuple[Location, ...]
    text: str


@dataclass(slots=True)
class Report:
    """What a compile gave. Counts are over all frames that the call ran (a graph break starts a new one).

    graphs           captured FX graphs, in order (for training: forward and backward in one)
    break_reasons    graph breaks and skipped frames: reason, user stack (outermost first), hint
    ops_per_graph    the operators of each graph, as text
    guards           guards of all frames, as text
    compile_times    seconds by frame, in the order in which they were compiled (a frame and the frames that resume it
        in one)
    stage_times      seconds by stage, "capture" first
    frame_count      frames compiled
    kernels          generated kernels, with the lines of the program that they came from
    overlaps         the collectives of the compiled plans: their bytes, and what runs until they are waited for
    replayed         output calls (prints, log records) that are made after a graph instead of breaking it
    autotuning       what max_autotune measured: who won, and by how much
    hints            what keeps the program from being faster
    errors           tracebacks of defects of fusewright, met on the way
    result           what the function returned
    record           every event with its time, which the page of a notebook is made of (tools/page.py)
    """

    graphs: list[torch.fx.Graph] = field(default_factory=list)
    break_reasons: list[BreakReport] = field(default_factory=list)
    ops_per_graph: list[list[str]] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)
    compile_times: dict[str, float] = field(default_factory=dict)
    stage_times: dict[str, float] = field(default_factory=dict)
    frame_count: int = 0
    kernels: list[KernelReport] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    replayed: list[str] = field(default_factory=list)
    autotuning: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    result: Any = None
    record: list[tuple[float, events.Event]] = field(default_factory=list)

    @property
    def graph_count(self) -> int:
        return len(self.graphs)

    @property
    def graph_break_count(self) -> int:
        return len(self.break_reasons)

    @property
    def collectives(self) -> list[Collective]:
        """The calls between processes of all graphs, in the order in which they begin."""
        return [one for graph in self.graphs for one in collectives_of(graph)]

    @property
    def op_count(self) -> int:
        return sum(map(len, self.ops_per_graph))

    def listen(self, event: events.Event) -> None:
        """Takes in one event of the compile."""
        self.record.append((time.perf_counter(), event))
        handler = HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def _repr_html_(self) -> str:
        return framed(page.render(self.record))

    def __str__(self) -> str:
        by_graph = (
            f" ({', '.join(str(len(ops)) for ops in self.ops_per_graph)} by graph)" if len(self.graphs) > 1 else ""
        )
        rows: list[tuple[str, str]] = [
            ("graphs", str(self.graph_count)),
            ("graph breaks", str(self.graph_break_count)),
            ("operators", f"{self.op_count}{by_graph}"),
            ("guards", str(len(self.guards))),
            (
                "compile time",
                f"{sum(self.compile_times.values()) * 1e3:.1f} ms, {self.frame_count} "
                f"frame{'s' * (self.frame_count != 1)}",
            ),
        ]
        rows += [(f"  {stage}", f"{seconds * 1e3:.1f} ms") for stage, seconds in self.stage_times.items()]
        if self.collectives:
            known = sum(one.bytes or 0 for one in self.collectives)
            rows.append(("collectives", f"{len(self.collectives)}, {known} bytes"))
            rows += [("", str(one)) for one in self.collectives]
        rows += [("  overlap", str(one)) for one in self.overlaps]
        rows.append(("kernels", str(len(self.kernels))))
        for kernel in self.kernels:
            more = f" and {len(kernel.locations) - 3} more" if len(kernel.locations) > 3 else ""
            rows.append(
                (f"  {kernel.name}", "; ".join(map(str, kernel.locations[:3])) + more or ", ".join(kernel.origins[:4]))
            )
        rows += [("after the graph", call) for call in self.replayed]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
        for number, reason in enumerate(self.break_reasons, 1):
            lines.append(f"\nbreak {number}: {reason}")
        lines.extend(f"\nmeasured: {one}" for one in self.autotuning)
        lines.extend(f"\nhint: {hint}" for hint in self.hints)
        lines.extend(f"\ninternal error:\n{trace}" for trace in self.errors)
        return "\n".join(lines)

    __repr__ = __str__


CALLS = frozenset({"call_function", "call_method", "call_module"})


def _add(times: dict[str, float], name: str, seconds: float) -> None:
    times[name] = times.get(name, 0.0) + seconds


def _captured(report: Report, event: events.Captured) -> None:
    report.guards.extend(event.guards)
    report.replayed.extend(event.replayed)
    _add(report.stage_times, "capture", event.seconds)
    if event.graph is not None:
        report.graphs.append(event.graph)
        report.ops_per_graph.append([_target(node) for node in event.graph.nodes if node.op in CALLS])


def _target(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _skipped(report: Report, event: events.Skipped) -> None:
    if not any(_same_place(event.report, known) for known in report.break_reasons):
        report.break_reasons.append(event.report)


def _same_place(skipped: BreakReport, known: BreakReport) -> bool:
    """A function that breaks where it is inlined is then captured by itself, and breaks there once more: that is one
    break."""
    return bool(skipped.stack and known.stack) and (skipped.code, skipped.stack[-1]) == (known.code, known.stack[-1])


def _compiled(report: Report, event: events.Compiled) -> None:
    report.frame_count += 1
    _add(report.compile_times, event.function, event.seconds)


HANDLERS: dict[type[events.Event], Callable[[Report, Any], None]] = {
    events.Captured: _captured,
    events.Broken: lambda report, event: report.break_reasons.append(event.report),
    events.Skipped: _skipped,
    events.StageDone: lambda report, event: _add(report.stage_times, event.stage, event.seconds),
    events.Compiled: _compiled,
    events.PlanLoaded: lambda report, event: report.overlaps.extend(overlaps(event.call_plan)),
    events.KernelMade: lambda report, event: report.kernels.append(
        KernelReport(event.name, event.origins, event.locations, event.text())
    ),
    events.InternalError: lambda report, event: report.errors.append(event.trace),
    events.FellBack: lambda report, event: report.hints.append(
        f"{event.function} was repeated eagerly: {event.reason}"
    ),
    events.Hint: lambda report, event: report.hints.append(event.text),
    events.Autotuned: lambda report, event: report.autotuning.append(event.text),
}


@overload
def explain(f: Callable[..., Any]) -> Callable[..., Report]: ...


@overload
def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Report: ...


def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Report | Callable[..., Report]:
    """What compiling `f` gives: `explain(f)(*args)` or `explain(f, *args)` runs it once and returns a report that
    prints as a table.

    `f` is what `compile` takes; something compiled is explained under its own settings. An exception of the user's
    code is the user's own.
    """
    if args or kwargs:
        return _explained(f, args, kwargs)
    return lambda *call_args, **call_kwargs: _explained(f, call_args, call_kwargs)


def _explained(f: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Report:
    """Compiles `f` anew and calls it once."""
    report = Report()
    compiled = api.compile_again(f)
    _native.hook_reset()  # what earlier compiles reached through a graph break is captured anew
    try:
        with events.STREAM.listening(report.listen):
            report.result = compiled(*args, **kwargs)
    finally:
        _native.hook_reset()
    return report
