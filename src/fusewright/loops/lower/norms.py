"""Layer, RMS, group and batch normalisation, and their gradients.

Takes the operators' arguments; gives their tuples of results. Always holds: statistics are computed in float32 for half
inputs, the variance in a second pass over (x - mean)^2, and each reduction reads its input from memory when computing
it is dear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusewright.loops import ir
from fusewright.loops.ir import Expression
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call, Lowering
from fusewright.loops.lower.expressions import fused_multiply_add as fma
from fusewright.loops.lower.reductions import Space, mean_and_squares, reduce_kept, space_of
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value, axis_symbols, is_empty, is_one, window
from fusewright.loops.lower.views import laid_out_as_typed, reshape_indices
from fusewright.sizes.expressions import Dim
from fusewright.sizes.tensor_type import TensorType


def over(
    low: Lowering, value: Value | None, space: Space, working: torch.dtype, dims: Sequence[int] | None = None
) -> Expression | None:
    """A parameter over the dimensions `dims` of a space (the trailing ones unless given), at the point of the space."""
    if value is None:
        return None
    symbols = [space.symbols[k] for k in dims] if dims is not None else space.symbols[len(space.symbols) - value.ndim :]
    indices = [0 if is_one(size) else sym for size, sym in zip(value.shape, symbols)]
    return low.read(value, indices, working)


def scaled(value: Expression, weight: Expression | None, bias: Expression | None) -> Expression:
    if weight is not None and bias is not None:
        return fma(value, weight, bias)
    return ex.mul(value, weight) if weight is not None else value if bias is None else ex.add(value, bias)


def trailing(value: Value, normalized_shape: Sequence[Dim]) -> Space:
    return space_of(value, tuple(range(value.ndim - len(normalized_shape), value.ndim)))


def reciprocal_root(count: Dim, eps: float, working: torch.dtype) -> Any:
    """finish: 1 / sqrt(acc / count + eps)."""
    return lambda acc: ex.rsqrt(ex.add(ex.div(acc, ex.index_as(count, working)), float(eps)))


# --- layer norm ------------------------------------------------------------------------------------------------------


@lowers("native_layer_norm")
def layer_norm(
    call: Call, input: Value, normalized_shape: Sequence[Dim], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    low = call.lowering
    out_type, mean_type, rstd_type = call.type
    space = trailing(input, normalized_shape)
    working = ex.compute_dtype(input.dtype)
    average, rstd = mean_and_squares(low, input, space, working, reciprocal_root(space.count, eps, working))
    kept = space.kept(True)
    x = low.read(input, space.symbols, working)
    normal = ex.mul(ex.sub(x, low.at(average, kept)), low.at(rstd, kept))
    result = scaled(normal, over(low, weight, space, working), over(low, bias, space, working))
    axes = axis_symbols(mean_type.shape)
    return (
        low.value(out_type, result),
        low.value(mean_type, low.at(average, axes)),
        low.value(rstd_type, low.at(rstd, axes)),
    )


@lowers("native_layer_norm_backward")
def layer_norm_backward(
    call: Call,
    grad_out: Value,
    input: Value,
    normalized_shape: Sequence[Dim],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    """With n = (x - mean) * rstd and d = g * w:  dx = rstd * (d - mean(d) - n * mean(d * n)),  dw = sum(g * n),  db =
    sum(g)."""
    low = call.lowering
    low.shared(grad_out)
    low.shared(input)
    space = trailing(input, normalized_shape)
    working = ex.compute_dtype(input.dtype)
    kept = space.kept(True)
    g = low.read(grad_out, space.symbols, working)
    r = low.read(rstd, kept, working)
    n = ex.mul(ex.sub(low.read(input, space.symbols, working), low.read(mean, kept, working)), r)
    results: list[Value | None] = [None, None, None]
    if output_mask[0]:
        d = scaled(g, over(low, weight, space, working), None)
        results[0] = low.value(call.type[0], normalized_gradient(low, input, space, d, n, r))
    outer = Space(space.symbols, space.shape, tuple(k for k in range(input.ndim) if k not in space.dims))
    for position, expression in ((1, ex.mul(g, n)), (2, g)):
        if output_mask[position]:
            results[position] = low.reduce("sum", call.type[position], outer.kept(False), outer.reduced, expression)
    return results[0], results[1], results[2]


def normalized_gradient(
    low: Lowering, like: Value, space: Space, d: Expression, n: Expression, rstd: Expression
) -> Expression:
    """rstd * (d - mean(d) - n * mean(d * n)), the means over the reduced dimensions of `space`."""
    kept, working = space.kept(True), ex.compute_dtype(like.dtype)
    average = ex.div(ex.accumulator(working), ex.index_as(space.count, working))
    mean_d = reduce_kept(low, "sum", space, d, like, average)
    mean_dn = reduce_kept(low, "sum", space, ex.mul(d, n), like, average)
    return ex.mul(rstd, fma(ex.neg(n), low.at(mean_dn, kept), ex.sub(d, low.at(mean_d, kept))))


@lowers("_fused_rms_norm")
def rms_norm(
    call: Call, input: Value, normalized_shape: Sequence[Dim], weight: Value | None, eps: float | None
) -> tuple[Value, Value]:
    low = call.lowering
    out_type, rstd_type = call.type
    low.shared(input)
    space = trailing(input, normalized_shape)
    working = ex.compute_dtype(input.dtype)
    x = low.read(input, space.symbols, working)
    epsilon = torch.finfo(working).eps if eps is None else float(eps)
    rstd = reduce_kept(
        low, "sum", space, ex.mul(x, x), input, reciprocal_root(space.count, epsilon, working)(ex.accumulator(working))
    )
    normal = ex.mul(x, low.at(rstd, space.kept(True)))
    return (
        low.value(out_type, scaled(normal, over(low, weight, space, working), None)),
        low.value(rstd_type, low.at(rstd, axis_symbols(rstd_type.shape))),
    )


@lowers("_fused_rms_norm_backward")
def rms_norm_backward(
    call: Call,
    grad_out: Value,
    input: Value,
    normalized_shape: Sequence[Dim],
    rstd: Value,
    weight: Value | None,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None]:
    """With n = x * rstd and d = g * w:  dx = rstd * (d - n * mean(d * n)),  dw = sum(g * n)."""
    low = call.lowering
    low.shared(grad_out)
    low.shared(input)
    space = trailing(input, normalized_shape)
    working = ex.compute_dtype(input.dtype)
    kept = space.kept(True)
    g, r = low.read(grad_out, space.symbols, working), low.read(rstd, kept, working)
    n = ex.mul(low.read(input, space.symbols, working), r)
    results: list[Value | None] = [None, None]
    if output_mask[0]:
        d = scaled(g, over(low, weight, space, working), None)
        average = ex.div(ex.accumulator(working), ex.index_as(space.count, working))
        mean_dn = reduce_kept(low, "sum", space, ex.mul(d, n), input, average)
        results[0] = low.value(call.type[0], ex.mul(r, fma(ex.neg(n), low.at(mean_dn, kept), d)))
    if output_mask[1] and weight is not None:
        outer = Space(space.symbols, space.shape, tuple(k for k in range(input.ndim) if k not in space.dims))
        results[1] = low.reduce("sum", call.type[1], outer.kept(False), outer.reduced, ex.mul(g, n))
    return results[0], results[1]


# --- group norm ------------------------------------------------------------------------------------------------------


def grouped(low: Lowering, value: Value, shape: tuple[Dim, ...]) -> Value:
    """`value` seen with another shape over the same elements."""
    indices = reshape_indices(value.shape, shape, axis_symbols(shape))
    seen = low.make(shape, low.at(value, indices), value.type, value.dtype)
    return seen


@lowers("native_group_norm")
def group_norm(
    call: Call, input: Value, weight: Value | None, bias: Value | None, N: Dim, C: Dim, HxW: Dim, group: int, eps: float
) -> tuple[Value, Value, Value]:
    low = call.lowering
    out_type, mean_type, rstd_type = call.type
    low.shared(input)
    members = C // group
    working = ex.compute_dtype(input.dtype)
    cells = grouped(low, input, (N, group, members, HxW))
    space = space_of(cells, (2, 3))
    average, rstd = mean_and_squares(low, cells, space, working, reciprocal_root(space.count, eps, working))
    axes = axis_symbols(input.shape)
    place = (axes[0], axes[1] // members, 0, 0) if group != 1 else (axes[0], 0, 0, 0)
    normal = ex.mul(ex.sub(low.read(input, axes, working), low.at(average, place)), low.at(rstd, place))
    channel = space_of(input, ())
    result = scaled(normal, over(low, weight, channel, working, (1,)), over(low, bias, channel, working, (1,)))
    stats = axis_symbols(mean_type.shape)
    return (
        low.value(out_type, result),
        low.value(mean_type, low.at(average, (*stats, 0, 0))),
        low.value(rstd_type, low.at(rstd, (*stats, 0, 0))),
    )


def lay_out(low: Lowering, value: Value) -> None:
    """Puts a copy that is to have another layout into memory, on a GPU: loops that sum in different directions would
    each read across what lies together (a training step of a group norm over channels-last images, 8x320x64x64 halves,
    on an H100: 0.27 ms instead of 0.66)."""
    ref = window(value) if value.type.device.type == "cuda" else None
    if ref is not None and not laid_out_as_typed(value, ref):
        low.realize(value)


@lowers("native_group_norm_backward")
def group_norm_backward(
    call: Call,
    grad_out: Value,
    input: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    N: Dim,
    C: Dim,
    HxW: Dim,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    low = call.lowering
    for value in (grad_out, input):
        low.shared(value)
        lay_out(low, value)
    members = C // group
    working = ex.compute_dtype(input.dtype)
    shape = (N, group, members, HxW)
    cells, grads = grouped(low, input, shape), grouped(low, grad_out, shape)
    space = space_of(cells, (2, 3))
    stats = space.symbols[:2]
    g = low.read(grads, space.symbols, working)
    r = low.read(rstd, stats, working)
    n = ex.mul(ex.sub(low.read(cells, space.symbols, working), low.read(mean, stats, working)), r)
    results: list[Value | None] = [None, None, None]
    if output_mask[0]:
        channel = space.symbols[1] * members + space.symbols[2]
        d = g if weight is None else ex.mul(g, low.read(weight, (channel if not is_one(C) else 0,), working))
        whole = low.make(shape, normalized_gradient(low, cells, space, d, n, r), input.type, input.dtype)
        axes = axis_symbols(input.shape)
        results[0] = low.value(call.type[0], low.at(whole, reshape_indices(shape, input.shape, axes)))
    outer = space_of(cells, (0, 3))
    for position, expression in ((1, ex.mul(g, n)), (2, g)):
        if output_mask[position] and call.type[position] is not None:
            total = reduce_kept(low, "sum", outer, expression, input)
            type_ = call.type[position]
            place = reshape_indices((group, members), type_.shape, axis_symbols(type_.shape))
            results[position] = low.value(type_, low.at(total, (0, *place, 0)))
    return results[0], results[1], results[2]


# --- batch norm ------------------------------------------------------------------------------------------------------


def channels(value: Value) -> Space:
    """All dimensions but the second are reduced."""
    return space_of(value, tuple(k for k in range(value.ndim) if k != 1))


def normalize_channels(
    low: Lowering, input: Value, mean: Expression, rstd: Expression, weight: Value | None, bias: Value | None
) -> Expression:
    """x * alpha + beta with alpha = rstd * w and beta = b - mean * alpha, which depend on the channel alone."""
    space, working = space_of(input, ()), ex.compute_dtype(input.dtype)
    scale = scaled(rstd, over(low, weight, space, working, (1,)), None)
    shift = ex.neg(ex.mul(mean, scale))
    offset = over(low, bias, space, working, (1,))
    if offset is not None:
        shift = ex.sub(offset, ex.mul(mean, scale))
    return fma(low.read(input, space.symbols, working), scale, shift)


def inference(
    low: Lowering, input: Value, weight: Value | None, bias: Value | None, statistics: tuple[Value, Value], eps: float
) -> Expression:
    """statistics: mean and variance of each channel."""
    mean, var = statistics
    working = ex.compute_dtype(input.dtype)
    space = space_of(input, ())
    average = over(low, mean, space, working, (1,))
    spread = over(low, var, space, working, (1,))
    assert average is not None and spread is not None
    rstd = ex.div(ir.constant(1, working), ex.sqrt(ex.add(spread, float(eps))))
    return normalize_channels(low, input, average, rstd, weight, bias)


def inference_statistics(call: Call, input: Value, mean: Value, var: Value, eps: float) -> list[Value]:
    """The saved statistics of inference, which no gradient reads: nothing on a CPU (meta kernels claim one for each
    channel)."""
    low = call.lowering
    types = call.type[1:3]
    if any(not isinstance(type_, TensorType) for type_ in types):
        raise Fallback("statistics of an unknown type")
    if is_empty(types[0].shape):
        return [low.value(type_, ir.constant(0, ex.compute_dtype(type_.dtype))) for type_ in types]
    working = ex.compute_dtype(input.dtype)
    average, spread = (low.read(value, axis_symbols(value.shape), working) for value in (mean, var))
    return [low.value(types[0], average), low.value(types[1], ex.rsqrt(ex.add(spread, float(eps))))]


@lowers("_native_batch_norm_legit_no_training")
def batch_norm_inference(
    call: Call,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    saved = inference_statistics(call, input, running_mean, running_var, eps)
    result = inference(call.lowering, input, weight, bias, (running_mean, running_var), eps)
    return (call.lowering.value(call.type[0], result), *saved)


@lowers("native_batch_norm", "_native_batch_norm_legit.no_stats", "_batch_norm_no_update")
def batch_norm(call: Call, input: Value, weight: Value | None, bias: Value | None, *rest: Any) -> tuple[Value, ...]:
    """`rest` is (running_mean, running_var,) (training,) momentum, eps: only the forms that change no running
    statistics."""
    training = True
    running: tuple[Any, ...] = (None, None)
    *head, momentum, eps = rest
    if len(head) == 3:
        *running_list, training = head
        running = tuple(running_list)
    elif len(head) == 1:
        training = head[0]
    elif len(head) == 2:
        running, training = tuple(head), False
    if not training:
        saved = inference_statistics(call, input, *running, eps)  # type: ignore[call-arg]
        result = inference(call.lowering, input, weight, bias, running, eps)  # type: ignore[arg-type]
        return (call.lowering.value(call.type[0], result), *saved)
    if input.ndim < 2:
        raise Fallback("a batch without channels")
    outputs, average, squares = training_statistics(call, input, weight, bias, eps)
    if any(value is not None for value in running):
        if not all(value in call.written for value in running):
            raise Fallback("running statistics that are updated behind the graph's back")
        updates = updated_statistics(call.lowering, input, running, average, squares, momentum)
        for value, expression in zip(running, updates):
            value.expression = expression
    return outputs


def training_statistics(
    call: Call, input: Value, weight: Value | None, bias: Value | None, eps: float
) -> tuple[tuple[Value, Value, Value], Value, Value]:
    """((result, mean, rstd), mean and sum of squares with dimensions kept)."""
    low = call.lowering
    out_type, mean_type, rstd_type = call.type[:3]
    space = channels(input)
    working = ex.compute_dtype(input.dtype)
    average, squares = mean_and_squares(low, input, space, working)
    kept = space.kept(True)
    count = ex.index_as(space.count, working)
    root = ex.sqrt(ex.add(ex.div(squares.expression, count), float(eps)))
    rstd = low.make(average.shape, ex.div(ir.constant(1, working), root), input.type)
    low.realize(rstd)
    # Not by one product and one sum as in inference: where a channel's values are equal, their difference is 0.
    everywhere = space_of(input, ())
    deviation = ex.sub(low.read(input, everywhere.symbols, working), low.at(average, kept))
    scale = scaled(low.at(rstd, kept), over(low, weight, everywhere, working, (1,)), None)
    offset = over(low, bias, everywhere, working, (1,))
    result = scaled(deviation, scale, offset)
    axes = channel_place(mean_type, input.ndim)
    outputs = (
        low.value(out_type, result),
        low.value(mean_type, low.at(average, axes)),
        low.value(rstd_type, low.at(rstd, axes)),
    )
    return outputs, average, squares


def channel_place(type_: TensorType, ndim: int) -> tuple[Dim, ...]:
    """The index of a [C] statistic into a value of `ndim` dimensions, all but the second of size 1."""
    (channel,) = axis_symbols(type_.shape)
    return (0, channel, *([0] * (ndim - 2)))


@lowers("_native_batch_norm_legit_functional")
def batch_norm_functional(
    call: Call,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    low = call.lowering
    if not training:
        saved = inference_statistics(call, input, running_mean, running_var, eps)
        result = low.value(call.type[0], inference(low, input, weight, bias, (running_mean, running_var), eps))
        unchanged = [
            low.value(value.type, low.at(value, axis_symbols(value.shape))) for value in (running_mean, running_var)
        ]
        return (result, *saved, *unchanged)
    outputs, average, squares = training_statistics(call, input, weight, bias, eps)
    updates = updated_statistics(low, input, (running_mean, running_var), average, squares, momentum)
    return (*outputs, *(low.value(type_, expression) for type_, expression in zip(call.type[3:], updates)))


def updated_statistics(
    low: Lowering, input: Value, running: Sequence[Value], average: Value, squares: Value, momentum: float
) -> list[Expression]:
    """The running mean and (unbiased) variance after this batch: momentum * new + (1 - momentum) * old."""
    working = ex.compute_dtype(input.dtype)
    unbiased = ex.sub(ex.index_as(channels(input).count, working), 1)
    updates = []
    for value, total, divisor in ((running[0], average, None), (running[1], squares, unbiased)):
        fresh = low.at(total, channel_place(value.type, input.ndim))
        fresh = fresh if divisor is None else ex.div(fresh, divisor)
        old = low.read(value, axis_symbols(value.shape), working)
        updates.append(
            ir.cast(
                ex.add(ex.mul(fresh, float(momentum)), ex.mul(old, 1 - float(momentum))), ex.compute_dtype(value.dtype)
            )
        )
    return updates


@lowers("native_batch_norm_backward")
def batch_norm_backward(
    call: Call,
    grad_out: Value,
    input: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_invstd: Value | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    """With n = (x - mean) * rstd: training dx = w * rstd * (g - mean(g) - n * mean(g * n)); inference dx = w * rstd *
    g."""
    low = call.lowering
    working = ex.compute_dtype(input.dtype)
    space = channels(input)
    low.shared(grad_out)
    low.shared(input)
    g = low.read(grad_out, space.symbols, working)
    if train:
        mean, rstd = over(low, save_mean, space, working, (1,)), over(low, save_invstd, space, working, (1,))
    else:
        mean, spread = over(low, running_mean, space, working, (1,)), over(low, running_var, space, working, (1,))
        rstd = None if spread is None else ex.div(ir.constant(1, working), ex.sqrt(ex.add(spread, float(eps))))
    if mean is None or rstd is None:
        raise Fallback("a batch norm gradient without statistics")
    n = ex.mul(ex.sub(low.read(input, space.symbols, working), mean), rstd)
    kept = space.kept(True)
    total_gn = reduce_kept(low, "sum", space, ex.mul(g, n), input)
    total_g = reduce_kept(low, "sum", space, g, input)
    results: list[Value | None] = [None, None, None]
    if output_mask[0]:
        scale = scaled(rstd, over(low, weight, space, working, (1,)), None)
        if train:
            count = ex.index_as(space.count, working)
            mean_g, mean_gn = ex.div(low.at(total_g, kept), count), ex.div(low.at(total_gn, kept), count)
            dx = ex.mul(scale, fma(ex.neg(n), mean_gn, ex.sub(g, mean_g)))
        else:
            dx = ex.mul(g, scale)
        results[0] = low.value(call.type[0], dx)
    for position, total in ((1, total_gn), (2, total_g)):
        type_ = call.type[position]
        if output_mask[position] and isinstance(type_, TensorType):
            results[position] = low.value(type_, low.at(total, channel_place(type_, input.ndim)))
    return results[0], results[1], results[2]
