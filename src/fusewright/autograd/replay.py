"""Running the recorded forward operators again, under PyTorch's own autograd: for gradients of gradients.

Takes the graph as it was recorded (forward and backward operators, writes included); gives a callable (*inputs) → the
graph's outputs, with their history. Always holds: nothing is written to (the graph is made functional first, and what
it would write at its end is left out); what ran without autograd in the program runs without it here; a custom autograd
function is applied natively, so that its own rules hold; an input that the call has changed since is not taken for what
it was: that is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from fusewright.autograd.halves import CHANGED
from fusewright.autograd.joint import output_node
from fusewright.graph.passes.clean.functionalise import functionalise
from fusewright.operators.schema import HIDDEN_WRITES, facts, written_by
from fusewright.record.applications import Application, Hook
from fusewright.sizes.expressions import Expr, evaluate

Replay = Callable[..., tuple[Any, ...]]


def replay(
    recorded: torch.fx.Graph,
    inputs: int,
    outputs: int,
    constants: dict[str, torch.Tensor],
    user_code: tuple[Application | Hook, ...] = (),
) -> Replay | None:
    """`inputs`, `outputs`: how many placeholders and outputs of the recorded graph are the forward's. Prepared at the
    first call. `user_code` is called again, natively. None where it stands beside writes, which only another graph than
    the recorded one is free of."""
    if user_code and any(isinstance(node.target, OpOverload) and facts(node.target).written for node in recorded.nodes):
        return None
    prepared: list[_Program] = []

    def run(*values: Any) -> tuple[Any, ...]:
        if not prepared:
            graph = recorded if user_code else functionalise(recorded, histories=True)
            prepared.append(_Program(graph, inputs, outputs, user_code))
        if prepared[0].changed:
            raise RuntimeError(CHANGED)
        return prepared[0].run(values, constants)

    return run


class _Program:
    """The nodes to run, in order, and the user code among them."""

    def __init__(
        self, graph: torch.fx.Graph, inputs: int, outputs: int, user_code: tuple[Application | Hook, ...]
    ) -> None:
        self.wanted: tuple[Any, ...] = tuple(output_node(graph).args[0])[:outputs]  # type: ignore[arg-type]
        self.inside = {node: one for one in user_code if isinstance(one, Application) for node in one.nodes}
        self.hooks: dict[torch.fx.Node, list[Callable[..., Any]]] = {}
        for one in user_code:
            if isinstance(one, Hook):
                self.hooks.setdefault(one.tensor, []).append(one.hook)
        roots = [item for item in self.wanted if isinstance(item, torch.fx.Node)]
        self.nodes = self._needed(graph, roots, inputs)
        self.changed = _reads_what_changes(graph, roots)

    def _needed(self, graph: torch.fx.Graph, roots: list[torch.fx.Node], inputs: int) -> list[torch.fx.Node]:
        """The forward's placeholders and what `roots` are computed from, in order."""
        seen: set[torch.fx.Node] = set()
        pending = list(roots)
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            pending += node.all_input_nodes
            application = self.inside.get(node)
            if application is not None:
                pending += application.nodes
                pending += [item for item in tree_leaves(application.args) if isinstance(item, torch.fx.Node)]
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        # Every draw of random numbers is made again, so that each gets the numbers that it got.
        drawn = {node for node in graph.nodes if node.op == "call_function" and node.meta.get("random")}
        return placeholders[:inputs] + [
            node for node in graph.nodes if node.op != "placeholder" and (node in seen or node in drawn)
        ]

    def run(self, values: tuple[Any, ...], constants: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        environment: dict[torch.fx.Node, Any] = {}
        sizes: dict[Any, int] = {}
        given = iter(values)
        for node in self.nodes:
            application = self.inside.get(node)
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
                with torch.set_grad_enabled(not node.meta.get("no_grad") and application is None):
                    args, kwargs = _resolved((node.args, node.kwargs), environment, sizes)
                    environment[node] = _DIFFERENTIATED.get(node.target, node.target)(*args, **kwargs)  # type: ignore
                before = environment.get(node.meta.get("history_of"))  # type: ignore[arg-type]
                if isinstance(before, torch.Tensor) and before.requires_grad:
                    environment[node] = _Written.apply(before, environment[node])
            if application is None:
                self._hook(node, environment)
            elif node is application.nodes[-1]:
                _apply(application, environment, sizes)
                for output in application.outputs:
                    self._hook(output, environment)
        return tuple(_resolved(item, environment, sizes) for item in self.wanted)

    def _hook(self, node: torch.fx.Node | None, environment: dict[torch.fx.Node, Any]) -> None:
        for hook in self.hooks.get(node, ()):  # type: ignore[arg-type]
            if environment[node].requires_grad:  # type: ignore[index]
                environment[node].register_hook(hook)  # type: ignore[index]


def _reads_what_changes(graph: torch.fx.Graph, roots: list[torch.fx.Node]) -> bool:
    """Whether `roots` depend on an input that takes a new value at the graph's end. Running statistics, which a batch
    normalisation by its own statistics only hands on, are none that it depends on."""
    changed = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
    seen: set[Any] = set()
    pending = list(roots) if changed else []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        handed_on = written_by(node.target, node.args) if node.target in HIDDEN_WRITES else ()  # type: ignore[arg-type]
        pending += [one for one in node.all_input_nodes if one not in {node.args[place] for place in handed_on}]
    return not changed.isdisjoint(seen)


def _apply(application: Application, environment: dict[torch.fx.Node, Any], sizes: dict[Any, int]) -> None:
    """Calls the user's function on the values, and puts its results, with their history, in the place of the recorded
    operators'. They are compared: the function may read something that has changed since."""
    found = application.function(*_resolved(application.args, environment, sizes))
    for node, value in zip(application.outputs, found if isinstance(found, (list, tuple)) else (found,)):
        if node is None:
            continue
        recorded = environment[node]
        same = isinstance(value, torch.Tensor) and value.shape == recorded.shape
        if not same or not torch.equal(value.nan_to_num(), recorded.nan_to_num()):
            raise RuntimeError(
                "fusewright: gradients of gradients (create_graph=True) need the forward of "
                f"{application.function.__qualname__} once "
                "more, and it computes something else now. Keep it out of the compiled function, or compile with "
                "fusewright.disable around it."
            )
        environment[node] = value


def _as_strided_scatter(
    base: torch.Tensor, value: torch.Tensor, size: Any, stride: Any, offset: int | None = None
) -> torch.Tensor:
    """As a write to a view. PyTorch's gradient of the operator has what was written over, and nothing else."""
    result = base.new_empty_strided(base.shape, base.stride()).copy_(base)
    start = None if offset is None else offset - base.storage_offset()
    result.as_strided(size, stride, start).copy_(value)
    return result


_DIFFERENTIATED: dict[Any, Callable[..., Any]] = {torch.ops.aten.as_strided_scatter.default: _as_strided_scatter}
"""What runs in an operator's place, whose gradient in PyTorch is not that of its values."""


class _Written(torch.autograd.Function):
    """A tensor that was written to under no_grad: the new value, with the gradient of the value before."""

    @staticmethod
    def forward(ctx: Any, before: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def _resolved(value: Any, environment: dict[torch.fx.Node, Any], sizes: dict[Any, int]) -> Any:
    """An argument with nodes and symbolic sizes replaced by their values."""
    if isinstance(value, torch.fx.Node):
        return environment[value]
    if isinstance(value, Expr):
        return evaluate(value, sizes)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [_resolved(item, environment, sizes) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _resolved(item, environment, sizes) for key, item in value.items()}
    return value
