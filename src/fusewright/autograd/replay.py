"""Running the recorded forward operators again, under PyTorch's own autograd: for gradients of gradients.

Takes the graph as it was recorded (forward and backward operators, writes included); gives a callable (*inputs) → the
graph's outputs, with their history. Always holds: writes are made in place, so that their gradients are PyTorch's, but
none reaches an input (it is copied first); what ran without autograd in the program runs without it here; a custom
autograd function is applied natively, so that its own rules hold; an input that the call has written to is what it was
before, and counts the input's versions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fusewright.autograd.halves import Replay
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
    outputs: Collection[int],
    constants: dict[str, torch.Tensor],
    user_code: tuple[UserCode, ...] = (),
) -> Replay:
    """`inputs`: how many placeholders of the recorded graph are the forward's; `outputs`: which of its outputs have
    gradients. Prepared at the first use. `user_code` is called again, natively."""
    return _Replay(functools.partial(_Program, recorded, inputs, outputs, user_code), constants)


Before = dict[int, tuple[torch.Tensor, int | None]]  # see halves.Replay


@dataclass(slots=True)
class _Replay:
    prepare: Callable[[], _Program]
    constants: dict[str, torch.Tensor]
    prepared: _Program | None = None

    def _program(self) -> _Program:
        self.prepared = self.prepared or self.prepare()
        return self.prepared

    def __call__(self, values: tuple[Any, ...], before: Before, known: dict[int, Any]) -> tuple[Any, ...]:
        return self._program().run(values, before, known, self.constants)

    def needed(self) -> frozenset[int]:
        return self._program().needed

    def changed(self) -> frozenset[int]:
        return self._program().changed


REPACKED = (
    "fusewright: the forward must run once more, for gradients of gradients (create_graph=True) or because what its "
    "backward looks up has changed, and what it saves is packed by a function that looks up something else now. Keep "
    "saved_tensors_hooks out of the compiled function."
)


class _Program:
    """The nodes to run, in order, and the user code among them."""

    def __init__(
        self, graph: torch.fx.Graph, inputs: int, outputs: Collection[int], user_code: tuple[UserCode, ...]
    ) -> None:
        results: Any = output_node(graph).args[0]
        self.wanted = tuple(one if place in outputs else None for place, one in enumerate(results[: max(outputs) + 1]))
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
        self.inputs, self.outputs, self.has_user_code = self.nodes[:inputs], outputs, bool(user_code)
        self.functional = functools.cache(lambda: functionalise(graph))
        self.changed = self._changed()

    def _changed(self) -> frozenset[int]:
        """The inputs that take a new value at the end, whose old one an output depends on, or the user's code reads."""
        found = {place for place, node in enumerate(self.inputs) if node in self.written}
        if found:
            updated = _updated(self.functional())
            inputs = [node for node in self.functional().nodes if node.op == "placeholder"]
            read = _read(self.functional(), self.outputs)
            found = {
                place
                for place in found
                if inputs[place] in updated and (inputs[place] in read or self.inputs[place] in self.shown)
            }
        return frozenset(found)

    @functools.cached_property
    def needed(self) -> frozenset[int]:
        """The inputs, by place, that the outputs depend on, or the user's code may."""
        read = _read(self.functional(), self.outputs)
        places = zip(range(len(self.inputs)), [node for node in self.functional().nodes if node.op == "placeholder"])
        return frozenset(place for place, node in places if self.has_user_code or node in read)

    def _ran(
        self, graph: torch.fx.Graph, inputs: int, user_code: tuple[UserCode, ...]
    ) -> tuple[list[torch.fx.Node], set[torch.fx.Node]]:
        """The forward's placeholders and what its outputs are computed from, in order; and what is written to of that
        which was there before. Every draw of random numbers is made again, so that each gets the numbers that it got.
        Leaves in `shown` what the user's code may read.
        """
        writes: dict[torch.fx.Node, list[torch.fx.Node]] = {}  # by what has the memory
        pending = _nodes(self.wanted)
        for node in graph.nodes:
            if node.op == "call_function" and "backward" not in node.meta:
                pending += [node] if node.meta.get("random") else []
                for one in _nodes(written_arguments(node)):
                    writes.setdefault(view_chain(one)[0], []).append(node)
        held: dict[Any, list[torch.fx.Node]] = {}  # what the user's code reads, by the node that it goes with
        for code in user_code:
            if isinstance(code, Hook):
                held.setdefault(code.tensor, []).extend(_nodes(code.called.held))
            elif isinstance(code, Saving):
                held.setdefault(None, []).extend(_nodes((code.pack.held, code.unpack.held)))
        for node, application in self.inside.items():
            held.setdefault(node, []).extend(_nodes(application.args))

        def reached(pending: list[torch.fx.Node], reads: Callable[[torch.fx.Node], list[torch.fx.Node]]) -> set[Any]:
            seen = set()
            while pending:
                node = pending.pop()
                if node not in seen:
                    seen.add(node)
                    pending += [*reads(node), *writes.get(node, ()), *held.get(node, ())]
                    pending += self.inside[node].nodes if node in self.inside else ()
            return seen

        seen = reached([*pending, *held.get(None, ())], lambda node: node.all_input_nodes)
        self.shown = reached([one for node in held.keys() & {*seen, None} for one in held[node]], _reads)
        self.writing = {node for nodes in writes.values() for node in nodes}
        placeholders = [node for node in graph.nodes if node.op == "placeholder"][:inputs]
        kept = [node for node in graph.nodes if node.op != "placeholder" and node in seen]
        given = {node for node in seen if node.op in ("placeholder", "get_attr")}
        return placeholders + kept, given & writes.keys()

    def run(
        self, values: tuple[Any, ...], before: Before, known: dict[int, Any], constants: dict[str, torch.Tensor]
    ) -> tuple[Any, ...]:
        instead = {self.wanted[position]: output for position, output in known.items()}
        environment: dict[torch.fx.Node, Any] = {}
        sizes: dict[Any, int] = {}
        given, later = iter(values), []
        as_before = {self.inputs[place]: one for place, one in before.items() if self.inputs[place] in self.written}

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
            if node in instead:
                environment[node] = instead[node]
            if node in as_before:
                environment[node] = _AsBefore.apply(environment[node], *as_before[node])
            elif node in self.written:
                environment[node] = environment[node].clone()
            elif node in self.writing:  # what autograd saves from here on, it saves of what the call has left
                _set_versions([(environment[input], version) for input, (_, version) in as_before.items()])
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


