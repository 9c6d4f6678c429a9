"""Rows of reductions, norms and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fusewright.backends.xla.table import ROWS, Array, Row, Values, dims_of, floating, row, with_axis


@row("sum.default", "sum.dim_IntList")
def _sum(values: Values, x: Array, dims: Any = None, keep: bool = False, dtype: Any = None) -> Array:
    return jnp.sum(x.astype(values.dtype), dims_of(x, dims), keepdims=keep)


@row("mean.default", "mean.dim")
def _mean(values: Values, x: Array, dims: Any = None, keep: bool = False, dtype: Any = None) -> Array:
    return jnp.mean(x.astype(values.dtype), dims_of(x, dims), keepdims=keep)


@row("prod.default")
def _prod(values: Values, x: Array, dtype: Any = None) -> Array:
    return jnp.prod(x.astype(values.dtype))


@row("prod.dim_int")
def _prod_of(values: Values, x: Array, dim: int, keep: bool = False, dtype: Any = None) -> Array:
    return jnp.prod(x.astype(values.dtype), dims_of(x, dim), keepdims=keep)


def _reduction(of: Callable[..., Any]) -> Row:
    return Row(lambda values, x, dims=None, keep=False: of(x, dims_of(x, dims), keepdims=keep), False)


def _index_of(of: Callable[..., Any]) -> Row:
    def compute(values: Values, x: Array, dim: Any = None, keep: bool = False) -> Array:
        return of(*with_axis(x), axis=None if dim is None else dim, keepdims=keep).reshape(values.shape)

    return Row(compute, False)


for name, of in (("amax", jnp.max), ("amin", jnp.min), ("any", jnp.any), ("all", jnp.all)):
    ROWS.update({f"{name}.{overload}": _reduction(of) for overload in ("default", "dim", "dims")})
ROWS |= {"max.default": _reduction(jnp.max), "min.default": _reduction(jnp.min)}
ROWS |= {"argmax.default": _index_of(jnp.argmax), "argmin.default": _index_of(jnp.argmin)}


def _extreme_of(of: Callable[..., Any], place_of: Callable[..., Any]) -> Row:
    def compute(values: Values, x: Array, dim: int, keep: bool = False) -> tuple[Array, Array]:
        shape = [int(size) for size in values.kind[0].shape]
        (x,) = with_axis(x)
        return of(x, dim, keepdims=keep).reshape(shape), place_of(x, dim, keepdims=keep).reshape(shape)

    return Row(compute, False)


ROWS |= {"max.dim": _extreme_of(jnp.max, jnp.argmax), "min.dim": _extreme_of(jnp.min, jnp.argmin)}


def _cumulative(of: Callable[..., Any]) -> Row:
    def compute(values: Values, x: Array, dim: int, dtype: Any = None) -> Array:
        return of(with_axis(x.astype(values.dtype))[0], dim).reshape(x.shape)

    return Row(compute, True)


ROWS |= {"cumsum.default": _cumulative(jnp.cumsum), "cumprod.default": _cumulative(jnp.cumprod)}


def _statistics(x: Array, dims: Any, correction: Any, keep: bool) -> tuple[Array, Array]:
    dims = dims_of(x, dims)
    count = math.prod(x.shape[dim] for dim in dims) - (1 if correction is None else correction)
    mean = jnp.mean(x, dims, keepdims=True)
    squares = jnp.sum(jnp.square(x - mean), dims, keepdims=keep)
    return squares / jnp.asarray(max(count, 0), x.dtype), mean if keep else jnp.squeeze(mean, dims)


@row("var.correction")
def _var(values: Values, x: Array, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Array:
    return _statistics(x, dims, correction, keepdim)[0]


@row("std.correction")
def _std(values: Values, x: Array, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Array:
    return jnp.sqrt(_statistics(x, dims, correction, keepdim)[0])


@row("var_mean.correction")
def _var_mean(values: Values, x: Array, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    return _statistics(x, dims, correction, keepdim)


@row("std_mean.correction")
def _std_mean(values: Values, x: Array, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    variance, mean = _statistics(x, dims, correction, keepdim)
    return jnp.sqrt(variance), mean


@row("logsumexp.default")
def _logsumexp(values: Values, x: Array, dims: Any, keep: bool = False) -> Array:
    return jax.nn.logsumexp(floating(x), dims_of(x, dims), keepdims=keep)


def norm(x: Array, p: Any, dims: tuple[int, ...] | None, keep: bool) -> Array:
    """The vector norm of order p over these dimensions, by default all."""
    size = jnp.abs(x)
    if p == float("inf"):
        return jnp.max(size, dims, keepdims=keep)
    if p == float("-inf"):
        return jnp.min(size, dims, keepdims=keep)
    if p == 0:
        return jnp.sum(x != 0, dims, keepdims=keep).astype(x.dtype)
    if p == 1:
        return jnp.sum(size, dims, keepdims=keep)
    if p == 2:
        return jnp.sqrt(jnp.sum(size * size, dims, keepdims=keep))
    return jnp.sum(size ** jnp.asarray(p, x.dtype), dims, keepdims=keep) ** jnp.asarray(1 / p, x.dtype)


@row("linalg_vector_norm.default")
def _vector_norm(
    values: Values, x: Array, order: Any = 2, dims: Any = None, keep: bool = False, dtype: Any = None
) -> Array:
    return norm(x.astype(values.dtype), order, dims_of(x, dims), keep)


@row("norm.ScalarOpt_dim", "norm.Scalar")
def _norm(values: Values, x: Array, order: Any = 2, dims: Any = None, keep: bool = False) -> Array:
    return norm(x.astype(values.dtype), 2 if order is None else order, dims_of(x, dims), keep)


@row("_softmax.default")
def _softmax(values: Values, x: Array, dim: int, half: bool = False) -> Array:
    dims = dims_of(x, dim)
    parts = jnp.exp(x - jnp.max(x, dims, keepdims=True))
    return parts / jnp.sum(parts, dims, keepdims=True)


@row("_safe_softmax.default")
def _safe_softmax(values: Values, x: Array, dim: int, dtype: Any = None) -> Array:
    x = x.astype(values.dtype)
    masked = jnp.all(jnp.isneginf(x), dims_of(x, dim), keepdims=True)
    return jnp.where(masked, 0, _softmax(values, jnp.where(masked, 0, x), dim))


@row("_log_softmax.default")
def _log_softmax(values: Values, x: Array, dim: int, half: bool = False) -> Array:
    dims = dims_of(x, dim)
    x = x - jnp.max(x, dims, keepdims=True)
    return x - jnp.log(jnp.sum(jnp.exp(x), dims, keepdims=True))


@row("_softmax_backward_data.default")
def _softmax_backward(values: Values, gradient: Array, y: Array, dim: int, dtype: Any) -> Array:
    return y * (gradient - jnp.sum(gradient * y, dims_of(y, dim), keepdims=True))


@row("_log_softmax_backward_data.default")
def _log_softmax_backward(values: Values, gradient: Array, y: Array, dim: int, dtype: Any) -> Array:
    return gradient - jnp.exp(y) * jnp.sum(gradient, dims_of(y, dim), keepdims=True)


# Losses


def _reduced(losses: Array, reduction: int) -> Array:
    return (lambda: losses, losses.mean, losses.sum)[reduction]()


def _spread(gradient: Array, like: Array, reduction: int) -> Array:
    return gradient / like.size if reduction == 1 else gradient


@row("mse_loss.default")
def _mse_loss(values: Values, x: Array, target: Array, reduction: int = 1) -> Array:
    return _reduced(jnp.square(x - target), reduction)


@row("mse_loss_backward.default")
def _mse_loss_backward(values: Values, gradient: Array, x: Array, target: Array, reduction: int) -> Array:
    return (
        _spread(gradient, jnp.broadcast_to(x, jnp.broadcast_shapes(x.shape, target.shape)), reduction)
        * 2
        * (x - target)
    )


@row("binary_cross_entropy_with_logits.default")
def _bce_logits(
    values: Values, x: Array, target: Array, weight: Any = None, positive: Any = None, reduction: int = 1
) -> Array:
    softened = jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(-x, 0)
    made = (1 - target) * x + (1 if positive is None else (positive - 1) * target + 1) * softened
    return _reduced(made if weight is None else made * weight, reduction)


def _classes(values: Values, x: Array, target: Array, weight: Any, ignored: int) -> tuple[Array, Array]:
    """Where the targets' scores are, along dimension 1 (0 of a vector), and each target's weight."""
    classes = 1 if x.ndim > 1 else 0
    counted = target != ignored
    values.check(counted & ((target < 0) | (target >= x.shape[classes])))
    target = jnp.where(counted, target, 0)
    weights = counted.astype(x.dtype) if weight is None else jnp.where(counted, weight[target], 0)
    return jnp.expand_dims(target, classes), jnp.expand_dims(weights, classes)


@row("nll_loss_forward.default", "nll_loss2d_forward.default")
def _nll_loss(
    values: Values, x: Array, target: Array, weight: Any, reduction: int, ignored: int
) -> tuple[Array, Array]:
    places, weights = _classes(values, x, target, weight, ignored)
    picked = jnp.take_along_axis(x, places, min(1, x.ndim - 1), mode="clip")
    losses = jnp.where(weights == 0, 0, -picked * weights).reshape(target.shape)
    if reduction == 0:
        return losses, jnp.zeros((), x.dtype)
    total = jnp.sum(weights)
    return (jnp.sum(losses) / total if reduction == 1 else jnp.sum(losses)), total


@row("nll_loss_backward.default", "nll_loss2d_backward.default")
def _nll_loss_backward(values: Values, gradient: Array, x: Array, target: Array, weight: Any, *how: Any) -> Array:
    reduction, ignored, total = how
    places, weights = _classes(values, x, target, weight, ignored)
    if reduction == 0:
        gradient = gradient.reshape(weights.shape)
    wanted = jnp.arange(x.shape[min(1, x.ndim - 1)]).reshape((-1,) + (1,) * max(x.ndim - 2, 0)) == places
    made = jnp.where(weights == 0, 0, -gradient * weights / (total if reduction == 1 else 1))
    return jnp.where(wanted, made, 0)


# Norms


@row("native_layer_norm.default")
def _layer_norm(values: Values, x: Array, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Array, ...]:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    mean = jnp.mean(x, dims, keepdims=True)
    scale = 1 / jnp.sqrt(jnp.mean((x - mean) ** 2, dims, keepdims=True) + eps)
    made = (x - mean) * scale
    made = made if weight is None else made * weight
    return (made if bias is None else made + bias), mean, scale


@row("native_layer_norm_backward.default")
def _layer_norm_backward(values: Values, gradient: Array, x: Array, shape: Any, *rest: Any) -> tuple[Any, ...]:
    mean, scale, weight, _bias, wanted = rest
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    outer = tuple(range(x.ndim - len(shape)))
    normed = (x - mean) * scale
    inner = gradient if weight is None else gradient * weight
    averages = jnp.mean(inner, dims, keepdims=True), jnp.mean(inner * normed, dims, keepdims=True)
    parts = (
        lambda: (inner - averages[0] - normed * averages[1]) * scale,
        lambda: jnp.sum(gradient * normed, outer),
        lambda: jnp.sum(gradient, outer),
    )
    return tuple(part() if want else None for part, want in zip(parts, wanted))


def _by_channel(x: Array, value: Any, usual: float) -> Any:
    return usual if value is None else value.reshape((1, -1) + (1,) * (x.ndim - 2))


@row("native_batch_norm.default")
def _batch_norm(values: Values, x: Array, weight: Any, bias: Any, mean: Any, *how: Any) -> tuple[Array, ...]:
    variance, training, momentum, eps = how
    saved: tuple[Array, Array] = (jnp.zeros(0, x.dtype), jnp.zeros(0, x.dtype))
    if training:
        dims = (0, *range(2, x.ndim))
        means = jnp.mean(x, dims)
        count = x.size // x.shape[1]
        variances = jnp.mean(jnp.square(x - _by_channel(x, means, 0)), dims)
        if mean is not None:
            values.wrote[3] = mean * (1 - momentum) + means * momentum
            values.wrote[4] = variance * (1 - momentum) + variances * (count / max(count - 1, 1)) * momentum
        mean, scale = means, 1 / jnp.sqrt(variances + eps)
        saved = mean, scale
    else:
        scale = 1 / jnp.sqrt(variance + eps)
    made = (x - _by_channel(x, mean, 0)) * _by_channel(x, scale, 1) * _by_channel(x, weight, 1)
    return made + _by_channel(x, bias, 0), *saved


@row("native_batch_norm_backward.default")
def _batch_norm_backward(values: Values, gradient: Array, x: Array, weight: Any, *how: Any) -> tuple[Any, ...]:
    mean, variance, saved_mean, saved_scale, training, eps, wanted = how
    dims = (0, *range(2, x.ndim))
    if training:
        mean, scale = saved_mean, saved_scale
    else:
        scale = 1 / jnp.sqrt(variance + eps)
    mean, scale = _by_channel(x, mean, 0), _by_channel(x, scale, 1)
    normed = (x - mean) * scale
    to_weight, to_bias = jnp.sum(gradient * normed, dims), jnp.sum(gradient, dims)
    to_x = gradient
    if training:
        count = x.size // x.shape[1]
        to_x = gradient - (_by_channel(x, to_bias, 0) + normed * _by_channel(x, to_weight, 0)) / count
    to_x = to_x * scale * _by_channel(x, weight, 1)
    return tuple(value if want else None for value, want in zip((to_x, to_weight, to_bias), wanted))


@row("native_group_norm.default")
def _group_norm(values: Values, x: Array, weight: Any, bias: Any, *how: Any) -> tuple[Array, ...]:
    count, _, _, groups, eps = how
    parts = x.reshape(count, groups, -1)
    mean = jnp.mean(parts, 2, keepdims=True)
    scale = 1 / jnp.sqrt(jnp.mean(jnp.square(parts - mean), 2, keepdims=True) + eps)
    made = ((parts - mean) * scale).reshape(x.shape) * _by_channel(x, weight, 1) + _by_channel(x, bias, 0)
    return made, mean[..., 0], scale[..., 0]


@row("native_group_norm_backward.default")
def _group_norm_backward(values: Values, gradient: Array, x: Array, mean: Array, scale: Array, *how: Any) -> Any:
    weight, count, _, _, groups, wanted = how
    mean, scale = mean[..., None], scale[..., None]
    normed = (x.reshape(count, groups, -1) - mean) * scale
    inner = (gradient * _by_channel(x, weight, 1)).reshape(normed.shape)
    averages = jnp.mean(inner, 2, keepdims=True), jnp.mean(inner * normed, 2, keepdims=True)
    dims = (0, *range(2, x.ndim))
    parts = (
        ((inner - averages[0] - normed * averages[1]) * scale).reshape(x.shape),
        jnp.sum(gradient * normed.reshape(x.shape), dims),
        jnp.sum(gradient, dims),
    )
    return tuple(part if want else None for part, want in zip(parts, wanted))
