"""torch.cond, while_loop, scan and map as operators of the graph, with gradients; associative_scan as plain Python.

Takes the call's arguments; gives its result, with the bodies captured as subgraphs whose closed-over tensors become
operands. A gradient is an operator too, over the bodies' gradients. Always holds: what a body of cond or while_loop
does besides computing tensors (a store, a write into an operand), or what differs between the branches, is a graph
break, and the call then runs by its plain Python meaning, with each body compiled; such a scan or map is unrolled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, replace
from fusewright.base.signals import GraphBreak, Retry, UserException
from fusewright.capture.call.bodies import (
    Body,
    add_placeholder_of,
    closed,
    differentiable,
    here,
    kind_of,
    placeholders_of,
    record_body,
    record_gradient,
    refuse,
    traces,
)
from fusewright.graph.bound_names import as_module
from fusewright.graph.nodes import leaves as leaves_of
from fusewright.operators import higher_order, subgraphs
from fusewright.operators.schema import facts
from fusewright.record.recorder import Recorder
from fusewright.record.traced_tensor import TracedTensor
from fusewright.sizes.expressions import Expr, Symbol, free_symbols
from fusewright.sizes.symint import dim_of
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Row = Callable[["Tracer", Args, Kwargs], Any]


def _plain(name: str) -> Row:
    function: Any = next(function for (_, known), function in higher_order.PLAIN.items() if known == name)
    return lambda tracer, args, kwargs: tracer.inline(function, args, kwargs)


def _cond(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    return _choose(tracer, *args, **kwargs)


def _choose(tracer: Tracer, pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    if not isinstance(pred, torch.Tensor):
        return tracer.inline(higher_order.cond, (pred, true_fn, false_fn, operands))  # type: ignore[arg-type]
    if tracer.options.exporting:
        return _chosen(tracer, pred, (true_fn, false_fn), tuple(operands))
    (pred,) = here(tracer, [pred])
    bodies = [record_body(tracer, function, list(operands)) for function in (true_fn, false_fn)]
    if bodies[0].spec != bodies[1].spec or not _same_types(bodies[0].results, bodies[1].results):
        refuse("torch.cond whose branches give different structures, shapes or dtypes")
    inputs, wanted = _common_inputs(bodies)
    results = bodies[0].results
    kinds = [kind_of(result) for result in results]
    if tracer.recorder.level == "torch":
        graphs = [_at_torch_level(tracer, body, inputs, bool(wanted)) for body in bodies]
        made = _record_modules(
            tracer, torch.ops.higher_order.cond, graphs, results, lambda parts: (pred, *parts, tuple(inputs))
        )
        return pytree.tree_unflatten(made, bodies[0].spec)
    graphs = [closed(body.recorder, body.results, placeholders_of(body, inputs)) for body in bodies]

    def forward(inputs: list[Any]) -> list[Any]:
        return _record(tracer.recorder, subgraphs.CHOOSE, graphs, kinds, ((pred,), (inputs,)))

    if not wanted:
        return pytree.tree_unflatten(forward(inputs), bodies[0].spec)
    back = [record_gradient(tracer, body, inputs, wanted) for body in bodies]
    state = _generator_state(tracer, bodies)
    floats = differentiable(results)

    def backward(inputs: list[Any], tangents: list[Any]) -> list[Any]:
        operands = (pred,), ([*inputs, *(tangents[place] for place in floats)], *state)
        return _record(tracer.recorder, subgraphs.CHOOSE, back, [kind_of(value) for value in wanted], operands)

    constant = {k for k in range(len(results)) if not any(body.results[k].requires_grad for body in bodies)}
    made = _differentiated(forward, backward, inputs, wanted, constant)
    return pytree.tree_unflatten(made, bodies[0].spec)


def _chosen(tracer: Tracer, pred: torch.Tensor, functions: tuple[Any, Any], operands: Args) -> Any:
    """The call in a program that leaves the process, whose graph has operators alone: both branches are computed, and
    the condition chooses between their results."""
    roots, graph = (*functions, *operands), tracer.recorder.graph
    before, known = traces(tracer, roots), set(graph.nodes)
    try:
        results = [tracer.world.materialise(tracer.call(function, operands)) for function in functions]
    except UserException as signal:
        refuse(f"a body raises {type(signal.exception).__name__}: {signal.exception}")
    if traces(tracer, roots) != before:
        refuse("a body that has effects besides its result")
    for node in graph.nodes:
        if node not in known and isinstance(node.target, torch._ops.OpOverload):
            about = facts(node.target)
            if about.written or about.random or about.effect or node.meta.get("random"):
                refuse(f"a body that writes, draws random numbers or has an effect: {node.target}")
            if about.may_fail:
                refuse(f"an exported program computes both branches, and {node.target} may fail in the other one")
    (leaves, spec), (others, other_spec) = map(pytree.tree_flatten, results)
    if not all(isinstance(leaf, TracedTensor) for leaf in (*leaves, *others)):
        refuse("a body that returns something besides tensors")
    if spec != other_spec or not _same_types(leaves, others):
        refuse("torch.cond whose branches give different structures, shapes or dtypes")
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in (*leaves, *others)):
        refuse("gradients through it are wanted: export it under torch.no_grad()")
    made = [tracer.world.torch_call(torch.where, (pred, *pair), {}) for pair in zip(leaves, others)]
    return pytree.tree_unflatten(made, spec)


def _while_loop(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    return _repeat(tracer, *args, **kwargs)


def _repeat(tracer: Tracer, cond_fn: Any, body_fn: Any, carried_inputs: Any) -> Any:
    carried = list(carried_inputs)
    if not carried or not all(isinstance(value, TracedTensor) for value in carried):
        refuse("torch.while_loop that carries something besides tensors")
    carried = here(tracer, carried)
    test, body = (record_body(tracer, function, [], carried) for function in (cond_fn, body_fn))
    if len(test.results) != 1 or test.results[0].numel() != 1:
        refuse("torch.while_loop whose condition is not one value")
    if not _same_types(body.results, carried):
        refuse("torch.while_loop whose body gives other shapes or dtypes than it takes")
    inputs, wanted = _common_inputs([test, body], carried)
    kinds = [kind_of(value) for value in carried]
    if tracer.recorder.level == "torch":
        operator = torch.ops.higher_order.while_loop
        graphs = [_at_torch_level(tracer, part, inputs, bool(wanted)) for part in (test, body)]
        output = graphs[0].output_node()  # the operator wants the bare condition
        output.args = (output.args[0][0],)  # type: ignore[index]
        return tuple(
            _record_modules(tracer, operator, graphs, carried, lambda parts: (*parts, tuple(carried), tuple(inputs)))
        )
    graphs = [closed(part.recorder, part.results, placeholders_of(part, inputs)) for part in (test, body)]
    operators = subgraphs.REPEAT, subgraphs.REPEAT_BACKWARD
    return tuple(_loop(tracer, operators, [test, body], graphs, _Operands(carried, [], inputs, wanted), kinds))


def _scan(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    return _pass_over(tracer, *args, **kwargs)


def _pass_over(tracer: Tracer, combine_fn: Any, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    """A scan: as an operator where it is long, else step by step, so that steps may fuse."""
    carried, spec = pytree.tree_flatten(init)
    rows, of_rows = pytree.tree_flatten(xs)
    if not _is_long(tracer, rows, dim) or not carried or not all(isinstance(one, TracedTensor) for one in carried):
        return tracer.inline(higher_order.scan, (combine_fn, init, xs), {"dim": dim, "reverse": reverse})  # type: ignore[arg-type]
    call = tracer.world.torch_call
    rows = [call(torch.movedim, (one, dim, 0), {}) for one in rows] if dim % rows[0].dim() else rows
    rows = [call(torch.flip, (one, [0]), {}) for one in rows] if reverse else rows
    sides = _Sides(spec, of_rows, len(carried))

    def step(*values: Any) -> Any:
        return tracer.call(combine_fn, (sides.carry(values), sides.row(values)))

    body, outputs = _scan_body(tracer, combine_fn, step, carried, rows)
    results = _scanned(tracer, body, carried, rows)
    finals, stacked = results[: len(carried)], results[len(carried) :]
    stacked = [call(torch.flip, (one, [0]), {}) for one in stacked] if reverse else stacked
    at = dim % rows[0].dim()
    stacked = [call(torch.movedim, (one, 0, at), {}) if 0 < at < one.dim() else one for one in stacked]
    return pytree.tree_unflatten(finals, spec), pytree.tree_unflatten(stacked, outputs)


def _map(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    return _over_rows(tracer, *args, **kwargs)


def _over_rows(tracer: Tracer, f: Any, xs: Any, *operands: Any) -> Any:
    """A map: a scan that carries nothing."""
    rows, of_rows = pytree.tree_flatten(xs)
    if not _is_long(tracer, rows, 0):
        return tracer.inline(higher_order.map, (f, xs, *operands))  # type: ignore[arg-type]

    def step(*values: Any) -> Any:
        return (), tracer.call(f, (pytree.tree_unflatten(list(values), of_rows), *operands))

    body, outputs = _scan_body(tracer, (f, operands), step, [], rows)
    return pytree.tree_unflatten(_scanned(tracer, body, [], rows), outputs)


UNROLLED = 16
"""Steps of a scan or map up to which they are captured one by one. (A step as an operator's body costs a call of each
of its operators; unrolled, they fuse, but capture grows with the length.)"""


def _is_long(tracer: Tracer, rows: list[Any], dim: int) -> bool:
    """Whether a scan over these becomes an operator."""
    if not rows or not tracer.assumptions.loops or not all(isinstance(one, TracedTensor) for one in rows):
        return False
    if any(one.dim() == 0 or one.dim() <= dim % rows[0].dim() for one in rows):
        return False
    length = dim_of(rows[0].shape[dim])
    if isinstance(length, int) and length <= UNROLLED:
        return False
    if tracer.recorder.level == "torch":
        if tracer.recorder.changes_level:
            raise Retry(lacks_form=True)
        return False
    return all(dim_of(one.shape[dim]) == length for one in rows)


@dataclass(frozen=True, slots=True)
class _Sides:
    """How the flat arguments of a scan's step become the two that the user's function takes."""

    spec: Any
    of_rows: Any
    count: int

    def carry(self, values: Args) -> Any:
        return pytree.tree_unflatten(list(values[: self.count]), self.spec)

    def row(self, values: Args) -> Any:
        return pytree.tree_unflatten(list(values[self.count :]), self.of_rows)


def _scan_body(
    tracer: Tracer, roots: Any, step: Callable[..., Any], carried: list[Any], rows: list[Any]
) -> tuple[Body, Any]:
    """The recording of a scan's step, and the structure of what it gives for a row. What cannot be one is unrolled."""
    try:
        body = record_body(tracer, step, [], carried, rows, roots)
        carry, outputs = pytree.tree_unflatten(list(range(len(body.results))), body.spec)
        places = [*pytree.tree_leaves(carry), *pytree.tree_leaves(outputs)]
        if places != list(range(len(places))) or not _same_types(body.results[: len(carried)], carried):
            refuse("a scan whose carry changes its structure, shape or dtype")
        if len(pytree.tree_leaves(carry)) != len(carried):
            refuse("a scan whose carry changes its structure")
    except GraphBreak as signal:
        if signal.code in ("higher-order-operator", "data-dependent-scalar"):
            raise Retry(loops=False) from None
        raise
    return body, pytree.tree_structure(outputs)


