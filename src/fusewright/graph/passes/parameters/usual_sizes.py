"""Sizes as they usually are, beside the sizes of the call: for what is prepared for one size and serves any.

Takes a functional inference graph over symbolic sizes; gives its sizes in terms of symbols of their own, whose values
are inputs behind the others, marked by meta["usual"] (the position of the input whose usual value it is).
`runtime/parameters.py` gives these inputs their values, and prepares anew when other sizes have come for a while.
Always holds: results do not depend on the usual sizes beyond rounding.
"""

from __future__ import annotations

import torch.fx

from fusewright.graph.nodes import add_placeholder
from fusewright.sizes.expressions import Dim, Expr, Symbol, free_symbols, substitute
from fusewright.sizes.shape_env import ShapeEnv


class UsualSizes:
    def __init__(self, graph: torch.fx.Graph, env: ShapeEnv | None) -> None:
        self.graph = graph
        self.env = env
        self.places: dict[Expr, int] = {}  # size -> position among the inputs
        self.copies: dict[Expr, Dim] = {}
        if env is not None and not env.unbacked:  # a part of a graph has no sizes of the call as inputs
            for position, node in enumerate(graph.find_nodes(op="placeholder")):
                if isinstance(node.meta.get("type"), Symbol):
                    self.places.setdefault(node.meta["type"], position)

    def has(self, size: Dim) -> bool:
        """Whether all that the size depends on is an input of the graph."""
        return self.env is not None and self.places.keys() >= free_symbols(size)

    def of(self, size: Dim) -> Dim:
        """The size in terms of the usual sizes."""
        for symbol in sorted(free_symbols(size) - self.copies.keys(), key=self.places.__getitem__):
            assert self.env is not None
            copy = self.env.copy_of(symbol, f"{symbol}_usual")  # type: ignore[arg-type]
            with self.graph.inserting_after(self.graph.find_nodes(op="placeholder")[-1]):
                node = add_placeholder(self.graph, "usual")
            node.meta.update(type=copy, usual=self.places[symbol], location=())
            self.copies[symbol] = copy
        return substitute(size, self.copies)
