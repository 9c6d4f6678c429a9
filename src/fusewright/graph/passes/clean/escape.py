"""Which nodes of a functional graph can be seen from outside as storage: the outputs, epilogue values, and what they
are views of.

Takes a functional graph; gives the set of nodes whose storage leaves the graph. Merging two of them, or replacing one
by an input, would make tensors share storage that are separate in eager.
"""

from __future__ import annotations

import operator

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.graph.nodes import written
from fusewright.operators.schema import facts


def is_view(node: torch.fx.Node) -> bool:
    """Whether the node's result shares its first argument's storage."""
    return isinstance(node.target, OpOverload) and facts(node.target).is_view and not facts(node.target).written


# Not views by their schema, but their result is (or may be) their argument's memory.
_SHARING = frozenset(
    {torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default, torch.ops.aten._reshape_alias.default}
)


def shares_memory(node: torch.fx.Node) -> bool:
    """Whether the node's result, or each of its results, may lie in its first argument's memory."""
    parts = isinstance(node.target, OpOverload) and facts(node.target).parts_of is not None
    return parts or is_view(node) or node.target in _SHARING


def escaping(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes whose storage is an output's or an epilogue copy's source."""
    found: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node.meta.get("epilogue") or node.meta.get("writes_private"):
            found.update(node.all_input_nodes)
        elif node in found and (shares_memory(node) or node.target in (operator.getitem, written)):
            found.update(node.all_input_nodes[:1])  # an operator of several results leaves with any of them
    return found
