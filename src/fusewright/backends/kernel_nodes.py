"""Which operators of a graph a kernel computes: what is left to PyTorch where the kernel has no code.

Takes a graph and kernels of its plan; gives names of nodes. Always holds: asked again about a kernel whose nodes are
left already, it gives more of what these read, until there is no more.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping

import torch.fx

from fusewright.schedule.plan import Kernel


def computing(
    graph: torch.fx.Graph, makers: Mapping[str, str], kernels: Iterable[Kernel], left: frozenset[str]
) -> frozenset[str]:
    """Names of the nodes. makers: of each buffer that lowering made, the node. A node whose value is in no buffer is
    computed where it is read."""
    nodes = {node.name: node for node in graph.nodes}
    in_memory = frozenset(makers.values())
    named = {makers.get(name, "") for kernel in kernels for name in kernel.written}
    named |= {_node_of(origin, nodes) for kernel in kernels for origin in kernel.origins}
    waiting = [nodes[name] for name in named if name in nodes]
    found: set[torch.fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in found or node.op not in ("call_function", "output"):
            continue
        found.add(node)
        passes_on = node.name in left or node.target is operator.getitem
        waiting += [read for read in node.all_input_nodes if passes_on or read.name not in in_memory]
    return frozenset(node.name for node in found)


def _node_of(operation: str, nodes: Mapping[str, torch.fx.Node]) -> str:
    """The node whose name, with something behind it, the operation has; nothing where there is none."""
    while operation not in nodes and "_" in operation:
        operation = re.sub(r"_[^_]*\Z", "", operation)
    return operation
