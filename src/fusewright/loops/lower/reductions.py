"""Reductions: sums, extremes, products, statistics, norms and softmax.

Takes one tensor and dimensions; gives realised values (one `Reduction` each), or lazy ones on top of them. Always
holds: half inputs accumulate in float32; what two loops read and is dear to compute is realised before the first of
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusewright.base.records import dataclass
from fusewright.loops import ir
from fusewright.loops.ir import Axis, Expression, ReductionKind
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call, Lowering
from fusewright.loops.lower.promotion import float_dtype
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value, axes_of, axis_symbols, normalize_dim, normalize_dims, numel
from fusewright.sizes.expressions import Dim
from fusewright.sizes.tensor_type import TensorType, contiguous_strides


@dataclass(frozen=True, slots=True)
class Space:
    """The iteration space of a reduction of a value: its loop variables, and which dimensions go."""

    symbols: tuple[Dim, ...]
    shape: tuple[Dim, ...]
    dims: tuple[int, ...]

    @property
    def reduced(self) -> tuple[Axis, ...]:
        return axes_of([self.symbols[k] for k in self.dims], [self.shape[k] for k in self.dims])

    def kept(self, keepdim: bool) -> tuple[Dim, ...]:
        """The loop variable of each dimension of the result."""
        if keepdim:
            return tuple(0 if k in self.dims else sym for k, sym in enumerate(self.symbols))
        return tuple(sym for k, sym in enumerate(self.symbols) if k not in self.dims)

    def kept_shape(self) -> tuple[Dim, ...]:
        return tuple(1 if k in self.dims else size for k, size in enumerate(self.shape))

    @property
    def count(self) -> Dim:
        return numel([self.shape[k] for k in self.dims])


def space_of(value: Value, dims: int | Sequence[int] | None) -> Space:
    return Space(axis_symbols(value.shape), value.shape, normalize_dims(dims, value.ndim))


def reduce_kept(
    low: Lowering,
    kind: ReductionKind,
    space: Space,
    expression: Expression,
    like: Value,
    finish: Expression | None = None,
) -> Value:
    """A reduction with the reduced dimensions kept as 1, row-major, in the accumulator's (or finish's) dtype."""
    shape = space.kept_shape()
    dtype = finish.dtype if finish is not None else torch.int64 if kind.startswith("arg") else expression.dtype
    type_ = TensorType(shape, contiguous_strides(shape), dtype, like.type.device)
    return low.reduce(kind, type_, space.kept(True), space.reduced, expression, finish)


def reduce_into(
    call: Call,
    kind: ReductionKind,
    space: Space,
    expression: Expression,
    keepdim: bool,
    finish: Expression | None = None,
) -> Value:
    return call.lowering.reduce(kind, call.type, space.kept(keepdim), space.reduced, expression, finish)


# --- sums, products, truth -------------------------------------------------------------------------------------------


@lowers("sum", "sum.dim_IntList", "nansum")
def sum_(call: Call, self: Value, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    space = space_of(self, dim)
    working = ex.compute_dtype(call.type.dtype)
    x = call.lowering.read(self, space.symbols, working)
    if "nansum" in call.target._schema.name and working.is_floating_point:
        x = ex.where(ex.isnan(x), 0, x)
    if working is torch.bool:
        return reduce_into(call, "any", space, x, keepdim)
    return reduce_into(call, "sum", space, x, keepdim)


@lowers("mean", "mean.dim")
def mean(call: Call, self: Value, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    space = space_of(self, dim)
    working = ex.compute_dtype(call.type.dtype)
    x = call.lowering.read(self, space.symbols, working)
    return reduce_into(
        call, "sum", space, x, keepdim, ex.div(ex.accumulator(working), ex.index_as(space.count, working))
    )


@lowers("prod", "prod.dim_int")
def prod(
    call: Call, self: Value, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    space = space_of(self, dim)
    working = ex.compute_dtype(call.type.dtype)
    if working is torch.bool:
        return reduce_into(call, "all", space, call.lowering.read(self, space.symbols, working), keepdim)
    return reduce_into(call, "prod", space, call.lowering.read(self, space.symbols, working), keepdim)


@lowers("any", "any.dim", "any.dims", "all", "all.dim", "all.dims")
def truth(call: Call, self: Value, dim: Any = None, keepdim: bool = False) -> Value:
    kind: ReductionKind = "any" if call.target._schema.name == "aten::any" else "all"
    if isinstance(dim, tuple) and not dim:
        raise Fallback("a reduction over no dimensions")
    space = space_of(self, dim)
    return reduce_into(call, kind, space, call.lowering.read(self, space.symbols, torch.bool), keepdim)


@lowers("count_nonzero", "count_nonzero.dim_IntList")
def count_nonzero(call: Call, self: Value, dim: Any = None) -> Value:
    space = space_of(self, dim)
    x = ir.cast(call.lowering.read(self, space.symbols, torch.bool), torch.int64)
    return reduce_into(call, "sum", space, x, False)


# --- extremes --------------------------------------------------------------------------------------------------------


def comparable(call: Call, self: Value, space: Space) -> Expression:
    """The elements in a dtype that orders: bool counts as 0 and 1."""
    x = call.lowering.read(self, space.symbols)
    return ir.cast(x, torch.uint8) if x.dtype is torch.bool else x


@lowers("amax", "amin", "max", "min")
def extreme(call: Call, self: Value, dim: Any = None, keepdim: bool = False) -> Value:
    kind: ReductionKind = "max" if call.target._schema.name.endswith("max") else "min"
    space = space_of(self, dim)
    return reduce_into(call, kind, space, comparable(call, self, space), keepdim)


@lowers("argmax", "argmin")
def arg_extreme(call: Call, self: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    kind: ReductionKind = "argmax" if call.target._schema.name == "aten::argmax" else "argmin"
    space = space_of(self, dim)
    return reduce_into(call, kind, space, ex.rounded(comparable(call, self, space), self.dtype), keepdim)


@lowers("max.dim", "min.dim")
def extreme_with_position(call: Call, self: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    low = call.lowering
    is_max = call.target._schema.name == "aten::max"
    low.shared(self)
    space = space_of(self, dim)
    x = ex.rounded(comparable(call, self, space), self.dtype)
    axes = space.kept(keepdim)
    return (
        low.reduce("max" if is_max else "min", call.type[0], axes, space.reduced, x),
        low.reduce("argmax" if is_max else "argmin", call.type[1], axes, space.reduced, x),
    )


@lowers("aminmax")
def aminmax(call: Call, self: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    low = call.lowering
    low.shared(self)
    space = space_of(self, dim)
    x = comparable(call, self, space)
    axes = space.kept(keepdim)
    return low.reduce("min", call.type[0], axes, space.reduced, x), low.reduce(
        "max", call.type[1], axes, space.reduced, x
    )


# --- statistics ------------------------------------------------------------------------------------------------------


def mean_and_squares(
    low: Lowering, self: Value, space: Space, working: torch.dtype, finish: Any = None
) -> tuple[Value, Value]:
    """(mean, finish(sum of squared deviations from it)), both with the reduced dimensions kept as 1."""
    low.shared(self)
    x = low.read(self, space.symbols, working)
    average = reduce_kept(
        low, "sum", space, x, self, ex.div(ex.accumulator(working), ex.index_as(space.count, working))
    )
    deviation = ex.sub(x, low.at(average, space.kept(True)))
    squares = ex.mul(deviation, deviation)
    final = None if finish is None else finish(ex.accumulator(working))
    return average, reduce_kept(low, "sum", space, squares, self, final)


def corrected_count(count: Dim, correction: float | None, dtype: torch.dtype) -> Expression:
    """max(0, count - correction); correction None means 1."""
    drop = 1 if correction is None else correction
    if isinstance(count, int):
        return ir.constant(max(0.0, count - drop), dtype)
    return ex.maximum(ex.sub(ex.index_as(count, dtype), float(drop)), 0)


def _deviation(call: Call, self: Value, dims: Any, correction: float | None, root: bool) -> tuple[Value, Value]:
    space = space_of(self, dims)
    working = ex.compute_dtype(self.dtype)
    if self.dtype in (torch.float32, torch.bfloat16) and self.type.device.type == "cpu":
        working = torch.float64  # as eager on a CPU: the squares of deviations from 1e19 on are no float32
    count = corrected_count(space.count, correction, working)

    def finish(acc: Expression) -> Expression:
        variance = ex.div(acc, count)
        return ex.sqrt(variance) if root else variance

    return mean_and_squares(call.lowering, self, space, working, finish)


def reshaped(low: Lowering, value: Value, space: Space, type_: TensorType, keepdim: bool) -> Value:
    """A kept-dimensions value as the result of `type_`."""
    if keepdim:
        return low.value(type_, low.at(value, axis_symbols(type_.shape)))
    kept = iter(axis_symbols(type_.shape))
    return low.value(type_, low.at(value, [0 if k in space.dims else next(kept) for k in range(len(space.shape))]))


@lowers("var.correction", "std.correction")
def variance(
    call: Call, self: Value, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Value:
    _, spread = _deviation(call, self, dim, correction, call.target._schema.name == "aten::std")
    return reshaped(call.lowering, spread, space_of(self, dim), call.type, keepdim)


@lowers("var_mean.correction", "std_mean.correction")
def variance_and_mean(
    call: Call, self: Value, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    average, spread = _deviation(call, self, dim, correction, "std_mean" in call.target._schema.name)
    space = space_of(self, dim)
    results = zip((spread, average), call.type)
    return tuple(reshaped(call.lowering, value, space, type_, keepdim) for value, type_ in results)  # type: ignore


@lowers("var", "std", "var_mean", "std_mean")
def statistics_unbiased(call: Call, self: Value, unbiased: bool = True) -> Any:
    row = variance_and_mean if "mean" in call.target._schema.name else variance
    return row(call, self, None, correction=1 if unbiased else 0)


@lowers("var.dim", "std.dim", "var_mean.dim", "std_mean.dim")
def statistics_unbiased_dim(call: Call, self: Value, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    row = variance_and_mean if "mean" in call.target._schema.name else variance
    return row(call, self, dim, correction=1 if unbiased else 0, keepdim=keepdim)


# --- norms -----------------------------------------------------------------------------------------------------------


@lowers("linalg_vector_norm")
def vector_norm(
    call: Call, self: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    return _norm(call, self, float(ord), dim, keepdim)


@lowers("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype")
def norm(
    call: Call, self: Value, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    return _norm(call, self, 2.0 if p is None else float(p), dim, keepdim)


def _norm(call: Call, self: Value, order: float, dims: Any, keepdim: bool) -> Value:
    space = space_of(self, dims)
    working = ex.compute_dtype(call.type.dtype)
    x = call.lowering.read(self, space.symbols, working)
    size = ex.absolute(x)
    acc = ex.accumulator(working)
    of_one = order != 0 and all(space.shape[dim] == 1 for dim in space.dims)  # nothing is squared, so nothing overflows
    if order == math.inf or of_one:
        return reduce_into(call, "max", space, size, keepdim)
    if order == -math.inf:
        return reduce_into(call, "min", space, size, keepdim)
    if order == 0:
        return reduce_into(call, "sum", space, ir.cast(ex.ne(x, 0), working), keepdim)
    if order == 1:
        return reduce_into(call, "sum", space, size, keepdim)
    if order == 2:
        return reduce_into(call, "sum", space, ex.mul(x, x), keepdim, ex.sqrt(acc))
    return reduce_into(call, "sum", space, ex.power(size, order), keepdim, ex.power(acc, 1 / order))


# --- softmax ---------------------------------------------------------------------------------------------------------


def _shifted(low: Lowering, self: Value, space: Space, working: torch.dtype, safe: bool) -> tuple[Value, Expression]:
    """(the maximum with dimensions kept, x - maximum). safe: an infinite maximum is not subtracted."""
    low.shared(self)
    x = low.read(self, space.symbols, working)
    top = reduce_kept(low, "max", space, x, self)
    shift = low.at(top, space.kept(True))
    if safe:
        shift = ex.where(ex.isinf(shift), 0, shift)
    return top, ex.sub(x, shift)


def _exponentials(low: Lowering, self: Value, space: Space, shifted: Expression) -> tuple[Value, Value]:
    """(exp(shifted), kept in memory for its second reader; the reciprocal of its sum, which is 1 or more, with
    dimensions kept)."""
    powers = low.make(self.shape, ex.exp(shifted), self.type, shifted.dtype)
    if space.reduced:
        low.realize(powers)
    return powers, reduce_kept(
        low, "sum", space, low.at(powers, space.symbols), self, ex.reciprocal(ex.accumulator(shifted.dtype))
    )


@lowers("_softmax", "_safe_softmax", "softmax.int")
def softmax(call: Call, self: Value, dim: int, half_to_float: Any = False, **options: Any) -> Value:
    low = call.lowering
    space = space_of(self, normalize_dim(dim, self.ndim))
    working = ex.compute_dtype(float_dtype(call.type.dtype))
    top, shifted = _shifted(low, self, space, working, safe=False)
    powers, share = _exponentials(low, self, space, shifted)
    kept = space.kept(True)
    result = ex.mul(low.at(powers, space.symbols), low.at(share, kept))
    if "_safe_softmax" in call.target._schema.name:
        result = ex.where(ex.eq(low.at(top, kept), -math.inf), 0, result)
    return call.result(result)


@lowers("_log_softmax", "log_softmax.int")
def log_softmax(call: Call, self: Value, dim: int, half_to_float: Any = False, **options: Any) -> Value:
    low = call.lowering
    space = space_of(self, normalize_dim(dim, self.ndim))
    working = ex.compute_dtype(float_dtype(call.type.dtype))
    _, shifted = _shifted(low, self, space, working, safe=False)
    total = reduce_kept(low, "sum", space, ex.exp(shifted), self, ex.log(ex.accumulator(working)))
    return call.result(ex.sub(shifted, low.at(total, space.kept(True))))


@lowers("logsumexp")
def logsumexp(call: Call, self: Value, dim: Any, keepdim: bool = False) -> Value:
    low = call.lowering
    space = space_of(self, dim)
    working = ex.compute_dtype(call.type.dtype)
    top, shifted = _shifted(low, self, space, working, safe=True)
    total = reduce_kept(low, "sum", space, ex.exp(shifted), self, ex.log(ex.accumulator(working)))
    kept = space.kept(True)
    shift = low.at(top, kept)
    result = ex.add(low.at(total, kept), ex.where(ex.isinf(shift), 0, shift))
    whole = low.make(space.kept_shape(), result, self.type)
    return reshaped(low, whole, space, call.type, keepdim)


@lowers("_softmax_backward_data")
def softmax_backward(call: Call, grad_output: Value, output: Value, dim: int, input_dtype: torch.dtype) -> Value:
    low = call.lowering
    space = space_of(output, normalize_dim(dim, output.ndim))
    low.shared(grad_output)
    working = ex.compute_dtype(output.dtype)
    g, y = low.read(grad_output, space.symbols, working), low.read(output, space.symbols, working)
    product = low.make(output.shape, ex.mul(g, y), output.type)
    total = reduce_kept(low, "sum", space, product.expression, output)
    return call.result(ex.sub(product.expression, ex.mul(y, low.at(total, space.kept(True)))))


@lowers("_log_softmax_backward_data")
def log_softmax_backward(call: Call, grad_output: Value, output: Value, dim: int, input_dtype: torch.dtype) -> Value:
    low = call.lowering
    space = space_of(output, normalize_dim(dim, output.ndim))
    low.shared(grad_output)
    working = ex.compute_dtype(output.dtype)
    g, y = low.read(grad_output, space.symbols, working), low.read(output, space.symbols, working)
    total = reduce_kept(low, "sum", space, g, output)
    return call.result(ex.sub(g, ex.mul(ex.exp(y), low.at(total, space.kept(True)))))
