"""Specialise: sizes that a guard has fixed, bounded, or tied to others, are written as what they equal.

Takes and gives any graph. A guard such as `s2 == 32` may be learnt after `s2` has gone into the types of earlier nodes;
loops over `s2` and over 32 must not look different to the stages that follow. Always holds: only what the capture's
guards check is used.
"""

from __future__ import annotations

import torch.fx

from fusewright.graph.builder import env_of
from fusewright.graph.passes.context import PassContext
from fusewright.graph.write_sizes import write_sizes


def specialise(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    env = env_of(graph)
    if env is None or not env.may_settle:
        return graph
    return write_sizes(graph, env.settled, context.allow)
