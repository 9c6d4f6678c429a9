"""Rows of operators that order, search, and reduce into places named by an index."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from fusewright.backends.xla.table import (
    DTYPES,
    ROWS,
    Array,
    NoRow,
    Row,
    Values,
    axis,
    common,
    is_float,
    is_half,
    row,
    with_axis,
)


@row("sort.stable", "sort.default", widens=False)
def _sort(values: Values, x: Array, *how: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
    given = dict(zip(("dim", "descending"), how))
    dim, descending = given.get("dim", dim), given.get("descending", descending)
    made, places = _sorted(x, dim, descending)
    if not stable:
        _check_ties(values, made, axis(x, dim), x.size)
    return made, places


@row("topk.default", widens=False)
def _topk(values: Values, x: Array, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> Any:
    made, places = _sorted(x, dim, largest)
    if x.ndim == 0:
        return made.reshape(values.kind[0].shape), places.reshape(values.kind[0].shape)
    _check_ties(values, made, axis(x, dim), int(k) + 1)
    if not in_order and k > 1:
        raise NoRow("topk in no order")
    return tuple(lax.slice_in_dim(one, 0, int(k), axis=axis(x, dim)) for one in (made, places))


def _check_ties(values: Values, made: Array, dim: int, count: int) -> None:
    """Among the first `count` of sorted values: in which order equal ones stand is PyTorch's to say."""
    if made.ndim:
        first = lax.slice_in_dim(made, 0, min(count, made.shape[dim]), axis=dim)
        one, other = lax.slice_in_dim(first, 0, -1, axis=dim), lax.slice_in_dim(first, 1, None, axis=dim)
        values.check((one == other) | (jnp.isnan(one) & jnp.isnan(other) if is_float(made) else False))


