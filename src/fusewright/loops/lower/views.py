"""Views: index maps from the result's elements to the argument's, without any work at run time.

Takes a value; gives a value of another shape over the same elements. Always holds: a view of a realised buffer whose
map is affine is still a window on that buffer (`values.window`), so library operators and callers receive it without a
copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.fx

from fusewright.base.errors import CannotFunctionalise
from fusewright.graph.builder import is_surely_dense
from fusewright.loops import ir
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.questions import memory_of
from fusewright.loops.lower.registry import Fallback, find, lowers, operator
from fusewright.loops.lower.values import (
    Shape,
    Value,
    axes_of,
    axis_symbols,
    flat_index,
    is_empty,
    is_non_overlapping,
    is_one,
    normalize_dim,
    numel,
    same_shape,
    same_size,
    strided_load,
    window,
)
from fusewright.operators.schema import argument
from fusewright.sizes.expressions import Dim, bounds, known_eq, known_le, maximum, minimum
from fusewright.sizes.tensor_type import TensorType


def viewed(call: Call, self: Value, indices: Sequence[Dim]) -> Value:
    """The result whose element at `call.axes` is the element of `self` at `indices`."""
    return call.result(call.lowering.at(self, indices))


@lowers("alias", "detach", "lift_fresh", "view_as", "_neg_view", "resolve_conj", "resolve_neg", view=True)
def same(call: Call, self: Value, *others: Any) -> Value:
    if call.target._schema.name == "aten::_neg_view":
        raise Fallback("the negative bit")
    return viewed(call, self, call.axes)


@lowers("permute", view=True)
def permute(call: Call, self: Value, dims: Sequence[int]) -> Value:
    source: list[Dim] = [0] * self.ndim
    for axis, dim in zip(call.axes, dims):
        source[normalize_dim(dim, self.ndim)] = axis
    return viewed(call, self, source)


@lowers("transpose.int", view=True)
def transpose(call: Call, self: Value, dim0: int, dim1: int) -> Value:
    source = list(call.axes)
    if source:
        a, b = normalize_dim(dim0, self.ndim), normalize_dim(dim1, self.ndim)
        source[a], source[b] = source[b], source[a]
    return viewed(call, self, source)


@lowers("t", view=True)
def matrix_transpose(call: Call, self: Value) -> Value:
    return viewed(call, self, call.axes[::-1])


@lowers("expand", view=True)
def expand(call: Call, self: Value, size: Sequence[Dim], *, implicit: bool = False) -> Value:
    return viewed(call, self, call.lowering.broadcast(self, call.type.shape, call.axes))


@lowers("unsqueeze", view=True)
def unsqueeze(call: Call, self: Value, dim: int) -> Value:
    at = normalize_dim(dim, self.ndim + 1)
    axes = call.axes
    return viewed(call, self, axes[:at] + axes[at + 1 :])


@lowers("squeeze", "squeeze.dim", "squeeze.dims", view=True)
def squeeze(call: Call, self: Value, dim: int | Sequence[int] | None = None) -> Value:
    if dim is None:
        candidates = set(range(self.ndim))
    else:
        candidates = {normalize_dim(d, self.ndim) for d in ((dim,) if isinstance(dim, int) else dim)}
    kept = iter(call.axes)
    source: list[Dim] = [0 if k in candidates and is_one(size) else next(kept, 0) for k, size in enumerate(self.shape)]
    if sum(1 for k, size in enumerate(self.shape) if not (k in candidates and is_one(size))) != len(call.type.shape):
        raise Fallback("a squeeze that depends on a symbolic size")
    return viewed(call, self, source)


@lowers("view", "_unsafe_view", "_reshape_alias", "reshape", view=True)
def view(call: Call, self: Value, size: Sequence[Dim], *stride: Any) -> Value:
    result = viewed(call, self, reshape_indices(self.shape, call.type.shape, call.axes))
    if window(result) is not None or call.target is torch.ops.aten.reshape.default:  # a reshape may be a copy
        return result
    return _view_in_memory(call, self) or result


def _view_in_memory(call: Call, self: Value) -> Value | None:
    """A view whose rows end elsewhere than the old ones: (8, 5) as (5, 8). Its strides are those that PyTorch found for
    memory laid out as the type of `self` says; None when `self` lies otherwise, or nowhere."""
    found = window(self)
    if found is None or is_empty(self.shape):
        return None
    if not all(is_one(size) or same_size(a, b) for size, a, b in zip(self.shape, found.stride, self.type.stride)):
        return None
    load = strided_load(found.buffer, call.type.shape, call.type.stride, found.offset, found.dtype)
    return Value(call.type, load, call.lowering.locations)


@lowers("flatten.using_ints", "unflatten.int", "view.dtype", view=True)
def view_by_type(call: Call, self: Value, *args: Any) -> Value:
    if call.type.dtype == self.dtype:
        return viewed(call, self, reshape_indices(self.shape, call.type.shape, call.axes))
    if call.type.dtype.itemsize != self.dtype.itemsize or torch.bool in (self.dtype, call.type.dtype):
        raise Fallback("a view of elements of another width")
    if not (self.dtype in BITCASTABLE and call.type.dtype in BITCASTABLE):
        raise Fallback("the bits of a half type")
    return call.result(ex.apply("bitcast", call.lowering.at(self, call.axes), dtype=call.type.dtype))


@lowers("view_as_real", view=True)
def view_as_real(call: Call, self: Value) -> Value:
    """The parts of complex numbers, which lie in memory: nothing is computed in them here."""
    found = window(self)
    if found is None or is_empty(self.shape):
        raise Fallback("parts of what is not in memory")
    stride = (*(2 * step for step in found.stride), 1)
    load = strided_load(found.buffer, call.type.shape, stride, 2 * found.offset, call.type.dtype)
    return Value(call.type, load, call.lowering.locations)


BITCASTABLE = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64})


def reshape_indices(old: Sequence[Dim], new: Sequence[Dim], axes: Sequence[Dim]) -> tuple[Dim, ...]:
    # no element, so any index is right; and nothing can be divided
    if any(isinstance(size, int) and size == 0 for size in new):
        return (0,) * len(old)
    return _reshape_indices(tuple(old), tuple(new), tuple(axes))


@lru_cache(maxsize=4096)
def _reshape_indices(old: Shape, new: Shape, axes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Where the element at `axes` of shape `new` stands in shape `old`, both row-major over the same elements.

    Runs of dimensions with equal products are matched from the left, so that divisions appear only where dimensions are
    split."""
    result: list[Dim] = [0] * len(old)
    i = j = 0
    while i < len(old) or j < len(new):
        start_i, start_j = i, j
        left: Dim = 1
        right: Dim = 1
        if i < len(old):
            left, i = old[i], i + 1
        if j < len(new):
            right, j = new[j], j + 1
        while not same_size(left, right):
            left_smaller = known_le(left, right)
            if left_smaller is None:
                if not (isinstance(left, int) or isinstance(right, int)):
                    # Sizes that cannot be compared: take all that is left as one run.
                    i, j = len(old), len(new)
                    break
                left_smaller = isinstance(left, int)
            if left_smaller and i < len(old):
                left, i = left * old[i], i + 1
            elif j < len(new):
                right, j = right * new[j], j + 1
            elif i < len(old):
                left, i = left * old[i], i + 1
            else:
                break
        _split(old[start_i:i], new[start_j:j], axes[start_j:j], result, start_i)
    return tuple(result)


