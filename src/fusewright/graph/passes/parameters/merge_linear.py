"""Linear layers that read one input (a transformer's query, key and value; a gate and its projection) become one
product with their weights side by side, of which each takes its columns.

Takes and gives a functional inference graph whose parameter inputs carry meta["stable"]. The weights side by side
depend on parameters alone, so they are made once (graph/passes/parameters/freeze.py).
Always holds: each element is the sum that it was, in the same precision. What a layer gave is a window on the product's
rows from now on; only operators that read any strides see it: layers whose result leaves the graph, or that another
matrix product reads, stay as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.base.records import replace
from fusewright.base.thresholds import LEAST_MERGED_WORK, MOST_MERGED_ROWS
from fusewright.graph.builder import MARKS, argument_types, building_for, env_of
from fusewright.graph.passes.clean.escape import shares_memory
from fusewright.graph.passes.context import PassContext
from fusewright.graph.passes.parameters.stable import stable_nodes
from fusewright.operators.derive import derive
from fusewright.operators.schema import facts
from fusewright.operators.shape_rules import by_rule
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import known_eq, product
from fusewright.sizes.shape_env import ShapeEnv, examples_of
from fusewright.sizes.tensor_type import TensorType, contiguous_strides, symbols_in

aten = torch.ops.aten
Node = torch.fx.Node

_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.convolution.default})
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def merge_linear(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    """See the head of this file."""
    stable, env = stable_nodes(graph), env_of(graph)
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        kind = _kind(node, stable, env)
        if kind is not None:
            groups.setdefault(kind, []).append(node)
    for (x, *_), nodes in groups.items():
        columns = sum(node.meta["type"].shape[1] for node in nodes)
        if (
            len(nodes) < 2
            or _rows(nodes[0], env) * x.meta["type"].shape[1] * columns < LEAST_MERGED_WORK  # type: ignore
        ):
            continue
        fitting = [node for node in nodes if _retype(node, replace(node.meta["type"], stride=(columns, 1)), {}, env)]
        if len(fitting) > 1 and context.allow(f"one product: {', '.join(node.name for node in fitting)}"):
            _merge(graph, fitting, x, env)  # type: ignore[arg-type]
    return graph


def _parts(node: Node) -> tuple[Node, Node, Node | None]:
    """Input, weight (inner x columns) and bias."""
    if node.target is aten.mm.default:
        return node.args[0], node.args[1], None  # type: ignore[return-value]
    return node.args[1], node.args[2], node.args[0]  # type: ignore[return-value]


def _rows(node: Node, env: ShapeEnv | None) -> int:
    """How many there are, or likely are where any number may come."""
    return estimate(node.meta["type"].shape[0], examples_of(env))


def _kind(node: Node, stable: set[Node], env: ShapeEnv | None) -> tuple[object, ...] | None:
    """What layers that may be one product have in common, their input first; None for other nodes."""
    if node.target is not aten.mm.default and node.target is not aten.addmm.default:
        return None
    if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    x, weight, bias = _parts(node)
    type_, kind = node.meta["type"], weight.meta["type"]
    sizes = (type_.shape[1], *kind.shape, _rows(node, env))
    if (
        type_.device.type != "cpu"
        or type_.dtype not in _DTYPES
        or not all(isinstance(size, int) and size > 0 for size in sizes)
    ):
        return None
    if (
        sizes[-1] > MOST_MERGED_ROWS
        or weight not in stable
        or x in stable
        or {type_.dtype, x.meta["type"].dtype} != {kind.dtype}
    ):
        return None
    if type_.stride != contiguous_strides(type_.shape):
        return None
    if bias is not None and (
        bias not in stable or bias.meta["type"].shape != type_.shape[1:] or bias.meta["type"].dtype != type_.dtype
    ):
        return None
    by_rows = kind.stride == (1, kind.shape[0])
    if not by_rows and kind.stride != contiguous_strides(kind.shape):
        return None
    marks = tuple(bool(node.meta.get(mark)) for mark in MARKS)
    return x, bias is not None, by_rows, kind.dtype, marks


def _retype(node: Node, type_: object, found: dict[Node, object], env: ShapeEnv | None) -> bool:
    """Whether all that reads `node` can when it is of `type_`; what its views are then goes to `found`."""
    waiting = [node]
    types: dict[Node, object] = {node: type_}
    while waiting:
        base = waiting.pop()
        for user in base.users:
            if user.op != "call_function" or not isinstance(user.target, OpOverload):
                return False
            if user.target in _PRODUCTS or user.meta.get("epilogue"):
                return False
            if not shares_memory(user):
                continue
            if facts(user.target).parts_of is not None or base is not user.args[0] or len(user.all_input_nodes) != 1:
                return False
            given = [types[base], *map(argument_types, user.args[1:])]
            kwargs: dict[str, object] = dict(user.kwargs)
            try:
                shown = by_rule(user.target, given, kwargs, env)
                if shown is NotImplemented:  # over symbols a meta kernel would make guards
                    shown = _split(given[0], user) if symbols_in(given) else derive(user.target, given, kwargs)
            except (RuntimeError, ValueError, NotImplementedError):  # such rows have no such view
                return False
            if not isinstance(shown, TensorType) or shown.shape != user.meta["type"].shape:
                return False
            types[user] = shown
            waiting.append(user)
    found.update(types)
    return True


def _split(kind: object, view: Node) -> TensorType | None:
    """A view that splits the dimensions of a matrix, whatever the sizes are (its rule would ask which of two sizes is
    the larger)."""
    shape = view.meta["type"].shape
    if view.target is not aten.view.default or not isinstance(kind, TensorType) or kind.ndim != 2:
        return None
    for border in range(1, len(shape)):
        outer, inner = shape[:border], shape[border:]
        if known_eq(product(outer), kind.shape[0]) and known_eq(product(inner), kind.shape[1]):
            rows = [step * kind.stride[0] for step in contiguous_strides(outer)]
            return replace(
                kind, shape=shape, stride=(*rows, *(step * kind.stride[1] for step in contiguous_strides(inner)))
            )
    return None


def _merge(graph: torch.fx.Graph, nodes: Sequence[Node], x: Node, env: ShapeEnv | None) -> None:
    first = nodes[0]
    build = building_for(graph, first)
    weights, biases = [], []
    for node in nodes:
        _, weight, bias = _parts(node)
        for part in (weight, bias):
            if part is not None:
                _bring_before(part, first)
        weights.append(weight)
        biases.append(bias)
    with graph.inserting_before(first):
        # each output's weights lie side by side
        if weights[0].meta["type"].stride[0] == 1 and weights[0].meta["type"].shape[1] > 1:
            rows = [build.call(aten.t.default, weight) for weight in weights]
            together = build.call(aten.t.default, build.call(aten.cat.default, rows))
        else:
            together = build.call(aten.cat.default, weights, 1)
        if biases[0] is None:
            product = build.call(aten.mm.default, x, together)
        else:
            product = build.call(aten.addmm.default, build.call(aten.cat.default, biases), x, together)
        borders = list(itertools.accumulate((node.meta["type"].shape[1] for node in nodes), initial=0))
        parts = [build.call(aten.slice.Tensor, product, 1, start, end) for start, end in itertools.pairwise(borders)]
    for node, part in zip(nodes, parts, strict=True):
        types: dict[Node, object] = {}
        if not _retype(node, part.meta["type"], types, env):
            raise AssertionError(f"{node.name} cannot be a window")  # it could be before
        for view, type_ in types.items():
            view.meta["type"] = type_
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _bring_before(node: Node, place: Node) -> None:
    """Moves a node that depends on parameters alone, and what it depends on, in front of `place`."""
    if node.op == "placeholder" or node < place:
        return
    for argument in node.all_input_nodes:
        _bring_before(argument, place)
    place.prepend(node)
