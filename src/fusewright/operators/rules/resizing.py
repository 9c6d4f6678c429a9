"""Shape rules of operators that resize images on a CPU, and of their gradients.

Takes TensorTypes as every rule does. Always holds: sizes that an operator refuses are left to its own kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fusewright.operators.rules.common import Rule, suggested_strides
from fusewright.sizes.expressions import Dim
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

aten = torch.ops.aten


def _gradient(follows_layout: bool) -> Rule:
    """The gradient has the input's size, which is an argument; some kernels keep the layout of what arrives."""

    def rule(
        grad_output: TensorType, output_size: Sequence[Dim], input_size: Sequence[Dim], *rest: Any, **named: Any
    ) -> object:
        strides = (
            suggested_strides(grad_output, input_size) if follows_layout else contiguous_strides(tuple(input_size))
        )
        return TensorType(tuple(input_size), strides, grad_output.dtype, grad_output.device)

    return rule


def _resized(spatial: int) -> Rule:
    """The result has the size that is asked for, and the layout that the input suggests. That there is something to
    read and something to write is a condition of operators/size_checks.py."""

    def rule(self: TensorType, output_size: Sequence[Dim], *rest: Any, **named: Any) -> object:
        if self.ndim != spatial + 2 or len(output_size) != spatial or not self.dtype.is_floating_point:
            return NotImplemented
        shape = (*self.shape[:2], *output_size)
        if any(isinstance(size, int) and size < 1 for size in (*shape[1:], *self.shape[2:])):
            return NotImplemented
        return TensorType(shape, suggested_strides(self, shape), self.dtype, self.device)

    return rule


UPSAMPLING: dict[OpOverload, int] = {
    aten.upsample_nearest1d.default: 1,
    aten._upsample_nearest_exact1d.default: 1,
    aten.upsample_linear1d.default: 1,
    aten.upsample_nearest2d.default: 2,
    aten._upsample_nearest_exact2d.default: 2,
    aten.upsample_bilinear2d.default: 2,
    aten._upsample_bilinear2d_aa.default: 2,
    aten.upsample_bicubic2d.default: 2,
    aten._upsample_bicubic2d_aa.default: 2,
    aten.upsample_nearest3d.default: 3,
    aten._upsample_nearest_exact3d.default: 3,
    aten.upsample_trilinear3d.default: 3,
}
"""Operators that resize images, and how many dimensions these have."""
RULES: dict[OpOverload, Rule] = {
    **{op: _resized(spatial) for op, spatial in UPSAMPLING.items()},
    aten.upsample_nearest1d_backward.default: _gradient(False),
    aten._upsample_nearest_exact1d_backward.default: _gradient(False),
    aten.upsample_nearest2d_backward.default: _gradient(True),
    aten._upsample_nearest_exact2d_backward.default: _gradient(True),
    aten.upsample_nearest3d_backward.default: _gradient(False),
    aten._upsample_nearest_exact3d_backward.default: _gradient(False),
    aten.upsample_linear1d_backward.default: _gradient(False),
    aten.upsample_bicubic2d_backward.default: _gradient(False),
    aten.upsample_bilinear2d_backward.default: _gradient(True),
    aten.upsample_trilinear3d_backward.default: _gradient(True),
}