def _scanned(tracer: Tracer, body: Body, carried: list[Any], rows: list[Any]) -> list[Any]:
    """The operator of a scan: what it carries in the end, then the rows that it gives."""
    carried, rows = here(tracer, carried), here(tracer, rows)
    inputs, wanted = _common_inputs([body], [*carried, *rows])
    graph = closed(body.recorder, body.results, placeholders_of(body, inputs))
    kinds = [kind_of(value) for value in carried]
    length = rows[0].tensor_type.shape[0]
    for value in body.results[len(carried) :]:
        shape = (length, *value.tensor_type.shape)
        kinds.append(replace(kind_of(value), shape=shape, stride=contiguous_strides(shape)))
    operators = subgraphs.SCAN, subgraphs.SCAN_BACKWARD
    return _loop(tracer, operators, [body], [graph], _Operands(carried, rows, inputs, wanted), kinds)


@dataclass(frozen=True, slots=True)
class _Operands:
    """What a loop's operator takes: what it carries, what it passes over, and what its body reads besides. wanted: the
    tensors of the three that have a gradient, in this order (all floats of the first two, or none at all)."""

    carried: list[Any]
    rows: list[Any]
    inputs: list[Any]
    wanted: list[Any]

    def all(self) -> list[Any]:
        return [*self.carried, *self.rows, *self.inputs]

    def split(self, values: list[Any]) -> tuple[list[Any], ...]:
        """`values` of the three, as the operator takes them. (A while_loop passes over nothing.)"""
        first, second = len(self.carried), len(self.carried) + len(self.rows)
        parts = values[:first], values[first:second], values[second:]
        return parts if self.rows else (parts[0], parts[2])


