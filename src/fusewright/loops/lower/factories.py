"""Tensors from nothing: constants, ranges, and the shapes of other tensors.

Takes sizes and numbers; gives lazy values without loads. Always holds: what eager leaves uninitialised is zero here.
"""

from __future__ import annotations

from typing import Any

import torch

from fusewright.loops import ir
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.promotion import number
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value, is_non_overlapping


@lowers("full", "full_like", "new_full", "scalar_tensor")
def full(call: Call, *args: Any, **options: Any) -> Value:
    name = call.target._schema.name.partition("::")[2]
    position = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}[name]
    value = args[position] if position < len(args) else options["fill_value"]
    return call.result(number(value, ex.compute_dtype(call.type.dtype), call.type.dtype))


@lowers("ones", "ones_like", "new_ones")
def ones(call: Call, *args: Any, **options: Any) -> Value:
    return call.result(number(1, ex.compute_dtype(call.type.dtype)))


@lowers("empty.memory_format", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
def empty(call: Call, *args: Any, **options: Any) -> Value:
    if not is_non_overlapping(call.type.shape, call.type.stride):
        raise Fallback("elements that share memory")
    return zeros(call)


@lowers("zeros", "zeros_like", "new_zeros", "zero")
def zeros(call: Call, *args: Any, **options: Any) -> Value:
    return call.result(number(0, ex.compute_dtype(call.type.dtype)))


@lowers("arange", "arange.start", "arange.start_step")
def arange(call: Call, *args: Any, **options: Any) -> Value:
    """start + step * i: in integers, or in double precision for floats (as ATen's CPU kernel computes it)."""
    (start, step) = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else options.get("step", 1))
    (axis,) = call.axes
    if not call.type.dtype.is_floating_point:
        if isinstance(start, float) or isinstance(step, float):
            raise Fallback("an integer range with a float step")
        return call.result(ex.index_as(start + axis * step, call.type.dtype))
    dtype = torch.float64
    position = ex.index_as(axis, dtype)
    if not (isinstance(step, (int, float)) and step == 1):
        position = ex.mul(position, number(step, dtype))
    if not (isinstance(start, (int, float)) and start == 0):
        position = ex.add(number(start, dtype), position)
    return call.result(ir.cast(position, ex.compute_dtype(call.type.dtype)))


@lowers("linspace")
def linspace(call: Call, start: Any, end: Any, steps: Any, **options: Any) -> Value:
    """From both ends towards the middle, as ATen does, so that the last element is exactly `end`."""
    dtype = call.type.dtype
    if dtype not in (torch.float32, torch.float64) or not isinstance(steps, int):
        raise Fallback("an integer, half or symbolic linspace")
    (axis,) = call.axes
    first, last = number(start, dtype), number(end, dtype)
    if steps == 1:
        return call.result(first)
    step = ex.div(ex.sub(last, first), float(steps - 1))
    rising = ex.add(first, ex.mul(step, ex.index_as(axis, dtype)))
    falling = ex.sub(last, ex.mul(step, ex.index_as(steps - 1 - axis, dtype)))
    return call.result(ex.where(ex.lt(ir.index_value(axis), steps // 2), rising, falling))
