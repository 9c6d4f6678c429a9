"""CPU operators that have no meta kernel, or a slow one.

Takes TensorTypes as every rule does. Always holds: what lies on another device is left to PyTorch.
tests/operators/test_meta_kernels.py compares every operator of PyTorch's samples with the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._ops import OpOverload

from fusewright.base.pytorch import torch
from fusewright.operators.rules import resizing
from fusewright.operators.rules.common import (
    Rule,
    channels_last_strides,
    fresh,
    is_channels_last,
    is_contiguous,
    same_shape,
)
from fusewright.operators.rules.corrections import as_batch_norm, as_column_major
from fusewright.sizes.expressions import Dim, minimum
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

aten = torch.ops.aten


def _on_cpu(rule: Rule) -> Rule:
    def checked(*args: Any, **kwargs: Any) -> object:
        tensors = [value for value in args if isinstance(value, TensorType)]
        return rule(*args, **kwargs) if all(t.device.type == "cpu" for t in tensors) else NotImplemented

    return checked


def _geqrf(self: TensorType) -> object:
    if self.ndim < 2:
        return NotImplemented
    return as_column_major(fresh(self.shape, self)), fresh(
        (*self.shape[:-2], minimum(self.shape[-2], self.shape[-1])), self
    )


def _like_input(gradient: TensorType, self: TensorType, *rest: Any) -> object:
    return fresh(self.shape, self)


def _histogram(self: TensorType, bins: Any, **options: Any) -> object:
    if isinstance(bins, TensorType):
        if bins.ndim != 1 or bins.shape[0] == 0:
            return NotImplemented
        return fresh((bins.shape[0] - 1,), self), fresh(bins.shape, self)
    if isinstance(bins, int) and bins <= 0:
        return NotImplemented
    return fresh((bins,), self), fresh((bins + 1,), self)


def _histogramdd_bin_edges(self: TensorType, bins: Sequence[Dim], **options: Any) -> object:
    return tuple(fresh((count + 1,), self) for count in bins) if _is_histogramdd(self, bins) else NotImplemented


def _histogramdd_from_bin_cts(self: TensorType, bins: Sequence[Dim], **options: Any) -> object:
    return fresh(bins, self) if _is_histogramdd(self, bins) else NotImplemented


def _histogramdd_from_bin_tensors(self: TensorType, bins: Sequence[TensorType], **options: Any) -> object:
    if not _is_histogramdd(self, bins) or any(edges.ndim != 1 for edges in bins):
        return NotImplemented
    return fresh([edges.shape[0] - 1 for edges in bins], self)


def _is_histogramdd(self: TensorType, bins: Sequence[Any]) -> bool:
    return (
        self.ndim >= 2
        and len(bins) == self.shape[-1]
        and all(not isinstance(count, int) or count > 0 for count in bins)
    )


def _ctc_loss(
    log_probs: TensorType,
    targets: TensorType,
    input_lengths: Sequence[Any],
    target_lengths: Sequence[Any],
    *options: Any,
    **more: Any,
) -> object:
    """(loss of each sequence, log_alpha); the lengths are Python numbers, so nothing depends on data."""
    if log_probs.ndim != 3 or targets.ndim not in (1, 2) or not all(isinstance(n, int) for n in target_lengths):
        return NotImplemented
    steps, batch, _ = log_probs.shape
    if len(input_lengths) != batch or len(target_lengths) != batch or not target_lengths:
        return NotImplemented
    return fresh((batch,), log_probs), fresh((batch, steps, 2 * max(target_lengths) + 1), log_probs)


def _ctc_loss_backward(gradient: TensorType, log_probs: TensorType, *rest: Any, **options: Any) -> object:
    return fresh(log_probs.shape, log_probs)


def _batch_norm_is_plain(input: TensorType, *given: TensorType | None) -> bool:
    """Whether all is of one floating dtype, and the input in one of the two usual layouts: then the kernels' results
    follow it."""
    if input.ndim < 2 or not input.dtype.is_floating_point or 0 in input.shape:
        return False
    parameters = [t for t in given if t is not None]
    if any(
        t.dtype != input.dtype or not same_shape(t.shape, input.shape[1:2]) or not is_contiguous(t) for t in parameters
    ):
        return False
    return is_contiguous(input) or is_channels_last(input)


def _normalised(input: TensorType) -> TensorType:
    """A contiguous input makes a contiguous result, also where single channels or positions would let it pass for
    channels-last; another one a channels-last result, whatever the steps of single positions."""
    strides = contiguous_strides(input.shape) if is_contiguous(input) else channels_last_strides(input.shape)
    return TensorType(input.shape, strides, input.dtype, input.device)


def _batch_norm_rule(
    input: TensorType, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> object:
    """A row of convolution networks, which have fifty of them. Their meta kernel takes 2 ms, and computes with sizes as
    floats."""
    if not _batch_norm_is_plain(input, weight, bias, mean, var):
        return NotImplemented
    if training:
        return _normalised(input), fresh(input.shape[1:2], input), fresh(input.shape[1:2], input)
    if mean is None or var is None:
        return NotImplemented
    nothing = fresh((0,), input)
    return _normalised(input), nothing, nothing


def _batch_norm_functional(
    input: TensorType,
    weight: Any,
    bias: Any,
    mean: TensorType,
    var: TensorType,
    training: bool,
    momentum: float,
    eps: float,
) -> object:
    found = _batch_norm_rule(input, weight, bias, mean, var, training, momentum, eps)
    return (*found, fresh(mean.shape, mean), fresh(var.shape, var)) if isinstance(found, tuple) else NotImplemented


def _batch_norm_without_stats(
    input: TensorType, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> object:
    return _batch_norm_rule(input, weight, bias, None, None, True, momentum, eps)


def _batch_norm_backward(
    grad_out: TensorType, input: TensorType, weight: Any, running_mean: Any, running_var: Any, save_mean: Any,
    save_invstd: Any,
    train: bool, eps: float, output_mask: Sequence[bool],
) -> object:  # fmt: skip
    """Gradients of the input, and of weight and bias."""
    if grad_out.dtype != input.dtype or not _batch_norm_is_plain(input, weight, running_mean, running_var):
        return NotImplemented
    channels = fresh(input.shape[1:2], input)
    made = as_batch_norm(fresh(input.shape, input), grad_out, input), channels, channels
    return tuple(one if wanted else None for one, wanted in zip(made, output_mask, strict=True))


_MISSING: dict[OpOverload, Rule] = {
    **resizing.RULES,
    aten.native_batch_norm.default: _batch_norm_rule,
    aten._native_batch_norm_legit.default: _batch_norm_rule,
    aten._native_batch_norm_legit_functional.default: _batch_norm_functional,
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_stats,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.geqrf.default: _geqrf,
    aten.multi_margin_loss_backward.default: _like_input,
    aten.multilabel_margin_loss_backward.default: _like_input,
    aten.fractional_max_pool2d_backward.default: _like_input,
    aten.fractional_max_pool3d_backward.default: _like_input,
    aten.histogram.bin_ct: _histogram,
    aten.histogram.bins_tensor: _histogram,
    aten._histogramdd_bin_edges.default: _histogramdd_bin_edges,
    aten._histogramdd_from_bin_cts.default: _histogramdd_from_bin_cts,
    aten._histogramdd_from_bin_tensors.default: _histogramdd_from_bin_tensors,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}
RULES: dict[OpOverload, Rule] = {op: _on_cpu(rule) for op, rule in _MISSING.items()}

__all__ = ["RULES"]
