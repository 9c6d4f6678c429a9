"""Rows of operators that read windows of images: convolutions, pools, changes of size.

Which elements a pool or a change of size reads is known when it is traced: tables of places, by numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fusewright.backends.xla.table import ROWS, Array, NoRow, Row, Values, is_float, row


def _lengths(x: Array, value: Any) -> list[int]:
    value = [value] if isinstance(value, int) else list(value)
    return value * (x.ndim - 2) if len(value) == 1 else value


def _convolve(x: Array, weight: Array, stride: Any, padding: Any, *how: Any) -> Array:
    dilation, transposed, extra, groups = how
    strides, pads, dilations = _lengths(x, stride), _lengths(x, padding), _lengths(x, dilation)
    spread = [1] * len(strides)
    around = [(size, size) for size in pads]
    if transposed:  # the gradient of a convolution: the input is spread out, the kernel turned round
        spread, strides = strides, spread
        sizes = [(size - 1) * step for size, step in zip(weight.shape[2:], dilations)]
        around = [(size - pad, size - pad + more) for size, pad, more in zip(sizes, pads, _lengths(x, extra))]
        parts = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        turned = jnp.flip(jnp.swapaxes(parts, 1, 2), tuple(range(3, parts.ndim)))
        weight = turned.reshape(-1, *turned.shape[2:])
    return lax.conv_general_dilated(
        x,
        weight,
        strides,
        around,
        lhs_dilation=spread,
        rhs_dilation=dilations,
        feature_group_count=groups,
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    ).astype(x.dtype)


@row("convolution.default")
def _convolution(values: Values, x: Array, weight: Array, bias: Any, *how: Any) -> Array:
    if not is_float(x):
        raise NoRow("a convolution of integers")
    made = _convolve(x, weight, *how)
    return made if bias is None else made + bias.reshape((-1,) + (1,) * (x.ndim - 2))


@row("convolution_backward.default")
def _convolution_backward(values: Values, gradient: Array, x: Array, weight: Array, sizes: Any, *how: Any) -> Any:
    *how, wanted = how  # type: ignore[assignment]
    to_x, to_weight = jax.vjp(lambda x, weight: _convolve(x, weight, *how), x, weight)[1](gradient)
    to_bias = jnp.sum(gradient, (0, *range(2, x.ndim)))
    return tuple(value if want else None for value, want in zip((to_x, to_weight, to_bias), wanted))


# Pools


def _spatial(value: Any, count: int) -> list[int]:
    value = [value] if isinstance(value, int) else list(value)
    return value * count if len(value) == 1 else value


def _places(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool) -> Any:
    """(windows, elements of one): where each element is; the padding is below 0 and above size."""
    reach = size + 2 * pad - dilation * (kernel - 1) - 1
    count = -(-reach // stride) + 1 if ceil else reach // stride + 1
    if ceil and (count - 1) * stride >= size + pad:
        count -= 1
    return np.arange(count)[:, None] * stride - pad + np.arange(kernel) * dilation


def _adaptive_places(size: int, count: int) -> Any:
    starts, ends = np.arange(count) * size // count, -(-(np.arange(count) + 1) * size // count)
    places = starts[:, None] + np.arange(int((ends - starts).max()))
    return np.where(places < ends[:, None], places, -1)


def _windows(x: Array, places: list[Any]) -> tuple[Array, Any, Any]:
    """For the last dimensions of `x`: the windows, with their elements in one last dimension, which of these lie in
    `x`, and each element's place in the flat image."""
    count = len(places)
    sizes, first = x.shape[-count:], x.ndim - count
    spread = [
        table.reshape(
            [table.shape[0] if at == own else table.shape[1] if at == own + count else 1 for at in range(2 * count)]
        )
        for own, table in enumerate(places)
    ]
    inside: Any = np.asarray(True)
    flat: Any = np.asarray(0)
    for table, size in zip(spread, sizes):
        inside = inside & (table >= 0) & (table < size)
        flat = flat * size + np.clip(table, 0, size - 1)
    shape = [table.shape[0] for table in places]
    inside, flat = inside.reshape(*shape, -1), flat.reshape(*shape, -1)
    return x.reshape(*x.shape[:first], math.prod(sizes))[..., flat], inside, flat


def _max_of(x: Array, places: list[Any]) -> tuple[Array, Array]:
    """Each window's greatest element, and where in the flat image it is: the first of equals, the last of NaNs."""
    parts, inside, flat = _windows(x, places)
    least = -jnp.inf if is_float(x) else jnp.iinfo(x.dtype).min
    parts = jnp.where(inside, parts, jnp.asarray(least, x.dtype))
    last = parts.shape[-1] - 1
    chosen = jnp.argmax(parts, -1)
    if is_float(x):
        chosen = jnp.where(jnp.isnan(parts).any(-1), last - jnp.argmax(jnp.isnan(parts)[..., ::-1], -1), chosen)
    chosen = jnp.where(
        jnp.take_along_axis(jnp.broadcast_to(inside, parts.shape), chosen[..., None], -1)[..., 0],
        chosen,
        inside.argmax(-1),
    )
    taken = jnp.take_along_axis(jnp.broadcast_to(flat, parts.shape), chosen[..., None], -1)[..., 0]
    return jnp.take_along_axis(parts, chosen[..., None], -1)[..., 0], taken


def _pool_places(x: Array, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, count: int) -> list[Any]:
    kernels = _spatial(kernel, count)
    how = zip(
        x.shape[-count:],
        kernels,
        _spatial(stride or kernels, count),
        *(_spatial(v, count) for v in (padding, dilation)),
    )
    return [_places(size, window, step, pad, apart, ceil) for size, window, step, pad, apart in how]


