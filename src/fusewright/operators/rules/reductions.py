"""Shape rules of reductions, softmax, normalisation and losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from fusewright.base.records import replace
from fusewright.operators.rules.common import (
    Rule,
    Undecided,
    axis_of,
    fresh,
    is_channels_last,
    is_contiguous,
    is_integral,
    same_shape,
    suggested_strides,
)
from fusewright.sizes.expressions import Dim
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten


def reduced_shape(t: TensorType, dim: Sequence[int] | int | None, keepdim: bool) -> tuple[Dim, ...]:
    """The shape after reducing over `dim` (None or empty: over everything)."""
    axes = [dim] if isinstance(dim, int) else list(dim or range(t.ndim))
    gone = {axis_of(axis, t.ndim) for axis in axes}
    if len(gone) != len(axes):
        raise Undecided  # a dimension is listed twice
    return tuple(1 if axis in gone else size for axis, size in enumerate(t.shape) if keepdim or axis not in gone)


def _sum(
    self: TensorType, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TensorType:
    kept = dtype or (torch.int64 if is_integral(self.dtype) else self.dtype)
    return fresh(reduced_shape(self, dim, keepdim), self, kept)


def _sum_all(self: TensorType, *, dtype: torch.dtype | None = None) -> TensorType:
    return _sum(self, dtype=dtype)


def _mean(
    self: TensorType, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> object:
    kept = dtype or self.dtype
    return NotImplemented if is_integral(kept) else fresh(reduced_shape(self, dim, keepdim), self, kept)


def _mean_all(self: TensorType, *, dtype: torch.dtype | None = None) -> object:
    return _mean(self, dtype=dtype)


def _extreme(self: TensorType, dim: Sequence[int] = (), keepdim: bool = False) -> object:
    if 0 in self.shape or self.dtype.is_complex:
        return NotImplemented
    return fresh(reduced_shape(self, dim, keepdim), self)


def _extreme_all(self: TensorType) -> object:
    return _extreme(self)


def _extreme_with_index(self: TensorType, dim: int, keepdim: bool = False) -> object:
    if 0 in self.shape or self.dtype.is_complex:
        return NotImplemented
    shape = reduced_shape(self, dim, keepdim)
    return fresh(shape, self), fresh(shape, self, torch.int64)


def _index_of(self: TensorType, dim: int | None = None, keepdim: bool = False) -> object:
    if 0 in self.shape or self.dtype.is_complex or self.dtype == torch.bool:
        return NotImplemented
    if dim is None and keepdim:
        return NotImplemented
    return fresh(reduced_shape(self, dim, keepdim), self, torch.int64)


def _truth(self: TensorType, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> object:
    return NotImplemented if self.dtype == torch.uint8 else fresh(reduced_shape(self, dim, keepdim), self, torch.bool)


def _var(
    self: TensorType, dim: Sequence[int] | None = None, *, correction: object = None, keepdim: bool = False
) -> object:
    return fresh(reduced_shape(self, dim, keepdim), self) if self.dtype.is_floating_point else NotImplemented


def _var_mean(
    self: TensorType, dim: Sequence[int] | None = None, *, correction: object = None, keepdim: bool = False
) -> object:
    found = _var(self, dim, keepdim=keepdim)
    return (found, found) if isinstance(found, TensorType) else NotImplemented


def _vector_norm(
    self: TensorType, ord: object = 2, dim: object = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> object:
    """PyTorch's meta kernel keeps dimensions of size 1 (2.11). It refuses other norms of no elements."""
    some = all(isinstance(size, int) and size > 0 for size in self.shape) or ord in (1, 2)
    if dtype is not None or not some or not (self.dtype.is_floating_point or self.dtype.is_complex):
        return NotImplemented
    return fresh(reduced_shape(self, dim, keepdim), self, self.dtype.to_real())  # type: ignore[arg-type]


def _cumulative(self: TensorType, dim: int, *, dtype: torch.dtype | None = None) -> object:
    axis_of(dim, self.ndim)
    return fresh(self.shape, self, dtype or (torch.int64 if is_integral(self.dtype) else self.dtype))


def _softmax(self: TensorType, dim: int, half_to_float: bool) -> object:
    rank = max(self.ndim, 1)
    if not -rank <= dim < rank:  # the meta kernel does not ask
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")
    if not self.dtype.is_floating_point:
        return NotImplemented
    return fresh(self.shape, self, torch.float32 if half_to_float else self.dtype)


def _safe_softmax(self: TensorType, dim: int, dtype: torch.dtype | None = None) -> object:
    if dtype is not None or not is_contiguous(self):
        return NotImplemented
    return _softmax(self, dim, False)


