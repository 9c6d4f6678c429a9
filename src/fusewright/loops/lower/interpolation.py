"""Resampling: nearest and (bi)linear.

Takes a tensor of shape (N, C, *spatial) with static spatial sizes; gives lazy values. Always holds: source positions are computed in the
float arithmetic of ATen's kernels, once, at compile time where they reduce to a division, else in the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusewright.graph.sizes import Dim
from fusewright.loops import ir
from fusewright.loops.ir import Expression
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call, Lowering
from fusewright.loops.lower.indexing import gathered
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value, is_one

Bound = tuple[Dim, ex.Bindings]


def source_scale(size: int, out: int, scale: float | None) -> float:
    """ATen's compute_scales_value: 1 / scale_factor when given, else size / out, in float32."""
    ratio = torch.tensor(1.0 / scale, dtype=torch.float32) if scale else torch.tensor(float(size)) / torch.tensor(float(out))
    return float(ratio)


def sizes_of(call: Call, self: Value, count: int) -> list[tuple[int, int]]:
    pairs = list(zip(self.shape[self.ndim - count :], call.type.shape[len(call.type.shape) - count :]))
    if any(not isinstance(size, int) or not isinstance(out, int) for size, out in pairs):
        raise Fallback("resampling a symbolic size")
    return pairs  # type: ignore[return-value]


def scales_of(count: int, scales: Sequence[Any]) -> list[float | None]:
    """The scale factors: separate arguments, or one list of them (the `.vec` overloads)."""
    if len(scales) == 1 and isinstance(scales[0], tuple):
        scales = scales[0]
    found = [*scales, *([None] * (count - len(scales)))]
    return [None if scale is None else float(scale) for scale in found]


# --- nearest ---------------------------------------------------------------------------------------------------------


def nearest_table(size: int, out: int, scale: float | None, exact: bool) -> list[int]:
    """The source index of every output index, by ATen's float32 formula."""
    positions = torch.arange(out, dtype=torch.float32)
    ratio = torch.tensor(source_scale(size, out, scale), dtype=torch.float32)
    shifted = (positions + 0.5) * ratio if exact else positions * ratio
    return shifted.floor().to(torch.int64).clamp(max=size - 1).tolist()


def as_division(table: Sequence[int], axis: Dim, size: int, out: int) -> Dim | None:
    """The table as floor(axis * size / out) or a close form, when it is one."""
    for numerator, shift in ((size, 0), (2 * size, size)):
        denominator = out if shift == 0 else 2 * out
        if all(found == (i * numerator + shift) // denominator for i, found in enumerate(table)):
            return (axis * numerator + shift) // denominator
    return None


@lowers(
    *(f"upsample_nearest{n}d{suffix}" for n in (1, 2, 3) for suffix in ("", ".vec")),
    *(f"_upsample_nearest_exact{n}d{suffix}" for n in (1, 2, 3) for suffix in ("", ".vec")),
)
def nearest(call: Call, self: Value, output_size: Any, *scales: Any) -> Value:
    low = call.lowering
    count = len(call.type.shape) - 2
    exact = "exact" in call.target._schema.name
    axes = call.axes
    place: list[Dim] = list(axes[:2])
    low.keep_if_expensive(self)
    for axis, (size, out), scale in zip(axes[2:], sizes_of(call, self, count), scales_of(count, scales)):
        index = 0 if size == 1 else as_division(nearest_table(size, out, scale, exact), axis, size, out)
        if index is None:
            raise Fallback("an irregular resampling")
        place.append(index)
    return call.result(low.at(self, place))


# --- linear ----------------------------------------------------------------------------------------------------------


def linear_source(axis: Dim, size: int, out: int, align_corners: bool, scale: float | None) -> Expression:
    """The real-valued source position (float32), by ATen's area_pixel_compute_source_index."""
    position = ex.index_as(axis, torch.float32)
    if align_corners:
        ratio = float(torch.tensor(float(size - 1)) / torch.tensor(float(out - 1))) if out > 1 else 0.0
        return ex.mul(position, ratio)
    ratio = source_scale(size, out, scale)
    return ex.maximum(ex.sub(ex.mul(ex.add(position, 0.5), ratio), 0.5), 0)


def neighbours(low: Lowering, axis: Dim, size: int, real: Expression) -> tuple[list[Bound], list[Expression]]:
    """The two source indices around a position, and their weights."""
    below = ex.minimum(ir.cast(real, torch.int64), size - 1)
    above = ex.minimum(ex.add(below, 1), size - 1)
    share = ex.minimum(ex.maximum(ex.sub(real, ir.cast(below, torch.float32)), 0), 1)
    indices: list[Bound] = []
    for expression in (below, above):
        if size == 1:
            indices.append((0, ()))
        else:
            indices.append(low.bind(expression, size))
    return indices, [ex.sub(ir.constant(1, torch.float32), share), share]


@lowers("upsample_linear1d", "upsample_linear1d.vec", "upsample_bilinear2d", "upsample_bilinear2d.vec")
def linear(call: Call, self: Value, output_size: Any, align_corners: bool, *scales: Any) -> Value:
    low = call.lowering
    if not self.dtype.is_floating_point or self.dtype is torch.float64:
        raise Fallback("linear resampling of integers or doubles")
    count = len(call.type.shape) - 2
    axes = call.axes
    sides: list[tuple[list[tuple[Dim, ex.Bindings]], list[Expression]]] = []
    for axis, (size, out), scale in zip(axes[2:], sizes_of(call, self, count), scales_of(count, scales)):
        if size == out and not align_corners and scale in (None, 1.0):
            sides.append(([(axis if not is_one(size) else 0, ())], [ir.constant(1, torch.float32)]))
        else:
            sides.append(neighbours(low, axis, size, linear_source(axis, size, out, align_corners, scale)))
    corners: list[tuple[list[Dim], ex.Bindings, Expression | None]] = [(list(axes[:2]), (), None)]
    for indices, weights in sides:
        corners = [
            ([*place, index], bindings + bound, weight if factor is None else ex.mul(factor, weight))
            for place, bindings, factor in corners
            for (index, bound), weight in zip(indices, weights)
        ]
    total: Expression | None = None
    for place, bindings, factor in corners:
        assert factor is not None
        term = ex.mul(ex.widen(gathered(low, self, place, bindings)), factor)
        total = term if total is None else ex.add(total, term)
    assert total is not None
    return call.result(total)