class _AsBefore(torch.autograd.Function):
    """forward(ctx, input, before, version) → a copy of `before`, with the input's history and (unless `version` is
    None) its version counter: PyTorch refuses what is saved of the copy once the input has been written to."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, before: torch.Tensor, version: int | None) -> torch.Tensor:
        copy = torch.empty_strided(before.shape, before.stride(), dtype=before.dtype, device=before.device)
        copy.copy_(before)
        if version is None:
            return copy
        counted = input.detach()
        counted.data = copy
        return counted

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient, None, None


def _set_versions(tensors: list[tuple[torch.Tensor, int | None]]) -> None:
    counted = [(tensor, version) for tensor, version in tensors if version is not None]
    if counted:
        torch._C._autograd._unsafe_set_version_counter(*zip(*counted))


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


def _reads(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What the node's results depend on. Running statistics, which a batch normalisation by its own statistics only
    hands on, are none of it."""
    handed_on = written_by(node.target, node.args) if node.target in HIDDEN_WRITES else ()  # type: ignore[arg-type]
    return [one for one in node.all_input_nodes if one not in {node.args[place] for place in handed_on}]


def _read(graph: torch.fx.Graph, outputs: Collection[int]) -> set[Any]:
    """What these outputs of a functional graph depend on."""
    seen: set[Any] = set()
    pending = _nodes([output_node(graph).args[0][place] for place in outputs])  # type: ignore[index]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += _reads(node)
    return seen


def _updated(graph: torch.fx.Graph) -> set[Any]:
    """The inputs that a functional graph writes to at its end."""
    return {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}


def changes(graph: torch.fx.Graph, outputs: Collection[int], replay: Replay, user_code: bool) -> frozenset[int]:
    """The inputs, by place, of which the replay needs what they held before. `graph`: a functional form of what was
    recorded, which is asked first: most graphs write to nothing that their results depend on."""
    updated = _updated(graph)
    if not updated or not (user_code or updated & _read(graph, outputs)):
        return frozenset()
    return replay.changed()


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