def _pools(count: int) -> None:
    def max_pool(
        values: Values, x: Array, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
    ) -> tuple[Array, Array]:
        return _max_of(x, _pool_places(x, kernel, stride, padding, dilation, ceil, count))

    def adaptive_max_pool(values: Values, x: Array, sizes: Any) -> tuple[Array, Array]:
        return _max_of(x, [_adaptive_places(*both) for both in zip(x.shape[-count:], _spatial(sizes, count))])

    def max_pool_backward(values: Values, gradient: Array, x: Array, *how: Any) -> Array:
        lead = x.shape[: x.ndim - count]
        flat = jnp.zeros((math.prod(lead), math.prod(x.shape[-count:])), gradient.dtype)
        index = how[-1].reshape(flat.shape[0], -1)
        made = flat.at[jnp.arange(flat.shape[0])[:, None], index].add(gradient.reshape(index.shape))
        return made.reshape(x.shape)

    def average(x: Array, kernel: Any, stride: Any = (), padding: Any = 0, *how: Any) -> Array:
        options: list[Any] = [*how, *(False, True, None)[len(how) :]]
        ceil, with_pad, divisor = options
        places = _pool_places(x, kernel, stride, padding, 1, ceil, count)
        parts, inside, _ = _windows(x, places)
        counted = inside.sum(-1)
        if with_pad:  # what lies beyond the padding, in the last windows, does not count
            beyond = [
                (table < size + pad).sum(1)
                for table, size, pad in zip(places, x.shape[-count:], _spatial(padding, count))
            ]
            counted = math.prod(np.ix_(*beyond)) if count > 1 else beyond[0]
        total = jnp.sum(jnp.where(inside, parts, 0), -1)
        return total / (jnp.asarray(counted, x.dtype) if divisor is None else jnp.asarray(divisor, x.dtype))

    def adaptive(x: Array, sizes: Any) -> Array:
        places = [_adaptive_places(*both) for both in zip(x.shape[-count:], _spatial(sizes, count))]
        parts, inside, _ = _windows(x, places)
        return jnp.sum(jnp.where(inside, parts, 0), -1) / jnp.asarray(inside.sum(-1), x.dtype)

    ROWS[f"max_pool{count}d_with_indices.default"] = Row(max_pool, False)
    ROWS[f"adaptive_max_pool{count}d.default"] = Row(adaptive_max_pool, False)
    for name in ("max_pool", "adaptive_max_pool"):
        ending = "_with_indices_backward" if name == "max_pool" else "_backward"
        ROWS[f"{name}{count}d{ending}.default"] = Row(max_pool_backward, True)
    both(f"avg_pool{count}d", average)
    both(f"_adaptive_avg_pool{count}d", adaptive)


def both(name: str, of: Callable[..., Any]) -> None:
    """A row of a linear function of its first argument, and that of its backward (gradient, x, ...)."""
    ROWS[f"{name}.default"] = Row(lambda values, x, *args, **named: of(x, *args, **named), True)
    ROWS[f"{name}_backward.default"] = Row(
        lambda values, gradient, x, *args: jax.vjp(lambda x: of(x, *args), x)[1](gradient)[0], True
    )


# Changes of size


def _resized(name: str, count: int, of: Callable[..., Any]) -> None:
    ROWS[f"{name}{count}d.default"] = Row(lambda values, x, sizes, *how: of(x, sizes, *how), True)

    def backward(values: Values, gradient: Array, sizes: Any, old: Any, *how: Any) -> Array:
        like = jnp.zeros([int(size) for size in old], gradient.dtype)
        return jax.vjp(lambda x: of(x, sizes, *how), like)[1](gradient)[0]

    ROWS[f"{name}{count}d_backward.default"] = Row(backward, True)


def _nearest(count: int, offset: float) -> Callable[..., Any]:
    def of(x: Array, sizes: Any, *scales: Any) -> Array:
        for at in range(count):
            dim, size = x.ndim - count + at, int(sizes[at])
            scale = np.float32(1 / scales[at] if scales and scales[at] else x.shape[dim] / size)
            places = np.floor((np.arange(size, dtype=np.float32) + np.float32(offset)) * scale)
            x = jnp.take(x, np.minimum(places.astype(np.int64), x.shape[dim] - 1), dim)
        return x

    return of


def _linear(count: int) -> Callable[..., Any]:
    def of(x: Array, sizes: Any, corners: bool, *scales: Any) -> Array:
        for at in range(count):
            dim, size = x.ndim - count + at, int(sizes[at])
            old, steps = x.shape[dim], np.arange(size, dtype=np.float32)
            if corners:
                where = steps * np.float32((old - 1) / (size - 1) if size > 1 else 0)
            else:
                scale = np.float32(1 / scales[at] if scales and scales[at] else old / size)
                where = np.maximum((steps + np.float32(0.5)) * scale - np.float32(0.5), 0)
            low = np.minimum(np.floor(where).astype(np.int64), old - 1)
            part = np.clip(where - low, 0, 1).reshape((-1,) + (1,) * (x.ndim - dim - 1))
            above = jnp.take(x, np.minimum(low + 1, old - 1), dim)
            x = jnp.take(x, low, dim) * jnp.asarray(1 - part, x.dtype) + above * jnp.asarray(part, x.dtype)
        return x

    return of


_pools(2)
_pools(3)
for count, linear in ((1, "linear"), (2, "bilinear"), (3, "trilinear")):
    _resized("upsample_nearest", count, _nearest(count, 0))
    _resized("_upsample_nearest_exact", count, _nearest(count, 0.5))
    _resized(f"upsample_{linear}", count, _linear(count))
