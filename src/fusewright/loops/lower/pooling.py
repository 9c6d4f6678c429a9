"""Pooling: windows unrolled when they are small, else reduced.

Takes a tensor of shape (N, C, *spatial) or (C, *spatial); gives lazy values. Always holds: the input, whose elements
several windows read, is in memory unless it is trivially cheap to compute; elements in the border are never loaded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from fusewright.loops import ir
from fusewright.loops.ir import Axis, Expression
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value, axis_symbols, is_one
from fusewright.sizes.expressions import Dim, known_le, known_lt, loop_symbol, maximum, minimum

MAX_UNROLLED = 32


def per_dimension(value: Any, count: int, default: Any = None) -> tuple[int, ...]:
    """An int list of length 1 or `count` (empty: the default)."""
    items = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not items:
        return tuple(default)
    if any(not isinstance(item, int) for item in items):
        raise Fallback("a symbolic window")
    return items * count if len(items) == 1 else items


class Windows:
    """Sliding windows over the trailing dimensions: where each element lies, and whether it lies inside the input."""

    def __init__(
        self, self_: Value, axes: Sequence[Dim], kernel: Sequence[int], stride: Any, padding: Any, dilation: Any = (1,)
    ) -> None:
        count = len(kernel)
        self.shape = self_.shape[self_.ndim - count :]
        self.lead = list(axes[: len(axes) - count])
        self.kernel = tuple(kernel)
        self.axes = axes[len(axes) - count :]
        self.stride = per_dimension(stride, count, kernel)
        self.padding = per_dimension(padding, count)
        self.dilation = per_dimension(dilation, count)

    def start(self, k: int) -> Dim:
        return self.axes[k] * self.stride[k] - self.padding[k]

    def place(self, offsets: Sequence[Dim]) -> tuple[list[Dim], Expression | None]:
        """(indices, condition of being inside or None) of the window's element at `offsets`."""
        indices = [self.start(k) + offset * self.dilation[k] for k, offset in enumerate(offsets)]
        conditions: list[Expression] = []
        for index, size in zip(indices, self.shape):
            if known_le(0, index) is not True:
                conditions.append(ex.ge(ir.index_value(index), 0))
            if known_lt(index, size) is not True:
                conditions.append(ex.lt(ir.index_value(index), ir.index_value(size)))
        return [*self.lead, *(0 if is_one(size) else index for index, size in zip(indices, self.shape))], ex.all_of(
            conditions
        )

    def offsets(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(size) for size in self.kernel)))


def loaded(
    call: Call, self: Value, place: Sequence[Dim], inside: Expression | None, outside: float, dtype: torch.dtype,
    compared: bool = False,
) -> Expression:  # fmt: skip
    body = call.lowering.read(self, place, dtype)
    if compared:
        body = ex.rounded(body, self.dtype)
    return body if inside is None else ex.masked(inside, body, ir.constant(outside, dtype))


def lowest(dtype: torch.dtype) -> float | int:
    if dtype is torch.bool:
        raise Fallback("a maximum of bools")
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


# --- maximum ---------------------------------------------------------------------------------------------------------


@lowers("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool_with_indices(
    call: Call,
    self: Value,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = (0,),
    dilation: Any = (1,),
    ceil_mode: bool = False,
) -> tuple[Value, Value]:
    """The position is that of the first greatest element of the window (of the last NaN, if any) in the flattened
    spatial dimensions."""
    low = call.lowering
    count = 2 if "2d" in call.target._schema.name else 3
    kernel = per_dimension(kernel_size, count)
    if not 0 < math.prod(kernel) <= MAX_UNROLLED:
        raise Fallback("a large window, or none")
    low.shared(self)
    value_type, index_type = call.type
    dtype = ex.compute_dtype(self.dtype)
    windows = Windows(self, axis_symbols(value_type.shape), kernel, stride, padding, dilation)
    best: Expression | None = None
    position: Expression | None = None
    value: Expression | None = None
    for offsets in windows.offsets():
        place, inside = windows.place(offsets)
        x = loaded(call, self, place, inside, lowest(dtype), dtype, compared=True)
        value = x if value is None else ex.maximum(value, x)
        flat: Dim = 0
        for index, size in zip(place[len(place) - count :], windows.shape):
            flat = flat * size + index
        here = ir.index_value(flat)
        if best is None or position is None:
            best, position = x, here if inside is None else ex.where(inside, here, -1)
            continue
        better = ex.gt(x, best)
        if dtype.is_floating_point:
            better = ex.either(better, ex.isnan(x))
        if inside is not None:
            # The first element inside counts even if it equals the border's value.
            better = ex.both(inside, ex.either(better, ex.lt(position, 0)))
        else:
            better = ex.either(better, ex.lt(position, 0))
        best, position = ex.where(better, x, best), ex.where(better, here, position)
    assert value is not None and position is not None
    return low.value(value_type, value), low.value(index_type, position)


