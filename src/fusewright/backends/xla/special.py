"""Rows of special functions, of activations and losses that are not in `pointwise`, and of what is made of them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import jax.scipy.special as jsp
from jax import lax

from fusewright.backends.xla.pointwise import digamma
from fusewright.backends.xla.table import ROWS, Array, Row, Values, common, floating, is_float, plain, row

UNARY = {
    "i0": jsp.i0,
    "special_i0e": jsp.i0e,
    "special_i1": jsp.i1,
    "special_i1e": jsp.i1e,
    "special_ndtri": jsp.ndtri,
    "special_log_ndtr": jsp.log_ndtr,
    "special_entr": lambda x: jnp.where(x > 0, -x * jnp.log(x), jnp.where(x == 0, 0, jnp.where(x < 0, -jnp.inf, x))),
}
BINARY = {
    "special_xlog1py": lambda x, y: jnp.where(jnp.isnan(y), y, jnp.where(x == 0, 0, x * jnp.log1p(y))),
    "nextafter": jnp.nextafter,
}
for _name, _of in UNARY.items():
    ROWS[f"{_name}.default"] = Row(plain(lambda x, of=_of: of(floating(x))), True)
for _name, _of in BINARY.items():
    ROWS[f"{_name}.default"] = Row(plain(lambda x, y, of=_of: of(*map(floating, common(x, y)))), _name != "nextafter")


@row("polygamma.default")
def _polygamma(values: Values, order: int, x: Array) -> Array:
    x = floating(x)
    if order == 0:
        return digamma(x)
    values.check(~(x > 0))  # below, each library has formulas of its own
    return (-1) ** (order + 1) * math.factorial(order) * lax.zeta(jnp.full_like(x, order + 1), x)


@row("mvlgamma.default")
def _mvlgamma(values: Values, x: Array, p: int) -> Array:
    x = floating(x)
    values.check(x <= (p - 1) / 2)
    return p * (p - 1) / 4 * math.log(math.pi) + sum(lax.lgamma(x - place / 2) for place in range(p))


@row("frexp.Tensor", widens=False)
def _frexp(values: Values, x: Array) -> tuple[Array, Array]:
    return jnp.frexp(x)


@row("round.decimals")
def _round(values: Values, x: Array, decimals: int = 0) -> Array:
    if not is_float(x) or not decimals:
        return jnp.round(x) if is_float(x) else x
    scale = 10.0 ** abs(decimals)
    return jnp.round(x * scale) / scale if decimals > 0 else jnp.round(x / scale) * scale


@row("logit.default")
def _logit(values: Values, x: Array, eps: Any = None) -> Array:
    x = floating(x)
    x = x if eps is None else jnp.where(x < eps, eps, jnp.where(x > 1 - eps, 1 - eps, x))
    return jnp.log(x / (1 - x))


@row("celu.default")
def _celu(values: Values, x: Array, alpha: Any = 1) -> Array:
    return jnp.where(x > 0, x, alpha * jnp.expm1(x / alpha))


@row("softshrink.default")
def _softshrink(values: Values, x: Array, by: Any = 0.5) -> Array:
    return jnp.where(x > by, x - by, jnp.where(x < -by, x + by, x * 0))


@row("hardshrink.default")
def _hardshrink(values: Values, x: Array, by: Any = 0.5) -> Array:
    return jnp.where((x >= -by) & (x <= by), 0, x)


@row("softshrink_backward.default", "hardshrink_backward.default")
def _shrink_backward(values: Values, gradient: Array, x: Array, by: Any) -> Array:
    return jnp.where((x >= -by) & (x <= by), 0, gradient)


@row("mish_backward.default")
def _mish_backward(values: Values, gradient: Array, x: Array) -> Array:
    tanh, sigmoid = jnp.tanh(jnp.logaddexp(x, 0)), 1 / (1 + jnp.exp(-x))
    return gradient * (tanh + x * sigmoid * (1 - tanh * tanh))


# Losses


def _reduced(loss: Array, reduction: int) -> Array:
    """reduction: 0 none, 1 mean, 2 sum."""
    return (loss, jnp.mean(loss), jnp.sum(loss))[reduction] if reduction else loss


@row("huber_loss.default")
def _huber(values: Values, x: Array, y: Array, reduction: int = 1, delta: Any = 1.0) -> Array:
    gap = jnp.abs(x - y)
    return _reduced(jnp.where(gap <= delta, 0.5 * gap * gap, delta * (gap - 0.5 * delta)), reduction)


@row("smooth_l1_loss.default")
def _smooth_l1(values: Values, x: Array, y: Array, reduction: int = 1, beta: Any = 1.0) -> Array:
    gap = jnp.abs(x - y)
    return _reduced(jnp.where(gap < beta, 0.5 * gap * gap / (beta or 1), gap - 0.5 * beta), reduction)


@row("soft_margin_loss.default")
def _soft_margin(values: Values, x: Array, y: Array, reduction: int = 1) -> Array:
    return _reduced(jnp.log1p(jnp.exp(-y * x)), reduction)


@row("binary_cross_entropy.default")
def _binary_cross_entropy(values: Values, x: Array, y: Array, weight: Any = None, reduction: int = 1) -> Array:
    values.check((x < 0) | (x > 1))
    loss = (y - 1) * jnp.maximum(jnp.log1p(-x), -100) - y * jnp.maximum(jnp.log(x), -100)
    return _reduced(loss if weight is None else loss * weight, reduction)


@row("binary_cross_entropy_backward.default")
def _binary_cross_entropy_backward(
    values: Values, gradient: Array, x: Array, y: Array, weight: Any = None, reduction: int = 1
) -> Array:
    made = gradient * (x - y) / jnp.maximum((1 - x) * x, 1e-12)
    made = made if weight is None else made * weight
    return made / x.size if reduction == 1 else made
