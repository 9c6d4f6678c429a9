"""Operators that rearrange elements: concatenation, padding, repetition, flips, triangles.

Takes tensors; gives lazy values, except that a concatenation which memory must hold is written piece by piece into one
buffer. Always holds: an element outside a piece or a border is not loaded (`Masked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusewright.loops import ir
from fusewright.loops.ir import Expression, Pointwise, Store
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.promotion import number
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value, axes_of, axis_symbols, flat_index, is_one, normalize_dim
from fusewright.loops.lower.views import reshape_indices
from fusewright.sizes.expressions import Dim, known_le, known_lt, maximum, minimum

MAX_LAZY_PIECES = 4


@lowers("cat")
def cat(call: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    if any(value.ndim == 0 for value in tensors):
        raise Fallback("a concatenation of scalars")
    dim = normalize_dim(dim, len(call.type.shape))
    return joined(call, tensors, dim, [value.shape[dim] for value in tensors], stacked=False)


@lowers("stack")
def stack(call: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    return joined(call, tensors, normalize_dim(dim, len(call.type.shape)), [1] * len(tensors), stacked=True)


def joined(call: Call, tensors: Sequence[Value], dim: int, sizes: Sequence[Dim], stacked: bool) -> Value:
    """Pieces one after the other along `dim`. stacked: the pieces lack the dimension, and each takes one place in
    it."""
    low = call.lowering
    dear = any(ex.cost(value.expression).expensive for value in tensors)
    if call.in_memory or len(tensors) > MAX_LAZY_PIECES or dear:
        return _written(call, tensors, dim, sizes, stacked)
    dtype = ex.compute_dtype(call.type.dtype)
    axis = call.axes[dim]
    end: Dim = 0
    pieces: list[tuple[Dim, Expression]] = []
    for value, size in zip(tensors, sizes):
        place = list(call.axes)
        place[dim] = axis - end if not is_one(size) else 0
        if stacked:
            del place[dim]
        end = end + size
        pieces.append((end, low.read(value, place, dtype)))
    result = pieces[-1][1]
    for end, piece in reversed(pieces[:-1]):
        result = ex.masked(ex.lt(ir.index_value(axis), ir.index_value(end)), piece, result)
    return call.result(result)


def _written(call: Call, tensors: Sequence[Value], dim: int, sizes: Sequence[Dim], stacked: bool) -> Value:
    low = call.lowering
    buffer = low.new_buffer(call.type)
    start: Dim = 0
    for value, size in zip(tensors, sizes):
        shape = (*call.type.shape[:dim], size, *call.type.shape[dim + 1 :])
        symbols = axis_symbols(shape)
        source = [*symbols[:dim], *symbols[dim + 1 :]] if stacked else symbols
        place = list(symbols)
        place[dim] = start + symbols[dim]
        element = low.at(value, source)
        stored = Store(buffer.name, flat_index(place, buffer.stride), ir.cast(ex.widen(element), call.type.dtype))
        if element.dtype == call.type.dtype:
            stored = Store(buffer.name, stored.index, element)
        low.emit(Pointwise(low.operation_name(), axes_of(symbols, shape), (stored,), low.locations))
        start = start + size
    return low.buffer_value(call.type, buffer)


@lowers("complex")
def complex_(call: Call, real: Value, imag: Value) -> Value:
    """Complex numbers are computed in their parts (graph/passes/clean/complex_parts.py); here they are put together."""
    low = call.lowering
    buffer = low.new_buffer(call.type)
    shape, place = call.type.shape, 2 * flat_index(call.axes, buffer.stride)
    stores = tuple(
        Store(buffer.name, place + half, low.read(part, low.broadcast(part, shape, call.axes), buffer.element))
        for half, part in enumerate((real, imag))
    )
    low.emit(Pointwise(low.operation_name(), axes_of(call.axes, call.type.shape), stores, low.locations))
    return low.buffer_value(call.type, buffer)


# --- padding ---------------------------------------------------------------------------------------------------------


def padded(call: Call, self: Value, pad: Sequence[Dim]) -> list[tuple[Dim, Dim]]:
    """(before, after) for each dimension; `pad` lists pairs from the last dimension backwards."""
    pairs: list[tuple[Dim, Dim]] = [(0, 0)] * self.ndim
    for k in range(len(pad) // 2):
        pairs[self.ndim - 1 - k] = (pad[2 * k], pad[2 * k + 1])
    return pairs


@lowers("constant_pad_nd")
def constant_pad(call: Call, self: Value, pad: Sequence[Dim], value: Any = 0) -> Value:
    low = call.lowering
    dtype = ex.compute_dtype(self.dtype)
    place: list[Dim] = []
    conditions: list[Expression] = []
    for (before, _), size, axis in zip(padded(call, self, pad), self.shape, call.axes):
        index = axis - before
        # A single place keeps index 0 inside; the conditions tell where that is.
        place.append(0 if is_one(size) else index)
        if known_le(0, index) is not True:
            conditions.append(ex.ge(ir.index_value(axis), ir.index_value(before)))
        if known_lt(index, size) is not True:
            conditions.append(ex.lt(ir.index_value(axis), ir.index_value(size + before)))
    inside = ex.all_of(conditions)
    body = low.read(self, place, dtype)
    return call.result(body if inside is None else ex.masked(inside, body, number(value, dtype, self.dtype)))


@lowers("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(call: Call, self: Value, padding: Sequence[Dim]) -> Value:
    call.lowering.keep_if_expensive(self)
    place: list[Dim] = []
    for (before, after), size, axis in zip(padded(call, self, padding), self.shape, call.axes):
        if isinstance(before, int) and isinstance(after, int) and before == after == 0:
            place.append(axis)
            continue
        left = axis - before
        mirrored = maximum(left, -left)
        distance = (size - 1) - mirrored
        place.append((size - 1) - maximum(distance, -distance))
    return call.result(call.lowering.at(self, place))


@lowers("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(call: Call, self: Value, padding: Sequence[Dim]) -> Value:
    call.lowering.keep_if_expensive(self)
    place: list[Dim] = []
    for (before, after), size, axis in zip(padded(call, self, padding), self.shape, call.axes):
        untouched = isinstance(before, int) and isinstance(after, int) and before == after == 0
        place.append(axis if untouched else minimum(maximum(axis - before, 0), size - 1))
    return call.result(call.lowering.at(self, place))


# --- repetition and order --------------------------------------------------------------------------------------------


@lowers("repeat")
def repeat(call: Call, self: Value, repeats: Sequence[Dim]) -> Value:
    call.lowering.keep_if_expensive(self)
    axes = call.axes[len(repeats) - self.ndim :]
    times = repeats[len(repeats) - self.ndim :]
    place = [0 if is_one(n) else axis if is_one(count) else axis % n for axis, n, count in zip(axes, self.shape, times)]
    return call.result(call.lowering.at(self, place))


@lowers("repeat_interleave.self_int")
def repeat_interleave(
    call: Call, self: Value, repeats: Dim, dim: int | None = None, *, output_size: Any = None
) -> Value:
    if dim is None:
        flat = call.axes[0] // repeats if call.axes else 0
        return call.result(
            call.lowering.at(self, reshape_indices(self.shape, (call.type.shape[0] // repeats,), (flat,)))
        )
    dim = normalize_dim(dim, self.ndim)
    place = list(call.axes)
    place[dim] = 0 if is_one(self.shape[dim]) else place[dim] // repeats
    return call.result(call.lowering.at(self, place))


@lowers("flip")
def flip(call: Call, self: Value, dims: Sequence[int]) -> Value:
    place = list(call.axes)
    for dim in {normalize_dim(dim, self.ndim) for dim in dims}:
        if self.ndim:
            place[dim] = self.shape[dim] - 1 - place[dim]
    return call.result(call.lowering.at(self, place))


@lowers("roll")
def roll(call: Call, self: Value, shifts: Any, dims: Any = ()) -> Value:
    shifts = (shifts,) if not isinstance(shifts, tuple) else shifts
    dims = (dims,) if isinstance(dims, int) else dims
    if not dims:
        (total,) = shifts
        count: Dim = 1
        for size in self.shape:
            count = count * size
        flat = (flat_index(call.axes, _row_major(self.shape)) - total) % count
        return call.result(call.lowering.at(self, reshape_indices(self.shape, (count,), (flat,))))
    place = list(call.axes)
    for shift, dim in zip(shifts, dims):
        dim = normalize_dim(dim, self.ndim)
        place[dim] = 0 if is_one(self.shape[dim]) else (place[dim] - shift) % self.shape[dim]
    return call.result(call.lowering.at(self, place))


def _row_major(shape: Sequence[Dim]) -> list[Dim]:
    strides: list[Dim] = []
    running: Dim = 1
    for size in reversed(shape):
        strides.append(running)
        running = running * size
    return strides[::-1]


@lowers("pixel_shuffle")
def pixel_shuffle(call: Call, self: Value, upscale_factor: int) -> Value:
    r = upscale_factor
    *batch, channel, row, column = call.axes
    source = (channel * r * r + (row % r) * r + column % r, row // r, column // r)
    return call.result(call.lowering.at(self, (*batch, *source)))


@lowers("pixel_unshuffle")
def pixel_unshuffle(call: Call, self: Value, downscale_factor: int) -> Value:
    r = downscale_factor
    *batch, channel, row, column = call.axes
    source = (channel // (r * r), row * r + channel // r % r, column * r + channel % r)
    return call.result(call.lowering.at(self, (*batch, *source)))


@lowers("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(call: Call, self: Value, groups: int) -> Value:
    members = self.shape[1] // groups
    place = list(call.axes)
    place[1] = (place[1] % groups) * members + place[1] // groups
    return call.result(call.lowering.at(self, place))


# --- triangles and diagonals -----------------------------------------------------------------------------------------


@lowers("tril", "triu")
def triangle(call: Call, self: Value, diagonal: Dim = 0) -> Value:
    row, column = call.axes[-2:]
    compare = ex.le if call.target._schema.name == "aten::tril" else ex.ge
    kept = compare(ir.index_value(column), ir.index_value(row + diagonal))
    dtype = ex.compute_dtype(self.dtype)
    return call.result(ex.masked(kept, call.lowering.read(self, call.axes, dtype), ir.constant(0, dtype)))


@lowers("diag_embed")
def diag_embed(call: Call, self: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    ndim = self.ndim + 1
    dim1, dim2 = normalize_dim(dim1, ndim), normalize_dim(dim2, ndim)
    axes = call.axes
    down, right = axes[dim1], axes[dim2]
    on_diagonal = ex.eq(ir.index_value(right), ir.index_value(down + offset))
    rest = [axis for k, axis in enumerate(axes) if k not in (dim1, dim2)]
    along = down if offset >= 0 else right
    place = [0 if is_one(size) else index for size, index in zip(self.shape, [*rest, along])]
    dtype = ex.compute_dtype(self.dtype)
    return call.result(ex.masked(on_diagonal, call.lowering.read(self, place, dtype), ir.constant(0, dtype)))


@lowers("eye", "eye.m")
def eye(call: Call, *sizes: Any, **options: Any) -> Value:
    row, column = call.axes
    dtype = ex.compute_dtype(call.type.dtype)
    return call.result(ir.cast(ex.eq(ir.index_value(row), ir.index_value(column)), dtype))
