"""Splits off what depends on parameters alone, so that it is computed once and not at every call.

Takes a functional inference graph whose parameter inputs carry meta["stable"]; changes it so that each such value that
the rest reads is one more input, behind the others; gives the steps that compute these inputs (from sizes as they
usually are, too).
Always holds: views of parameters stay where they are (they cost nothing), and so does what would need much more memory
than the parameters that it comes from, and what leaves the graph: the caller may write to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from fusewright.base.thresholds import MOST_GROWTH, SMALL
from fusewright.graph.freezing import Prepacking, Ref, Size, Step
from fusewright.graph.nodes import add_placeholder, ancestors
from fusewright.graph.passes.clean.escape import escaping
from fusewright.graph.passes.parameters.stable import stable_nodes
from fusewright.operators.schema import facts
from fusewright.sizes.expressions import Expr, to_tuples
from fusewright.sizes.tensor_type import TensorType

Node = torch.fx.Node


def split_prepacking(graph: torch.fx.Graph) -> Prepacking | None:
    """What is computed beforehand, or None when there is nothing. `graph` then takes the values as further inputs."""
    stable = stable_nodes(graph) - escaping(graph)
    wanted = [node for node in graph.nodes if node in stable and _is_worth_keeping(node, stable)]
    if not wanted:
        return None
    steps, inputs = _steps(graph, wanted)
    usual = tuple(
        (node.meta["usual"], node.meta["type"].name)
        for node in graph.find_nodes(op="placeholder")
        if "usual" in node.meta
    )
    types = tuple(node.meta["type"] for node in wanted)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in wanted:
        with graph.inserting_after(last):
            last = add_placeholder(graph, "prepared")
        last.meta["type"] = node.meta["type"]
        node.replace_all_uses_with(last)
    for node in reversed(list(graph.nodes)):
        if node in stable and node.op != "placeholder" and not node.users:
            graph.erase_node(node)
    results = tuple(
        Ref(position) for position in range(len(inputs) + len(steps) - len(wanted), len(inputs) + len(steps))
    )
    return Prepacking(tuple(inputs), tuple(steps), results, types, usual)


def _is_worth_keeping(node: Node, stable: set[Node]) -> bool:
    """Whether the rest of the graph reads `node`, and it is worth its memory."""
    if (
        node.op == "placeholder"
        or all(user in stable for user in node.users)
        or not isinstance(node.meta["type"], TensorType)
    ):
        return False
    base = node
    while base.op == "call_function" and isinstance(base.target, torch._ops.OpOverload) and facts(base.target).is_view:
        base = base.all_input_nodes[0]
    if base.op == "placeholder":
        return False
    return may_be_kept(node)


def may_be_kept(node: Node) -> bool:
    """Whether a value that depends on parameters alone may stay in memory beside them: else it is computed at every
    call."""
    size = _bytes(node)
    if size is None:
        return False
    return size <= SMALL or size <= MOST_GROWTH * sum(_bytes(source) or 0 for source in _sources(node))


def _bytes(node: Node) -> int | None:
    type_: TensorType = node.meta["type"]
    count = type_.numel()
    return count * type_.dtype.itemsize if isinstance(count, int) else None


def _sources(node: Node) -> set[Node]:
    """The inputs that a node depends on."""
    return {one for one in ancestors([node]) if one.op == "placeholder"}


def _steps(graph: torch.fx.Graph, wanted: list[Node]) -> tuple[list[Step], list[int]]:
    """The steps that compute `wanted`, whose last ones are `wanted` in order; and the positions of the inputs that they
    read."""
    needed = ancestors(wanted)
    places: dict[Node, int] = {}
    inputs: list[int] = []
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        if node in needed:
            places[node] = len(inputs)
            inputs.append(position)
    steps: list[Step] = []

    def argument(value: Any) -> Any:
        if isinstance(value, Node):
            return Ref(places[value])
        if isinstance(value, list | tuple):
            return tuple(argument(item) for item in value)
        return Size(to_tuples(value)) if isinstance(value, Expr) else value

    for node in graph.nodes:
        if node in needed and node.op == "call_function":
            places[node] = len(inputs) + len(steps)
            target = node.target if isinstance(node.target, torch._ops.OpOverload) else None  # None: getitem
            keywords = tuple((name, argument(value)) for name, value in node.kwargs.items())
            steps.append(Step(target, argument(node.args), keywords))
    for node in wanted:  # once more at the end, in the order of the new inputs
        steps.append(Step(None, (Ref(places[node]),), ()))
    return steps, inputs
