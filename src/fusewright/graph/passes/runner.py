"""The pass runner: the one place that prints, verifies, times and counts.

Takes a recorded graph and a pipeline, a literal list of (pass, one sentence); gives the graph after the last pass.
Always holds: a changed graph is verified after the last pass, and after every pass that changed it when somebody
watches; with a budget of n rewrites exactly the first n are done, over all pipelines that share the context.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.fx

from fusewright.graph.passes.context import Pass, PassContext, PassReport
from fusewright.graph.printer import print_graph
from fusewright.graph.verify import shared_results, verify, verify_results


def run_passes(graph: torch.fx.Graph, pipeline: Sequence[tuple[Pass, str]], context: PassContext) -> torch.fx.Graph:
    """Run the pipeline. The context's observer is called after each pass; printing costs nothing when there is none. A
    graph that no pass changed is not verified again."""
    given, shared = graph, shared_results(graph) if context.observer is not None else set()
    rewrites, observer = context.rewrites, context.observer
    before_all = rewrites.done
    verified: torch.fx.Graph | None = None
    for function, sentence in pipeline:
        before = print_graph(graph) if observer is not None else ""
        done = rewrites.done
        start = time.perf_counter()
        graph = function(graph, context)
        seconds = time.perf_counter() - start
        if rewrites.done != done and rewrites.done == rewrites.limit:
            rewrites.stopped_in = function.__name__
        if observer is not None and (graph is not verified or rewrites.done != done):
            verify(graph, functional=True)
            verify_results(graph, shared)
            verified = graph
        if observer is not None:
            observer(
                PassReport(
                    function.__name__,
                    sentence,
                    before,
                    print_graph(graph),
                    rewrites.done - done,
                    seconds,
                    rewrites.last,
                )
            )
    if observer is None and (graph is not given or rewrites.done != before_all):
        verify(graph, functional=True)
    return graph
