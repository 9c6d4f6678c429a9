"""Constant folding: operators over tensors that are filled with one known number become one `full`, and so do such
tensors side by side in a concatenation (the gradient of a split of which few parts are used).

Takes and gives a functional graph. Always holds: what is computed here, with PyTorch's own operator, is exact by IEEE
754 (so the kernels of any device would give the same bits), or what eager would run on this machine's CPU (so is an
integer of a float beyond its range); parameters and constants from outside are never looked at, but those that the
program made of Python numbers are.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._ops import OpOverload

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.graph.builder import Builder
from fusewright.graph.known_values import NUMBER
from fusewright.graph.passes.clean.escape import escaping
from fusewright.graph.passes.context import PassContext
from fusewright.operators.rules.common import holds
from fusewright.operators.schema import ZEROS
from fusewright.sizes.expressions import Expr
from fusewright.sizes.tensor_type import TensorType, contiguous_strides, same_strides

aten = torch.ops.aten
Number = int | float | bool


def _given(index: int) -> Callable[[torch.fx.Node], object]:
    return lambda node: node.args[index]


# Operators that fill: which number.
_FILLS: dict[OpOverload, Callable[[torch.fx.Node], object]] = {
    aten.full.default: _given(1),
    aten.full_like.default: _given(1),
    aten.new_full.default: _given(2),
    aten.scalar_tensor.default: _given(0),
    **{op: lambda node: 0 for op in ZEROS},
    **{op: lambda node: 1 for op in (aten.ones.default, aten.ones_like.default, aten.new_ones.default)},
}

# Operators that count: of one element, it is where they start.
_COUNTS: dict[OpOverload, Callable[[torch.fx.Node], object]] = {
    aten.arange.default: lambda node: 0,
    aten.arange.start: _given(0),
    aten.arange.start_step: _given(0),
}

# Operators that only rearrange: the number stays.
_REARRANGES = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)

# Operators that compute, exactly.
_EXACT = frozenset(
    {
        aten._to_copy.default,
        aten.add.Scalar,
        aten.add.Tensor,
        aten.bitwise_and.Tensor,
        aten.bitwise_not.default,
        aten.bitwise_or.Tensor,
        aten.div.Scalar,
        aten.div.Tensor,
        aten.eq.Scalar,
        aten.eq.Tensor,
        aten.ge.Scalar,
        aten.ge.Tensor,
        aten.gt.Scalar,
        aten.gt.Tensor,
        aten.le.Scalar,
        aten.le.Tensor,
        aten.logical_and.default,
        aten.logical_not.default,
        aten.logical_or.default,
        aten.lt.Scalar,
        aten.lt.Tensor,
        aten.maximum.default,
        aten.minimum.default,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.ne.Scalar,
        aten.ne.Tensor,
        aten.neg.default,
        aten.rsub.Scalar,
        aten.sqrt.default,
        aten.sub.Scalar,
        aten.sub.Tensor,
        aten.where.self,
    }
)

# Operators that compute, in CPU memory: of one element, their kernel is the one that eager runs there, and this is what
# it gives.
_EAGERS_OWN = frozenset(
    {
        aten.abs.default,
        aten.ceil.default,
        aten.cos.default,
        aten.exp.default,
        aten.floor.default,
        aten.log.default,
        aten.log2.default,
        aten.pow.Scalar,
        aten.pow.Tensor_Scalar,
        aten.pow.Tensor_Tensor,
        aten.reciprocal.default,
        aten.round.default,
        aten.rsqrt.default,
        aten.sin.default,
        aten.tanh.default,
    }
)


def _is_known(node: torch.fx.Node, type_: TensorType) -> bool:
    """Whether PyTorch's operator gives at compile time what the program would get."""
    return node.target in _EXACT or (node.target in _EAGERS_OWN and type_.device.type == "cpu" and type_.numel() == 1)


