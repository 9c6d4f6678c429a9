"""`fusewright.explain`: one run of a function under a listening ear, as a report that prints as a table.

Takes a callable and its arguments; gives a `Report`. Always holds: the run uses a compile of its own (nothing compiled before is used or
changed)
and its result is what the function returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx

from fusewright import api, events
from fusewright.errors import BreakReport
from fusewright.graph.types import Location


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

    graphs           captured FX graphs, in order
    break_reasons    graph breaks and skipped frames: reason, user stack (outermost first), hint
    ops_per_graph    the operators of each graph
    guards           guards of all frames, as text
    compile_times    seconds by frame and stage
    kernels          generated kernels
    result           what the function returned
    """

    graphs: list[torch.fx.Graph] = field(default_factory=list)
    break_reasons: list[BreakReport] = field(default_factory=list)
    ops_per_graph: list[list[str]] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)
    compile_times: dict[str, float] = field(default_factory=dict)
    stage_times: dict[str, float] = field(default_factory=dict)
    kernels: list[KernelReport] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    result: Any = None

    @property
    def graph_count(self) -> int:
        return len(self.graphs)

    @property
    def graph_break_count(self) -> int:
        return len(self.break_reasons)

    @property
    def op_count(self) -> int:
        return sum(map(len, self.ops_per_graph))

    def _listen(self, event: events.Event) -> None:
        if isinstance(event, events.Captured):
            self.guards.extend(event.guards)
            if event.graph is not None:
                self.graphs.append(event.graph)
                self.ops_per_graph.append([str(node.target) for node in event.graph.nodes if node.op in CALLS])
        elif isinstance(event, events.Broken):
            self.break_reasons.append(event.report)
        elif isinstance(event, events.Skipped):
            if not any(_same_place(event.report, known) for known in self.break_reasons):
                self.break_reasons.append(event.report)
        elif isinstance(event, events.StageDone):
            self.stage_times[event.stage] = self.stage_times.get(event.stage, 0.0) + event.seconds
        elif isinstance(event, events.Compiled):
            self.compile_times[event.function] = self.compile_times.get(event.function, 0.0) + event.seconds
        elif isinstance(event, events.KernelMade):
            self.kernels.append(KernelReport(event.name, event.origins, event.locations, event.text()))
        elif isinstance(event, events.InternalError):
            self.errors.append(event.trace)
        elif isinstance(event, events.Hint):
            self.hints.append(event.text)

    def __str__(self) -> str:
        rows: list[tuple[str, str]] = [
            ("graphs", str(self.graph_count)),
            ("graph breaks", str(self.graph_break_count)),
            ("operators", f"{self.op_count} ({', '.join(str(len(ops)) for ops in self.ops_per_graph)} by graph)"),
            ("guards", str(len(self.guards))),
            ("compile time", f"{sum(self.compile_times.values()):.3f} s in {len(self.compile_times)} frames"),
        ]
        rows += [(f"  {stage}", f"{seconds * 1e3:.1f} ms") for stage, seconds in self.stage_times.items()]
        rows.append(("kernels", str(len(self.kernels))))
        for kernel in self.kernels:
            rows.append((f"  {kernel.name}", "; ".join(map(str, kernel.locations[:3])) or ", ".join(kernel.origins[:4])))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
        for number, reason in enumerate(self.break_reasons, 1):
            lines.append(f"\nbreak {number}: {reason}")
        lines.extend(f"\ninternal error:\n{trace}" for trace in self.errors)
        lines.extend(f"\nhint: {hint}" for hint in self.hints)
        return "\n".join(lines)

    __repr__ = __str__


def _same_place(skipped: BreakReport, known: BreakReport) -> bool:
    """A function that breaks where it is inlined is then captured by itself, and breaks there once more: that is one break."""
    return bool(skipped.stack and known.stack) and (skipped.code, skipped.stack[-1]) == (known.code, known.stack[-1])


CALLS = frozenset({"call_function", "call_method", "call_module"})


def explain(f: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Report:
    """Compiles `f` anew and calls it once. An exception of the user's code is the user's own."""
    report = Report()
    compiled = api.compile(f)
    with events.STREAM.listening(report._listen):
        report.result = compiled(*args, **kwargs)
    return report
