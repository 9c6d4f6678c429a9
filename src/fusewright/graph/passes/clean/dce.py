"""Dead code elimination: removes nodes that nothing uses.

Takes and gives a functional graph. Always holds: inputs, epilogue copies, effects, random operators (removing a draw of
random numbers would change every later one) and what gives a size stay.
"""

from __future__ import annotations

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.graph.passes.context import PassContext
from fusewright.operators.data_dependent import GIVES
from fusewright.operators.schema import facts


def must_stay(node: torch.fx.Node) -> bool:
    """Whether the node matters even when nothing uses it."""
    if node.op in ("placeholder", "output"):
        return True
    meta = node.meta
    if meta.get("epilogue") or meta.get("random") or meta.get("writes_private") or GIVES in meta:
        return True
    return isinstance(node.target, OpOverload) and facts(node.target).effect


def dce(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for node in reversed(graph.nodes):
        if not node.users and not must_stay(node):
            if not context.allow(f"dce: {node.name}"):
                return graph
            graph.erase_node(node)
    return graph
