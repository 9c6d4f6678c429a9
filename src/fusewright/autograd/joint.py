"""The joint graph: forward and backward operators recorded into one graph, and its halves.

Takes what the recorder recorded when PyTorch's autograd engine was asked for the gradients of the captured outputs; gives data for
`partition`.
Always holds: forward nodes stand before backward nodes; a node is *backward* exactly when a tangent reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx


@dataclass(slots=True)
class JointGraph:
    """Forward and backward in one FX graph.

    graph      placeholders: the forward's inputs, then one tangent for each differentiable output; the output node holds the forward's
               outputs, then the gradients (None where an input gets none)
    inputs     how many placeholders are the forward's inputs
    outputs    how many outputs are the forward's
    tangents   positions (among the forward's outputs) of the outputs that the tangents belong to
    gradients  positions (among the inputs) of the inputs that have a gradient, in the order of the gradient outputs
    """

    graph: torch.fx.Graph
    inputs: int
    outputs: int
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]


@dataclass(slots=True)
class Split:
    """The halves of a joint graph.

    forward   inputs → (user outputs..., saved values...)
    backward  (saved values..., tangents...) → gradients, in the order of JointGraph.gradients
    saved_inputs  for each saved value: the position of the forward input that it is, or -1 for a value that the forward computes (those are
                  the forward's extra outputs, in order)
    """

    forward: torch.fx.Graph
    backward: torch.fx.Graph
    saved_inputs: tuple[int, ...]


def output_node(graph: torch.fx.Graph) -> torch.fx.Node:
    """The graph's output node."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def results_of(graph: torch.fx.Graph) -> tuple[Any, ...]:
    """The graph's outputs: nodes, or constants."""
    return tuple(output_node(graph).args[0])  # type: ignore[arg-type]


def backward_nodes(graph: torch.fx.Graph, inputs: int) -> set[torch.fx.Node]:
    """The nodes that depend on a tangent: a placeholder after the first `inputs`."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    reached = set(placeholders[inputs:])
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
    return reached


def forward_only(graph: torch.fx.Graph, inputs: int, outputs: int) -> torch.fx.Graph:
    """The forward part of a recorded joint graph, as it was recorded (in-place operators included)."""
    backward = backward_nodes(graph, inputs)
    forward = torch.fx.Graph()
    values: dict[torch.fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op != "output" and node not in backward:
            values[node] = forward.node_copy(node, values.__getitem__)
    results = results_of(graph)[:outputs]
    forward.output(tuple(values[item] if isinstance(item, torch.fx.Node) else item for item in results))
    return forward
