"""torch.cond and torch.while_loop as operators of the graph; the other higher-order functions by their plain meaning.

Takes the call's arguments; gives its result, with the bodies captured as subgraphs whose closed-over tensors become
operands. Always holds: what a body does besides computing tensors (a store, a write into an operand, a gradient that is
wanted), or what differs between the branches, is a graph break; the call then runs by its plain Python meaning, with
each body compiled.
"""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.fx
from torch.utils import _pytree as pytree

from fusewright.base.records import replace
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.effects import changed
from fusewright.operators import higher_order, subgraphs
from fusewright.operators.schema import facts
from fusewright.record.recorder import Recorder
from fusewright.record.traced_tensor import TracedTensor, make_traced
from fusewright.sizes.expressions import Expr, Symbol, free_symbols
from fusewright.sizes.tensor_type import TensorType

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Row = Callable[["Tracer", Args, Kwargs], Any]


def _refuse(reason: str) -> NoReturn:
    raise GraphBreak("higher-order-operator", reason)


class SubRecorder(Recorder):
    """Records a body. Tensors of the outer recording become placeholders when they are first used (`lifted`, in
    order)."""

    def __init__(self, outer: Recorder) -> None:
        super().__init__(outer.level, outer.env, outer.location)
        self.outer = outer
        self.lifted: list[TracedTensor] = []
        self._inner: dict[int, TracedTensor] = {}

    def lift(self, value: TracedTensor) -> TracedTensor:
        """The placeholder for a tensor of the outer recording."""
        found = self._inner.get(id(value))
        if found is None:
            found = self._inner[id(value)] = self.operand(value)
            self.lifted.append(value)
        return found

    def operand(self, value: TracedTensor) -> TracedTensor:
        """A fresh placeholder of the type of `value`."""
        kind = replace(value.tensor_type, requires_grad=False, offset=0)
        node = self._placeholder(f"operand_{len(self.inputs)}", value)
        node.meta["type"] = kind
        inner = make_traced(self, node, kind)
        inner.input_storage = True
        return inner

    def input(self, *args: Any, **kwargs: Any) -> TracedTensor:
        return self.outer.input(*args, **kwargs)

    def size_input(self, *args: Any, **kwargs: Any) -> torch.SymInt:
        return self.outer.size_input(*args, **kwargs)

    def constant(self, tensor: torch.Tensor) -> TracedTensor:
        return self.lift(self.outer.constant(tensor))

    def convert(self, value: object) -> tuple[object, object]:
        if isinstance(value, TracedTensor) and value.recorder is self.outer:
            value = self.lift(value)
        return super().convert(value)


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
    bodies = [_body(tracer, function, list(operands), []) for function in (true_fn, false_fn)]
    (_, spec, results), (_, other_spec, other_results) = bodies
    if spec != other_spec or not _same_types(results, other_results):
        _refuse("torch.cond whose branches give different structures, shapes or dtypes")
    inputs = _common_inputs([recorder for recorder, _, _ in bodies])
    graphs = [_closed(recorder, outputs, inputs, 0) for recorder, _, outputs in bodies]
    kinds = [_kind(result) for result in results]
    if tracer.recorder.level == "torch":
        made = _record_modules(
            tracer, torch.ops.higher_order.cond, graphs, results, lambda parts: (pred, *parts, tuple(inputs))
        )
    else:
        made = _record(tracer, subgraphs.CHOOSE, graphs, kinds, (pred,), (inputs,))
    return pytree.tree_unflatten(made, spec)


_MAY_FAIL = re.compile(
    r"index|gather|scatter|take|put|embedding|one_hot|bincount|multinomial|nll_loss|assert|linalg|cholesky|inverse|lu_|"
    r"_svd|_eig|_qr|lstsq|_solve|histogram|_mode|floor_divide|remainder|fmod|local_scalar"
)
"""Names of operators that fail for some values of their operands, which another branch may be there for."""