def _split(old: Sequence[Dim], new: Sequence[Dim], axes: Sequence[Dim], result: list[Dim], start: int) -> None:
    """The indices of one run: the flat index over `new`, taken apart along `old`."""
    flat: Dim = 0
    for size, axis in zip(new, axes):
        flat = flat * size + axis
    inner: Dim = 1
    places = []
    for size in reversed(old):
        places.append((size, inner))
        inner = inner * size
    wide = [position for position, size in enumerate(old) if not is_one(size)]
    for position, (size, step) in zip(range(len(old)), reversed(places)):
        if is_one(size):
            continue
        quotient = flat // step
        # The first dimension of the run needs no modulo: the flat index is below the run's product.
        result[start + position] = quotient if position == wide[0] else quotient % size


@lowers("slice.Tensor", view=True)
def slice_(
    call: Call, self: Value, dim: int = 0, start: Dim | None = None, end: Dim | None = None, step: Dim = 1
) -> Value:
    dim = normalize_dim(dim, self.ndim)
    first = slice_start(start, end, self.shape[dim], step, call.type.shape[dim])
    source = list(call.axes)
    source[dim] = first + source[dim] * step
    return viewed(call, self, source)


def slice_start(start: Dim | None, end: Dim | None, size: Dim, step: Dim, length: Dim) -> Dim:
    """The first index of a slice of `length`: negative values count from the end, what is out of range is clamped. Only
    a slice without elements can start beyond the end: how capture typed it says whether it does (of a size s - 1
    nothing here tells that it is not -1)."""
    if start is None:
        return 0
    low, high = bounds(start)
    if high is not None and high < 0:
        return maximum(start + size, 0)
    if (low is not None and low >= 0) or (known_eq(step, 1) and _counts_from_begin(start, end, size, length)):
        return minimum(start, size) if length == 0 else start
    raise Fallback("a slice that starts at an index of unknown sign")


