"""Shape rules of operators that make tensors, and of copies and casts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from torch._ops import OpOverload

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.operators.host_draws import CLOCK, HOST_DRAW, row_of
from fusewright.operators.philox import BERNOULLI
from fusewright.operators.rules.common import (
    Rule,
    channels_last_strides,
    fresh,
    iterator_strides,
    number_dtype,
    preserved_strides,
    suggested_strides,
)
from fusewright.sizes.expressions import Dim, Expr, bounds, ceil_div
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

aten = torch.ops.aten


def exact_device(device: torch.device | str | None) -> torch.device:
    """`device` with its index, as tensors on it report it; None is the CPU (a default device is set above the
    dispatcher)."""
    device = torch.device("cpu") if device is None else torch.device(device)
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _strides(shape: tuple[Dim, ...], memory_format: torch.memory_format | None) -> tuple[Dim, ...]:
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        return channels_last_strides(shape)
    return contiguous_strides(shape)


def _make(
    size: Sequence[Dim],
    dtype: torch.dtype | None,
    layout: torch.layout | None,
    device: torch.device | None,
    memory_format: torch.memory_format | None = None,
) -> object:
    if layout not in (None, torch.strided):
        return NotImplemented
    shape = tuple(size)
    if any(isinstance(d, int) and d < 0 for d in shape):
        return NotImplemented
    return TensorType(shape, _strides(shape, memory_format), dtype or torch.get_default_dtype(), exact_device(device))


def _empty(  # type: ignore[no-untyped-def]
    size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None, generator=None
):
    return _make(size, dtype, layout, device, memory_format)


def _full(size, fill_value, *, dtype=None, layout=None, device=None, pin_memory=None):  # type: ignore[no-untyped-def]
    return _make(size, dtype or number_dtype(fill_value), layout, device)


def _scalar(s, *, dtype=None, layout=None, device=None, pin_memory=None):  # type: ignore[no-untyped-def]
    return _make((), dtype, layout, device)


def _like(  # type: ignore[no-untyped-def]
    self, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None, generator=None
):
    if layout not in (None, torch.strided):
        return NotImplemented
    if memory_format in (None, torch.preserve_format):
        strides = preserved_strides(self)
    else:
        strides = _strides(self.shape, memory_format)
    return TensorType(self.shape, strides, dtype or self.dtype, self.device if device is None else exact_device(device))


def _full_like(self, fill_value, **options):  # type: ignore[no-untyped-def]
    return _like(self, **options)


def _new(self, size, *, dtype=None, layout=None, device=None, pin_memory=None):  # type: ignore[no-untyped-def]
    return _make(size, dtype or self.dtype, layout, self.device if device is None else device)


def _new_full(self, size, fill_value, **options):  # type: ignore[no-untyped-def]
    return _new(self, size, **options)


def _strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):  # type: ignore[no-untyped-def]
    found = _make(size, dtype, layout, device)
    return replace(found, stride=tuple(stride)) if isinstance(found, TensorType) else found


def _new_strided(self, size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):  # type: ignore
    return _strided(
        size, stride, dtype=dtype or self.dtype, layout=layout, device=self.device if device is None else device
    )


def _arange(start, end, step, dtype, layout, device):  # type: ignore[no-untyped-def]
    numbers = (start, end, step)
    if any(isinstance(n, (bool, complex)) for n in numbers) or step == 0:
        return NotImplemented
    whole = all(isinstance(n, (int, Expr)) for n in numbers)
    if any(isinstance(n, Expr) for n in numbers):
        low = bounds(end - start)[0] if whole else None
        if step != 1 or low is None or low < 0:
            return NotImplemented
        length: Dim = end - start
    elif whole and dtype in (None, torch.int64):
        length = ceil_div(end - start, step) if step > 0 else ceil_div(start - end, -step)
    elif dtype is not None and not dtype.is_floating_point:
        return NotImplemented  # the numbers are rounded to integers first, each device in its own way
    else:
        length = math.ceil((float(end) - float(start)) / float(step))
    if isinstance(length, int) and (length < 0 or (end - start) * step < 0):
        return NotImplemented
    return _make((length,), dtype or (torch.int64 if whole else torch.get_default_dtype()), layout, device)


def _arange_end(end, *, dtype=None, layout=None, device=None, pin_memory=None):  # type: ignore[no-untyped-def]
    return _arange(0, end, 1, dtype, layout, device)


def _arange_start(start, end, *, dtype=None, layout=None, device=None, pin_memory=None):  # type: ignore[no-untyped-def]
    return _arange(start, end, 1, dtype, layout, device)


def _arange_step(start, end, step=1, *, dtype=None, layout=None, device=None, pin_memory=None):  # type: ignore
    return _arange(start, end, step, dtype, layout, device)


def _clone(self: TensorType, *, memory_format: torch.memory_format | None = None) -> TensorType:
    if memory_format in (None, torch.preserve_format):
        strides = preserved_strides(self)
    else:
        strides = _strides(self.shape, memory_format)
    return TensorType(self.shape, strides, self.dtype, self.device)


@cache
def _casts_keep_order() -> bool:
    """Whether a cast of a tensor that is not dense keeps the order of its strides: PyTorch's versions differ."""
    columns = torch.empty_strided((2, 3), (2, 6), device="meta")
    return columns.to(torch.int16).stride() == (1, 2)


