"""The pass runner: the one place that prints, verifies, times and counts.

Takes a recorded graph and a pipeline, a literal list of (pass, one sentence); gives the graph after the last pass.
Always holds: a changed graph is verified after the last pass, and after every pass that changed it when somebody watches; with
`stop_after=n` exactly the first n rewrites are done, so that a wrong answer can be bisected to one rewrite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.fx

from fusewright.base.records import dataclass
from fusewright.graph.printer import print_graph
from fusewright.graph.verify import verify


class Rewrites:
    """Counts rewrites, and refuses them once `limit` are done. A pass asks `allow` before each change that it makes."""

    __slots__ = ("done", "last", "limit")

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.done = 0
        self.last = ""

    def allow(self, what: str) -> bool:
        """Whether one more rewrite may be done; `what` describes it."""
        if self.limit is not None and self.done >= self.limit:
            return False
        self.done += 1
        self.last = what
        return True


Pass = Callable[[torch.fx.Graph, Rewrites], torch.fx.Graph]


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did. `before` and `after` are printed graphs; `seconds` is the pass alone; `last` describes the last rewrite."""

    name: str
    sentence: str
    before: str
    after: str
    rewrites: int
    seconds: float
    last: str


Observer = Callable[[PassReport], None]


def run_passes(
    graph: torch.fx.Graph,
    pipeline: Sequence[tuple[Pass, str]],
    observer: Observer | None = None,
    stop_after: int | None = None,
) -> torch.fx.Graph:
    """Run the pipeline. The observer is called after each pass; printing costs nothing when there is none. A graph that no pass changed
    is not verified again."""
    given = graph
    rewrites = Rewrites(stop_after)
    verified: torch.fx.Graph | None = None
    for function, sentence in pipeline:
        before = print_graph(graph) if observer is not None else ""
        done = rewrites.done
        start = time.perf_counter()
        graph = function(graph, rewrites)
        seconds = time.perf_counter() - start
        if observer is not None and (graph is not verified or rewrites.done != done):
            verify(graph, functional=True)
            verified = graph
        if observer is not None:
            report = PassReport(function.__name__, sentence, before, print_graph(graph), rewrites.done - done, seconds, rewrites.last)
            observer(report)
    if observer is None and (graph is not given or rewrites.done):
        verify(graph, functional=True)
    return graph
