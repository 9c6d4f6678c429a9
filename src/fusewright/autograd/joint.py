"""The joint graph: forward and backward operators recorded into one graph, and its halves.

Takes what the recorder recorded when PyTorch's autograd engine was asked for the gradients of the captured outputs; gives data for `partition`.
Always holds: forward nodes stand before backward nodes; a node is *backward* exactly when a tangent reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def backward_nodes(joint: JointGraph) -> set[torch.fx.Node]:
    """The nodes that depend on a tangent."""
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    reached = set(placeholders[joint.inputs :])
    for node in joint.graph.nodes:
        if node.op not in ("placeholder", "output") and any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
    return reached