def _loop(
    tracer: Tracer, operators: Args, bodies: list[Body], graphs: list[Any], operands: _Operands, kinds: list[TensorType]
) -> list[Any]:
    def forward(values: list[Any]) -> list[Any]:
        return _record(tracer.recorder, operators[0], graphs, kinds, ((), operands.split(values)))

    if not operands.wanted:
        return forward(operands.all())
    body = bodies[-1]
    floats = differentiable(kinds)
    asked = [own for own in body.own if own.is_floating_point()]
    asked += operands.wanted[len(asked) :]
    back = record_gradient(tracer, body, operands.inputs, asked)
    state = _generator_state(tracer, bodies) or (None,)

    def backward(values: list[Any], tangents: list[Any]) -> list[Any]:
        given = (*operands.split(values), [tangents[place] for place in floats], *state)
        wanted = [kind_of(value) for value in operands.wanted]
        for place, kind in enumerate(wanted):  # rows' gradients are stacked
            wanted[place] = replace(kind, stride=contiguous_strides(kind.shape))
        return _record(tracer.recorder, operators[1], [*graphs, back], wanted, ((), given))

    return _differentiated(forward, backward, operands.all(), operands.wanted, set())


def _generator_state(tracer: Tracer, bodies: list[Body]) -> tuple[Any, ...]:
    """The state of the random generator before the operator, where its gradient has to draw the same numbers again."""
    drawn = [node for body in bodies for node in body.recorder.graph.nodes if node.meta.get("random")]
    if not drawn:
        return ()
    kinds = [kind for node in drawn for kind in leaves_of(node.meta["type"]) if isinstance(kind, TensorType)]
    if any(kind.device.type != "cpu" for kind in kinds):
        refuse("a gradient through random numbers of a GPU in a body")
    size, device = len(torch.get_rng_state()), torch.device("cpu")
    kind = TensorType((size,), (1,), torch.uint8, device, False, 0)
    state = tracer.recorder.record(subgraphs.GENERATOR_STATE, (device,), kind)
    return (state,)


