"""Shape rules of view operators, with the strides and offsets that eager gives, and of reshaping ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fusewright.base.records import replace
from fusewright.operators.rules.common import Rule, Undecided, axis_of, fresh, is_dense, less, same, same_shape
from fusewright.sizes.expressions import Dim, Expr, ceil_div, floor_div, product
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

aten = torch.ops.aten
NO_VIEW = "view size is not compatible with input tensor's size and stride. Use .reshape(...) instead."


def _view(t: TensorType, shape: Sequence[Dim], stride: Sequence[Dim], offset: Dim | None = None) -> TensorType:
    return TensorType(tuple(shape), tuple(stride), t.dtype, t.device, False, t.offset if offset is None else offset)


def _identity(self: TensorType) -> TensorType:
    return replace(self, requires_grad=False) if self.requires_grad else self


def full_shape(t: TensorType, size: Sequence[Dim]) -> tuple[Dim, ...]:
    """`size` with its -1 filled in. Raises Undecided when it does not fit."""
    total = t.numel()
    if -1 not in size:
        if not same(product(size), total):
            raise Undecided
        return tuple(size)
    others = product(d for d in size if d != -1)
    if same(others, 0) or list(size).count(-1) > 1:
        raise Undecided
    missing = floor_div(total, others)
    if not same(missing * others, total):
        raise Undecided
    return tuple(missing if d == -1 else d for d in size)


def view_strides(
    t: TensorType, shape: Sequence[Dim], same: Callable[[Any, Any], Any] = same, less: Callable[[Any, Any], Any] = less
) -> tuple[Dim, ...] | None:
    """Strides that show `t` as `shape` without a copy; None when there are none (ATen/TensorUtils.cpp, computeStride).
    `same`, `less`: who compares sizes."""
    if any(size == 0 for size in t.shape):
        if len(t.shape) == len(shape) and all(map(same, t.shape, shape)):
            return t.stride
        strides: list[Dim] = [1] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * (1 if shape[axis + 1] == 0 else shape[axis + 1])
        return tuple(strides)
    if not t.shape:
        return (1,) * len(shape)
    result: list[Dim] = [0] * len(shape)
    axis = len(shape) - 1
    base: Dim = t.stride[-1]
    have: Dim = 1
    shown: Dim = 1
    for old in range(t.ndim - 1, -1, -1):
        have = have * t.shape[old]
        outer = 1 if old == 0 else t.shape[old - 1]
        if old == 0 or (outer != 1 and not same(t.stride[old - 1], have * base) and not same(outer, 1)):
            while axis >= 0 and (shape[axis] == 1 or less(shown, have)):
                result[axis] = shown * base
                shown = shown * shape[axis]
                axis -= 1
            if not same(shown, have):
                return None
            if old > 0:
                base = t.stride[old - 1]
                have = shown = 1
    return tuple(result) if axis == -1 else None


def _reshape(self: TensorType, size: Sequence[Dim]) -> object:
    shape = full_shape(self, size)
    if self.stride == contiguous_strides(self.shape) and 0 not in self.shape:  # whatever symbolic sizes are
        return _view(self, shape, contiguous_strides(shape))
    strides = view_strides(self, shape)
    if strides is None:  # PyTorch's meta kernel over symbolic sizes gives strides all the same
        raise RuntimeError(NO_VIEW)
    return _view(self, shape, strides)


def _unsafe_view(self: TensorType, size: Sequence[Dim]) -> object:
    found = _reshape(self, size)
    return replace(found, offset=self.offset) if isinstance(found, TensorType) else found


def _reshape_alias(self: TensorType, size: Sequence[Dim], stride: Sequence[Dim]) -> TensorType:
    return _view(self, size, stride)


def _permute(self: TensorType, dims: Sequence[int]) -> TensorType:
    order = [axis_of(d, self.ndim) for d in dims]
    if sorted(order) != list(range(self.ndim)):
        raise Undecided
    return _view(self, [self.shape[a] for a in order], [self.stride[a] for a in order])


def _transpose(self: TensorType, dim0: int, dim1: int) -> TensorType:
    a, b = axis_of(dim0, self.ndim), axis_of(dim1, self.ndim)
    if not self.shape:
        return _identity(self)
    order = list(range(self.ndim))
    order[a], order[b] = b, a
    return _permute(self, order)


def _t(self: TensorType) -> object:
    if self.ndim > 2:
        return NotImplemented
    return _transpose(self, 0, self.ndim - 1)


def _expand(self: TensorType, size: Sequence[Dim], *, implicit: bool = False) -> TensorType:
    missing = len(size) - self.ndim
    if missing < 0:
        raise Undecided
    shape: list[Dim] = list(size)
    stride: list[Dim] = [0] * len(size)
    for axis in range(len(size) - 1, -1, -1):
        if axis < missing:
            if shape[axis] == -1:
                raise Undecided
            # A new leading dimension of size 1 gets the stride that a dense one would have; one of a tensor without
            # dimensions gets 0 (inferExpandGeometry).
            if self.ndim and shape[axis] == 1:
                stride[axis] = shape[axis + 1] * stride[axis + 1]
            continue
        own = self.shape[axis - missing]
        if shape[axis] == -1:
            shape[axis] = own
        stride[axis] = self.stride[axis - missing]
        if not same(own, shape[axis]):
            if own != 1:
                raise Undecided
            stride[axis] = 0
    return _view(self, shape, stride)


def _unsqueeze(self: TensorType, dim: int) -> TensorType:
    axis = axis_of(dim, self.ndim + 1)
    stride: Dim = 1 if axis == self.ndim else self.shape[axis] * self.stride[axis]
    return _view(self, (*self.shape[:axis], 1, *self.shape[axis:]), (*self.stride[:axis], stride, *self.stride[axis:]))


def _squeeze(self: TensorType, dim: int | Sequence[int] | None = None) -> TensorType:
    axes = range(self.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {axis_of(axis, self.ndim) for axis in axes}
    kept = [axis for axis in range(self.ndim) if axis not in gone or not same(self.shape[axis], 1)]
    return _view(self, [self.shape[a] for a in kept], [self.stride[a] for a in kept])


def _select(self: TensorType, dim: int, index: Dim) -> TensorType:
    if not self.shape or isinstance(index, Expr):
        raise Undecided
    axis = axis_of(dim, self.ndim)
    size = self.shape[axis]
    if index < 0:
        if less(size, -index):
            raise Undecided
        index = size + index
    elif not less(index, size):
        raise Undecided
    return _view(
        self,
        self.shape[:axis] + self.shape[axis + 1 :],
        self.stride[:axis] + self.stride[axis + 1 :],
        self.offset + index * self.stride[axis],
    )


def _slice(
    self: TensorType, dim: int = 0, start: Dim | None = None, end: Dim | None = None, step: Dim = 1
) -> TensorType:
    if not self.shape or isinstance(step, Expr) or step <= 0:
        raise Undecided
    axis = axis_of(dim, self.ndim)
    size = self.shape[axis]
    first = _clip(0 if start is None else start, size)
    last = _clip(size if end is None or (isinstance(end, int) and end >= 2**62) else end, size)
    if first is not last and first != last and less(last, first):
        last = first
    length = ceil_div(last - first, step)
    shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
    stride = (*self.stride[:axis], self.stride[axis] * step, *self.stride[axis + 1 :])
    return _view(self, shape, stride, self.offset + first * self.stride[axis])


def _clip(position: Dim, size: Dim) -> Dim:
    """A slice's bound in 0..size."""
    if position is size:
        return size
    if less(position, 0):
        position = position + size
        if less(position, 0):
            return 0
    return size if less(size, position) else position


