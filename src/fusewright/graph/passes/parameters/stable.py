"""What of a graph depends on parameters alone.

Takes a functional graph whose parameter inputs carry meta["stable"]; gives the nodes that have one value as long as
these do not change. An input with meta["usual"] is a size too, as it usually is (see
graph/passes/parameters/usual_sizes.py): what depends on it is prepared as well.
"""

from __future__ import annotations

import operator
from collections.abc import Set

import torch
import torch.fx

from fusewright.graph.nodes import leaves
from fusewright.operators.schema import facts
from fusewright.sizes.expressions import Expr, free_symbols


def is_pure(node: torch.fx.Node, usual: Set[Expr] = frozenset()) -> bool:
    """Whether the node computes the same from the same tensors, and does nothing else (a size of the call is none of
    these, a size in `usual` is)."""
    if node.op != "call_function" or node.meta.get("random") or node.meta.get("epilogue"):
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if any(isinstance(leaf, Expr) and not usual >= free_symbols(leaf) for leaf in leaves((node.args, node.kwargs))):
        return False
    known = facts(node.target)
    return not (known.written or known.random or known.effect)


def stable_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The stable inputs that the graph does not write to, and every pure node that depends on them alone."""
    written = {argument for node in graph.nodes if node.meta.get("epilogue") for argument in node.all_input_nodes[:1]}
    found: set[torch.fx.Node] = set()
    usual: set[Expr] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if "usual" in node.meta:
                usual.add(node.meta["type"])
            if node.meta.get("stable") and node not in written:
                found.add(node)
            continue
        read = node.all_input_nodes
        if read and found.issuperset(read) and is_pure(node, usual):  # few nodes read stable ones alone
            found.add(node)
    return found
