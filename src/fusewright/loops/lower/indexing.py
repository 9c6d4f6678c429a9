"""Indirect indexing: gathers (embedding, index, gather, take) and scatters (index_put, scatter, index_add, index_copy).

Takes tensors and integer index tensors; gathers give lazy values, scatters a realised copy of their input with one more
loop that stores into it. Always holds: every index that comes from a tensor is checked at run time (`CheckedIndex`),
with eager's rule for negative values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.loops import ir
from fusewright.loops.ir import Buffer, Store
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call, Lowering
from fusewright.loops.lower.promotion import number, refuse_checked
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import (
    Value,
    axes_of,
    axis_symbols,
    flat_index,
    is_one,
    normalize_dim,
    numel,
    same_size,
)
from fusewright.sizes.expressions import Dim, Expr, free_symbols, loop_symbol
from fusewright.sizes.tensor_type import TensorType

INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


def indirect(
    low: Lowering, value: Value, indices: Sequence[Dim], extent: Dim, wrap: bool = False
) -> tuple[Dim, ex.Bindings]:
    """(index, bindings) of the index that `value` holds at `indices`, checked against `extent`."""
    if value.dtype not in INDEX_DTYPES:
        raise Fallback(f"an index of dtype {value.dtype}")
    return low.bind(low.checked(low.read(value, indices), extent, wrap), extent)


def gathered(
    low: Lowering, source: Value, indices: Sequence[Dim], bindings: ex.Bindings, few: bool = False
) -> ir.Expression:
    """The element of `source` at run-time indices. The source is put in memory, behind one plain load; but where only
    `few` of its elements are read (one a row), each is computed from what the source is computed from, if that can be
    indexed as well."""
    if not bindings:
        return low.at(source, indices)
    if few and not isinstance(source.expression, ir.Load):
        plain = low.at(source, indices)
        found = _computed_at(plain, bindings)
        # a source of one class does not depend on its number, which is checked all the same
        if found is not None and found is not plain:
            return found
    if not isinstance(source.expression, ir.Load) or source.expression.bindings:
        low.realize(source)
    load = low.at(source, indices)
    assert isinstance(load, ir.Load)
    return ir.load(load.buffer, load.index, load.dtype, bindings)


def _computed_at(expression: ir.Expression, bindings: ex.Bindings) -> ir.Expression | None:
    """The expression with `bindings` on the loads that need them; None where something else than plain loads depends on
    them."""
    symbols = {symbol for symbol, _ in bindings}
    memo: dict[ir.Expression, ir.Expression | None] = {}

    def visit(node: ir.Expression) -> ir.Expression | None:
        if node not in memo:
            memo[node] = rebuild(node)
        return memo[node]

    def rebuild(node: ir.Expression) -> ir.Expression | None:
        match node:
            case ir.Constant():
                return node
            case ir.IndexValue():
                return node if symbols.isdisjoint(free_symbols(node.index)) else None
            case ir.Load():
                if node.bindings:
                    return None
                return (
                    node
                    if symbols.isdisjoint(free_symbols(node.index))
                    else ir.load(node.buffer, node.index, node.dtype, bindings)
                )
            case ir.Apply():
                args = [visit(arg) for arg in node.args]
                found = [arg for arg in args if arg is not None]
                return ir.apply(node.op, *found, dtype=node.dtype) if len(found) == len(args) else None
        return None

    return visit(expression)


# --- gathers ---------------------------------------------------------------------------------------------------------


@lowers("embedding")
def embedding(
    call: Call,
    weight: Value,
    indices: Value,
    padding_idx: Any = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    row, bindings = indirect(call.lowering, indices, call.axes[:-1], weight.shape[0])
    return call.result(gathered(call.lowering, weight, (row, call.axes[-1]), bindings))


@lowers("index_select")
def index_select(call: Call, self: Value, dim: int, index: Value) -> Value:
    if self.ndim == 0:
        raise Fallback("index_select of a scalar")
    dim = normalize_dim(dim, self.ndim)
    place = list(call.axes)
    place[dim], bindings = indirect(call.lowering, index, (place[dim],) if index.ndim else (), self.shape[dim])
    return call.result(gathered(call.lowering, self, place, bindings))


@lowers("gather")
def gather(call: Call, self: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if self.ndim == 0 or index.ndim == 0:
        raise Fallback("gather of a scalar")
    dim = normalize_dim(dim, self.ndim)
    place = list(call.axes)
    place[dim], bindings = indirect(call.lowering, index, call.axes, self.shape[dim])
    return call.result(gathered(call.lowering, self, place, bindings))


@lowers("take")
def take(call: Call, self: Value, index: Value) -> Value:
    low = call.lowering
    total = numel(self.shape)
    low.shared(self)
    flat, bindings = indirect(low, index, call.axes, total, wrap=True)
    place: list[Dim] = []
    step = total
    for size in self.shape:
        step = step // size
        place.append(0 if is_one(size) else flat // step % size)
    return call.result(gathered(low, self, place, bindings))


class Advanced:
    """`x[indices]` with tensors (or None for a full slice) per dimension: the shape of the result and where each
    element comes from."""

    def __init__(self, low: Lowering, shape: Sequence[Dim], indices: Sequence[Value | None]) -> None:
        self.low = low
        self.shape = tuple(shape)
        self.indices = [*indices, *([None] * (len(shape) - len(indices)))]
        used = [value for value in self.indices if value is not None]
        if not used or any(value.dtype not in INDEX_DTYPES for value in used):
            raise Fallback("an index by a mask")
        self.positions = [k for k, value in enumerate(self.indices) if value is not None]
        self.common = broadcast_shape([value.shape for value in used])
        adjacent = self.positions == list(range(self.positions[0], self.positions[-1] + 1))
        self.first = self.positions[0] if adjacent else 0
        rest = [size for size, value in zip(self.shape, self.indices) if value is None]
        self.result_shape = (*rest[: self.first], *self.common, *rest[self.first :])

    def place(self, axes: Sequence[Dim], wrap: bool = True) -> tuple[list[Dim], ex.Bindings]:
        """(indices into the indexed tensor, bindings) at the point `axes` of the result."""
        common = axes[self.first : self.first + len(self.common)]
        rest = iter([*axes[: self.first], *axes[self.first + len(self.common) :]])
        indices: list[Dim] = []
        bindings: ex.Bindings = ()
        for size, value in zip(self.shape, self.indices):
            if value is None:
                indices.append(next(rest))
                continue
            index, bound = indirect(self.low, value, self.low.broadcast(value, self.common, common), size, wrap)
            indices.append(index)
            # Two dimensions may be indexed by one tensor: one symbol is bound once.
            bindings += tuple(pair for pair in bound if pair not in bindings)
        return indices, bindings


def broadcast_shape(shapes: Sequence[Sequence[Dim]]) -> tuple[Dim, ...]:
    ndim = max(len(shape) for shape in shapes)
    result: list[Dim] = [1] * ndim
    for shape in shapes:
        for k, size in enumerate(shape, ndim - len(shape)):
            if not is_one(size):
                if not is_one(result[k]) and not same_size(result[k], size):
                    raise Fallback("index shapes that cannot be compared")
                result[k] = size
    return tuple(result)


@lowers("index.Tensor", "_unsafe_index.Tensor")
def index(call: Call, self: Value, indices: Sequence[Value | None]) -> Value:
    advanced = Advanced(call.lowering, self.shape, indices)
    place, bindings = advanced.place(call.axes)
    return call.result(gathered(call.lowering, self, place, bindings))


@lowers("_unsafe_masked_index")
def masked_index(call: Call, self: Value, mask: Value, indices: Sequence[Value | None], fill: Any) -> Value:
    """`self[indices]` where mask, else `fill`; the indices are clamped into range by their maker."""
    low = call.lowering
    advanced = Advanced(low, self.shape, indices)
    place, bindings = advanced.place(call.axes)
    dtype = ex.compute_dtype(self.dtype)
    found = ex.widen(gathered(low, self, place, bindings))
    shown = low.read(mask, low.broadcast(mask, call.type.shape, call.axes), torch.bool)
    return call.result(ex.masked(shown, found, number(fill, dtype, self.dtype)))


# --- scatters --------------------------------------------------------------------------------------------------------


def scattered(
    call: Call,
    target: Value,
    shape: Sequence[Dim],
    where: tuple[Sequence[Dim], ex.Bindings],
    value: ir.Expression,
    mode: Any = "write",
) -> Value:
    """A copy of `target` into which `value` is stored at a place (its index, with bindings) for every point of a loop
    nest over `shape`."""
    low, (place, bindings) = call.lowering, where
    on_gpu = target.type.device.type == "cuda"
    if mode == "add" and on_gpu:
        summed = summed_by_place(call, target, shape, where, value)
        if summed is not None:
            return summed
    if mode == "add" and target.dtype in ex.HALF and not on_gpu:
        raise Fallback("accumulation in half precision")
    if mode == "add" and on_gpu and target.dtype.is_floating_point and torch.are_deterministic_algorithms_enabled():
        raise Fallback("sums whose order is left open")
    kind: TensorType = call.type
    ordered = on_gpu and mode in ("max", "min") and kind.dtype.is_floating_point
    if mode != "write" and on_gpu:
        kind = replace(kind, dtype=gathered_as(kind.dtype, mode))

    def encoded(number: ir.Expression) -> ir.Expression:
        return order_of(ir.cast(number, call.type.dtype), mode) if ordered else ir.cast(number, kind.dtype)

    copied = Value(kind, encoded(low.at(target, axis_symbols(target.shape))), low.locations)
    axes = axes_of(axis_symbols(shape), shape)

    def store(buffer: Buffer) -> Store:
        return Store(buffer.name, flat_index(place, buffer.stride), encoded(value), mode, bindings)

    made = low.scatter(copied, axes, store)
    if kind.dtype is call.type.dtype:
        return made
    result = low.at(made, axis_symbols(kind.shape))
    return call.result(of_order(result, call.type.dtype) if ordered else result)


def gathered_as(dtype: torch.dtype, mode: str) -> torch.dtype:
    """In what a GPU's atomic operations accumulate. It adds halves one after the other, and has none for short integers
    (their low bits are right all the same), nor for the extremes of floats."""
    if dtype.is_floating_point:
        if mode == "add":
            return torch.float32 if dtype in ex.HALF else dtype
        return torch.int64 if dtype is torch.float64 else torch.int32
    return torch.int32 if dtype.itemsize < 4 else dtype


def order_of(value: ir.Expression, mode: str) -> ir.Expression:
    """Integers that lie as floats do: the bits of a negative one, but for its sign, the other way round. NaN is beyond
    all, for it is to win."""
    integer = gathered_as(value.dtype, mode)
    limits = torch.iinfo(integer)
    bits = _with_order(ir.apply("bitcast", value, dtype=integer))
    nan = ir.apply("isnan", value, dtype=torch.bool)
    return ex.where(nan, ir.constant(limits.max if mode == "max" else limits.min, integer), bits)


def of_order(order: ir.Expression, dtype: torch.dtype) -> ir.Expression:
    """The float of an integer that `order_of` has made."""
    return ir.apply("bitcast", _with_order(order), dtype=dtype)


def _with_order(bits: ir.Expression) -> ir.Expression:
    most = ir.constant(torch.iinfo(bits.dtype).max, bits.dtype)
    turned = ir.apply("bitwise_xor", bits, most, dtype=bits.dtype)
    return ex.where(ex.lt(bits, ir.constant(0, bits.dtype)), turned, bits)


def summed_by_place(
    call: Call,
    target: Value,
    shape: Sequence[Dim],
    where: tuple[Sequence[Dim], ex.Bindings],
    value: ir.Expression,
) -> Value | None:
    """What `scattered` gives, as sums over all points that say which place each belongs to; None where that is not
    likely quicker. Many points that add to few places wait for each other where atomics add them."""
    low, (place, bindings) = call.lowering, where
    counts = [size for size in (*shape, *target.shape) if isinstance(size, int)]
    bound = [dim for dim, index in enumerate(place) if bindings and index is bindings[0][0]]
    if len(bindings) != 1 or len(bound) != 1 or len(counts) != len(shape) + target.ndim:
        return None
    (_, index), (dim,) = bindings[0], bound
    few, elements = target.shape[dim], math.prod(counts[len(shape) :])
    symbols = axis_symbols(shape)
    extents = {symbol: size for symbol, size in zip(symbols, shape) if isinstance(symbol, Expr)}
    kept = [one for number, one in enumerate(place) if number != dim and isinstance(one, Expr)]
    whole = all(
        is_one(size) if not isinstance(one, Expr) else extents.get(one) == size
        for number, (one, size) in enumerate(zip(place, target.shape))
        if number != dim
    )
    if not whole or len({*kept}) != len(kept) or not 1 < few <= MOST_PLACES:  # type: ignore[operator]
        return None
    if elements > MOST_SUMS or math.prod(counts[: len(shape)]) < LEAST_ADDED * elements:
        return None
    added = low.shared(low.make(tuple(shape), value, target.type))  # it is read once for each place
    here = loop_symbol("p0", few)
    dtype = ex.compute_dtype(target.dtype)
    reduced = [axis for axis in axes_of(symbols, shape) if axis.symbol not in kept]
    axes = [here if number == dim else one for number, one in enumerate(place)]
    term = ex.where(ex.eq(index, ir.index_value(here)), low.read(added, symbols, dtype), 0)
    total = ex.add(ex.accumulator(dtype), low.read(target, axes, dtype))
    return low.reduce("sum", call.type, axes, reduced, term, total)


MOST_PLACES, MOST_SUMS, LEAST_ADDED = 64, 4096, 64
"""Of `summed_by_place`: indices, elements of the result, and points that add to one of them on average. With more
elements atomics seldom meet; with more indices each point is read too often."""


@lowers("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(
    call: Call,
    self: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Value:
    low = call.lowering
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype in (torch.bool, torch.uint8):
        return masked_put(call, self, indices[0], values, accumulate)
    advanced = Advanced(low, self.shape, indices)
    shape = advanced.result_shape
    symbols = axis_symbols(shape)
    if values.ndim > len(shape):
        raise Fallback("values of more dimensions than the place they go to")
    where = advanced.place(symbols)
    value = low.read(values, low.broadcast(values, shape, symbols), ex.compute_dtype(self.dtype))
    if accumulate and self.dtype is torch.bool:
        raise Fallback("accumulation of bools")
    return scattered(call, self, shape, where, value, "add" if accumulate else "write")


def masked_put(call: Call, self: Value, mask: Value, values: Value, accumulate: bool) -> Value:
    """`x[mask] = v` with one value for all places is a selection; anything else depends on data."""
    if mask.dtype is not torch.bool or not all(is_one(size) for size in values.shape) or accumulate:
        raise Fallback("an assignment by a mask")
    refuse_checked(self, values)
    low = call.lowering
    dtype = ex.compute_dtype(self.dtype)
    shown = low.read(mask, call.axes[: mask.ndim], torch.bool)
    value = low.read(values, (0,) * values.ndim, dtype)
    return call.result(ex.where(shown, value, low.read(self, call.axes, dtype)))


def scatter_along(call: Call, self: Value, dim: int, index: Value, value: Any, mode: Any) -> Value:
    low = call.lowering
    if self.ndim == 0 or index.ndim == 0 or (isinstance(value, Value) and value.ndim == 0):
        raise Fallback("scatter into a scalar, or of one")
    dim = normalize_dim(dim, self.ndim)
    symbols = axis_symbols(index.shape)
    place = list(symbols)
    place[dim], bindings = indirect(low, index, symbols, self.shape[dim])
    dtype = ex.compute_dtype(self.dtype)
    stored = low.read(value, symbols, dtype) if isinstance(value, Value) else number(value, dtype, self.dtype)
    return scattered(call, self, index.shape, (place, bindings), stored, mode)


@lowers("scatter.src", "scatter.value")
def scatter(call: Call, self: Value, dim: int, index: Value, src: Any = None, *, value: Any = None) -> Value:
    return scatter_along(call, self, dim, index, value if src is None else src, "write")


@lowers("scatter_add")
def scatter_add(call: Call, self: Value, dim: int, index: Value, src: Value) -> Value:
    if self.dtype is torch.bool:
        raise Fallback("accumulation of bools")
    return scatter_along(call, self, dim, index, src, "add")


@lowers("scatter_reduce.two")
def scatter_reduce(
    call: Call, self: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    mode = {"sum": "add", "amax": "max", "amin": "min"}.get(reduce)
    if mode is None or not include_self or self.dtype is torch.bool or self.dtype in ex.HALF:
        raise Fallback(f"scatter_reduce by {reduce}")
    return scatter_along(call, self, dim, index, src, mode)


def along_dim(
    call: Call, self: Value, dim: int, index: Value, wrap: bool = False
) -> tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[list[Dim], ex.Bindings]]:
    """The loops over `self` with dimension `dim` replaced by the positions of a 1-d index: (shape, symbols, place with
    bindings). `wrap`: negative indices count from the end."""
    if self.ndim == 0 or index.ndim == 0:
        raise Fallback("an index into a scalar")
    shape = (*self.shape[:dim], index.shape[0], *self.shape[dim + 1 :])
    symbols = axis_symbols(shape)
    place = list(symbols)
    place[dim], bindings = indirect(call.lowering, index, (symbols[dim],), self.shape[dim], wrap)
    return shape, symbols, (place, bindings)


@lowers("index_copy")
def index_copy(call: Call, self: Value, dim: int, index: Value, source: Value) -> Value:
    dim = normalize_dim(dim, self.ndim)
    shape, symbols, where = along_dim(call, self, dim, index)
    value = call.lowering.read(source, symbols, ex.compute_dtype(self.dtype))
    return scattered(call, self, shape, where, value)


@lowers("index_add")
def index_add(call: Call, self: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> Value:
    if self.dtype is torch.bool:
        raise Fallback("accumulation of bools")
    dim = normalize_dim(dim, self.ndim)
    shape, symbols, where = along_dim(call, self, dim, index)
    value = call.lowering.read(source, symbols, ex.compute_dtype(self.dtype))
    if not (isinstance(alpha, (int, float)) and alpha == 1):
        value = ex.mul(value, alpha)
    return scattered(call, self, shape, where, value, "add")


@lowers("embedding_dense_backward")
def embedding_backward(
    call: Call, gradient: Value, indices: Value, rows: int, padding: int, scale_by_frequency: bool
) -> Value:
    """On a GPU: the rows of the gradient are added where the indices say. A CPU's library does that on all cores."""
    if scale_by_frequency or gradient.type.device.type == "cpu":
        raise Fallback("the library's own")
    low, symbols = call.lowering, axis_symbols(gradient.shape)
    row, bindings = indirect(low, indices, symbols[:-1], call.type.shape[0], wrap=False)
    value = low.read(gradient, symbols, ex.compute_dtype(gradient.dtype))
    if padding >= 0:
        index = low.read(indices, symbols[:-1], torch.int64)
        value = ex.where(ex.eq(index, padding), 0, value)
    zeros = Value(call.type, ir.constant(0, call.type.dtype), low.locations)
    return scattered(call, zeros, gradient.shape, ([row, symbols[-1]], bindings), value, "add")


@lowers("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(call: Call, self: Value, dim: int, index: Value, value: Any) -> Value:
    refuse_checked(self, value)
    dim = normalize_dim(dim, self.ndim)
    shape, _, where = along_dim(call, self, dim, index, wrap=True)
    dtype = ex.compute_dtype(self.dtype)
    stored = call.lowering.read(value, (), dtype) if isinstance(value, Value) else number(value, dtype, self.dtype)
    return scattered(call, self, shape, where, stored)