def _counts_from_begin(start: Dim, end: Dim | None, size: Dim, length: Dim) -> bool:
    """Whether the length shows that `start` is not negative: with a negative one, it would be a whole `size` less."""
    if known_eq(length, size - start):
        return True
    low = None if end is None else bounds(end)[0]
    return end is not None and low is not None and low >= 0 and bool(known_eq(length, end - start))


@lowers("select.int", view=True)
def select(call: Call, self: Value, dim: int, index: Dim) -> Value:
    dim = normalize_dim(dim, self.ndim)
    axes = call.axes
    return viewed(call, self, (*axes[:dim], element_index(index, self.shape[dim]), *axes[dim:]))


def element_index(index: Dim, size: Dim) -> Dim:
    """An index into a dimension, negative ones counted from the end."""
    low, high = bounds(index)
    if high is not None and high < 0:
        return index + size
    if low is not None and low >= 0:
        return index
    raise Fallback("an index of unknown sign")


@lowers("split.Tensor", "split_with_sizes", "unsafe_split.Tensor", "unsafe_split_with_sizes", view=True)
def split(call: Call, self: Value, split_size: Any, dim: int = 0) -> tuple[Value, ...]:
    dim = normalize_dim(dim, self.ndim)
    pieces: list[Value] = []
    start: Dim = 0
    for type_ in call.type:
        source = list(axis_symbols(type_.shape))
        source[dim] = start + source[dim]
        pieces.append(call.lowering.value(type_, call.lowering.at(self, source)))
        start = start + type_.shape[dim]
    return tuple(pieces)


