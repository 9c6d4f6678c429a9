"""Running the recorded forward operators again, under PyTorch's own autograd: for gradients of gradients.

Takes the graph as it was recorded (forward and backward operators, writes included); gives a callable (*inputs) → the graph's outputs, with
their history. Always holds: nothing is written to (the graph is made functional first, and what it would write at its end is left out);
what ran without autograd in the program runs without it here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from fusewright.autograd.joint import output_node
from fusewright.graph.passes.functionalise import functionalise
from fusewright.graph.sizes import Expr, evaluate

Replay = Callable[..., tuple[Any, ...]]


def replay(recorded: torch.fx.Graph, inputs: int, outputs: int, constants: dict[str, torch.Tensor]) -> Replay:
    """`inputs`, `outputs`: how many placeholders and outputs of the recorded graph are the forward's. Prepared at the first call."""
    prepared: list[tuple[list[torch.fx.Node], tuple[Any, ...]]] = []

    def run(*values: Any) -> tuple[Any, ...]:
        if not prepared:
            graph = functionalise(recorded)
            wanted = tuple(output_node(graph).args[0])[:outputs]  # type: ignore[arg-type]
            prepared.append((_needed(graph, [item for item in wanted if isinstance(item, torch.fx.Node)], inputs), wanted))
        nodes, wanted = prepared[0]
        environment: dict[torch.fx.Node, Any] = {}
        sizes: dict[Any, int] = {}
        given = iter(values)
        for node in nodes:
            if node.op == "placeholder":
                value = environment[node] = next(given)
                if isinstance(node.meta["type"], Expr):
                    sizes[node.meta["type"]] = value
            elif node.op == "get_attr":
                environment[node] = constants[str(node.target)]
            elif isinstance(node.meta.get("type"), Expr):
                environment[node] = evaluate(node.meta["type"], sizes)
            elif node.target is operator.getitem:
                environment[node] = environment[node.args[0]][node.args[1]]  # type: ignore[index]
            else:
                with torch.set_grad_enabled(not node.meta.get("no_grad")):
                    args, kwargs = _resolved((node.args, node.kwargs), environment, sizes)
                    environment[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                before = environment.get(node.meta.get("history_of"))  # type: ignore[arg-type]
                if isinstance(before, torch.Tensor) and before.requires_grad:
                    environment[node] = _Written.apply(before, environment[node])
        return tuple(_resolved(item, environment, sizes) for item in wanted)

    return run


class _Written(torch.autograd.Function):
    """A tensor that was written to under no_grad: the new value, with the gradient of the value before."""

    @staticmethod
    def forward(ctx: Any, before: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def _needed(graph: torch.fx.Graph, roots: list[torch.fx.Node], inputs: int) -> list[torch.fx.Node]:
    """The forward's placeholders and what `roots` are computed from, in order."""
    seen: set[torch.fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    # Every draw of random numbers is made again, so that each gets the numbers that it got.
    drawn = {node for node in graph.nodes if node.op == "call_function" and node.meta.get("random")}
    return placeholders[:inputs] + [node for node in graph.nodes if node.op != "placeholder" and (node in seen or node in drawn)]


def _resolved(value: Any, environment: dict[torch.fx.Node, Any], sizes: dict[Any, int]) -> Any:
    """An argument with nodes and symbolic sizes replaced by their values."""
    if isinstance(value, torch.fx.Node):
        return environment[value]
    if isinstance(value, Expr):
        return evaluate(value, sizes)
    if isinstance(value, (list, tuple)):
        return [_resolved(item, environment, sizes) for item in value]
    if isinstance(value, dict):
        return {key: _resolved(item, environment, sizes) for key, item in value.items()}
    return value