def _sorted(x: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    """Equal elements stay in order; what is no number is the greatest."""
    shape, dim = x.shape, axis(x, dim)
    (x,) = with_axis(x)
    keys = x.astype(jnp.int8) if x.dtype == jnp.bool_ else jnp.where(x == 0, 0, x)  # 0 and -0 are equal
    places = jnp.argsort(jnp.flip(keys, dim) if descending else keys, axis=dim, stable=True)
    places = x.shape[dim] - 1 - jnp.flip(places, dim) if descending else places
    return jnp.take_along_axis(x, places, dim).reshape(shape), places.astype(jnp.int64).reshape(shape)


def _cumulative(better: Callable[[Array, Array], Array]) -> Callable[..., Any]:
    def pick(first: Any, second: Any) -> Any:
        (one, place), (other, later) = first, second
        take = better(other, one)
        if is_float(one):
            take = (take & ~jnp.isnan(one)) | jnp.isnan(other)
        return jnp.where(take, other, one), jnp.where(take, later, place)

    def compute(values: Values, x: Array, dim: int) -> Any:
        shape, dim = x.shape, axis(x, dim)
        (x,) = with_axis(x)
        places = lax.broadcasted_iota(jnp.int64, x.shape, dim)
        return tuple(one.reshape(shape) for one in lax.associative_scan(pick, (x, places), axis=dim))

    return compute


ROWS["cummax.default"] = Row(_cumulative(lambda one, other: one >= other), False)
ROWS["cummin.default"] = Row(_cumulative(lambda one, other: one <= other), False)


@row("logcumsumexp.default")
def _logcumsumexp(values: Values, x: Array, dim: int) -> Array:
    shape, dim = x.shape, axis(x, dim)
    return lax.cumlogsumexp(with_axis(x)[0], axis=dim).reshape(shape)


@row("aminmax.default")
def _aminmax(values: Values, x: Array, *, dim: Any = None, keepdim: bool = False) -> tuple[Array, Array]:
    if dim is None:
        dim = tuple(range(x.ndim))
    elif x.ndim == 0:
        return x, x
    return jnp.min(x, dim, keepdims=keepdim), jnp.max(x, dim, keepdims=keepdim)


@row("nansum.default")
def _nansum(values: Values, x: Array, dim: Any = None, keepdim: bool = False, **dtype: Any) -> Array:
    dims = tuple(range(x.ndim)) if not dim else tuple(one % x.ndim for one in dim if x.ndim)
    return jnp.sum(jnp.where(jnp.isnan(x), 0, x) if is_float(x) else x.astype(values.dtype), dims, keepdims=keepdim)


@row("isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor", widens=False)
def _isin(values: Values, x: Any, of: Any, *, assume_unique: bool = False, invert: bool = False) -> Array:
    x, of = common(x, of)
    found = jnp.any(x[..., None] == jnp.ravel(of), -1)
    return ~found if invert else found


@row("bucketize.Tensor", "bucketize.Scalar", widens=False)
def _bucketize(values: Values, x: Any, borders: Array, *, out_int32: bool = False, right: bool = False) -> Array:
    x, borders = common(x, borders)
    return jnp.searchsorted(borders, x, side="right" if right else "left")


# By index


@row("take.default", widens=False)
def _take(values: Values, x: Array, index: Array) -> Array:
    values.check((index < -x.size) | (index >= x.size))
    return jnp.take(x.reshape(-1), jnp.where(index < 0, index + x.size, index), mode="clip")


@row("put.default")
def _put(values: Values, x: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    values.check((index < -x.size) | (index >= x.size))
    places = x.reshape(-1).at[jnp.where(index < 0, index + x.size, index).reshape(-1)]
    return (places.add if accumulate else places.set)(source.reshape(-1)).reshape(x.shape)


@row("index_copy.default", widens=False)
def _index_copy(values: Values, x: Array, dim: int, index: Array, source: Array) -> Array:
    shape, dim = x.shape, axis(x, dim)
    x, index, source = with_axis(x, index, source)
    values.check((index < 0) | (index >= x.shape[dim]))
    return x.at[(slice(None),) * dim + (index,)].set(source).reshape(shape)


_START = {"sum": 0, "prod": 1, "mean": 0, "amax": None, "amin": None}


def _reduce_into(values: Values, x: Array, places: Any, source: Array, reduce: str, include_self: bool) -> Array:
    """x with `source` reduced into the elements at `places`; without them themselves unless `include_self`."""
    if is_half(DTYPES[values.kind.dtype]) and reduce not in ("amax", "amin"):
        raise NoRow(f"{reduce} of halves, which PyTorch rounds after each step")
    start: Any = _START[reduce]
    if start is None:
        low, high = (
            (-jnp.inf, jnp.inf)
            if is_float(x)
            else (False, True)
            if x.dtype == jnp.bool_
            else (jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max)
        )
        start = low if reduce == "amax" else high
    made = x if include_self else x.at[places].set(jnp.asarray(start, x.dtype))
    if reduce in ("sum", "mean"):
        made = made.at[places].add(source)
    elif reduce == "prod":
        made = made.at[places].multiply(source)
    else:
        made = (made.at[places].max if reduce == "amax" else made.at[places].min)(source)
    if reduce == "mean":
        count = jnp.full(x.shape, int(include_self), x.dtype).at[places].add(jnp.ones_like(source))
        count = jnp.maximum(count, 1)
        made = made / count if is_float(x) else jnp.floor_divide(made, count)
    return made


@row("scatter_reduce.two")
def _scatter_reduce(
    values: Values, x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True
) -> Array:
    shape, dim = x.shape, axis(x, dim)
    x, index, source = with_axis(x, index, source)
    values.check((index < 0) | (index >= x.shape[dim]))
    places = list(jnp.indices(index.shape, sparse=True))
    places[dim] = index
    source = source[tuple(map(slice, index.shape))]
    return _reduce_into(values, x, tuple(places), source, reduce, include_self).reshape(shape)


@row("index_reduce.default")
def _index_reduce(
    values: Values, x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True
) -> Array:
    shape, dim = x.shape, axis(x, dim)
    x, index, source = with_axis(x, index, source)
    values.check((index < 0) | (index >= x.shape[dim]))
    places = (slice(None),) * dim + (index,)
    return _reduce_into(values, x, places, source, reduce, include_self).reshape(shape)


@row("masked_scatter.default", widens=False)
def _masked_scatter(values: Values, x: Array, mask: Array, source: Array) -> Array:
    mask, x = jnp.broadcast_to(mask, values.shape).reshape(-1), jnp.broadcast_to(x, values.shape)
    values.check(jnp.sum(mask) > source.size)
    if not source.size:
        return x
    picked = jnp.take(source.reshape(-1), jnp.cumsum(mask) - 1, mode="clip")
    return jnp.where(mask, picked, x.reshape(-1)).reshape(x.shape)


def _max_unpool(values: Values, x: Array, index: Array, size: Any, *windows: Any) -> Array:
    lead, whole = x.shape[: -len(size)], math.prod(map(int, size))
    values.check((index < 0) | (index >= whole))
    rows = math.prod(lead)
    flat, places = x.reshape(rows, -1), index.reshape(rows, -1)
    made = jnp.zeros((rows, whole), x.dtype).at[jnp.arange(rows)[:, None], places].set(flat)
    return made.reshape(*lead, *map(int, size))


ROWS["max_unpool2d.default"] = ROWS["max_unpool3d.default"] = Row(_max_unpool, False)


@row("_unsafe_masked_index.default", widens=False)
def _masked_index(values: Values, x: Array, mask: Array, indices: Any, fill: Any) -> Array:
    index = tuple(slice(None) if one is None else one for one in indices)
    return jnp.where(mask, x.at[index].get(mode="clip"), jnp.asarray(fill, x.dtype))