@lowers("max_pool2d_with_indices_backward")
def max_pool_gradient(
    call: Call,
    grad_output: Value,
    self: Value,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Value,
) -> Value:
    """Each input element collects the gradients of the windows that chose it: as a gather over the windows that can
    contain it."""
    low = call.lowering
    kernel = per_dimension(kernel_size, 2)
    steps = per_dimension(stride, 2, kernel)
    pads = per_dimension(padding, 2)
    if per_dimension(dilation, 2) != (1, 1):
        raise Fallback("a dilated window")
    reach = [-(-size // step) for size, step in zip(kernel, steps)]
    if math.prod(reach) > MAX_UNROLLED:
        raise Fallback("a large window")
    low.shared(grad_output)
    low.shared(indices)
    *lead, row, column = call.axes
    width = self.shape[-1]
    here = ir.index_value(row * width + column)
    dtype = ex.compute_dtype(grad_output.dtype)
    out_shape = grad_output.shape[-2:]
    total: Expression = ir.constant(0, dtype)
    last = [(axis + pad) // step for axis, pad, step in zip((row, column), pads, steps)]
    for offsets in itertools.product(*(range(n) for n in reach)):
        place = [end - offset for end, offset in zip(last, offsets)]
        conditions = []
        for index, size in zip(place, out_shape):
            if known_le(0, index) is not True:
                conditions.append(ex.ge(ir.index_value(index), 0))
            if known_lt(index, size) is not True:
                conditions.append(ex.lt(ir.index_value(index), ir.index_value(size)))
        spot = [*lead, *(0 if is_one(size) else index for index, size in zip(place, out_shape))]
        chosen = ex.eq(low.read(indices, spot), here)
        term = ex.where(chosen, low.read(grad_output, spot, dtype), 0)
        inside = ex.all_of(conditions)
        total = ex.add(total, term if inside is None else ex.masked(inside, term, ir.constant(0, dtype)))
    return call.result(total)


# --- average ---------------------------------------------------------------------------------------------------------


@lowers("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    call: Call,
    self: Value,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    low = call.lowering
    count = int(call.target._schema.name[-2])
    kernel = per_dimension(kernel_size, count)
    if not 0 < math.prod(kernel) <= MAX_UNROLLED:
        raise Fallback("a large window, or none")
    if not self.dtype.is_floating_point:
        raise Fallback("an average of integers")
    low.shared(self)
    dtype = ex.compute_dtype(self.dtype)
    windows = Windows(self, call.axes, kernel, stride, padding)
    total: Expression | None = None
    for offsets in windows.offsets():
        place, inside = windows.place(offsets)
        x = loaded(call, self, place, inside, 0, dtype)
        total = x if total is None else ex.add(total, x)
    assert total is not None
    if divisor_override is not None:
        return call.result(ex.div(total, float(divisor_override)))
    area: Dim = 1
    for k, size in enumerate(windows.shape):
        start = windows.start(k)
        end = minimum(start + kernel[k], size + windows.padding[k])
        area = area * (end - start if count_include_pad else minimum(end, size) - maximum(start, 0))
    return call.result(ex.div(total, ex.index_as(area, dtype)))


@lowers("avg_pool2d_backward")
def avg_pool_gradient(
    call: Call,
    grad_output: Value,
    self: Value,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    """Each input element collects its share of the gradients of the windows that contain it."""
    low = call.lowering
    kernel = per_dimension(kernel_size, 2)
    steps = per_dimension(stride, 2, kernel)
    pads = per_dimension(padding, 2)
    reach = [-(-size // step) for size, step in zip(kernel, steps)]
    if math.prod(reach) > MAX_UNROLLED:
        raise Fallback("a large window")
    low.shared(grad_output)
    *lead, row, column = call.axes
    dtype = ex.compute_dtype(grad_output.dtype)
    out_shape, shape = grad_output.shape[-2:], self.shape[-2:]
    total: Expression = ir.constant(0, dtype)
    last = [(axis + pad) // step for axis, pad, step in zip((row, column), pads, steps)]
    for offsets in itertools.product(*(range(n) for n in reach)):
        place = [end - offset for end, offset in zip(last, offsets)]
        conditions = []
        area: Dim = 1
        for k, axis in enumerate((row, column)):
            index, start = place[k], place[k] * steps[k] - pads[k]
            if known_le(0, index) is not True:
                conditions.append(ex.ge(ir.index_value(index), 0))
            if known_lt(index, out_shape[k]) is not True:
                conditions.append(ex.lt(ir.index_value(index), ir.index_value(out_shape[k])))
            if kernel[k] % steps[k]:  # the farthest window that may begin before the element may end there, too
                conditions.append(ex.lt(ir.index_value(axis), ir.index_value(start + kernel[k])))
            end = minimum(start + kernel[k], shape[k] + pads[k])
            area = area * (end - start if count_include_pad else minimum(end, shape[k]) - maximum(start, 0))
        spot = [*lead, *(0 if is_one(size) else index for index, size in zip(place, out_shape))]
        given = low.read(grad_output, spot, dtype)
        divisor = ir.constant(float(divisor_override), dtype) if divisor_override else ex.index_as(area, dtype)
        term, inside = ex.div(given, divisor), ex.all_of(conditions)
        total = ex.add(total, term if inside is None else ex.masked(inside, term, ir.constant(0, dtype)))
    return call.result(total)


@lowers("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d")
def adaptive_avg_pool(call: Call, self: Value, output_size: Sequence[int]) -> Value:
    """Bin i covers floor(i * size / bins) .. ceil((i + 1) * size / bins)."""
    low = call.lowering
    count = len(output_size)
    sizes, bins = self.shape[self.ndim - count :], call.type.shape[len(call.type.shape) - count :]
    if any(not isinstance(n, int) for n in (*sizes, *bins)) or not self.dtype.is_floating_point:
        raise Fallback("bins of a symbolic size")
    low.shared(self)
    dtype = ex.compute_dtype(self.dtype)
    axes = call.axes
    lead, spatial = list(axes[: len(axes) - count]), axes[len(axes) - count :]
    starts: list[Dim] = [axis * size // n for axis, size, n in zip(spatial, sizes, bins)]
    ends: list[Dim] = [-((-(axis + 1) * size) // n) for axis, size, n in zip(spatial, sizes, bins)]
    widths = [max(-(-(i + 1) * size // n) - i * size // n for i in range(n)) for size, n in zip(sizes, bins)]
    area: Dim = 1
    for start, end in zip(starts, ends):
        area = area * (end - start)
    offsets = [0 if width == 1 else loop_symbol(f"r{k}", width) for k, width in enumerate(widths)]
    reduced = tuple(Axis(sym, width) for sym, width in zip(offsets, widths) if not isinstance(sym, int))
    place = [start + offset for start, offset in zip(starts, offsets)]
    inside = ex.all_of(
        [ex.lt(ir.index_value(i), ir.index_value(end)) for i, end in zip(place, ends) if known_lt(i, end) is not True]
    )
    indices = [*lead, *(0 if is_one(size) else i for size, i in zip(sizes, place))]
    x = loaded(call, self, indices, inside, 0, dtype)
    if not isinstance(area, int):
        total = low.make(call.type.shape, ir.constant(0, dtype), call.type)
        total = low.reduce("sum", total.type, axes, reduced, x)
        return call.result(ex.div(low.at(total, axes), ex.index_as(area, dtype)))
    return low.reduce("sum", call.type, axes, reduced, x, ex.div(ex.accumulator(dtype), float(area)))
