"""Rows of operators that work element by element."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fusewright.backends.xla.table import (
    DTYPES,
    ROWS,
    Array,
    NoRow,
    Row,
    Values,
    common,
    floating,
    is_float,
    plain,
    row,
)


def _sign(x: Array) -> Array:
    return jnp.where(jnp.isnan(x), 0, jnp.sign(x)) if is_float(x) else jnp.sign(x)


def digamma(x: Array) -> Array:
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x))


UNARY: dict[str, Callable[..., Any]] = {
    "relu": lambda x: jnp.maximum(x, 0),
    "neg": jnp.negative,
    "abs": jnp.abs,
    "logical_not": jnp.logical_not,
    "bitwise_not": jnp.bitwise_not,
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
    "isposinf": jnp.isposinf,
    "isneginf": jnp.isneginf,
    "sign": _sign,
    "sgn": _sign,
    "signbit": lambda x: jnp.signbit(x) if is_float(x) else x < 0,
    "floor": lambda x: jnp.floor(x) if is_float(x) else x,
    "ceil": lambda x: jnp.ceil(x) if is_float(x) else x,
    "trunc": lambda x: jnp.trunc(x) if is_float(x) else x,
    "round": lambda x: jnp.round(x) if is_float(x) else x,
    "frac": lambda x: x - jnp.trunc(x),
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "mish": lambda x: x * jnp.tanh(jnp.logaddexp(x, 0)),
    "hardswish": lambda x: x * jnp.clip(x + 3, 0, 6) / 6,
    "hardsigmoid": lambda x: jnp.clip(x + 3, 0, 6) / 6,
}
FLOATING: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(jnp, name)
        for name in (
            "sin", "cos", "tan", "tanh", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sinh",
            "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "deg2rad", "rad2deg", "sinc",
        )
    },
    "rsqrt": lambda x: 1 / jnp.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sigmoid": jax.nn.sigmoid,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "lgamma": lax.lgamma,
    "digamma": digamma,
}  # fmt: skip
"""Unary operators that make floating-point numbers of integers."""

BINARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "mul": operator.mul,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "clamp_min": jnp.maximum,
    "clamp_max": jnp.minimum,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "atan2": lambda x, y: jnp.arctan2(floating(x), floating(y)),
    "copysign": lambda x, y: jnp.copysign(floating(x), floating(y)),
    "hypot": jnp.hypot,
    "logaddexp": lambda x, y: jnp.logaddexp(x, y),
    "logaddexp2": lambda x, y: jnp.logaddexp2(x, y),
    "xlogy": lambda x, y: jnp.where(
        jnp.isnan(floating(y)), jnp.nan, jnp.where(x == 0, 0, floating(x) * jnp.log(floating(y)))
    ),
    "heaviside": lambda x, y: jnp.where(x == 0, y, (x > 0).astype(y.dtype)),
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
}


def _compute_floating(of: Callable[..., Any]) -> Callable[..., Any]:
    return plain(lambda x: of(floating(x)))


def _compute_common(of: Callable[..., Any]) -> Callable[..., Any]:
    return plain(lambda x, y: of(*common(x, y)))


ROWS.update({f"{name}.default": Row(plain(of), True) for name, of in UNARY.items()})
ROWS.update({f"{name}.default": Row(_compute_floating(of), True) for name, of in FLOATING.items()})
ROWS.update(
    {
        f"{name}.{overload}": Row(_compute_common(of), True)
        for name, of in BINARY.items()
        for overload in ("default", "Tensor", "Scalar")
    }
)


@row("add.Tensor", "add.Scalar")
def _add(values: Values, x: Array, y: Any, alpha: Any = 1) -> Array:
    x, y = common(x, y)
    return x + y if alpha == 1 else x + y * jnp.asarray(alpha, y.dtype)


@row("sub.Tensor", "sub.Scalar")
def _sub(values: Values, x: Array, y: Any, alpha: Any = 1) -> Array:
    x, y = common(x, y)
    return x - (y if alpha == 1 else y * jnp.asarray(alpha, y.dtype))


@row("rsub.Scalar", "rsub.Tensor")
def _rsub(values: Values, x: Array, y: Any, alpha: Any = 1) -> Array:
    x, y = common(x, y)
    return y - (x if alpha == 1 else x * jnp.asarray(alpha, x.dtype))


@row("div.Tensor", "div.Scalar")
def _div(values: Values, x: Array, y: Any) -> Array:
    x, y = common(x, y)
    return floating(x) / floating(y)


@row("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(values: Values, x: Array, y: Any, rounding_mode: str | None = None) -> Array:
    if rounding_mode is None:
        return _div(values, x, y)
    x, y = common(x, y)
    if not is_float(x):
        return _floor_divide(values, x, y) if rounding_mode == "floor" else _int_divide(values, x, y)
    return _floor_divide(values, x, y) if rounding_mode == "floor" else jnp.trunc(x / y)


def _int_divide(values: Values, x: Array, y: Array) -> Array:
    values.check(y == 0)
    return lax.div(*jnp.broadcast_arrays(x, y))


@row("floor_divide.default", "floor_divide.Scalar")
def _floor_divide(values: Values, x: Array, y: Any) -> Array:
    x, y = common(x, y)
    if not is_float(x):
        rest = x - _int_divide(values, x, y) * y
        return _int_divide(values, x, y) - ((rest != 0) & ((rest < 0) != (y < 0))).astype(x.dtype)
    rest = lax.rem(*jnp.broadcast_arrays(x, y))
    made = (x - rest) / y
    made = jnp.where((rest != 0) & ((rest < 0) != (y < 0)), made - 1, made)
    down = jnp.floor(made)
    down = jnp.where(made - down > 0.5, down + 1, down)
    return jnp.where(y == 0, x / y, jnp.where(made == 0, jnp.copysign(jnp.zeros_like(made), x / y), down))


@row("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def _remainder(values: Values, x: Any, y: Any) -> Array:
    x, y = common(x, y)
    made = _fmod(values, x, y)
    return jnp.where((made != 0) & ((made < 0) != (y < 0)), made + y, made)


@row("fmod.Tensor", "fmod.Scalar")
def _fmod(values: Values, x: Array, y: Any) -> Array:
    x, y = common(x, y)
    if not is_float(x):
        values.check(y == 0)
    return lax.rem(*jnp.broadcast_arrays(x, y))


@row("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(values: Values, x: Any, exponent: Any) -> Array:
    x, y = common(x, exponent)
    if not is_float(x):
        raise NoRow("pow of integers")
    return x * x if isinstance(exponent, (int, float)) and exponent == 2 else jnp.power(x, y)


@row("addcmul.default")
def _addcmul(values: Values, x: Array, y: Array, z: Array, value: Any = 1) -> Array:
    x, y, z = common(x, y, z)
    return x + jnp.asarray(value, x.dtype) * y * z


@row("addcdiv.default")
def _addcdiv(values: Values, x: Array, y: Array, z: Array, value: Any = 1) -> Array:
    x, y, z = common(x, y, z)
    return x + jnp.asarray(value, x.dtype) * y / z


@row("lerp.Scalar", "lerp.Tensor")
def _lerp(values: Values, x: Array, end: Array, weight: Any) -> Array:
    weight = jnp.asarray(weight, x.dtype)
    return jnp.where(jnp.abs(weight) < 0.5, x + weight * (end - x), end - (end - x) * (1 - weight))


@row("elu.default")
def _elu(values: Values, x: Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Array:
    return jnp.where(x > 0, x * scale, jnp.expm1(x * input_scale) * (alpha * scale))


@row("elu_backward.default")
def _elu_backward(values: Values, gradient: Array, alpha: Any, scale: Any, input_scale: Any, *rest: Any) -> Array:
    is_result, x = rest
    below = input_scale * (x + alpha * scale) if is_result else input_scale * alpha * scale * jnp.exp(x * input_scale)
    return gradient * jnp.where(x > 0, scale, below)


@row("leaky_relu.default", "_prelu_kernel.default")
def _leaky_relu(values: Values, x: Array, slope: Any = 0.01) -> Array:
    return jnp.where(x > 0, x, x * slope)


@row("leaky_relu_backward.default")
def _leaky_relu_backward(values: Values, gradient: Array, x: Array, slope: Any, is_result: bool) -> Array:
    return jnp.where(x > 0, gradient, gradient * slope)


@row("softplus.default")
def _softplus(values: Values, x: Array, beta: Any = 1, threshold: Any = 20) -> Array:
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta)


@row("softplus_backward.default")
def _softplus_backward(values: Values, gradient: Array, x: Array, beta: Any, threshold: Any) -> Array:
    return jnp.where(x * beta > threshold, gradient, gradient * jax.nn.sigmoid(x * beta))


@row("log_sigmoid_forward.default")
def _log_sigmoid(values: Values, x: Array) -> tuple[Array, Array]:
    small = jnp.exp(-jnp.abs(x))
    stored = list(values.kind[1].shape)
    return jnp.minimum(x, 0) - jnp.log1p(small), small if stored == list(x.shape) else jnp.zeros(stored, x.dtype)


@row("log_sigmoid_backward.default")
def _log_sigmoid_backward(values: Values, gradient: Array, x: Array, stored: Array) -> Array:
    return gradient * jax.nn.sigmoid(-x)


@row("hardswish_backward.default")
def _hardswish_backward(values: Values, gradient: Array, x: Array) -> Array:
    return jnp.where(x <= -3, 0, jnp.where(x < 3, gradient * (x / 3 + 0.5), gradient))


@row("hardsigmoid_backward.default")
def _hardsigmoid_backward(values: Values, gradient: Array, x: Array) -> Array:
    return jnp.where((x > -3) & (x < 3), gradient / 6, 0)


@row("threshold.default")
def _threshold(values: Values, x: Array, threshold: Any, value: Any) -> Array:
    return jnp.where(x <= threshold, jnp.asarray(value, x.dtype), x)


@row("glu.default")
def _glu(values: Values, x: Array, dim: int = -1) -> Array:
    first, second = jnp.split(x, 2, dim)
    return first * jax.nn.sigmoid(second)


@row("nan_to_num.default")
def _nan_to_num(values: Values, x: Array, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Array:
    if not is_float(x):
        return x
    most = jnp.finfo(DTYPES[values.kind.dtype])
    for wrong, value, usual in (
        (jnp.isnan(x), nan, 0),
        (jnp.isposinf(x), posinf, most.max),
        (jnp.isneginf(x), neginf, most.min),
    ):
        x = jnp.where(wrong, jnp.asarray(usual if value is None else value, x.dtype), x)
    return x


@row("where.self", widens=False)
def _where(values: Values, condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition, *common(x, y))


@row("masked_fill.Scalar", "masked_fill.Tensor", widens=False)
def _masked_fill(values: Values, x: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@row("clamp.default", "clamp.Tensor")
def _clamp(values: Values, x: Array, low: Any = None, high: Any = None) -> Array:
    if low is not None:
        x = jnp.maximum(*common(x, low))
    return x if high is None else jnp.minimum(*common(x, high))


@row("hardtanh.default")
def _hardtanh(values: Values, x: Array, low: Any = -1, high: Any = 1) -> Array:
    return _clamp(values, x, low, high)


@row("gelu.default")
def _gelu(values: Values, x: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


@row("threshold_backward.default")
def _threshold_backward(values: Values, gradient: Array, x: Array, threshold: Any) -> Array:
    return jnp.where(x <= threshold, jnp.zeros_like(gradient), gradient)


@row("hardtanh_backward.default")
def _hardtanh_backward(values: Values, gradient: Array, x: Array, low: Any, high: Any) -> Array:
    return jnp.where((x <= low) | (x >= high), jnp.zeros_like(gradient), gradient)


@row("tanh_backward.default")
def _tanh_backward(values: Values, gradient: Array, y: Array) -> Array:
    return gradient * (1 - y * y)


@row("sigmoid_backward.default")
def _sigmoid_backward(values: Values, gradient: Array, y: Array) -> Array:
    return gradient * (1 - y) * y


@row("silu_backward.default")
def _silu_backward(values: Values, gradient: Array, x: Array) -> Array:
    part = jax.nn.sigmoid(x)
    return gradient * part * (1 + x * (1 - part))


@row("gelu_backward.default")
def _gelu_backward(values: Values, gradient: Array, x: Array, approximate: str = "none") -> Array:
    return jax.vjp(lambda x: _gelu(values, x, approximate), x)[1](gradient)[0]
