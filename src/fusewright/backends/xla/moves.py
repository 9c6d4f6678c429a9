"""Rows of operators that move, read by index or make elements."""

from __future__ import annotations

import math
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
    axis,
    common,
    is_float,
    is_half,
    plain,
    row,
    with_axis,
)
from fusewright.base.pytorch import torch


@row("view.default", "_unsafe_view.default", "reshape.default", widens=False)
def _view(values: Values, x: Array, shape: Any) -> Array:
    return x.reshape([int(size) for size in shape])


@row("t.default", widens=False)
def _t(values: Values, x: Array) -> Array:
    return x.T


@row("transpose.int", widens=False)
def _transpose(values: Values, x: Array, first: int, second: int) -> Array:
    return x if x.ndim == 0 else jnp.swapaxes(x, first, second)


@row("permute.default", widens=False)
def _permute(values: Values, x: Array, dims: Any) -> Array:
    return jnp.transpose(x, dims)


@row("unsqueeze.default", widens=False)
def _unsqueeze(values: Values, x: Array, dim: int) -> Array:
    return jnp.expand_dims(x, dim)


@row("squeeze.dim", "squeeze.dims", widens=False)
def _squeeze(values: Values, x: Array, dims: Any) -> Array:
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    return jnp.squeeze(x, tuple(dim for dim in dims if x.ndim and x.shape[dim] == 1))


@row("expand.default", widens=False)
def _expand(values: Values, x: Array, shape: Any, implicit: bool = False) -> Array:
    own = (1,) * (len(shape) - x.ndim) + x.shape
    return jnp.broadcast_to(x, [old if new == -1 else int(new) for old, new in zip(own, shape)])


@row("select.int", widens=False)
def _select(values: Values, x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, int(index), dim % x.ndim, keepdims=False)


@row("select_backward.default", widens=False)
def _select_backward(values: Values, gradient: Array, shape: Any, dim: int, index: int) -> Array:
    made = jnp.zeros([int(size) for size in shape], gradient.dtype)
    return made.at[(slice(None),) * (dim % made.ndim) + (int(index),)].set(gradient)


def _places(size: int, start: Any, end: Any, step: int) -> slice:
    return slice(*slice(start, end, step).indices(size))