@lowers("chunk", "unsafe_chunk", view=True)
def chunk(call: Call, self: Value, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    return split(call, self, None, dim)


@lowers("unbind.int", view=True)
def unbind(call: Call, self: Value, dim: int = 0) -> tuple[Value, ...]:
    dim = normalize_dim(dim, self.ndim)
    pieces = []
    for position, type_ in enumerate(call.type):
        axes = axis_symbols(type_.shape)
        pieces.append(call.lowering.value(type_, call.lowering.at(self, (*axes[:dim], position, *axes[dim:]))))
    return tuple(pieces)


@lowers("diagonal", view=True)
def diagonal(call: Call, self: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    dim1, dim2 = normalize_dim(dim1, self.ndim), normalize_dim(dim2, self.ndim)
    axes = list(call.axes)
    along = axes.pop()
    rest = iter(axes)
    down, right = (along, along + offset) if offset >= 0 else (along - offset, along)
    return viewed(call, self, [down if k == dim1 else right if k == dim2 else next(rest) for k in range(self.ndim)])


@lowers("unfold", view=True)
def unfold(call: Call, self: Value, dimension: int, size: int, step: int) -> Value:
    if self.ndim == 0:  # counts as one element in one dimension
        return viewed(call, self, ())
    axes = list(call.axes)
    within = axes.pop()
    dim = normalize_dim(dimension, self.ndim)
    axes[dim] = axes[dim] * step + within
    return viewed(call, self, axes)


@lowers("as_strided", view=True)
def as_strided(
    call: Call, self: Value, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Dim | None = None
) -> Value:
    """Addresses the storage below `self`: so `self` must be a window with the layout that its type tells of."""
    low = call.lowering
    ref = window(self)
    begins = None if ref is None else ref.offset + low.program.buffers[ref.buffer].offset
    elsewhere = storage_offset is not None and begins is not None and known_eq(begins, self.type.offset) is False
    if ref is None or elsewhere or not laid_out_as_typed(self, ref):  # a copy that was to be none: now it is one
        low.realize(self)
        ref = window(self)
    if ref is None or not laid_out_as_typed(self, ref):
        raise CannotFunctionalise("as_strided of a value whose storage is laid out otherwise")
    buffer = low.program.buffers[ref.buffer]
    if buffer.dtype is not self.dtype:
        raise Fallback("as_strided of the parts of complex numbers")
    base = ref.offset if storage_offset is None else storage_offset - buffer.offset
    if buffer.role not in ("input", "constant"):
        if storage_offset is not None and known_eq(ref.offset, self.type.offset) is not True:
            raise CannotFunctionalise("as_strided from the start of a tensor that was never put into memory")
        last = base + sum((n - 1) * s for n, s in zip(size, stride))
        if known_le(0, base) is not True or known_le(last + 1, buffer.span()) is not True:
            if storage_offset is not None:  # the operator would count from the start of all temporary memory
                raise CannotFunctionalise("as_strided of sizes that are not known, from the start of a tensor")
            if not is_surely_dense(call.type):  # the operator's copy is, where a half of a training step expects a view
                raise CannotFunctionalise("as_strided of sizes that are not known, with gaps or shared elements")
            raise Fallback("as_strided beyond the buffer")
    return call.result(ir.load(ref.buffer, flat_index(call.axes, stride, base), self.dtype))


def _from_known_start(node: torch.fx.Node) -> bool:
    """Where the memory of an input begins, only the call knows."""
    place = argument(node.target, node.args, dict(node.kwargs), 4)  # type: ignore[arg-type]
    return place is None or memory_of(node.args[0]).op == "call_function"  # type: ignore[arg-type]


@lowers("as_strided_scatter", accepts=_from_known_start)
def as_strided_scatter(
    call: Call,
    self: Value,
    src: Value,
    size: Sequence[Dim],
    stride: Sequence[Dim],
    storage_offset: Dim | None = None,
) -> Value:
    low = call.lowering
    first = 0 if storage_offset is None else storage_offset - self.type.offset
    last = first + sum((n - 1) * s for n, s in zip(size, stride))
    copy = Value(call.type, self.expression, low.locations)
    fits = known_le(0, first) is True and known_le(last + 1, numel(self.shape)) is True
    if not (fits and is_surely_dense(self.type) and is_non_overlapping(size, stride) and same_shape(src.shape, size)):
        if storage_offset is None:
            raise Fallback("as_strided_scatter beyond the elements of the tensor, or into elements that share memory")
        raise CannotFunctionalise("as_strided_scatter from the start of memory that begins elsewhere")
    symbols = axis_symbols(size)

    def store(buffer: ir.Buffer) -> ir.Store:
        return ir.Store(buffer.name, flat_index(symbols, stride, first), low.read(src, symbols, call.type.dtype))

    return low.scatter(copy, axes_of(symbols, size), store)


def laid_out_as_typed(self: Value, ref: ir.BufferRef) -> bool:
    """Whether the window on memory has the strides that the value's type says."""
    return all(is_one(n) or same_size(a, b) for n, a, b in zip(self.shape, ref.stride, self.type.stride))


# --- writing into a part: the functional forms of assignments to views ------------------------------------------------


@lowers("slice_scatter")
def slice_scatter(
    call: Call, self: Value, src: Value, dim: int = 0, start: Dim | None = None, end: Dim | None = None, step: int = 1
) -> Value:
    low = call.lowering
    dim = normalize_dim(dim, self.ndim)
    size = self.shape[dim]
    if same_shape(self.shape, src.shape) and known_eq(slice_start(start, end, size, step, src.shape[dim]), 0):
        return call.result(low.read(src, call.axes))
    first = slice_start(start, end, size, step, src.shape[dim])
    axis = call.axes[dim]
    last = first + src.shape[dim] * step
    conditions = []
    if not (isinstance(first, int) and first == 0):
        conditions.append(ex.ge(ir.index_value(axis), ir.index_value(first)))
    if known_le(size, last) is not True:
        conditions.append(ex.lt(ir.index_value(axis), ir.index_value(last)))
    if step != 1:
        conditions.append(ex.eq(ir.index_value((axis - first) % step), 0))
    inside = ex.all_of(conditions)
    source = list(call.axes)
    source[dim] = 0 if is_one(src.shape[dim]) else (axis - first) // step
    dtype = ex.compute_dtype(self.dtype)
    part = low.read(src, source, dtype)
    return call.result(part if inside is None else ex.masked(inside, part, low.read(self, call.axes, dtype)))


@lowers("select_scatter")
def select_scatter(call: Call, self: Value, src: Value, dim: int, index: Dim) -> Value:
    low = call.lowering
    dim = normalize_dim(dim, self.ndim)
    axes = call.axes
    inside = ex.eq(ir.index_value(axes[dim]), ir.index_value(element_index(index, self.shape[dim])))
    dtype = ex.compute_dtype(self.dtype)
    indices = low.broadcast(src, self.shape[:dim] + self.shape[dim + 1 :], axes[:dim] + axes[dim + 1 :])
    return call.result(ex.masked(inside, low.read(src, indices, dtype), low.read(self, axes, dtype)))


@lowers("diagonal_scatter")
def diagonal_scatter(call: Call, self: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    low = call.lowering
    dim1, dim2 = normalize_dim(dim1, self.ndim), normalize_dim(dim2, self.ndim)
    axes = call.axes
    down, right = axes[dim1], axes[dim2]
    inside = ex.eq(ir.index_value(right), ir.index_value(down + offset))
    along = down if offset >= 0 else right
    rest = [axis for k, axis in enumerate(axes) if k not in (dim1, dim2)]
    source = [0 if is_one(size) else index for size, index in zip(src.shape, [*rest, along])]
    dtype = ex.compute_dtype(self.dtype)
    return call.result(ex.masked(inside, low.read(src, source, dtype), low.read(self, axes, dtype)))


# --- gradients of views -----------------------------------------------------------------------------------------------


@lowers("slice_backward")
def slice_backward(
    call: Call, grad_output: Value, input_sizes: Sequence[Dim], dim: int, start: Dim, end: Dim, step: int
) -> Value:
    return slice_scatter(call, zeros(call, input_sizes, grad_output), grad_output, dim, start, end, step)


@lowers("select_backward")
def select_backward(call: Call, grad_output: Value, input_sizes: Sequence[Dim], dim: int, index: Dim) -> Value:
    return select_scatter(call, zeros(call, input_sizes, grad_output), grad_output, dim, index)


@lowers("diagonal_backward")
def diagonal_backward(
    call: Call, grad_output: Value, input_sizes: Sequence[Dim], offset: int, dim1: int, dim2: int
) -> Value:
    return diagonal_scatter(call, zeros(call, input_sizes, grad_output), grad_output, offset, dim1, dim2)


def zeros(call: Call, shape: Sequence[Dim], like: Value) -> Value:
    dtype = ex.compute_dtype(like.dtype)
    type_ = TensorType(call.type.shape, call.type.stride, like.dtype, like.type.device)
    return call.lowering.value(type_, ir.constant(0, dtype))


# --- views that are asked to be copies --------------------------------------------------------------------------------


def _register_copies() -> None:
    names = (
        "permute transpose.int t expand unsqueeze squeeze squeeze.dim squeeze.dims view view.dtype _reshape_alias "
        "slice.Tensor select.int split.Tensor split_with_sizes unbind.int diagonal unfold alias detach"
    ).split()
    for name in names:
        row = find(operator(name))
        packet, _, overload = name.partition(".")
        assert row is not None
        lowers(f"{packet}_copy.{overload}" if overload else f"{packet}_copy")(row.function)


_register_copies()