def _softmax_backward(grad_output: TensorType, output: TensorType, dim: int, input_dtype: torch.dtype) -> object:
    if not same_shape(grad_output.shape, output.shape):
        return NotImplemented
    return fresh(grad_output.shape, grad_output, input_dtype)


def _layer_norm(
    input: TensorType, normalized_shape: Sequence[Dim], weight: TensorType | None, bias: TensorType | None, eps: float
) -> object:
    count = len(normalized_shape)
    if not count:
        return NotImplemented
    given = [t for t in (weight, bias) if t is not None]
    if not same_shape(input.shape[input.ndim - count :], normalized_shape) or not input.dtype.is_floating_point:
        return NotImplemented
    if any(t.dtype != input.dtype or not same_shape(t.shape, normalized_shape) for t in given):
        return NotImplemented
    if input.device.type == "cpu":
        kept = input.dtype
    else:
        kept = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    statistic = fresh((*input.shape[: input.ndim - count], *[1] * count), input, kept)
    return fresh(input.shape, input), statistic, statistic


def _layer_norm_backward(
    grad_out: TensorType,
    input: TensorType,
    normalized_shape: Sequence[Dim],
    mean: TensorType,
    rstd: TensorType,
    weight: TensorType | None,
    bias: TensorType | None,
    output_mask: Sequence[bool],
) -> object:
    if (output_mask[1] and weight is None) or (output_mask[2] and bias is None):
        return NotImplemented
    return (
        fresh(input.shape, input) if output_mask[0] else None,
        fresh(weight.shape, weight) if output_mask[1] and weight is not None else None,
        fresh(bias.shape, bias) if output_mask[2] and bias is not None else None,
    )


def _group_norm(
    input: TensorType,
    weight: TensorType | None,
    bias: TensorType | None,
    N: Dim,
    C: Dim,
    HxW: Dim,
    group: int,
    eps: float,
) -> object:
    given = [t for t in (weight, bias) if t is not None]
    if not input.dtype.is_floating_point or any(t.dtype != input.dtype for t in given):
        return NotImplemented
    if not is_contiguous(input) and (input.device.type != "cpu" or not is_channels_last(input)):
        return NotImplemented
    statistic = fresh((N, group), input)
    return _as_images(input), statistic, statistic


def _as_images(input: TensorType) -> TensorType:
    """Of the layout that the input suggests on a CPU, also where a size is 1; row-major on a GPU."""
    made = fresh(input.shape, input)
    return replace(made, stride=suggested_strides(input)) if input.device.type == "cpu" else made


def _nll_loss(
    self: TensorType, target: TensorType, weight: TensorType | None, reduction: int, ignore_index: Dim
) -> object:
    if self.ndim not in (1, 2) or target.ndim != self.ndim - 1:
        return NotImplemented
    if target.ndim and not same_shape(target.shape, self.shape[:1]):
        return NotImplemented
    shape = self.shape[:1] if reduction == 0 and self.ndim == 2 else ()
    return fresh(shape, self), fresh((), self)


def _nll_loss2d(
    self: TensorType, target: TensorType, weight: TensorType | None, reduction: int, ignore_index: Dim
) -> object:
    if self.ndim != 4 or not same_shape(target.shape, (self.shape[0], *self.shape[2:])):
        return NotImplemented
    return fresh(target.shape if reduction == 0 else (), self), fresh((), self)


def _nll_loss_backward(grad_output: TensorType, self: TensorType, *others: object) -> object:
    return fresh(self.shape, self) if is_contiguous(self) else NotImplemented


def _loss(self: TensorType, target: TensorType, reduction: int = 1, *options: object) -> object:
    if reduction == 0 or self.dtype != target.dtype or not same_shape(self.shape, target.shape):
        return NotImplemented
    return fresh((), self)


RULES: dict[OpOverload, Rule] = {
    aten.sum.default: _sum_all,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean_all,
    aten.mean.dim: _mean,
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    aten.max.default: _extreme_all,
    aten.min.default: _extreme_all,
    aten.max.dim: _extreme_with_index,
    aten.min.dim: _extreme_with_index,
    aten.argmax.default: _index_of,
    aten.argmin.default: _index_of,
    aten.any.default: _truth,
    aten.any.dim: _truth,
    aten.all.default: _truth,
    aten.all.dim: _truth,
    aten.var.correction: _var,
    aten.std.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.cumsum.default: _cumulative,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss2d_forward.default: _nll_loss2d,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.mse_loss.default: _loss,
}
