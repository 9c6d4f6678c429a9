"""Rows of linear algebra. What may fail for its numbers (a singular matrix) is handed to `Values.check`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax import lax

from fusewright.backends.xla.reductions import norm
from fusewright.backends.xla.table import DTYPES, Array, NoRow, Values, axis, is_half, row


def _finite(values: Values, *made: Array) -> None:
    for one in made:
        values.check(~jnp.isfinite(one))


def _info(x: Array) -> Array:
    return jnp.zeros(x.shape[:-2], jnp.int32)


@row("_linalg_check_errors.default")
def _check_errors(values: Values, info: Array, name: str, *, is_matrix: bool) -> None:
    values.check(info != 0)


@row("_assert_async.default", "_assert_async.msg")
def _assert(values: Values, condition: Array, *message: str) -> None:
    values.check(condition == 0)


@row("linalg_inv_ex.default")
def _inverse(values: Values, x: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    made = jnp.linalg.inv(x)
    _finite(values, made)
    return made, _info(x)


@row("linalg_cholesky_ex.default")
def _cholesky_ex(values: Values, x: Array, *, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    made = _cholesky(values, x, upper)
    return made, _info(x)


@row("cholesky.default")
def _cholesky(values: Values, x: Array, upper: bool = False) -> Array:
    made = lax.linalg.cholesky(x if not upper else jnp.swapaxes(x, -1, -2), symmetrize_input=False)
    _finite(values, made)
    return jnp.swapaxes(made, -1, -2) if upper else made


@row("cholesky_solve.default")
def _cholesky_solve(values: Values, right: Array, factor: Array, upper: bool = False) -> Array:
    shape = jnp.broadcast_shapes(right.shape[:-2], factor.shape[:-2])
    right, factor = (jnp.broadcast_to(one, (*shape, *one.shape[-2:])) for one in (right, factor))
    made = right
    for transposed in (upper, not upper):
        made = lax.linalg.triangular_solve(factor, made, left_side=True, lower=not upper, transpose_a=transposed)
    _finite(values, made)
    return made


@row("cholesky_inverse.default")
def _cholesky_inverse(values: Values, factor: Array, upper: bool = False) -> Array:
    return _cholesky_solve(
        values, jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape), factor, upper
    )


@row("linalg_solve_triangular.default")
def _solve_triangular(
    values: Values, x: Array, right: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    shape = jnp.broadcast_shapes(x.shape[:-2], right.shape[:-2])
    x, right = (jnp.broadcast_to(one, (*shape, *one.shape[-2:])) for one in (x, right))
    made = lax.linalg.triangular_solve(x, right, left_side=left, lower=not upper, unit_diagonal=unitriangular)
    _finite(values, made)
    return made


@row("triangular_solve.default")
def _triangular_solve(
    values: Values, right: Array, x: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    shape = jnp.broadcast_shapes(x.shape[:-2], right.shape[:-2])
    x, right = (jnp.broadcast_to(one, (*shape, *one.shape[-2:])) for one in (x, right))
    made = lax.linalg.triangular_solve(
        x, right, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    _finite(values, made)
    return made, x


@row("_linalg_solve_ex.default")
def _solve(
    values: Values, x: Array, right: Array, *, left: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array, Array]:
    vector = right.ndim == 1 or (right.ndim == x.ndim - 1 and right.shape == x.shape[:-1])
    columns = right[..., None] if vector else right
    if left:
        made = jnp.linalg.solve(x, columns)
    else:
        made = jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(x, -1, -2), jnp.swapaxes(columns, -1, -2)), -1, -2)
    _finite(values, made)
    factors, pivots, _ = lax.linalg.lu(x if left else jnp.swapaxes(x, -1, -2))
    return (made[..., 0] if vector else made), factors, pivots + 1, _info(x)


@row("linalg_lu_factor_ex.default")
def _lu_factor(values: Values, x: Array, *, pivot: bool = True, check_errors: bool = False) -> tuple[Array, ...]:
    if not pivot:
        raise NoRow("LU without pivots")
    factors, pivots, _ = lax.linalg.lu(x)
    values.check(jnp.diagonal(factors, axis1=-2, axis2=-1) == 0)
    return factors, pivots + 1, _info(x)


@row("linalg_qr.default")
def _qr(values: Values, x: Array, mode: str = "reduced") -> tuple[Array, Array]:
    made = jnp.linalg.qr(x, mode=mode)
    return (jnp.zeros((0,), x.dtype), made) if mode == "r" else tuple(made)  # type: ignore[return-value]


@row("_linalg_det.default")
def _det(values: Values, x: Array) -> tuple[Array, Array, Array]:
    factors, pivots, _ = lax.linalg.lu(x)
    return jnp.linalg.det(x), factors, pivots + 1


@row("_linalg_slogdet.default")
def _slogdet(values: Values, x: Array) -> tuple[Array, Array, Array, Array]:
    factors, pivots, _ = lax.linalg.lu(x)
    sign, logarithm = jnp.linalg.slogdet(x)
    return sign, logarithm, factors, pivots + 1


@row("linalg_matrix_exp.default")
def _matrix_exp(values: Values, x: Array) -> Array:
    if is_half(DTYPES[values.kind.dtype]):
        raise NoRow("the exponential of a matrix of halves, which PyTorch rounds after each step")
    return jsl.expm(x)


@row("linalg_householder_product.default")
def _householder_product(values: Values, x: Array, scales: Array) -> Array:
    return lax.linalg.householder_product(x, scales)


@row("linalg_cross.default")
def _cross(values: Values, x: Array, y: Array, *, dim: int = -1) -> Array:
    x, y = jnp.broadcast_arrays(x, y)
    return jnp.cross(x, y, axis=dim)


def _affine(x: Array, product: Array, beta: Any, alpha: Any) -> Array:
    beta, alpha = (jnp.asarray(factor).astype(product.dtype) for factor in (beta, alpha))  # 0.6 of integers is 0
    return jnp.where(beta == 0, 0, x * beta) + product * alpha


@row("addbmm.default")
def _addbmm(values: Values, x: Array, left: Array, right: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _affine(x, jnp.einsum("bij,bjk->ik", left, right), beta, alpha)


@row("addr.default")
def _addr(values: Values, x: Array, left: Array, right: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _affine(x, jnp.outer(left, right), beta, alpha)


@row("block_diag.default")
def _block_diag(values: Values, blocks: Any) -> Array:
    blocks = [jnp.atleast_2d(block) for block in blocks]
    dtype = jnp.result_type(*blocks)
    made = jnp.zeros(values.shape, dtype)
    top = left = 0
    for block in blocks:
        made = made.at[top : top + block.shape[0], left : left + block.shape[1]].set(block)
        top, left = top + block.shape[0], left + block.shape[1]
    return made


@row("trace.default")
def _trace(values: Values, x: Array) -> Array:
    return jnp.trace(x)


@row("dist.default")
def _dist(values: Values, x: Array, y: Array, p: Any = 2) -> Array:
    return norm(x - y, p, None, False)


@row("_cdist_forward.default")
def _cdist(values: Values, x: Array, y: Array, p: Any, mode: Any) -> Array:
    if is_half(DTYPES[values.kind.dtype]):
        raise NoRow("distances of halves")
    return norm(x[..., :, None, :] - y[..., None, :, :], p, (-1,), False)


@row("renorm.default")
def _renorm(values: Values, x: Array, p: Any, dim: int, most: Any) -> Array:
    rest = tuple(place for place in range(x.ndim) if place != axis(x, dim))
    size = norm(x, p, rest, True)
    return jnp.where(size > most, x * (most / (size + 1e-7)), x)


@row("_trilinear.default")
def _trilinear(
    values: Values,
    x: Array,
    y: Array,
    z: Array,
    expand1: Any,
    expand2: Any,
    expand3: Any,
    sumdim: Any,
    unroll_dim: int = 1,
) -> Array:
    for place in range(len(values.shape) + len(sumdim)):
        x, y, z = (
            jnp.expand_dims(one, place) if place in dims else one
            for one, dims in ((x, expand1), (y, expand2), (z, expand3))
        )
    return jnp.sum(x * y * z, tuple(sumdim))
