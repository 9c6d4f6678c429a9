"""Resampling: nearest, (bi)linear and bicubic, to a size or at the positions of a grid.

Takes a tensor of shape (N, C, *spatial) with static spatial sizes (the result's may be symbolic, but for nearest; a
grid takes any); gives lazy values.
Always holds: source positions are computed in the float arithmetic of ATen's kernels, once, at compile time where they
reduce to a division, else in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.fx import Node

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.loops import ir
from fusewright.loops.ir import Expression
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call, Lowering
from fusewright.loops.lower.expressions import fused_multiply_add as fma
from fusewright.loops.lower.indexing import gathered
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value, is_one
from fusewright.sizes.expressions import Dim
from fusewright.sizes.tensor_type import TensorType

_EXACT = 1 << 20
"""Up to this size a position in float32 is right to an eighth of an element."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A source index along one dimension. weight: None for 1. inside: where the element counts, None for everywhere;
    elsewhere it counts as 0. (The load is not masked: what its index is computed from would be loaded again.)"""

    index: Dim
    bindings: ex.Bindings = ()
    weight: Expression | None = None
    inside: Expression | None = None


def source_scale(size: int, out: int, scale: float | None) -> float:
    """ATen's compute_scales_value: 1 / scale_factor when given, else size / out, in float32."""
    ratio = (
        torch.tensor(1.0 / scale, dtype=torch.float32, device="cpu")
        if scale
        else torch.tensor(float(size), device="cpu") / torch.tensor(float(out), device="cpu")
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
    positions = torch.arange(out, dtype=torch.float32, device="cpu")
    ratio = torch.tensor(source_scale(size, out, scale), dtype=torch.float32, device="cpu")
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
            return source_scale(size - 1, out - 1, None) if out > 1 else 0.0
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


def neighbours(low: Lowering, size: int, real: Expression, inside: bool) -> list[Neighbour]:
    """The two source indices around a position. inside: see `stays_inside`."""
    below = ex.minimum(ex.maximum(ir.cast(real, torch.int64), 0), size - 1)
    above = ex.minimum(ex.add(below, 1), size - 1)
    if inside:
        share = ex.sub(real, ex.floor(real))
    else:
        share = ex.minimum(ex.maximum(ex.sub(real, ir.cast(below, torch.float32)), 0), 1)
    weights = ex.sub(ir.constant(1, torch.float32), share), share
    return [Neighbour(*bound(low, place, size), weight) for place, weight in zip((below, above), weights)]


def bound(low: Lowering, place: Expression, size: Dim) -> tuple[Dim, ex.Bindings]:
    """(index, bindings) of a place in a dimension."""
    return (0, ()) if is_one(size) else low.bind(place, size)


@lowers("upsample_linear1d", "upsample_linear1d.vec", "upsample_bilinear2d", "upsample_bilinear2d.vec")
def linear(call: Call, self: Value, output_size: Any, align_corners: bool, *scales: Any) -> Value:
    low = call.lowering
    if not self.dtype.is_floating_point or self.dtype is torch.float64:
        raise Fallback("linear resampling of integers or doubles")
    count = len(call.type.shape) - 2
    axes = call.axes
    sides: list[list[Neighbour]] = []
    for axis, (size, out), scale in zip(axes[2:], sizes_of(call, self, count), scales_of(count, scales)):
        if size == out and not align_corners and scale in (None, 1.0):
            sides.append([Neighbour(axis if not is_one(size) else 0)])
        else:
            source = source_of(axis, size, out, align_corners, scale)
            inside = stays_inside(size, out, align_corners, scale)
            sides.append(neighbours(low, size, source if align_corners else ex.maximum(source, 0), inside))
    return call.result(_sum_of_neighbours(call, self, sides))


def _sum_of_neighbours(call: Call, self: Value, sides: Sequence[Sequence[Neighbour]]) -> Expression:
    """The weighted sum over the neighbours along each dimension. In rows a sum of sums, which takes least arithmetic an
    element; with channels side by side every element times the product of its weights, which are the same for all
    channels."""
    together = self.type.stride[1] == 1

    def element(chosen: Sequence[Neighbour]) -> Expression:
        place = [*call.axes[:2], *(one.index for one in chosen)]
        bindings = sum((one.bindings for one in chosen), ())
        found = ex.widen(gathered(call.lowering, self, place, bindings))
        inside = ex.all_of([one.inside for one in chosen if one.inside is not None])
        return found if inside is None else ex.where(inside, found, 0)

    def total(chosen: tuple[Neighbour, ...], factor: Expression | None, found: Expression | None) -> Expression:
        """`found` and, where all lie together, factor times the sum over neighbours of the dimensions that are left."""
        if len(chosen) == len(sides):
            return _plus(found, element(chosen), factor)
        for one in sides[len(chosen)]:
            weight = one.weight
            if together:
                if factor is not None:
                    weight = factor if weight is None else ex.mul(factor, weight)
                found = total((*chosen, one), weight, found)
            else:
                found = _plus(found, total((*chosen, one), None, None), weight)
        assert found is not None
        return found

    return total((), None, None)


def _plus(found: Expression | None, value: Expression, weight: Expression | None) -> Expression:
    if found is None:
        return value if weight is None else ex.mul(value, weight)
    return ex.add(found, value) if weight is None else fma(value, weight, found)


# --- cubic -----------------------------------------------------------------------------------------------------------

SHARPNESS = -0.75
"""The parameter of the cubic convolution that ATen uses."""


def _near(x: Expression) -> Expression:
    """The weight of a neighbour at distance x <= 1."""
    return fma(ex.mul(fma(x, SHARPNESS + 2, -SHARPNESS - 3), x), x, 1.0)


def _far(x: Expression) -> Expression:
    """The weight of a neighbour at distance 1 <= x <= 2."""
    return fma(fma(fma(x, SHARPNESS, -5 * SHARPNESS), x, 8 * SHARPNESS), x, -4 * SHARPNESS)


_STEPS = (-1, 0, 1, 2)


def _cubic_weights(share: Expression) -> list[Expression]:
    """The weights at `_STEPS` from the whole part of a position. share: the rest of it."""
    rest = ex.sub(ir.constant(1.0, share.dtype), share)
    return [_far(ex.add(share, 1.0)), _near(share), _near(rest), _far(ex.add(rest, 1.0))]


@lowers("upsample_bicubic2d", "upsample_bicubic2d.vec")
def cubic(call: Call, self: Value, output_size: Any, align_corners: bool, *scales: Any) -> Value:
    low = call.lowering
    if not self.dtype.is_floating_point or self.dtype is torch.float64:
        raise Fallback("cubic resampling of integers or doubles")
    if self.type.stride[1] != 1 and self.type.device.type == "cpu":
        # 256 channels of 8x8: 0.51 ms, loops 0.93; with channels side by side 0.42 and 0.03
        raise Fallback("cubic resampling of rows")
    sides: list[list[Neighbour]] = []
    for axis, (size, out), scale in zip(call.axes[2:], sizes_of(call, self, 2), scales_of(2, scales)):
        source = source_of(axis, size, out, align_corners, scale)
        if size > _EXACT:
            raise Fallback("cubic resampling of a long row")
        # No position lies below -1: as a number from 0 on it is seen to fit few bits.
        above = ex.minimum(ex.maximum(ir.cast(ex.add(ex.floor(source), 1.0), torch.int64), 0), size)
        whole = ex.sub(above, 1)
        share = ex.minimum(ex.maximum(ex.sub(source, ir.cast(whole, torch.float32)), 0), 1)
        places = [ex.minimum(ex.maximum(ex.add(whole, step), 0), size - 1) for step in _STEPS]
        sides.append([Neighbour(*bound(low, at, size), weight) for at, weight in zip(places, _cubic_weights(share))])
    result = call.result(_sum_of_neighbours(call, self, sides))
    low.realize(result)  # sixteen elements are read for each: readers do not do so again
    return result


# --- at the positions of a grid --------------------------------------------------------------------------------------

ZEROS, BORDER, REFLECTION = range(3)
"""What lies outside, as ATen numbers it."""
Hold = Callable[[Expression], Expression]


def _held(size: Dim, padding: int, align_corners: bool, real: Expression) -> Expression:
    """A position brought to where it reads from: to the nearest element, by reflections, or (of zeros) at most next to
    the first and the last element and what is interpolated with them. Infinity that is reflected, and NaN, are the
    least such position."""
    dtype = real.dtype
    if padding == REFLECTION:
        # between the middles of the outer elements or between their outer edges
        start, period = (0.0, 2 * (size - 1)) if align_corners else (-0.5, 2 * size)
        whole = ex.index_as(period, dtype)
        distance = ex.absolute(ex.sub(real, start))
        distance = ex.sub(distance, ex.mul(ex.floor(ex.div(distance, whole)), whole))
        real = ex.add(ex.fmin(distance, ex.sub(whole, distance)), start)
    first, last = (-2, size) if padding == ZEROS else (0, size - 1)
    return ex.fmin(ex.fmax(real, ex.index_as(first, dtype)), ex.index_as(last, dtype))


def _bilinear_places(real: Expression, held: Hold) -> list[tuple[Expression, Expression | None]]:
    real = held(real)
    below = ex.floor(real)
    share = ex.sub(real, below)
    return [(below, ex.sub(ir.constant(1.0, real.dtype), share)), (ex.add(below, 1.0), share)]


def _nearest_place(real: Expression, held: Hold) -> list[tuple[Expression, Expression | None]]:
    return [(ex.rint(held(real)), None)]


def _bicubic_places(real: Expression, held: Hold) -> list[tuple[Expression, Expression | None]]:
    """Each neighbour is brought inside by itself; the weights of NaN and infinity are NaN."""
    whole = ex.floor(real)
    weights = _cubic_weights(ex.sub(real, whole))
    return [(held(ex.add(whole, float(step))), weight) for step, weight in zip(_STEPS, weights)]


BILINEAR, NEAREST, BICUBIC = range(3)
MODES = {BILINEAR: _bilinear_places, NEAREST: _nearest_place, BICUBIC: _bicubic_places}
"""(place, weight) of the neighbours of a real-valued position along one dimension. Places are whole numbers."""


def _on_gpu(node: Node) -> bool:
    """A CPU's library computes a position once for all channels, with instructions that gather: in half to a fifth of
    the time of loops (8x32x128x128 float32, two cores), and in as long at most where they fuse (a tanh before, three
    channels)."""
    kind = node.meta.get("type")
    return isinstance(kind, TensorType) and kind.device.type != "cpu"


@lowers("grid_sampler_2d", "grid_sampler_3d", accepts=_on_gpu)
def grid_sample(
    call: Call, input: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Value:
    low, count = call.lowering, input.ndim - 2
    mode, padding = interpolation_mode, padding_mode
    if input.type.device.type == "cpu":
        raise Fallback("the library's own")
    if grid.dtype != input.dtype or not input.dtype.is_floating_point or mode not in MODES:
        raise Fallback("what PyTorch refuses")
    if mode == BICUBIC and input.dtype in ex.HALF:
        raise Fallback("bicubic positions that the library rounds to halves")
    sides: list[list[Neighbour]] = []
    for dim, size in enumerate(input.shape[2:]):
        # a grid names the last dimension first
        value = low.read(grid, (call.axes[0], *call.axes[2:], count - 1 - dim))
        steps = ex.mul(ex.add(ex.rounded(value, grid.dtype), 1.0), ex.index_as(size - align_corners, value.dtype))
        real = ex.mul(steps if align_corners else ex.sub(steps, 1.0), 0.5)
        side: list[Neighbour] = []
        last = ex.index_as(size - 1, value.dtype)
        for place, weight in MODES[mode](real, partial(_held, size, padding, align_corners)):
            inside = None
            if padding == ZEROS or (mode == BILINEAR and side):  # the second one may lie behind the last element
                wanted, place = place, ex.fmin(ex.fmax(place, 0), last)
                inside = ex.eq(place, wanted)
            side.append(Neighbour(*bound(low, ir.cast(place, torch.int64), size), weight, inside))
        sides.append(side)
    result = call.result(_sum_of_neighbours(call, input, sides))
    if mode == BICUBIC:
        low.realize(result)
    return result