@row("slice.Tensor", widens=False)
def _slice(values: Values, x: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Array:
    dim %= x.ndim
    return x[(slice(None),) * dim + (_places(x.shape[dim], start, end, step),)]


@row("slice_backward.default", widens=False)
def _slice_backward(values: Values, gradient: Array, shape: Any, dim: int, *part: Any) -> Array:
    made = jnp.zeros([int(size) for size in shape], gradient.dtype)
    dim %= made.ndim
    return made.at[(slice(None),) * dim + (_places(made.shape[dim], *part),)].set(gradient)


@row("split.Tensor", widens=False)
def _split(values: Values, x: Array, size: int, dim: int = 0) -> list[Array]:
    return jnp.split(x, list(range(size, x.shape[dim], size)), dim)


@row("split_with_sizes.default", widens=False)
def _split_with_sizes(values: Values, x: Array, sizes: Any, dim: int = 0) -> list[Array]:
    return jnp.split(x, [sum(sizes[: place + 1]) for place in range(len(sizes) - 1)], dim)


@row("cat.default", widens=False)
def _cat(values: Values, parts: Any, dim: int = 0) -> Array:
    parts = [part for part in parts if part.shape != (0,)] or parts[:1]
    return jnp.concatenate(common(*parts) if len(parts) > 1 else parts, dim)


@row("stack.default", widens=False)
def _stack(values: Values, parts: Any, dim: int = 0) -> Array:
    return jnp.stack(common(*parts) if len(parts) > 1 else parts, dim)


@row("unbind.int", widens=False)
def _unbind(values: Values, x: Array, dim: int = 0) -> list[Array]:
    return [lax.index_in_dim(x, place, axis(x, dim), keepdims=False) for place in range(x.shape[dim])]


@row("squeeze.default", widens=False)
def _squeeze_all(values: Values, x: Array) -> Array:
    return jnp.squeeze(x)


@row("repeat.default", widens=False)
def _repeat(values: Values, x: Array, times: Any) -> Array:
    return jnp.tile(x.reshape((1,) * (len(times) - x.ndim) + x.shape), times)


@row("flip.default", widens=False)
def _flip(values: Values, x: Array, dims: Any) -> Array:
    return jnp.flip(x, tuple(axis(x, dim) for dim in dims)) if x.ndim else x


@row("roll.default", widens=False)
def _roll(values: Values, x: Array, shifts: Any, dims: Any = ()) -> Array:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims and x.ndim else jnp.roll(x, shifts[0])


ROWS["tril.default"] = Row(plain(jnp.tril), False)
ROWS["triu.default"] = Row(plain(jnp.triu), False)


@row("diagonal.default", "diagonal_copy.default", widens=False)
def _diagonal(values: Values, x: Array, offset: int = 0, first: int = 0, second: int = 1) -> Array:
    return jnp.diagonal(x, offset, first, second)


@row("unfold.default", widens=False)
def _unfold(values: Values, x: Array, dim: int, size: int, step: int) -> Array:
    (x,), dim = with_axis(x), axis(x, dim)
    starts = jnp.arange(0, x.shape[dim] - size + 1, step)
    made = jnp.take(x, starts[:, None] + jnp.arange(size), dim, mode="clip")
    return jnp.moveaxis(made, dim + 1, -1).reshape(values.shape)


@row("select_scatter.default", widens=False)
def _select_scatter(values: Values, x: Array, source: Array, dim: int, index: int) -> Array:
    return x.at[(slice(None),) * axis(x, dim) + (int(index),)].set(source)


@row("slice_scatter.default", widens=False)
def _slice_scatter(values: Values, x: Array, source: Array, dim: int = 0, *part: Any, **named: Any) -> Array:
    start, end, step = {
        "start": None,
        "end": None,
        "step": 1,
        **dict(zip(("start", "end", "step"), part)),
        **named,
    }.values()
    dim = axis(x, dim)
    return x.at[(slice(None),) * dim + (_places(x.shape[dim], start, end, step),)].set(source)


@row("constant_pad_nd.default", widens=False)
def _pad(values: Values, x: Array, pads: Any, value: Any = 0) -> Array:
    by_dim = [(int(low), int(high), 0) for low, high in zip(pads[::2], pads[1::2])]
    by_dim = [(0, 0, 0)] * (x.ndim - len(by_dim)) + by_dim[::-1]
    return lax.pad(x, jnp.asarray(value, x.dtype), by_dim)


@row("clone.default", "alias.default", "detach.default", "lift_fresh_copy.default", widens=False)
def _clone(values: Values, x: Array, memory_format: Any = None) -> Array:
    return x


@row("_to_copy.default", widens=False)
def _to_copy(values: Values, x: Array, dtype: Any = None, **where: Any) -> Array:
    if dtype is None or DTYPES[dtype] == x.dtype:
        return x
    if is_float(x) and not jnp.issubdtype(DTYPES[dtype], jnp.floating) and dtype != torch.bool:
        most, made = jnp.iinfo(DTYPES[dtype]), x.astype(DTYPES[dtype])
        outside = ~((x > float(most.min) - 1) & (x < float(most.max) + 1))
        # C++ leaves these conversions open: each machine, and each of its instructions, has its own result
        found = set(torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30], device="cpu").to(dtype).tolist())
        if len(found) == 1:
            return jnp.where(outside, found.pop(), made)
        values.check(outside)
        return made
    return x.astype(DTYPES[dtype])


# Reading by index: XLA clamps an index out of range, eager raises an error


@row("embedding.default", widens=False)
def _embedding(
    values: Values, weight: Array, index: Array, padding: int = -1, scale: bool = False, sparse: bool = False
) -> Array:
    values.check((index < 0) | (index >= weight.shape[0]))
    return jnp.take(weight, index, axis=0, mode="clip")


@row("embedding_dense_backward.default")
def _embedding_backward(values: Values, gradient: Array, index: Array, rows: int, padding: int, scale: bool) -> Array:
    if scale:
        raise NoRow("embedding with scale_grad_by_freq")
    gradient = jnp.where((index == padding)[..., None], jnp.zeros_like(gradient), gradient)
    return jnp.zeros((int(rows), gradient.shape[-1]), gradient.dtype).at[index].add(gradient)