def _split(self: TensorType, split_size: Dim, dim: int = 0) -> object:
    axis = axis_of(dim, self.ndim)
    if not self.shape or not isinstance(split_size, int) or not isinstance(self.shape[axis], int) or split_size <= 0:
        return NotImplemented
    size = self.shape[axis]
    count = max(-(-size // split_size), 1)  # type: ignore[type-var]
    return tuple(
        _slice(self, axis, i * split_size, min((i + 1) * split_size, size)) for i in range(count)  # type: ignore
    )


def _split_with_sizes(self: TensorType, split_sizes: Sequence[Dim], dim: int = 0) -> object:
    axis = axis_of(dim, self.ndim)
    if not self.shape or not same(sum(split_sizes, start=0), self.shape[axis]):
        return NotImplemented
    results: list[TensorType] = []
    start: Dim = 0
    for size in split_sizes:
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        results.append(_view(self, shape, self.stride, self.offset + start * self.stride[axis]))
        start = start + size
    return tuple(results)


def _unbind(self: TensorType, dim: int = 0) -> object:
    axis = axis_of(dim, self.ndim)
    if not self.shape or not isinstance(self.shape[axis], int):
        return NotImplemented
    return tuple(_select(self, axis, index) for index in range(self.shape[axis]))  # type: ignore[arg-type]


def _as_strided(
    self: TensorType, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Dim | None = None
) -> object:
    if len(size) != len(stride):
        return NotImplemented
    return _view(self, size, stride, storage_offset)


def _select_scatter(self: TensorType, src: TensorType, dim: int, index: Dim) -> object:
    return _scattered(self, src, _select(self, dim, index))


def _slice_scatter(
    self: TensorType, src: TensorType, dim: int = 0, start: Dim | None = None, end: Dim | None = None, step: Dim = 1
) -> object:
    return _scattered(self, src, _slice(self, dim, start, end, step))


def _as_strided_scatter(self: TensorType, src: TensorType, size: Sequence[Dim], *place: object) -> object:
    """A copy of the whole memory: PyTorch's Python version, used over symbolic sizes, knows none around the tensor."""
    return replace(self, requires_grad=False) if same_shape(src.shape, size) and is_dense(self) else NotImplemented


def _scattered(self: TensorType, src: TensorType, place: TensorType) -> object:
    if not same_shape(src.shape, place.shape):
        return NotImplemented
    dense = fresh(self.shape, self)
    return dense if dense.stride == self.stride else NotImplemented


def _backward_of_view(grad_output: TensorType, input_sizes: Sequence[Dim], *place: object) -> TensorType:
    """The gradient of a slice, select or diagonal: zeros of the input's size, written in part."""
    return fresh(input_sizes, grad_output)


RULES: dict[OpOverload, Rule] = {
    aten.slice_backward.default: _backward_of_view,
    aten.select_backward.default: _backward_of_view,
    aten.diagonal_backward.default: _backward_of_view,
    aten.alias.default: _identity,
    aten.detach.default: _identity,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _unsafe_view,
    aten._reshape_alias.default: _reshape_alias,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.expand.default: _expand,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten.as_strided.default: _as_strided,
    aten.select_scatter.default: _select_scatter,
    aten.slice_scatter.default: _slice_scatter,
    aten.as_strided_scatter.default: _as_strided_scatter,
}
