"""Overlap: collectives begin as early, and are waited for as late, as what they need and give allows.

Takes and gives a functional graph, at whose end inputs are written to. Always holds: collectives keep their order,
which all processes share; nothing that writes to a tensor moves, or is moved across.
"""

from __future__ import annotations

import torch.fx
from torch._ops import OpOverload

from fusewright.graph.collectives import is_collective, is_wait
from fusewright.graph.passes.context import PassContext


def overlap_collectives(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    nodes = list(graph.nodes)
    if not any(map(is_collective, nodes)):
        return graph
    barrier: torch.fx.Node | None = None  # the last node that a collective may not begin before
    place = {node: position for position, node in enumerate(nodes)}
    for node in nodes:
        if is_collective(node):
            after = max((*node.all_input_nodes, *([barrier] if barrier else ())), key=place.__getitem__)
            if after.next is not node and after.op != "placeholder" and context.allow(f"{node.name} begins earlier"):
                after.append(node)
                place[node] = place[after]  # equal places: a collective stands behind what it waits for
            barrier = node
        elif _writes(node):
            barrier = node
    writes = False
    for node in reversed(list(graph.nodes)):
        if _writes(node):
            writes = True
        elif not writes and (is_wait(node) or _shows_awaited(node)) and node.users:
            first = node.next
            while first not in node.users:
                first = first.next
            if first is not node.next and first.op != "output" and context.allow(f"{node.name} is waited for later"):
                first.prepend(node)
    return graph


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _shows_awaited(node: torch.fx.Node) -> bool:
    """A view of what a wait gives, and of nothing else."""
    target = node.target
    if not isinstance(target, OpOverload) or len(node.all_input_nodes) != 1:
        return False
    source = node.all_input_nodes[0]
    shows = any(one.alias_info is not None for one in target._schema.returns)
    return shows and (is_wait(source) or _shows_awaited(source))
