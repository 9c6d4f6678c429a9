"""Conditions on sizes that eager's kernels check and PyTorch's meta kernels take for granted.

Takes an operator with a TensorType in each tensor's place; makes each condition a guard over symbolic sizes. Always
holds: sizes that do not fit break the graph, so that eager raises its own error; a later call whose sizes do not fit
fails a guard, and ends up here again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import ops
from torch._ops import OpOverload

from fusewright.base.records import replace
from fusewright.base.signals import GraphBreak
from fusewright.operators.data_dependent import MASKS
from fusewright.operators.derive import derive
from fusewright.operators.rules.common import preserved_strides, promote
from fusewright.operators.rules.resizing import UPSAMPLING
from fusewright.operators.rules.views import view_strides
from fusewright.sizes.expressions import Dim, Relation, minimum, product
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.tensor_type import TensorType

aten = ops.aten
Pairs = Sequence[tuple[Dim, Dim] | Relation]
Condition = Callable[..., Pairs | None]
"""From the sizes' environment and the operator's arguments, the sizes that must be equal, and other relations that must
hold; None when even the number of sizes is wrong."""


def _fourier(env: ShapeEnv, self: TensorType, *rest: Any) -> Pairs:
    return [Relation("<=", 1, size) for size in self.shape]  # neither MKL nor cuFFT has one of nothing


def _equal_shapes(a: Sequence[Dim], b: Sequence[Dim]) -> Pairs | None:
    return list(zip(a, b, strict=True)) if len(a) == len(b) else None


def _fits_view(view: OpOverload) -> Condition:
    """`src` has the shape of the part of `self` that it is written to."""

    def condition(env: ShapeEnv, self: TensorType, src: TensorType, *place: Any, **named: Any) -> Pairs | None:
        part: Any = derive(view, (self, *place), named, env)
        return _equal_shapes(src.shape, part.shape)

    return condition


def _group_norm(
    env: ShapeEnv,
    input: TensorType,
    weight: TensorType | None,
    bias: TensorType | None,
    n: Dim,
    c: Dim,
    hxw: Dim,
    *rest: Any,
) -> Pairs:
    parameters = [(t.shape[0], c) for t in (weight, bias) if t is not None and t.ndim == 1]
    return [(product(input.shape), product((n, c, hxw))), *parameters]


def _index_add(
    env: ShapeEnv, self: TensorType, dim: int, index: TensorType, source: TensorType, *rest: Any, **named: Any
) -> Pairs:
    axes = range(self.ndim if self.ndim == source.ndim else 0)
    return [(self.shape[axis], source.shape[axis]) for axis in axes if axis != dim % self.ndim]


def _convolution(
    env: ShapeEnv, input: TensorType, weight: TensorType, bias: TensorType | None, stride: object, padding: object,
    dilation: object, transposed: bool, output_padding: object, groups: int,
) -> Pairs | None:  # fmt: skip
    """The meta kernel does not look at the bias, and that of PyTorch before 2.13 does not compare the channels of a
    transposed one."""
    fits = input.ndim == weight.ndim > 1
    pairs = [(input.shape[1], weight.shape[0])] if transposed and fits else []
    if bias is None or not fits:
        return pairs
    filters = weight.shape[1] * groups if transposed else weight.shape[0]
    return [*pairs, (bias.shape[0], filters)] if bias.ndim == 1 else None


def _index_copy(env: ShapeEnv, self: TensorType, dim: int, index: TensorType, source: TensorType) -> Pairs:
    """The meta kernel of PyTorch before 2.13 does not count the indices."""
    count = source.shape[dim % source.ndim] if source.ndim else 1
    return [*_index_add(env, self, dim, index, source), (index.numel(), count)]


def _has(self: TensorType, dim: int) -> bool:
    """Whether there is such a dimension; a number has one."""
    return -max(self.ndim, 1) <= dim < max(self.ndim, 1)


def _along(env: ShapeEnv, self: TensorType, dim: int = -1, *rest: Any, **named: Any) -> Pairs | None:
    return () if _has(self, dim) else None


def _squeeze(env: ShapeEnv, self: TensorType, dim: Sequence[int]) -> Pairs | None:
    """Each dimension is named once."""
    return () if len({one % max(self.ndim, 1) for one in dim}) == len(dim) else None


def _gather(env: ShapeEnv, self: TensorType, dim: int, index: TensorType, **named: Any) -> Pairs | None:
    """The index is no larger than what it picks from, but along `dim`; one without elements fits any."""
    if not _has(self, dim):
        return None
    if self.ndim != index.ndim or 0 in index.shape:
        return ()
    return [Relation("<=", index.shape[axis], self.shape[axis]) for axis in range(self.ndim) if axis != dim % self.ndim]


def _index_put(
    env: ShapeEnv, self: TensorType, indices: Sequence[TensorType | None], values: TensorType, *rest: Any, **named: Any
) -> Pairs | None:
    """Masks have the sizes of what they select from; where there are none, each index has places, to which the values
    broadcast."""
    masks: list[tuple[Dim, Dim]] = []
    axis = 0
    for index in indices:
        width = index.ndim if index is not None and index.dtype in MASKS else 1
        if axis + width > self.ndim:
            return None
        if index is not None and index.dtype in MASKS:
            masks += zip(index.shape, self.shape[axis : axis + width], strict=True)
        axis += width
    if masks or any(index is not None and index.dtype in MASKS for index in indices):
        return masks
    if _index(env, self, indices) is None:
        return None
    places: Any = derive(aten.index.Tensor, (self, indices), {}, env)
    missing = places.ndim - values.ndim
    if missing < 0 and any(size != 1 for size in values.shape[:-missing]):
        return None
    pairs = zip(values.shape[max(-missing, 0) :], places.shape[max(missing, 0) :], strict=True)
    return [(size, place) for size, place in pairs if not env.guard(Relation("==", size, 1))]


def _nll_loss(
    env: ShapeEnv, self: TensorType, target: TensorType, weight: TensorType | None, *rest: Any, **named: Any
) -> Pairs:
    """A weight for each class; a target for each place."""
    weights = () if weight is None or weight.ndim != 1 else ((weight.shape[0], self.shape[1 if self.ndim > 1 else 0]),)
    places = zip((self.shape[0], *self.shape[2:]), target.shape) if self.ndim == 4 and target.ndim == 3 else ()
    return [*weights, *places]


def _upsample(env: ShapeEnv, self: TensorType, output_size: Sequence[Dim], *rest: Any, **named: Any) -> Pairs:
    """There is something to read and something to write; an empty batch is allowed."""
    return [Relation("<=", 1, size) for size in (*self.shape[1:], *output_size)]


def _constant_pad(env: ShapeEnv, self: TensorType, pad: Sequence[Dim], value: object = 0) -> Pairs | None:
    """Negative padding takes away no more than there is."""
    for size, before, after in zip(reversed(self.shape), pad[::2], pad[1::2], strict=False):
        taking = [amount for amount in (before, after) if env.known(Relation("<=", 0, amount)) is not True]
        # What is added on one side cannot be taken away on the other. One amount alone needs no minimum: the size
        # itself is not negative.
        left = size + (minimum(before, 0) + minimum(after, 0) if len(taking) == 2 else taking[0]) if taking else size
        if not env.expect(Relation("<=", 0, left)):
            return None
    return ()


def _hold(env: ShapeEnv, relations: Sequence[Relation]) -> Pairs | None:
    """They hold, and no size is taken to be 2 or more for it."""
    return () if all(env.expect(one) if env.is_unbacked(one) else env.settle(one) for one in relations) else None


def _extreme(
    env: ShapeEnv, self: TensorType, dim: int | Sequence[int] | None = None, *rest: Any, **named: Any
) -> Pairs | None:
    """There is something to choose from."""
    axes = [dim] if isinstance(dim, int) else dim or range(self.ndim)
    return _hold(env, [Relation("<=", 1, self.shape[axis]) for axis in axes if self.ndim])


def _pool(op: OpOverload) -> Condition:
    """There is something to read, and something to write; an empty batch is allowed."""

    def condition(env: ShapeEnv, self: TensorType, *rest: Any, **named: Any) -> Pairs | None:
        found: Any = derive(op, (self, *rest), named, env)
        result = found if isinstance(found, TensorType) else found[0]
        return _hold(env, [Relation("<=", 1, size) for size in (*self.shape[-3:], *result.shape[-2:])])

    return condition


def _adaptive_pool(env: ShapeEnv, self: TensorType, *rest: Any) -> Pairs | None:
    return _hold(env, [Relation("<=", 1, size) for size in self.shape[1:]])


def _pixel_unshuffle(env: ShapeEnv, self: TensorType, *rest: Any) -> Pairs | None:
    """There is something to move: eager gives what has no elements back with the shape that it has."""
    return _hold(env, [Relation("<=", 1, size) for size in self.shape])


def _index(
    env: ShapeEnv, self: TensorType, indices: Sequence[TensorType | None], *rest: Any, **named: Any
) -> Pairs | None:
    """Where an index stands, there is a place. Kernels check each index, and are not asked where another dimension is
    empty."""
    indexed = {axis: index for axis, index in enumerate(indices) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in indexed.values()):
        return ()
    places = [Relation("<=", minimum(product(index.shape), 1), self.shape[axis]) for axis, index in indexed.items()]
    if any(env.known(one) is False for one in places):
        return None  # also where nothing reads the result, and so no kernel asks
    if all(env.known(Relation("<=", 1, size)) for axis, size in enumerate(self.shape) if axis not in indexed):
        return ()
    return _hold(env, places)


def _index_select(
    env: ShapeEnv, self: TensorType, dim: int, index: TensorType, *rest: Any, **named: Any
) -> Pairs | None:
    """A CPU's kernel looks at each index, also where it takes nothing: whether it does is settled, since a loop over
    nothing checks nothing."""
    if not self.ndim or not _has(self, dim):
        return () if _has(self, dim) else None
    for axis, size in enumerate(self.shape):
        if axis != dim % self.ndim and self.device.type == "cpu" and not env.is_unbacked(size):
            env.settle(Relation("==", size, 0))
    return _index(env, self, [None] * (dim % self.ndim) + [index])


def _isin(env: ShapeEnv, elements: TensorType, test_elements: TensorType, **named: Any) -> Pairs | None:
    """A CPU views few elements to look for in one dimension, which not every layout allows."""
    sizes = (*elements.shape, *test_elements.shape, *test_elements.stride)
    if test_elements.device.type != "cpu" or not all(isinstance(size, int) for size in sizes):
        return ()
    count: Any = product(test_elements.shape)
    few = count < 10 * product(elements.shape) ** 0.145  # type: ignore[operator]
    if promote(elements, test_elements) != test_elements.dtype:
        test_elements = replace(test_elements, stride=preserved_strides(test_elements))
    return None if few and view_strides(test_elements, (count,)) is None else ()


CONDITIONS: dict[OpOverload, Condition] = {
    **dict.fromkeys(
        (
            aten.amax.default,
            aten.amin.default,
            aten.max.default,
            aten.min.default,
            aten.max.dim,
            aten.min.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.aminmax.default,
            aten.median.dim,
            aten.nanmedian.dim,
            aten.mode.default,
        ),
        _extreme,
    ),
    aten.max_pool2d_with_indices.default: _pool(aten.max_pool2d_with_indices.default),
    aten.avg_pool2d.default: _pool(aten.avg_pool2d.default),
    aten._adaptive_avg_pool2d.default: _adaptive_pool,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_select.default: _index_select,
    **dict.fromkeys(
        (
            aten.index_fill.int_Scalar,
            aten.index_fill.int_Tensor,
            aten.index_fill_.int_Scalar,
            aten.index_fill_.int_Tensor,
        ),
        _index_select,
    ),
    **dict.fromkeys((aten.sort.default, aten.sort.stable, aten.unique_dim.default), _along),
    aten.unique_consecutive.default: lambda env, self, inverse=False, counts=False, dim=None: (
        () if dim is None else _along(env, self, dim)
    ),
    aten.squeeze.dims: _squeeze,
    aten.embedding.default: lambda env, weight, indices, *rest: _index_select(env, weight, 0, indices),
    aten.slice_scatter.default: _fits_view(aten.slice.Tensor),
    aten.select_scatter.default: _fits_view(aten.select.int),
    aten.diagonal_scatter.default: _fits_view(aten.diagonal.default),
    aten.as_strided_scatter.default: lambda env, self, src, size, *rest, **named: _equal_shapes(src.shape, size),
    **dict.fromkeys(
        (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
        lambda env, gradient, result, *rest: _equal_shapes(gradient.shape, result.shape),
    ),
    aten.native_group_norm.default: _group_norm,
    aten.gather.default: _gather,
    aten.isin.Tensor_Tensor: _isin,
    **dict.fromkeys(
        (
            aten.index_put.default,
            aten.index_put_.default,
            aten._unsafe_index_put.default,
            aten._index_put_impl.default,
            aten._index_put_impl_.default,
        ),
        _index_put,
    ),
    aten.convolution.default: _convolution,
    aten.index_add.default: _index_add,
    aten.index_add_.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.index_copy_.default: _index_copy,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.constant_pad_nd.default: _constant_pad,
    **dict.fromkeys(UPSAMPLING, _upsample),
    **dict.fromkeys((aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default), _fourier),
}


def check(env: ShapeEnv | None, op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> None:
    """Raises GraphBreak when the sizes do not fit. `env`: None where all sizes are numbers."""
    condition = CONDITIONS.get(op)
    if condition is None:
        return
    env = ShapeEnv() if env is None else env
    pairs = condition(env, *args, **kwargs)
    if pairs is None or not all(env.guard(one if isinstance(one, Relation) else Relation("==", *one)) for one in pairs):
        raise GraphBreak("operator-failed", f"{op}: sizes do not fit")


__all__ = ["check"]
