"""What of a graph depends on parameters alone.

Takes a functional graph whose parameter inputs carry meta["stable"]; gives the nodes that have one value as long as these do not change.
"""

from __future__ import annotations

import operator

import torch
import torch.fx

from fusewright.graph.nodes import leaves
from fusewright.graph.schema import facts
from fusewright.graph.sizes import Expr


def is_pure(node: torch.fx.Node) -> bool:
    """Whether the node computes the same from the same tensors, and does nothing else (a size of the call is none of these)."""
    if node.op != "call_function" or node.meta.get("random") or node.meta.get("epilogue"):
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if any(isinstance(leaf, Expr) for leaf in leaves((node.args, node.kwargs))):
        return False
    known = facts(node.target)
    return not (known.written or known.random or known.effect)


def stable_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The stable inputs that the graph does not write to, and every pure node that depends on them alone."""
    written = {argument for node in graph.nodes if node.meta.get("epilogue") for argument in node.all_input_nodes[:1]}
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.meta.get("stable") and node not in written:
                found.add(node)
            continue
        read = node.all_input_nodes
        if read and found.issuperset(read) and is_pure(node):  # few nodes read stable ones alone
            found.add(node)
    return found
