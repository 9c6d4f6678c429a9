"""What PyTorch's meta kernels of Fourier transforms say, corrected to what its CPU kernels give: see cpu.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch._ops import OpOverload

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.operators.rules.common import less
from fusewright.sizes.expressions import Dim
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

aten = torch.ops.aten


def _fft_strides(input: TensorType, shape: tuple[Dim, ...], dims: Sequence[int]) -> tuple[Dim, ...]:
    """Strides of an MKL transform of `dims` (ATen/native/mkl/SpectralOps.cpp, _exec_fft): the batch dimensions outside,
    in the order of the input's strides, the transformed ones inside, as listed."""
    batch = _by_stride(input, [axis for axis in range(input.ndim) if axis not in dims])
    strides: list[Dim] = [0] * input.ndim
    running: Dim = 1
    for axis in reversed([*batch, *dims]):
        strides[axis] = running
        running = running * shape[axis]
    return tuple(strides)


def _by_stride(input: TensorType, dims: Sequence[int]) -> list[int]:
    """The dimensions by falling stride; the order of equal ones is the given one."""

    def order(one: int, other: int) -> int:
        return less(input.stride[one], input.stride[other]) - less(input.stride[other], input.stride[one])

    return sorted(dims, key=functools.cmp_to_key(order))


def _fft_r2c(said: TensorType, input: TensorType, dim: Sequence[int], *rest: Any) -> TensorType:
    if not torch.backends.mkl.is_available():
        return replace(said, stride=contiguous_strides(said.shape))
    if 0 in input.shape or not dim:
        return said
    dims = [axis % input.ndim for axis in dim]
    dims = [*_by_stride(input, dims[:-1]), dims[-1]]
    return replace(said, stride=_fft_strides(input, said.shape, dims))


def _fft_c2c(said: TensorType, input: TensorType, dim: Sequence[int], *rest: Any) -> TensorType:
    if not torch.backends.mkl.is_available():
        return replace(said, stride=contiguous_strides(said.shape)) if dim else said
    if 0 in input.shape or not dim:
        return said
    return replace(said, stride=_fft_strides(input, said.shape, _by_stride(input, [axis % input.ndim for axis in dim])))


def _fft_c2r(said: TensorType, input: TensorType, dim: Sequence[int], *rest: Any) -> TensorType:
    if not torch.backends.mkl.is_available():
        return replace(said, stride=contiguous_strides(said.shape))
    if 0 in input.shape or not dim:
        return said
    dims = [axis % input.ndim for axis in dim]
    if len(dims) > 1:
        input = replace(input, stride=_fft_strides(input, input.shape, _by_stride(input, dims[:-1])))
    return replace(said, stride=_fft_strides(input, said.shape, dims[-1:]))


CORRECTIONS: dict[OpOverload, Callable[..., Any]] = {
    aten._fft_r2c.default: _fft_r2c,
    aten._fft_c2c.default: _fft_c2c,
    aten._fft_c2r.default: _fft_c2r,
}