class _Differentiated(torch.autograd.Function):
    """Recorded operators with their own backward. forward: (operands) → results; backward: (operands, tangents) →
    gradients of those operands that have one."""

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], facts: tuple[Any, Any], *operands: Any
    ) -> Any:
        wanted, constant = facts
        ctx.run, ctx.wanted = backward, [any(value is one for one in wanted) for value in operands]
        ctx.save_for_backward(*operands)
        made = tuple(forward(list(operands)))
        ctx.mark_non_differentiable(*(made[place] for place in constant))
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: Any) -> Any:
        found = iter(ctx.run(list(ctx.saved_tensors), list(tangents)))
        return (None, None, None, *(next(found) if wanted else None for wanted in ctx.wanted))


def _differentiated(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    operands: list[Any],
    wanted: list[Any],
    constant: set[int],
) -> list[Any]:
    if any(value._backward_hooks for value in wanted):
        refuse("a tensor with a hook is an operand, and gradients are wanted")
    if any(value.is_inference() for value in operands):
        refuse("an inference tensor is an operand, and gradients are wanted")
    return list(_Differentiated.apply(forward, backward, (wanted, constant), *operands))


def _same_types(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        (a.tensor_type.shape, a.dtype, a.device) == (b.tensor_type.shape, b.dtype, b.device)
        for a, b in zip(left, right)
    )


