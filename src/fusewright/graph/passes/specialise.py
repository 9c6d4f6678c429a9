"""Specialise: sizes that a guard has fixed, or tied to others, are written as what they equal.

Takes and gives any graph. A guard such as `s2 == 32` may be learnt after `s2` has gone into the types of earlier nodes; loops over `s2`
and over 32 must not look different to the stages that follow. Always holds: only equalities that the capture's guards check are used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.fx
from torch.fx.node import map_aggregate

from fusewright.graph.builder import env_of
from fusewright.graph.passes.runner import Rewrites
from fusewright.graph.sizes import Dim, Expr
from fusewright.graph.types import TensorType


def specialise(graph: torch.fx.Graph, rewrites: Rewrites) -> torch.fx.Graph:
    env = env_of(graph)
    if env is None or not env.has_equalities:
        return graph
    known: dict[Dim, Dim] = {}

    def dim(d: Dim) -> Dim:
        found = known.get(d)
        if found is None:
            found = known[d] = env.simplify(d)
        return found

    def value(item: Any) -> Any:
        return dim(item) if isinstance(item, Expr) else item

    def type_(kind: Any) -> Any:
        if isinstance(kind, TensorType):
            return replace(kind, shape=tuple(map(dim, kind.shape)), stride=tuple(map(dim, kind.stride)), offset=dim(kind.offset))
        if isinstance(kind, tuple):
            return tuple(map(type_, kind))
        return value(kind)

    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("type"), Expr):
            continue  # the size itself: it still arrives
        if "type" in node.meta:
            node.meta["type"] = type_(node.meta["type"])
        if node.op != "placeholder" and rewrites.allow(f"specialise: {node.name}"):
            node.args, node.kwargs = map_aggregate(node.args, value), map_aggregate(node.kwargs, value)
    return graph