def _chosen(tracer: Tracer, pred: torch.Tensor, functions: tuple[Any, Any], operands: Args) -> Any:
    """The call in a program that leaves the process, whose graph has operators alone: both branches are computed, and
    the condition chooses between their results."""
    roots, graph = (*functions, *operands), tracer.recorder.graph
    before, known = _traces(tracer, roots), set(graph.nodes)
    try:
        results = [tracer.world.materialise(tracer.call(function, operands)) for function in functions]
    except UserException as signal:
        _refuse(f"a body raises {type(signal.exception).__name__}: {signal.exception}")
    if _traces(tracer, roots) != before:
        _refuse("a body that has effects besides its result")
    for node in graph.nodes:
        if node not in known and isinstance(node.target, torch._ops.OpOverload):
            about = facts(node.target)
            if about.written or about.random or about.effect or node.meta.get("random"):
                _refuse(f"a body that writes, draws random numbers or has an effect: {node.target}")
            if _MAY_FAIL.search(str(node.target)):
                _refuse(f"an exported program computes both branches, and {node.target} may fail in the other one")
    (leaves, spec), (others, other_spec) = map(pytree.tree_flatten, results)
    if not all(isinstance(leaf, TracedTensor) for leaf in (*leaves, *others)):
        _refuse("a body that returns something besides tensors")
    if spec != other_spec or not _same_types(leaves, others):
        _refuse("torch.cond whose branches give different structures, shapes or dtypes")
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in (*leaves, *others)):
        _refuse("gradients through it are wanted: export it under torch.no_grad()")
    made = [tracer.world.torch_call(torch.where, (pred, *pair), {}) for pair in zip(leaves, others)]
    return pytree.tree_unflatten(made, spec)


def _while_loop(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    return _repeat(tracer, *args, **kwargs)


def _repeat(tracer: Tracer, cond_fn: Any, body_fn: Any, carried_inputs: Any) -> Any:
    carried = list(carried_inputs)
    if not carried or not all(isinstance(value, TracedTensor) for value in carried):
        _refuse("torch.while_loop that carries something besides tensors")
    bodies = [_body(tracer, function, [], carried) for function in (cond_fn, body_fn)]
    (_, _, test), (_, _, results) = bodies
    if len(test) != 1 or test[0].numel() != 1:
        _refuse("torch.while_loop whose condition is not one value")
    if not _same_types(results, carried):
        _refuse("torch.while_loop whose body gives other shapes or dtypes than it takes")
    inputs = _common_inputs([recorder for recorder, _, _ in bodies])
    graphs = [_closed(recorder, outputs, inputs, len(carried)) for recorder, _, outputs in bodies]
    if tracer.recorder.level == "torch":
        operator = torch.ops.higher_order.while_loop
        output = graphs[0].output_node()  # the operator wants the bare condition
        output.args = (output.args[0][0],)  # type: ignore[index]
        return tuple(
            _record_modules(tracer, operator, graphs, carried, lambda parts: (*parts, tuple(carried), tuple(inputs)))
        )
    return tuple(_record(tracer, subgraphs.REPEAT, graphs, [_kind(value) for value in carried], (), (carried, inputs)))


def _body(
    tracer: Tracer, function: Any, operands: list[Any], carried: list[Any]
) -> tuple[SubRecorder, Any, list[TracedTensor]]:
    """A body's recording over fresh placeholders for `carried`, the structure of what it returns, and its tensors."""
    outer = tracer.recorder
    if isinstance(outer, SubRecorder):
        _refuse("a higher-order operator inside another")
    roots = (function, *operands, *carried)
    before = _traces(tracer, roots)
    tracer.recorder = recorder = SubRecorder(outer)
    try:
        result = tracer.call(function, (*operands, *(recorder.operand(value) for value in carried)))
    except UserException as signal:
        _refuse(f"a body raises {type(signal.exception).__name__}: {signal.exception}")
    finally:
        tracer.recorder = outer
    if _traces(tracer, roots) != before:
        _refuse("a body that has effects besides its result")
    leaves, spec = pytree.tree_flatten(tracer.world.materialise(result))
    if not all(isinstance(leaf, TracedTensor) for leaf in leaves):
        _refuse("a body that returns something besides tensors")
    tensors = [leaf if leaf.recorder is recorder else recorder.lift(leaf) for leaf in leaves]
    if torch.is_grad_enabled() and any(value.requires_grad for value in (*recorder.lifted, *carried)):
        _refuse("gradients through it are wanted")
    if any(value.is_complex() for value in tensors) or any(node.meta.get("random") for node in recorder.graph.nodes):
        _refuse("random or complex numbers in a body")
    return recorder, spec, tensors


def _traces(tracer: Tracer, roots: Args) -> Any:
    """What a body must leave as it is: effects held back, and objects of this capture that it can reach."""
    world = tracer.world
    effects = world.effects
    outside = (
        len(effects.calls),
        [(key, id(store.value)) for key, store in effects.slots.items()],
        [(key, id(store.value)) for key, store in effects.cells.items()],
        [changed(shadow) for shadow in effects.shadows if changed(shadow)],
        [[(id(key), id(value)) for key, value in namespace.stores.items()] for namespace in world.written_dicts()],
        torch.is_grad_enabled(),
    )
    seen: dict[int, Any] = {}
    for root in roots:
        _reach(world, root, seen)
    return outside, seen


def _reach(world: Any, value: Any, seen: dict[int, Any]) -> None:
    """Notes the content of `value` and of everything made inside that it leads to."""
    if id(value) in seen or isinstance(value, (torch.nn.Module, types.ModuleType, type)):
        return
    if isinstance(value, torch.Tensor):
        seen[id(value)] = value._version
        return
    parts: list[Any] = []
    if isinstance(value, types.FunctionType):
        parts = [cell.cell_contents for cell in value.__closure__ or () if _is_bound(cell)]
    elif isinstance(value, types.MethodType):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, dict):
        parts = [part for pair in dict.items(value) for part in pair]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    elif world.outside(value) is None:
        parts = list(getattr(value, "__dict__", {}).values())
    if parts:
        seen[id(value)] = [id(part) for part in parts]
        for part in parts:
            _reach(world, part, seen)