@row("gather.default", widens=False)
def _gather(values: Values, x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    shape, dim = index.shape, axis(x, dim)
    x, index = with_axis(x, index)
    values.check((index < 0) | (index >= x.shape[dim]))
    part = x[tuple(slice(None) if place == dim else slice(size) for place, size in enumerate(index.shape))]
    return jnp.take_along_axis(part, index, dim, mode="clip").reshape(shape)


def _scattered(values: Values, x: Array, dim: int, index: Array, source: Any) -> tuple[Any, Array]:
    """The places of `x` that `index` names, and what goes there."""
    dim = axis(x, dim)
    x, index = with_axis(x, index)
    values.check((index < 0) | (index >= x.shape[dim]))
    places = list(jnp.indices(index.shape, sparse=True))
    places[dim] = index
    if isinstance(source, jax.Array) and source.ndim:
        source = source[tuple(map(slice, index.shape))]
    elif isinstance(source, jax.Array):
        source = source.reshape((1,) * index.ndim)
    return x.at[tuple(places)], jnp.asarray(source, x.dtype)


@row("scatter.src", "scatter.value", widens=False)
def _scatter(values: Values, x: Array, dim: int, index: Array, source: Any) -> Array:
    places, source = _scattered(values, x, dim, index, source)
    return places.set(source).reshape(x.shape)


@row("scatter_add.default")
def _scatter_add(values: Values, x: Array, dim: int, index: Array, source: Array) -> Array:
    places, source = _scattered(values, x, dim, index, source)
    return places.add(source).reshape(x.shape)


@row("index_select.default", widens=False)
def _index_select(values: Values, x: Array, dim: int, index: Array) -> Array:
    shape = values.shape
    (x, index), dim = with_axis(x, index), axis(x, dim)
    values.check((index < 0) | (index >= x.shape[dim]))
    return jnp.take(x, index, dim, mode="clip").reshape(shape)


@row("index_add.default")
def _index_add(values: Values, x: Array, dim: int, index: Array, source: Array, alpha: Any = 1) -> Array:
    shape, dim = x.shape, axis(x, dim)
    x, index, source = with_axis(x, index, source)
    values.check((index < 0) | (index >= x.shape[dim]))
    return x.at[(slice(None),) * dim + (index,)].add(source * jnp.asarray(alpha, x.dtype)).reshape(shape)


def _places_of(values: Values, x: Array, indices: Any) -> tuple[Any, ...]:
    for dim, index in enumerate(indices):
        if index is None:
            continue
        if index.dtype in (jnp.bool_, jnp.uint8):
            raise NoRow("an index that is a mask")
        values.check((index < -x.shape[dim]) | (index >= x.shape[dim]))
    return tuple(slice(None) if index is None else index for index in indices)


@row("index.Tensor", "_unsafe_index.Tensor", widens=False)
def _index(values: Values, x: Array, indices: Any) -> Array:
    return x.at[_places_of(values, x, indices)].get(mode="clip")


@row("index_put.default", "_unsafe_index_put.default")
def _index_put(values: Values, x: Array, indices: Any, source: Array, accumulate: bool = False) -> Array:
    places = x.at[_places_of(values, x, indices)]
    return places.add(source) if accumulate else places.set(source)


# Making


@row("full.default", widens=False)
def _full(values: Values, shape: Any, value: Any, **how: Any) -> Array:
    return jnp.full(values.shape, jnp.asarray(value).astype(DTYPES[values.kind.dtype]))


@row("new_full.default", "full_like.default", "fill.Scalar", "fill.Tensor", widens=False)
def _full_like(values: Values, x: Array, *rest: Any, **how: Any) -> Array:
    return _full(values, None, rest[-1])


@row("zeros.default", "new_zeros.default", "zeros_like.default", widens=False)
def _zeros(values: Values, *given: Any, **how: Any) -> Array:
    return jnp.zeros(values.shape, DTYPES[values.kind.dtype])


@row("ones.default", "new_ones.default", "ones_like.default", widens=False)
def _ones(values: Values, *given: Any, **how: Any) -> Array:
    return jnp.ones(values.shape, DTYPES[values.kind.dtype])


@row("scalar_tensor.default", widens=False)
def _scalar_tensor(values: Values, value: Any, **how: Any) -> Array:
    return _full(values, None, value)


@row("eye.default", "eye.m", widens=False)
def _eye(values: Values, *sizes: Any, **how: Any) -> Array:
    return jnp.eye(*values.shape, dtype=DTYPES[values.kind.dtype])


@row("arange.default", "arange.start", "arange.start_step", widens=False)
def _arange(values: Values, *ends: Any, **how: Any) -> Array:
    if not all(isinstance(value, int) for value in ends):
        raise NoRow("arange of floating-point numbers")
    return jnp.arange(*ends).astype(DTYPES[values.kind.dtype])


@row("empty.memory_format", "new_empty.default", "empty_like.default", "empty_permuted.default", widens=False)
def _empty(values: Values, *given: Any, **how: Any) -> Array:
    return jnp.zeros(values.shape, DTYPES[values.kind.dtype])  # any numbers will do


@row("linspace.default", widens=False)
def _linspace(values: Values, start: Any, end: Any, steps: int, **how: Any) -> Array:
    dtype = DTYPES[values.kind.dtype]
    if not jnp.issubdtype(dtype, jnp.floating) or is_half(dtype):
        raise NoRow(f"linspace of {dtype}")
    step = jnp.asarray((end - start) / max(int(steps) - 1, 1), dtype)
    places = jnp.arange(int(steps))
    ahead = jnp.asarray(start, dtype) + step * places.astype(dtype)
    back = jnp.asarray(end, dtype) - step * (int(steps) - 1 - places).astype(dtype)
    return jnp.where(places < int(steps) // 2, ahead, back) if steps > 1 else jnp.full((int(steps),), start, dtype)


@row("diag_embed.default", widens=False)
def _diag_embed(values: Values, x: Array, offset: int = 0, first: int = -2, second: int = -1) -> Array:
    size, ndim = x.shape[-1] + abs(offset), x.ndim + 1
    places = jnp.arange(x.shape[-1])
    made = jnp.zeros((*x.shape[:-1], size, size), x.dtype)
    made = made.at[..., places + max(-offset, 0), places + max(offset, 0)].set(x)
    return jnp.moveaxis(made, (-2, -1), (first % ndim, second % ndim))


@row("diagonal_scatter.default", widens=False)
def _diagonal_scatter(
    values: Values, x: Array, source: Array, offset: int = 0, first: int = 0, second: int = 1
) -> Array:
    made = jnp.moveaxis(x, (axis(x, first), axis(x, second)), (-2, -1))
    places = jnp.arange(source.shape[-1])
    made = made.at[..., places + max(-offset, 0), places + max(offset, 0)].set(source)
    return jnp.moveaxis(made, (-2, -1), (axis(x, first), axis(x, second)))


def _padded(mode: str) -> Any:
    def compute(values: Values, x: Array, pads: Any) -> Array:
        by_dim = [(int(low), int(high)) for low, high in zip(pads[::2], pads[1::2])][::-1]
        for dim, (low, high) in enumerate(by_dim, x.ndim - len(by_dim)):
            size = x.shape[dim]
            if mode == "reflect" and max(low, high) >= size:
                raise NoRow("a reflection by more than the size")
            places = jnp.arange(-low, size + high)
            places = (
                (size - 1) - jnp.abs((size - 1) - jnp.abs(places)) if mode == "reflect" else places.clip(0, size - 1)
            )
            x = jnp.take(x, places, dim)
        return x

    return compute


for _count in (1, 2, 3):
    ROWS[f"reflection_pad{_count}d.default"] = Row(_padded("reflect"), False)
    ROWS[f"replication_pad{_count}d.default"] = Row(_padded("edge"), False)


@row("rot90.default", widens=False)
def _rot90(values: Values, x: Array, times: int = 1, dims: Any = (0, 1)) -> Array:
    return jnp.rot90(x, times, tuple(dims))


@row("pixel_shuffle.default", widens=False)
def _pixel_shuffle(values: Values, x: Array, factor: int) -> Array:
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    at = len(lead)
    return x.transpose(*range(at), at, at + 3, at + 1, at + 4, at + 2).reshape(values.shape)


@row("pixel_unshuffle.default", widens=False)
def _pixel_unshuffle(values: Values, x: Array, factor: int) -> Array:
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    at = len(lead)
    return x.transpose(*range(at), at, at + 2, at + 4, at + 1, at + 3).reshape(values.shape)


@row("channel_shuffle.default", widens=False)
def _channel_shuffle(values: Values, x: Array, groups: int) -> Array:
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:]).swapaxes(1, 2).reshape(x.shape)


