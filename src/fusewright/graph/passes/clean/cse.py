"""Common subexpression elimination: a pure operator that is repeated with the same arguments is computed once.

Takes and gives a functional graph. Always holds: random operators and effects are never merged, nor two fresh tensors
that both leave the graph (they are separate storage in eager), nor two results.
"""

from __future__ import annotations

import operator
import struct

import torch
import torch.fx

from fusewright.graph.passes.clean.dce import must_stay
from fusewright.graph.passes.clean.escape import escaping, is_view
from fusewright.graph.passes.context import PassContext


def cse(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    outside = escaping(graph)
    returned = set(next(iter(reversed(graph.nodes))).all_input_nodes)
    seen: dict[object, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr") or must_stay(node) or node.meta.get("private"):
            continue
        target = id(node.target) if node.op == "call_function" else node.target  # operators hash in Python
        key = (node.op, target, _key(node.args), _key(node.kwargs))
        first = seen.setdefault(key, node)
        if first is node:
            continue
        aliases_anyway = is_view(node) or node.op == "get_attr" or node.target is operator.getitem
        if first in outside and node in outside and not aliases_anyway:
            continue
        if first in returned and node in returned:
            continue  # two results are two objects, even when they share storage
        if not context.allow(f"cse: {node.name} is {first.name}"):
            return graph
        if node in outside:
            outside.add(first)
        if node in returned:
            returned.add(first)
        node.replace_all_uses_with(first)
        graph.erase_node(node)
    return graph


def _key(value: object) -> object:
    """Equal for arguments that are the same to the bit: 1, 1.0 and True differ, as 0.0 and -0.0 do."""
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in sorted(value.items()))
    if isinstance(value, float):
        return float, struct.pack("d", value)
    if isinstance(value, complex):
        return complex, struct.pack("dd", value.real, value.imag)
    return type(value), value