def _common_inputs(
    bodies: list[Body], operands: list[TracedTensor] | None = None
) -> tuple[list[TracedTensor], list[TracedTensor]]:
    """The outer tensors that any of the bodies uses, each once, those with a gradient first; and what gradients are
    wanted of: nothing, or the floats among a loop's `operands`, then these."""
    found: dict[int, TracedTensor] = {}
    for body in bodies:
        found.update((id(value), value) for value in body.recorder.lifted)
    inputs = sorted(found.values(), key=lambda value: not value.requires_grad)
    differentiated = [value for value in inputs if value.requires_grad]
    operands = operands or []
    if not torch.is_grad_enabled() or not any(value.requires_grad for value in (*inputs, *operands)):
        return inputs, []
    return inputs, [*(value for value in operands if value.is_floating_point()), *differentiated]


def _at_torch_level(tracer: Tracer, body: Body, inputs: list[TracedTensor], differentiated: bool) -> torch.fx.Graph:
    """A body as a module of a torch-level graph."""
    nested = any(node.op == "get_attr" for node in body.recorder.graph.nodes)
    if differentiated or nested or any(isinstance(dim, Expr) for one in inputs for dim in one.tensor_type.shape):
        tracer.recorder.lacks_form("higher-order-operator", "gradients, sizes or operators of this kind in a body")
    return closed(body.recorder, body.results, placeholders_of(body, inputs))


def _sizes(graphs: list[torch.fx.Graph]) -> list[Symbol]:
    found: set[Symbol] = set()

    def note(value: Any) -> Any:
        if isinstance(value, Expr):
            found.update(free_symbols(value))
        elif isinstance(value, (list, tuple)):
            for part in value:
                note(part)
        elif isinstance(value, dict):
            note(list(value.values()))
        return value

    for graph in graphs:
        for node in graph.nodes:
            note(node.args)
            note(node.kwargs)
    return sorted(found, key=lambda symbol: symbol.name)


def _record(
    recorder: Recorder,
    operator: Any,
    graphs: list[torch.fx.Graph],
    kinds: list[TensorType],
    operands: tuple[Args, Args],
) -> list[Any]:
    """The operator's node in the outer ATen graph. operands: what stands before and behind the sizes."""
    copies = [torch.fx.Graph() for _ in graphs]
    for copy, graph in zip(copies, graphs):
        values: dict[torch.fx.Node, torch.fx.Node] = {}
        copy.output(copy.graph_copy(graph, values)).meta.update(graph.output_node().meta)
    sizes = _sizes(copies)
    for graph in copies:
        first = next(iter(graph.nodes))
        with graph.inserting_before(first):
            for size in sizes:  # named as sizes print, so that the graph's code runs
                add_placeholder_of(graph, size.name, {"type": size})
        graph.lint()
    key = subgraphs.register(copies, kinds)
    before, behind = operands
    drawing = any(node.meta.get("random") for graph in copies for node in graph.nodes)
    overload = operator.drawing if drawing else operator.default
    return list(recorder.record(overload, (key, *before, sizes, *behind), tuple(kinds)))


def _record_modules(
    tracer: Tracer,
    operator: Any,
    graphs: list[torch.fx.Graph],
    results: list[Any],
    arguments: Callable[[list[Any]], Args],
) -> list[Any]:
    """The operator's node in the outer torch-level graph, with the bodies as submodules."""
    parts = [tracer.recorder.submodule(as_module(torch.nn.Module(), graph)) for graph in graphs]
    return tracer.recorder.record_call(operator, arguments(parts), [kind_of(result) for result in results])


ROWS: dict[tuple[str, str], Row] = {
    ("torch._higher_order_ops.cond", "cond"): _cond,
    ("torch._higher_order_ops.while_loop", "while_loop"): _while_loop,
    ("torch._higher_order_ops.map", "map"): _map,
    ("torch._higher_order_ops.scan", "scan"): _scan,
    ("torch._higher_order_ops.associative_scan", "associative_scan"): _plain("associative_scan"),
}
