"""Running the recorded forward operators again, under PyTorch's own autograd: for gradients of gradients.

Takes the graph as it was recorded (forward and backward operators, writes included); gives a callable (*inputs) → the
graph's outputs, with their history. Always holds: writes are made in place, so that their gradients are PyTorch's, but
none reaches an input (it is copied first); what ran without autograd in the program runs without it here; a custom
autograd function is applied natively, so that its own rules hold; an input that the call has changed since is not taken
for what it was: that is an error.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fusewright.autograd.halves import CHANGED, Replay
from fusewright.autograd.joint import output_node
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.capture.border.aliasing import written_arguments
from fusewright.graph.nodes import leaves
from fusewright.graph.passes.clean.functionalise import functionalise
from fusewright.operators.overlap import view_chain
from fusewright.operators.schema import HIDDEN_WRITES, written_by
from fusewright.record.applications import Application, Called, Hook, Saving, Shape, UserCode
from fusewright.sizes.expressions import Expr, evaluate


def replay(
    recorded: torch.fx.Graph,
    inputs: int,
    outputs: int,
    constants: dict[str, torch.Tensor],
    user_code: tuple[UserCode, ...] = (),
) -> Replay:
    """`inputs`, `outputs`: how many placeholders and outputs of the recorded graph are the forward's. Prepared at the
    first use. `user_code` is called again, natively."""
    return _Replay(functools.partial(_Program, recorded, inputs, outputs, user_code), constants)


@dataclass(slots=True)
class _Replay:
    prepare: Callable[[], _Program]
    constants: dict[str, torch.Tensor]
    prepared: _Program | None = None

    def _program(self) -> _Program:
        self.prepared = self.prepared or self.prepare()
        return self.prepared

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        program = self._program()
        if program.changed:
            raise RuntimeError(CHANGED)
        return program.run(values, self.constants)

    def needed(self) -> frozenset[int]:
        return self._program().needed


REPACKED = (
    "fusewright: the forward must run once more, for gradients of gradients (create_graph=True) or because what its "
    "backward looks up has changed, and what it saves is packed by a function that looks up something else now. Keep "
    "saved_tensors_hooks out of the compiled function."
)


class _Program:
    """The nodes to run, in order, and the user code among them."""

    def __init__(
        self, graph: torch.fx.Graph, inputs: int, outputs: int, user_code: tuple[UserCode, ...]
    ) -> None:
        self.wanted: tuple[Any, ...] = tuple(output_node(graph).args[0])[:outputs]  # type: ignore[arg-type]
        self.inside = {node: one for one in user_code if isinstance(one, Application) for node in one.nodes}
        self.nodes, self.written = self._ran(graph, inputs, user_code)
        self.hooks: dict[torch.fx.Node, list[Hook]] = {}  # by the node behind which they are registered
        places = {node: place for place, node in enumerate(graph.nodes)}
        self.saving: dict[torch.fx.Node, Saving] = {}  # what sees what the node saves: the context that began last
        for one in user_code:
            if isinstance(one, Hook) and one.tensor in self.nodes:
                last = max((node for node in self.nodes if places[node] <= places[one.after]), key=places.__getitem__)
                self.hooks.setdefault(last, []).append(one)
            elif isinstance(one, Saving):
                begins, ends = places.get(one.after, -1), places.get(one.last, len(places))
                self.saving |= {node: one for node in self.nodes if begins < places[node] <= ends}
        inputs_change = any(node.op == "placeholder" for node in self.written)
        self.inputs, self.has_user_code = inputs, bool(user_code)
        self.functional = functools.cache(lambda: functionalise(graph))
        self.changed = inputs_change and self._reads_what_changes()

    def _reads_what_changes(self) -> bool:
        """Whether an output depends on an input that takes a new value at the end."""
        nodes = self.functional().nodes
        updated = {node.args[0] for node in nodes if node.target is torch.ops.aten.copy_.default}
        return not updated.isdisjoint(_read(self.functional(), len(self.wanted)))

    @functools.cached_property
    def needed(self) -> frozenset[int]:
        """The inputs, by place, that the outputs depend on, or the user's code may."""
        read = _read(self.functional(), len(self.wanted))
        places = enumerate([node for node in self.functional().nodes if node.op == "placeholder"][: self.inputs])
        return frozenset(place for place, node in places if self.has_user_code or node in read)

    def _ran(
        self, graph: torch.fx.Graph, inputs: int, user_code: tuple[UserCode, ...]
    ) -> tuple[list[torch.fx.Node], set[torch.fx.Node]]:
        """The forward's placeholders and what its outputs are computed from, in order; and what is written to of that
        which was there before. Every draw of random numbers is made again, so that each gets the numbers that it got.
        """
        writes: dict[torch.fx.Node, list[torch.fx.Node]] = {}  # by what has the memory
        pending = _nodes(self.wanted)
        for node in graph.nodes:
            if node.op == "call_function" and "backward" not in node.meta:
                pending += [node] if node.meta.get("random") else []
                for one in _nodes(written_arguments(node)):
                    writes.setdefault(view_chain(one)[0], []).append(node)
        seen: set[torch.fx.Node] = set()
        hooks: dict[torch.fx.Node, list[Hook]] = {}
        for code in user_code:
            if isinstance(code, Hook):
                hooks.setdefault(code.tensor, []).append(code)
            elif isinstance(code, Saving):
                pending += _nodes((code.pack.held, code.unpack.held))
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            pending += [*node.all_input_nodes, *writes.get(node, ())]
            pending += [held for hook in hooks.get(node, ()) for held in _nodes(hook.called.held)]
            application = self.inside.get(node)
            if application is not None:
                pending += [*application.nodes, *_nodes(application.args)]
        placeholders = [node for node in graph.nodes if node.op == "placeholder"][:inputs]
        kept = [node for node in graph.nodes if node.op != "placeholder" and node in seen]
        given = {node for node in seen if node.op in ("placeholder", "get_attr")}
        return placeholders + kept, given & writes.keys()

    def run(self, values: tuple[Any, ...], constants: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        environment: dict[torch.fx.Node, Any] = {}
        sizes: dict[Any, int] = {}
        given, later = iter(values), []

        def function(called: Called) -> Any:
            return called.over(_resolved(called.held, environment, sizes))

        def seen_by(saving: Saving | None) -> AbstractContextManager[Any]:
            if saving is None:
                return nullcontext()
            if not saving.as_packed():
                raise RuntimeError(REPACKED)
            return torch.autograd.graph.saved_tensors_hooks(function(saving.pack), function(saving.unpack))

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
            elif "saved" in node.meta:
                environment[node] = environment[_with_history(node)]
            elif node.target is operator.getitem:
                environment[node] = environment[node.args[0]][node.args[1]]  # type: ignore[index]
            else:
                args, kwargs = _resolved((node.args, node.kwargs), environment, sizes)
                enabled = not node.meta.get("no_grad") and application is None
                with torch.set_grad_enabled(enabled), seen_by(self.saving.get(node)):
                    run: Any = _INSTEAD.get(node.target, node.target)
                    environment[node] = run(*args, **kwargs)
            if node in self.written:
                environment[node] = environment[node].clone()
            if application is not None and node is application.nodes[-1]:
                with seen_by(self.saving.get(node)):
                    _apply(application, environment, sizes)
            for hook in self.hooks.get(node, ()):
                if environment[hook.tensor].requires_grad:
                    later.append((hook, _Late()))
                    environment[hook.tensor].register_hook(later[-1][1])
        for hook, late in later:
            late.function = function(hook.called)
        return tuple(_resolved(item, environment, sizes) for item in self.wanted)


class _Late:
    """A hook that is registered before all that it holds is there. PyTorch's engine asks with None where only another
    result of the operator has a gradient: in the program this is one tensor with what was called, whose gradient the
    hook has seen there."""

    function: Callable[..., Any]

    def __call__(self, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else self.function(gradient)


_INSTEAD: dict[Any, Callable[..., Any]] = {torch.ops.aten.detach.default: lambda tensor: tensor.data}
"""What runs in an operator's place: `detach` stands for `data` too, a write to which does not count as one."""


def _with_history(node: torch.fx.Node) -> torch.fx.Node:
    """What autograd has saved as this."""
    while node.target is torch.ops.aten.detach.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _nodes(value: Any) -> list[torch.fx.Node]:
    return [item for item in leaves(value) if isinstance(item, torch.fx.Node)]


def _read(graph: torch.fx.Graph, outputs: int) -> set[Any]:
    """What so many outputs of a functional graph depend on. Running statistics, which a batch normalisation by its own
    statistics only hands on, are none of it."""
    seen: set[Any] = set()
    pending = _nodes(output_node(graph).args[0][:outputs])  # type: ignore[index]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        handed_on = written_by(node.target, node.args) if node.target in HIDDEN_WRITES else ()  # type: ignore[arg-type]
        pending += [one for one in node.all_input_nodes if one not in {node.args[place] for place in handed_on}]
    return seen


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
                f"fusewright: the forward of {application.function.__qualname__} must run once more, for gradients of "
                "gradients (create_graph=True) or because what its backward looks up has changed, and it computes "
                "something else now. Keep it out of the compiled function, or compile with "
                "fusewright.disable around it."
            )
        environment[node] = value


def _resolved(value: Any, environment: dict[torch.fx.Node, Any], sizes: dict[Any, int]) -> Any:
    """An argument with nodes and symbolic sizes replaced by their values."""
    if isinstance(value, torch.fx.Node):
        return environment[value]
    if isinstance(value, Expr):
        return evaluate(value, sizes)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [_resolved(item, environment, sizes) for item in value]
        kind = torch.Size if isinstance(value, Shape) else list if isinstance(value, list) else tuple
        return kind(items)
    if isinstance(value, dict):
        return {key: _resolved(item, environment, sizes) for key, item in value.items()}
    return value
