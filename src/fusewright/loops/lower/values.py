"""Tensors during lowering: a type and the expression of one element over canonical loop variables.

Takes sizes; gives `Value`s. Always holds: the expression of a value of shape (n0, n1, ...) is over
`axis_symbols(shape)`: i0 < n0, i1 < n1, ..., where a dimension of size 1 has the index 0. So values of one shape
compose without any substitution. A value of a half dtype may carry a float32 expression: rounding happens where it is
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch.fx import Graph

from fusewright.base.location import Location
from fusewright.base.records import dataclass
from fusewright.graph.builder import given_of
from fusewright.loops import ir
from fusewright.loops.ir import Axis, BufferRef, Expression, Load
from fusewright.loops.lower.registry import Fallback
from fusewright.sizes.expressions import (
    Dim,
    Expr,
    coefficient,
    floor_div,
    free_symbols,
    known_eq,
    known_le,
    loop_symbol,
    maximum,
    product,
    substitute,
)
from fusewright.sizes.proofs import Given, prove
from fusewright.sizes.strides import dense_order
from fusewright.sizes.tensor_type import TensorType

Shape = tuple[Dim, ...]
MOST_SEARCHES = 8
"""Of one proof that elements lie apart: what has one takes a few, and each that is in vain 50 ms."""


@dataclass(slots=True, eq=False)
class Value:
    """`expression` is replaced by a plain load when the value is realised into a buffer."""

    type: TensorType
    expression: Expression
    locations: tuple[Location, ...] = ()

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return len(self.type.shape)


def is_one(size: Dim) -> bool:
    return isinstance(size, int) and size == 1


def same_size(a: Dim, b: Dim) -> bool:
    return known_eq(a, b) is True


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b))


def is_empty(shape: Sequence[Dim]) -> bool:
    """Whether the shape certainly has no elements."""
    return any(isinstance(size, int) and size == 0 for size in shape)


def numel(shape: Sequence[Dim]) -> Dim:
    return product(shape)


def axis_symbols(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    return _axis_symbols(tuple(shape))


@lru_cache(maxsize=1024)
def _axis_symbols(shape: Shape) -> tuple[Dim, ...]:
    return tuple(0 if is_one(size) else loop_symbol(f"i{k}", size) for k, size in enumerate(shape))


def axes_of(symbols: Sequence[Dim], shape: Sequence[Dim]) -> tuple[Axis, ...]:
    """Loops over the symbols, without the dimensions of size 1."""
    return tuple(Axis(sym, size) for sym, size in zip(symbols, shape) if isinstance(sym, Expr))


def flat_index(symbols: Sequence[Dim], stride: Sequence[Dim], offset: Dim = 0) -> Dim:
    index = offset
    for sym, step in zip(symbols, stride):
        index = index + sym * step
    return index


def normalize_dim(dim: int, ndim: int) -> int:
    """The dimension counted from the front; one that is not there is for the operator itself to refuse."""
    dimensions = max(ndim, 1)
    if not -dimensions <= dim < dimensions:
        raise Fallback("a dimension out of range")
    return dim + dimensions if dim < 0 else dim


def normalize_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Sorted non-negative dimensions; None and () mean all of them."""
    if isinstance(dims, int):
        dims = (dims,)
    if dims is None or len(dims) == 0:
        return tuple(range(ndim))
    return tuple(sorted(normalize_dim(dim, ndim) for dim in dims if ndim > 0))


def window(value: Value) -> BufferRef | None:
    """The value as a strided window on one buffer, or None if it is not one (computed, wrapped or reversed
    elements)."""
    load = value.expression
    if not isinstance(load, Load) or load.bindings or load.dtype != value.dtype:
        return None
    found = _affine(load.index, value.shape, value.type.stride)
    if found is None:
        return None
    strides, offset = found
    # Where the size is 1 the stride is of no consequence: it is the type's.
    placed = tuple(natural if stride is None else stride for natural, stride in zip(value.type.stride, strides))
    return BufferRef(load.buffer, value.shape, placed, offset, value.dtype)


def _is_forward(stride: Dim, shape: Shape) -> bool:
    """Whether a stride is certainly not negative, as no size is: of n - 1 the algebra alone cannot tell."""
    if known_le(0, stride):
        return True
    for position, size in enumerate(shape):
        if isinstance(size, Expr) and not known_le(0, size):
            times = floor_div(stride, size)
            if times * size == stride and _is_forward(times, shape[:position] + shape[position + 1 :]):
                return True
    return False