def constant_fold(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    numbers: dict[torch.fx.Node, Number] = {}
    outside = escaping(graph)
    build = Builder(graph)
    for node in list(graph.nodes):
        type_ = node.meta.get("type")
        if NUMBER in node.meta:
            numbers[node] = node.meta[NUMBER]
        if (
            node.op != "call_function"
            or not isinstance(type_, TensorType)
            or type_.dtype.is_complex
            or node.meta.get("private")
        ):
            continue
        if node.target in _FILLS:
            number = _FILLS[node.target](node)
            if isinstance(number, (int, float, bool)) and holds(type_.dtype, number):
                numbers[node] = _rounded(number, type_.dtype)
        elif node.target in _COUNTS:
            number = _COUNTS[node.target](node)
            if type_.shape == (1,) and isinstance(number, (int, float)) and holds(type_.dtype, number):
                numbers[node] = _rounded(number, type_.dtype)
        elif node.target in _REARRANGES:
            if node.args[0] in numbers:
                numbers[node] = numbers[node.args[0]]
        elif node.target is aten.cat.default:
            runs = _runs(node, type_, numbers)
            if all(len(run) == 1 for run in runs):
                continue
            if not context.allow(f"constant_fold: {node.name} has {len(runs)} pieces"):
                return graph
            build.location = node.meta.get("location", ())
            with graph.inserting_before(node):
                pieces = [_joined(build, node, run, numbers[run[0]]) if len(run) > 1 else run[0] for run in runs]
            numbers |= {piece: numbers[run[0]] for piece, run in zip(pieces, runs, strict=True) if len(run) > 1}
            node.args = (pieces, *node.args[1:])
        elif _is_known(node, type_):
            result = _compute(node, type_, numbers)
            if result is None:
                chosen = _chosen(node, type_, numbers)
                if chosen is not None and node not in outside:
                    if not context.allow(f"constant_fold: {node.name} is {chosen.name}"):
                        return graph
                    node.replace_all_uses_with(chosen)
                    graph.erase_node(node)
                continue
            numbers[node] = result
            # A tensor that leaves the graph keeps its own operator's layout, and so do all others that are not
            # row-major.
            if node in outside or not same_strides(type_, _row_major(type_)):
                continue
            if not context.allow(f"constant_fold: {node.name} is full of {result}"):
                return graph
            build.location = node.meta.get("location", ())
            with graph.inserting_before(node):
                options = {"dtype": type_.dtype, "device": type_.device}
                made = build.node(aten.full.default, (list(type_.shape), result), options, type_)
            numbers[made] = result
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    return graph


def _runs(node: torch.fx.Node, type_: TensorType, numbers: dict[torch.fx.Node, Number]) -> list[list[torch.fx.Node]]:
    """The pieces of a concatenation, together those side by side that are filled with one number."""
    runs: list[list[torch.fx.Node]] = []
    last = None
    for piece in node.args[0]:  # type: ignore[union-attr]
        kind: TensorType = piece.meta["type"]  # type: ignore[union-attr]
        plain = kind.dtype == type_.dtype and kind.ndim == type_.ndim and same_strides(kind, _row_major(kind))
        number = repr(numbers[piece]) if plain and piece in numbers else None  # type: ignore[index] # -0.0 is not 0.0
        if number is not None and number == last:
            runs[-1].append(piece)  # type: ignore[arg-type]
        else:
            runs.append([piece])  # type: ignore[list-item]
        last = number
    return runs if same_strides(type_, _row_major(type_)) else []


def _joined(build: Builder, node: torch.fx.Node, run: list[torch.fx.Node], number: Number) -> torch.fx.Node:
    dim: int = (*node.args[1:], node.kwargs.get("dim", 0))[0]  # type: ignore[assignment]
    kinds: list[TensorType] = [piece.meta["type"] for piece in run]
    shape = list(kinds[0].shape)
    shape[dim] = sum(kind.shape[dim] for kind in kinds)
    type_ = _row_major(replace(kinds[0], shape=tuple(shape)))
    return build.node(aten.full.default, (shape, number), {"dtype": type_.dtype, "device": type_.device}, type_)


def _row_major(type_: TensorType) -> TensorType:
    return TensorType(type_.shape, contiguous_strides(type_.shape), type_.dtype, type_.device)


def _rounded(number: Number, dtype: torch.dtype) -> Number:
    return torch.full((), number, dtype=dtype, device="cpu").item()


def _chosen(node: torch.fx.Node, type_: TensorType, numbers: dict[torch.fx.Node, Number]) -> torch.fx.Node | None:
    """What a choice by a known condition chooses, when that has the result's type."""
    if node.target is not aten.where.self or node.args[0] not in numbers:
        return None
    chosen = node.args[1 if numbers[node.args[0]] else 2]  # type: ignore[index]
    kind = chosen.meta["type"] if isinstance(chosen, torch.fx.Node) and not chosen.meta.get("private") else None
    if not isinstance(kind, TensorType) or (kind.shape, kind.dtype, kind.device) != (
        type_.shape,
        type_.dtype,
        type_.device,
    ):
        return None
    return chosen if same_strides(kind, type_) else None  # type: ignore[return-value]


def _compute(node: torch.fx.Node, type_: TensorType, numbers: dict[torch.fx.Node, Number]) -> Number | None:
    """The one number of the result, when every tensor argument is filled with a known number."""
    if not node.all_input_nodes or any(source not in numbers for source in node.all_input_nodes):
        return None
    if any(source.meta["type"].dtype.is_complex for source in node.all_input_nodes):
        return None
    if any(isinstance(argument, Expr) for argument in (*node.args, *node.kwargs.values())):
        return None  # a number that is known at a call only
    cut = node.target is aten._to_copy.default and not type_.dtype.is_floating_point
    if cut and type_.device.type != "cpu" and not holds(type_.dtype, numbers[node.all_input_nodes[0]]):
        return None  # each device has a conversion of its own

    def small(source: torch.fx.Node) -> torch.Tensor:
        # As many dimensions as the real one: a tensor without dimensions takes part in type promotion differently.
        full: TensorType = source.meta["type"]
        return torch.full([1] * full.ndim, numbers[source], dtype=full.dtype, device="cpu")

    args = torch.fx.node.map_arg(node.args, small)
    kwargs = {name: torch.fx.node.map_arg(value, small) for name, value in node.kwargs.items() if name != "device"}
    kwargs.pop("memory_format", None)
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    return result.item() if result.dtype == type_.dtype else None
