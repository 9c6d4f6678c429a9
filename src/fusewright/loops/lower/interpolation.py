"""Resampling: nearest, (bi)linear and bicubic.

Takes a tensor of shape (N, C, *spatial) with static spatial sizes (the result's may be symbolic, but for nearest);
gives lazy values.
Always holds: source positions are computed in the float arithmetic of ATen's kernels, once, at compile time where they
reduce to a division, else in the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusewright.loops import ir
from fusewright.loops.ir import Expression
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call, Lowering
from fusewright.loops.lower.indexing import gathered
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value, is_one
from fusewright.sizes.expressions import Dim

Bound = tuple[Dim, ex.Bindings]
_EXACT = 1 << 20
"""Up to this size a position in float32 is right to an eighth of an element."""


def source_scale(size: int, out: int, scale: float | None) -> float:
    """ATen's compute_scales_value: 1 / scale_factor when given, else size / out, in float32."""
    ratio = (
        torch.tensor(1.0 / scale, dtype=torch.float32)
        if scale
        else torch.tensor(float(size)) / torch.tensor(float(out))
    )
    return float(ratio)


def sizes_of(call: Call, self: Value, count: int) -> list[tuple[int, Dim]]:
    """The input's and the result's size in each spatial dimension."""
    pairs = list(zip(self.shape[self.ndim - count :], call.type.shape[len(call.type.shape) - count :]))
    if any(not isinstance(size, int) for size, _ in pairs):
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
        if not isinstance(out, int):
            raise Fallback("resampling to a symbolic size")
        index = 0 if size == 1 else as_division(nearest_table(size, out, scale, exact), axis, size, out)
        if index is None:
            raise Fallback("an irregular resampling")
        place.append(index)
    return call.result(low.at(self, place))


# --- linear ----------------------------------------------------------------------------------------------------------


def ratio_of(size: int, out: Dim, align_corners: bool, scale: float | None) -> float | Expression:
    """Input positions a step of the result, in float32."""
    if isinstance(out, int):
        if align_corners:
            return float(torch.tensor(float(size - 1)) / torch.tensor(float(out - 1))) if out > 1 else 0.0
        return source_scale(size, out, scale)
    if align_corners:
        steps = ex.index_as(out - 1, torch.float32)
        return ex.where(ex.gt(steps, 0), ex.div(ir.constant(float(size - 1), torch.float32), steps), 0.0)
    if scale is not None:
        return source_scale(size, 1, scale)
    return ex.div(ir.constant(float(size), torch.float32), ex.index_as(out, torch.float32))


def source_of(axis: Dim, size: int, out: Dim, align_corners: bool, scale: float | None) -> Expression:
    """The real-valued source position (float32), by ATen's area_pixel_compute_source_index."""
    position = ex.index_as(axis, torch.float32)
    ratio = ratio_of(size, out, align_corners, scale)
    return ex.mul(position, ratio) if align_corners else ex.sub(ex.mul(ex.add(position, 0.5), ratio), 0.5)


def stays_inside(size: int, out: Dim, align_corners: bool, scale: float | None) -> bool:
    """Whether every position lies below the input's end, however it is rounded; a scale may give any position."""
    ratio = ratio_of(size, out, align_corners, scale)
    if not isinstance(out, int) or not isinstance(ratio, float) or size > _EXACT:
        return False
    return ((out - 1) * ratio if align_corners else (out - 0.5) * ratio - 0.5) < size - 0.25


def neighbours(
    low: Lowering, axis: Dim, size: int, real: Expression, inside: bool
) -> tuple[list[Bound], list[Expression]]:
    """The two source indices around a position, and their weights. inside: see `stays_inside`."""
    below = ex.minimum(ex.maximum(ir.cast(real, torch.int64), 0), size - 1)
    above = ex.minimum(ex.add(below, 1), size - 1)
    if inside:
        share = ex.sub(real, ex.floor(real))
    else:
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
            source = source_of(axis, size, out, align_corners, scale)
            inside = stays_inside(size, out, align_corners, scale)
            sides.append(neighbours(low, axis, size, source if align_corners else ex.maximum(source, 0), inside))
    return call.result(_sum_of_neighbours(call, self, sides))