ROWS |= {  # the same as values of their own
    f"{copied}.{overload}": ROWS[f"{original}.{overload}"]
    for copied, original, overload in (
        ("expand_copy", "expand", "default"), ("alias_copy", "alias", "default"), ("view_copy", "view", "default"),
        ("permute_copy", "permute", "default"), ("unbind_copy", "unbind", "int"), ("t_copy", "t", "default"),
        ("unfold_copy", "unfold", "default"), ("unsqueeze_copy", "unsqueeze", "default"),
        ("transpose_copy", "transpose", "int"), ("split_with_sizes_copy", "split_with_sizes", "default"),
        ("split_copy", "split", "Tensor"), ("squeeze_copy", "squeeze", "default"),
        ("squeeze_copy", "squeeze", "dim"), ("squeeze_copy", "squeeze", "dims"), ("slice_copy", "slice", "Tensor"),
        ("select_copy", "select", "int"),
        ("detach_copy", "detach", "default"),
    )
    if f"{original}.{overload}" in ROWS
}  # fmt: skip


@row("narrow_copy.default", widens=False)
def _narrow_copy(values: Values, x: Array, dim: int, start: Any, length: Any) -> Array:
    return lax.dynamic_slice_in_dim(x, int(start) % max(x.shape[axis(x, dim)], 1), int(length), axis(x, dim))
