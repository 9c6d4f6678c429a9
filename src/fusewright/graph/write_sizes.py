"""Sizes in a graph replaced by what they are known to be: in the types of its nodes and in their arguments.

Takes a graph (which is changed) and what each size becomes; placeholders of sizes stay, since the sizes still arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch.fx
from torch.fx.node import map_aggregate

from fusewright.graph.nodes import leaves
from fusewright.sizes.expressions import Dim, Expr
from fusewright.sizes.tensor_type import with_sizes


def write_sizes(
    graph: torch.fx.Graph, becomes: Callable[[Dim], Dim], allowed: Callable[[str], bool] = lambda text: True
) -> torch.fx.Graph:
    """`allowed` is asked for each node whether its arguments may be rewritten."""
    dim = cache(becomes)

    def value(item: Any) -> Any:
        return dim(item) if isinstance(item, Expr) else item

    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("type"), Expr):
            continue  # the size itself: it still arrives
        if "type" in node.meta:
            node.meta["type"] = with_sizes(node.meta["type"], dim)
        # Most nodes have no such argument, and to give one new arguments costs more than to look.
        if any(isinstance(leaf, Expr) and dim(leaf) is not leaf for leaf in leaves((node.args, node.kwargs))):
            if node.op != "placeholder" and allowed(f"specialise: {node.name}"):
                node.args, node.kwargs = map_aggregate(node.args, value), map_aggregate(node.kwargs, value)
    return graph
