"""Rows of products and attention."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fusewright.backends.xla.table import Array, NoRow, Values, is_float, row


@row("mm.default", "bmm.default", "mv.default", "dot.default", "vdot.default", widens=False)
def _product(values: Values, x: Array, y: Array) -> Array:
    if not is_float(x):
        raise NoRow("a product of integers")
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return jnp.matmul(x, y, preferred_element_type=wide).astype(x.dtype)


@row("addmm.default", "baddbmm.default", "addmv.default", widens=False)
def _addmm(values: Values, bias: Array, x: Array, y: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    if not is_float(x):
        raise NoRow("addmm of integers")
    wide = jnp.promote_types(x.dtype, jnp.float32)
    made = jnp.matmul(x, y, preferred_element_type=wide)
    made = made if alpha == 1 else made * jnp.asarray(alpha, wide)
    if beta == 0:  # what the bias holds does not count
        return made.astype(x.dtype)
    bias = bias.astype(wide)
    return (made + (bias if beta == 1 else bias * jnp.asarray(beta, wide))).astype(x.dtype)


def _scores(q: Array, k: Array, causal: bool, mask: Any, scale: Any) -> tuple[Array, float]:
    if q.shape[:-2] != k.shape[:-2]:
        raise NoRow("attention of fewer heads of keys")
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = jnp.matmul(q, jnp.swapaxes(k, -1, -2)) * factor
    if causal:
        scores = jnp.where(jnp.tri(q.shape[-2], k.shape[-2], dtype=bool), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask
    return scores, factor


@row("_scaled_dot_product_flash_attention_for_cpu.default")
def _attention(
    values: Values, q: Array, k: Array, v: Array, dropout: float = 0.0, is_causal: bool = False, **how: Any
) -> tuple[Array, Array]:
    if dropout:
        raise NoRow("attention with dropout")
    scores, _ = _scores(q, k, is_causal, how.get("attn_mask"), how.get("scale"))
    total = jax.nn.logsumexp(scores, -1)
    # from the greatest score, not from `total`, which is rounded
    weights = jnp.where(jnp.isneginf(total)[..., None], 0, jax.nn.softmax(scores, -1))
    return jnp.matmul(weights, v), total


@row("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def _attention_backward(
    values: Values, gradient: Array, q: Array, k: Array, v: Array, *rest: Any, **how: Any
) -> tuple[Array, ...]:
    made, total, dropout, causal = rest
    if dropout:
        raise NoRow("attention with dropout")
    scores, factor = _scores(q, k, causal, how.get("attn_mask"), how.get("scale"))
    weights = jnp.where(jnp.isneginf(total)[..., None], 0, jnp.exp(scores - total[..., None]))
    to_weights = jnp.matmul(gradient, jnp.swapaxes(v, -1, -2))
    to_scores = weights * (to_weights - jnp.sum(gradient * made, -1, keepdims=True)) * factor
    to_k = jnp.matmul(jnp.swapaxes(to_scores, -1, -2), q)
    return jnp.matmul(to_scores, k), to_k, jnp.matmul(jnp.swapaxes(weights, -1, -2), gradient)