def _sum_of_neighbours(call: Call, self: Value, sides: Sequence[tuple[list[Bound], list[Expression]]]) -> Expression:
    """The weighted sum over the places of each dimension. `sides`: places and weights of each dimension. In rows a sum
    of sums, which takes least arithmetic an element; with channels side by side every element times the product of its
    weights, which are the same for all channels."""
    together = self.type.stride[1] == 1

    def total(number: int, place: list[Dim], bindings: ex.Bindings, factor: Expression | None) -> Expression:
        if number == len(sides):
            element = ex.widen(gathered(call.lowering, self, place, bindings))
            return element if factor is None else ex.mul(element, factor)
        found: Expression | None = None
        for (index, bound), weight in zip(*sides[number]):
            of_all = None
            if together:
                of_all = weight if factor is None else ex.mul(factor, weight)
            term = total(number + 1, [*place, index], bindings + bound, of_all)
            term = term if together else ex.mul(term, weight)
            found = term if found is None else ex.add(found, term)
        assert found is not None
        return found

    return total(0, list(call.axes[:2]), (), None)


# --- cubic -----------------------------------------------------------------------------------------------------------

SHARPNESS = -0.75
"""The parameter of the cubic convolution that ATen uses."""


def _near(x: Expression) -> Expression:
    """The weight of a neighbour at distance x <= 1."""
    return ex.add(ex.mul(ex.mul(ex.sub(ex.mul(x, SHARPNESS + 2), SHARPNESS + 3), x), x), 1.0)


def _far(x: Expression) -> Expression:
    """The weight of a neighbour at distance 1 <= x <= 2."""
    inner = ex.add(ex.mul(ex.sub(ex.mul(x, SHARPNESS), 5 * SHARPNESS), x), 8 * SHARPNESS)
    return ex.sub(ex.mul(inner, x), 4 * SHARPNESS)


@lowers("upsample_bicubic2d", "upsample_bicubic2d.vec")
def cubic(call: Call, self: Value, output_size: Any, align_corners: bool, *scales: Any) -> Value:
    low = call.lowering
    if not self.dtype.is_floating_point or self.dtype is torch.float64:
        raise Fallback("cubic resampling of integers or doubles")
    if self.type.stride[1] != 1 and self.type.device.type == "cpu":
        # 256 channels of 8x8: 0.51 ms, loops 0.93; with channels side by side 0.42 and 0.03
        raise Fallback("cubic resampling of rows")
    sides: list[tuple[list[Bound], list[Expression]]] = []
    for axis, (size, out), scale in zip(call.axes[2:], sizes_of(call, self, 2), scales_of(2, scales)):
        source = source_of(axis, size, out, align_corners, scale)
        if size > _EXACT:
            raise Fallback("cubic resampling of a long row")
        # No position lies below -1: as a number from 0 on it is seen to fit few bits.
        above = ex.minimum(ex.maximum(ir.cast(ex.add(ex.floor(source), 1.0), torch.int64), 0), size)
        whole = ex.sub(above, 1)
        share = ex.minimum(ex.maximum(ex.sub(source, ir.cast(whole, torch.float32)), 0), 1)
        rest = ex.sub(ir.constant(1.0, torch.float32), share)
        places = [ex.minimum(ex.maximum(ex.add(whole, step), 0), size - 1) for step in (-1, 0, 1, 2)]
        weights = [_far(ex.add(share, 1.0)), _near(share), _near(rest), _far(ex.add(rest, 1.0))]
        sides.append(([low.bind(place, size) if size > 1 else (0, ()) for place in places], weights))
    result = call.result(_sum_of_neighbours(call, self, sides))
    low.realize(result)  # sixteen elements are read for each: readers do not do so again
    return result