@lru_cache(maxsize=4096)
def _affine(index: Dim, shape: Shape, natural: Shape) -> tuple[tuple[Dim | None, ...], Dim] | None:
    """(strides, None where the size is 1; offset) of an index over the canonical loop variables of `shape`, if it is
    affine in them and never steps backwards. `natural`: the strides of the value's type, which no tensor has below
    0."""
    symbols = axis_symbols(shape)
    loops = frozenset(sym for sym in symbols if isinstance(sym, Expr))
    strides: list[Dim | None] = []
    zeros: dict[Expr, Dim] = {}
    for sym, usual in zip(symbols, natural, strict=True):
        if isinstance(sym, int):
            strides.append(None)
            continue
        stride = coefficient(index, sym)
        if (
            stride is None
            or not (stride == usual or _is_forward(stride, shape))
            or not loops.isdisjoint(free_symbols(stride))
        ):
            return None
        strides.append(stride)
        zeros[sym] = 0
    return tuple(strides), substitute(index, zeros)


def strided_load(buffer: str, shape: Shape, stride: Sequence[Dim], offset: Dim, dtype: torch.dtype) -> Load:
    return ir.load(buffer, flat_index(axis_symbols(shape), stride, offset), dtype)


def is_non_overlapping(
    shape: Sequence[Dim], stride: Sequence[Dim], at_most: Callable[[Dim, Dim], bool | None] = known_le
) -> bool:
    """Whether no two elements certainly share a place: sorted by stride, each dimension steps over the extent of those
    before. at_most: how two sizes are compared."""
    dims = [(step, size) for size, step in zip(shape, stride) if not is_one(size)]
    if all(isinstance(step, int) for step, _ in dims):
        dims.sort(key=lambda pair: (-pair[0], str(pair[1])))
    return _can_be_stacked(dims, 1, at_most) or _is_dense(dims)


def _is_dense(dims: list[tuple[Dim, Dim]]) -> bool:
    """Whether each step is the product of the sizes inside of it: true for any sizes, also those that may be 0 (PyTorch
    counts them as 1 in strides), which no comparison tells."""
    expected: tuple[Dim, ...] = (1,)
    while dims:
        at = next((at for at, (step, _) in enumerate(dims) if step in expected), None)
        if at is None:
            return False
        step, size = dims.pop(at)
        expected = (step * size, step * maximum(size, 1))
    return True


def _can_be_stacked(dims: list[tuple[Dim, Dim]], extent: Dim, at_most: Callable[[Dim, Dim], bool | None]) -> bool:
    """Whether the dimensions, innermost last as a rule, can be put in an order in which each steps over `extent` and
    those before it. Symbolic steps have no order of their own: another one is tried where the first does not lead to
    the end."""
    return not dims or any(
        at_most(extent, step) is True
        and _can_be_stacked(dims[:at] + dims[at + 1 :], (size - 1) * step + extent, at_most)
        for at, (step, size) in reversed(list(enumerate(dims)))
    )


def lie_apart(of: TensorType | BufferRef, graph: Graph) -> bool:
    """Whether no two elements share a place, by ranges or by what is known of the graph's sizes."""
    return is_non_overlapping(of.shape, of.stride) or _proved_apart(tuple(of.shape), tuple(of.stride), given_of(graph))


@lru_cache(1024)  # a model's buffers have few types, and each proof is a search
def _proved_apart(shape: Shape, stride: Shape, given: Given) -> bool:
    shape, stride, facts = map(given.in_parts, (shape, stride, given.facts))
    searched: dict[Dim, bool] = {}

    def at_most(most: int, a: Dim, b: Dim) -> bool:
        if (d := b - a) not in searched and len(searched) < most:
            searched[d] = prove(d, facts)
        return searched.get(d) or prove(d, facts, search=False)

    # All orders are looked at before one is searched for.
    return any(is_non_overlapping(shape, stride, partial(at_most, most)) for most in (0, MOST_SEARCHES))


def own_strides(type_: TensorType, graph: Graph) -> tuple[Dim, ...]:
    """The type's, or dense ones where those would make elements share memory."""
    return type_.stride if lie_apart(type_, graph) else dense_strides_like(type_.shape, type_.stride)


def dense_strides_like(shape: Shape, stride: Sequence[Dim]) -> tuple[Dim, ...]:
    """Dense strides with the order of dimensions of `stride` (of symbolic ones, the order that they have as a rule)."""
    result: list[Dim] = [1] * len(shape)
    running: Dim = 1
    for k in dense_order(shape, stride):
        result[k] = running
        running = running * shape[k]
    return tuple(result)