def _is_bound(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _kind(value: Any) -> TensorType:
    return replace(value.tensor_type, requires_grad=False, offset=0)


def _same_types(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        (a.tensor_type.shape, a.dtype, a.device) == (b.tensor_type.shape, b.dtype, b.device)
        for a, b in zip(left, right)
    )


def _common_inputs(recorders: list[SubRecorder]) -> list[TracedTensor]:
    """The outer tensors that any of the bodies uses, each once."""
    found: dict[int, TracedTensor] = {}
    for recorder in recorders:
        found.update((id(value), value) for value in recorder.lifted)
    return list(found.values())


def _closed(
    recorder: SubRecorder, outputs: list[TracedTensor], inputs: list[TracedTensor], carried: int
) -> torch.fx.Graph:
    """The graph of a body whose placeholders are the sizes it needs, the carried values, then `inputs`; functional at
    ATen level."""
    graph = recorder.finish(outputs)
    if recorder.level == "aten":
        # Imported late: a process that finds all its graphs in the disk cache needs no passes.
        graph = importlib.import_module("fusewright.graph.passes").run(graph)
        for node in graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and facts(node.target).written:
                _refuse("a body that writes into its operands")
    own = list(graph.find_nodes(op="placeholder"))
    places = {id(value): node for value, node in zip(recorder.lifted, own[carried:])}
    closed = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    for index, node in enumerate(own[:carried]):
        values[node] = _placeholder(closed, f"carried_{index}", node.meta)
    for index, value in enumerate(inputs):
        made = _placeholder(closed, f"input_{index}", {"type": _kind(value)})
        if id(value) in places:
            values[places[id(value)]] = made
    closed.output(closed.graph_copy(graph, values))
    return closed


def _placeholder(graph: torch.fx.Graph, name: str, meta: dict[str, Any]) -> torch.fx.Node:
    node = graph.placeholder(name)
    node.meta.update(meta)
    return node


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
    tracer: Tracer, operator: Any, graphs: list[torch.fx.Graph], kinds: list[TensorType], leading: Args, operands: Args
) -> list[Any]:
    """The operator's node in the outer ATen graph."""
    sizes = _sizes(graphs)
    for graph in graphs:
        first = next(iter(graph.nodes))
        with graph.inserting_before(first):
            for size in sizes:  # named as sizes print, so that the graph's code runs
                _placeholder(graph, size.name, {"type": size})
        graph.lint()
    key = subgraphs.register(graphs[0], graphs[1], kinds)
    return tracer.recorder.record(operator, (key, *leading, sizes, *operands), tuple(kinds))


def _record_modules(
    tracer: Tracer,
    operator: Any,
    graphs: list[torch.fx.Graph],
    results: list[Any],
    arguments: Callable[[list[Any]], Args],
) -> list[Any]:
    """The operator's node in the outer torch-level graph, with the bodies as submodules."""
    if _sizes(graphs) or any(graph.find_nodes(op="get_attr") for graph in graphs):
        _refuse("symbolic sizes or constants in a body")
    parts = [tracer.recorder.submodule(torch.fx.GraphModule(torch.nn.Module(), graph)) for graph in graphs]
    return tracer.recorder.record_call(operator, arguments(parts), [_kind(result) for result in results])


ROWS: dict[tuple[str, str], Row] = {
    ("torch._higher_order_ops.cond", "cond"): _cond,
    ("torch._higher_order_ops.while_loop", "while_loop"): _while_loop,
    ("torch._higher_order_ops.map", "map"): _plain("map"),
    ("torch._higher_order_ops.scan", "scan"): _plain("scan"),
    ("torch._higher_order_ops.associative_scan", "associative_scan"): _plain("associative_scan"),
}