def _to_copy(  # type: ignore[no-untyped-def]
    self, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None
):
    if layout not in (None, torch.strided):
        return NotImplemented
    if memory_format in (None, torch.preserve_format):
        strides = preserved_strides(self)
        if strides != self.stride and not _casts_keep_order():
            strides = suggested_strides(self)
    else:
        strides = _strides(self.shape, memory_format)
    return TensorType(self.shape, strides, dtype or self.dtype, self.device if device is None else exact_device(device))


def _draw(self: TensorType, p: object, *, generator: None = None) -> TensorType:
    return TensorType(self.shape, contiguous_strides(self.shape), self.dtype, self.device)


def _sample(self: TensorType, generator: None = None) -> TensorType:
    return TensorType(self.shape, contiguous_strides(self.shape), self.dtype, self.device)


def _dropout(input: TensorType, p: float, train: bool | None) -> object:
    if not input.dtype.is_floating_point:
        return NotImplemented
    mask = TensorType(input.shape, preserved_strides(input), torch.bool, input.device)
    product = input.device.type == "cpu" and train is not False
    strides = iterator_strides(input.shape, [input, mask]) if product else mask.stride
    return TensorType(input.shape, strides, input.dtype, input.device), mask


def _jagged(dense: TensorType, offsets: Sequence[TensorType], total_L: Dim | None = None) -> object:
    """Rows of a padded tensor, whose kernel checks how many there are."""
    return NotImplemented if total_L is None else fresh((total_L, *dense.shape[1 + len(offsets) :]), dense)


RULES: dict[OpOverload, Rule] = {
    aten.empty.memory_format: _empty,
    aten.zeros.default: _empty,
    aten.ones.default: _empty,
    aten.rand.default: _empty,
    aten.randn.default: _empty,
    aten.full.default: _full,
    aten.scalar_tensor.default: _scalar,
    aten.empty_like.default: _like,
    aten.zeros_like.default: _like,
    aten.ones_like.default: _like,
    aten.rand_like.default: _like,
    aten.randn_like.default: _like,
    aten.full_like.default: _full_like,
    aten.new_empty.default: _new,
    aten.new_zeros.default: _new,
    aten.new_ones.default: _new,
    aten.new_full.default: _new_full,
    aten.empty_strided.default: _strided,
    aten.new_empty_strided.default: _new_strided,
    aten.arange.default: _arange_end,
    aten.arange.start: _arange_start,
    aten.arange.start_step: _arange_step,
    aten.clone.default: _clone,
    aten.lift_fresh_copy.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.bernoulli.p: _draw,
    aten._sample_dirichlet.default: _sample,
    aten._standard_gamma.default: _sample,
    aten.native_dropout.default: _dropout,
    aten._padded_dense_to_jagged_forward.default: _jagged,
    HOST_DRAW: lambda name, parameters, size: TensorType(
        tuple(size or ()), contiguous_strides(tuple(size or ())), row_of(name).dtype, torch.device("cpu")
    ),
    CLOCK: lambda name, after: TensorType((), (), torch.float64, torch.device("cpu")),
    BERNOULLI: lambda seed, draw, p, size: TensorType(
        tuple(size), contiguous_strides(tuple(size)), torch.bool, seed.device
    ),
}
