"""Shape rules of matrix products, convolution, pooling, attention, embedding and concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._ops import OpOverload

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.operators.rules.common import (
    Rule,
    as_row,
    axis_of,
    broadcast,
    channels_last_strides,
    convolves_channels_last,
    fresh,
    in_format,
    is_channels_last,
    is_contiguous,
    iterator_strides,
    less,
    preserved_strides,
    same,
    same_shape,
    suggested_strides,
    suggests_channels_last,
)
from fusewright.operators.rules.views import _expand, _permute, _transpose, view_strides
from fusewright.sizes.expressions import Dim, floor_div, maximum
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

aten = torch.ops.aten


def _mm(self: TensorType, mat2: TensorType) -> object:
    if self.ndim != 2 or mat2.ndim != 2 or self.dtype != mat2.dtype or not same(self.shape[1], mat2.shape[0]):
        return NotImplemented
    return fresh((self.shape[0], mat2.shape[1]), self)


def _addmm(self: TensorType, mat1: TensorType, mat2: TensorType, *, beta: object = 1, alpha: object = 1) -> object:
    found = _mm(mat1, mat2)
    if not isinstance(found, TensorType) or self.dtype != mat1.dtype:
        return NotImplemented
    return found if same_shape(broadcast(self.shape, found.shape), found.shape) else NotImplemented


def _bmm(self: TensorType, mat2: TensorType) -> object:
    if self.ndim != 3 or mat2.ndim != 3 or self.dtype != mat2.dtype:
        return NotImplemented
    if not same(self.shape[0], mat2.shape[0]) or not same(self.shape[2], mat2.shape[1]):
        return NotImplemented
    return fresh((self.shape[0], self.shape[1], mat2.shape[2]), self)


def _baddbmm(
    self: TensorType, batch1: TensorType, batch2: TensorType, *, beta: object = 1, alpha: object = 1
) -> object:
    found = _bmm(batch1, batch2)
    if not isinstance(found, TensorType) or self.dtype != batch1.dtype:
        return NotImplemented
    return found if same_shape(broadcast(self.shape, found.shape), found.shape) else NotImplemented


def _mv(self: TensorType, vec: TensorType) -> object:
    if self.ndim != 2 or vec.ndim != 1 or self.dtype != vec.dtype or not same(self.shape[1], vec.shape[0]):
        return NotImplemented
    return fresh(self.shape[:1], self)


def _dot(self: TensorType, tensor: TensorType) -> object:
    if self.ndim != 1 or tensor.ndim != 1 or self.dtype != tensor.dtype or not same(self.shape[0], tensor.shape[0]):
        return NotImplemented
    return fresh((), self)


def _spread(values: Sequence[int] | int, rank: int) -> list[int]:
    listed = [values] if isinstance(values, int) else list(values)
    return listed * rank if len(listed) == 1 else listed


def follows_arguments(input: TensorType) -> bool:
    """Whether a 2-d convolution's results are channels-last where an argument is: on every CPU path (measured over
    dtypes, groups, sizes), and by cuDNN, except in double precision."""
    return input.device.type == "cpu" or (input.device.type == "cuda" and input.dtype is not torch.float64)


_C: Any = torch._C
_PLAIN_VOLUMES = frozenset(
    {None, _C._ConvBackend.Slow3d, _C._ConvBackend.SlowDilated3d, _C._ConvBackend.SlowTranspose3d}
)
_AS_WEIGHTS = frozenset({_C._ConvBackend.Slow2d, _C._ConvBackend.SlowTranspose2d})
"""They begin a weight's gradient as what the weight is in their format: itself, if it lies in it."""


def _backend(
    input: TensorType, weight: TensorType, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> Any:
    """The CPU's library for a convolution; None where that depends on what symbolic sizes are. Batches and windows of
    symbolic sizes are of more than one."""
    if 0 in input.shape:
        return None
    groups, found = rest[-1], set()
    first, second, *kernel = weight.shape
    for size in (input.shape[0], *kernel):
        less(1, size)  # where nobody knows, the rule is asked again with sizes that are
    for extent in (2, 1 << 6):  # of what is not known: from few channels and small images to many and large ones
        window = [_size(size, 2) for size in kernel]
        filters = _size(first, _size(input.shape[1], extent * groups) if transposed else extent * groups)
        channels = _size(second, extent if transposed else _size(input.shape[1], extent * groups) // groups)
        reach = [max(extent, gap * (size - 1) + 1) for size, gap in zip(window, _spread(dilation, len(kernel)))]
        given = [extent, filters if transposed else channels * groups, *reach]
        shapes = [_size(size, own) for size, own in zip(input.shape, given)], [filters, channels, *window]
        tensors = (torch.empty(1, dtype=input.dtype, device="cpu").expand(shape) for shape in shapes)
        found.add(_C._select_conv_backend(*tensors, None, stride, padding, dilation, transposed, *rest, None))
    return found.pop() if len(found) == 1 else None


def _size(size: Dim, otherwise: int) -> int:
    return size if isinstance(size, int) else otherwise


def keeps_format(input: TensorType, weight: TensorType, *rest: Any) -> bool:
    """Whether the CPU's convolution over images or volumes keeps the memory format of its arguments: oneDNN does;
    PyTorch's own kernels for volumes do not. Where that depends on symbolic sizes it is taken not to."""
    if input.ndim < 5:
        return True
    return _backend(input, weight, *rest) not in _PLAIN_VOLUMES


def _convolution(
    input: TensorType,
    weight: TensorType,
    bias: TensorType | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> object:
    rank = weight.ndim - 2
    if less(weight.shape[0], groups):  # the meta kernel takes this, and no operator that computes does
        raise RuntimeError(f"a convolution of {groups} groups needs as many filters, its weight has {weight.shape[0]}")
    if input.ndim != weight.ndim or rank < 1 or input.dtype != weight.dtype:
        return NotImplemented
    if not same(input.shape[1], weight.shape[0] if transposed else weight.shape[1] * groups):
        if transposed:  # the same
            raise RuntimeError(f"a weight of {weight.shape[0]} input channels for an input of {input.shape[1]}")
        return NotImplemented
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    shape: list[Dim] = [input.shape[0], channels]
    windows = zip(
        input.shape[2:],
        weight.shape[2:],
        *(_spread(v, rank) for v in (stride, padding, dilation, output_padding)),
        strict=True,
    )
    for size, kernel, step, pad, gap, extra in windows:
        reach = gap * (kernel - 1)
        if transposed:
            shape.append((size - 1) * step - 2 * pad + reach + extra + 1)
        elif less(size + 2 * pad, reach + 1):  # older meta kernels take this
            raise RuntimeError(f"a convolution's window of {reach + 1} over {size}, with {pad} on each side")
        else:
            shape.append(floor_div(size + 2 * pad - reach - 1, step) + 1)
    if 0 in input.shape or any(isinstance(d, int) and d <= 0 for d in shape):
        return NotImplemented
    if rank < 3 and follows_arguments(input):
        return replace(fresh(shape, input), stride=in_format(shape, convolves_channels_last(input, weight)))
    last = convolves_channels_last(input, weight)
    if last and input.device.type == "cpu":
        kept = keeps_format(input, weight, stride, padding, dilation, transposed, output_padding, groups)
        result = fresh(shape, input)
        return replace(result, stride=channels_last_strides(shape)) if kept else result
    if last or not is_contiguous(input) or not is_contiguous(weight):
        return NotImplemented  # the layout depends on the library that computes it
    return fresh(shape, input)


def _cudnn_formats(gradient: TensorType, input: TensorType, weight: TensorType) -> tuple[bool, bool]:
    """Whether cuDNN's gradients of an input and of a weight are channels-last. It brings the input into the forward's
    format, and the gradient into the one that the input then suggests; each product takes the format that one of its
    operands suggests, which single channels and positions leave open."""
    if input.ndim == 3:
        gradient, input, weight = map(as_row, (gradient, input, weight))
    input = _in_format(input, convolves_channels_last(input, weight))
    gradient = _in_format(gradient, suggests_channels_last(input))
    return convolves_channels_last(gradient, weight), convolves_channels_last(input, gradient)


def _in_format(t: TensorType, last: bool) -> TensorType:
    lies_so = is_channels_last(t) if last else is_contiguous(t)
    return t if lies_so else replace(t, stride=in_format(t.shape, last))


def _convolution_backward(
    grad_output: TensorType,
    input: TensorType,
    weight: TensorType,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> object:
    """On a CPU both gradients lie as the library computes, which the forward's arguments decide (measured over dtypes,
    groups and kernels)."""
    on_cpu = input.device.type == "cpu"
    if input.ndim not in ((3, 4, 5) if on_cpu else (3, 4)) or 0 in input.shape or not follows_arguments(input):
        return NotImplemented
    if not on_cpu:
        last, of_weight = _cudnn_formats(grad_output, input, weight)
        strides = in_format(input.shape, last), in_format(weight.shape, of_weight)
    else:
        last = convolves_channels_last(input, weight) and keeps_format(
            input, weight, stride, padding, dilation, transposed, output_padding, groups
        )
        strides = in_format(input.shape, last), in_format(weight.shape, last)
    if last and on_cpu and input.ndim > 3 and is_contiguous(weight) and is_channels_last(weight):
        # a weight of one channel or of one position lies in both formats
        if _backend(input, weight, stride, padding, dilation, transposed, output_padding, groups) in _AS_WEIGHTS:
            strides = strides[0], weight.stride
    found: list[TensorType | None] = [
        replace(fresh(like.shape, input), stride=own) if wanted else None
        for wanted, like, own in zip(output_mask, (input, weight), strides, strict=False)
    ]
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    found.append(fresh([channels], input) if output_mask[2] else None)
    return tuple(found)


def _window(size: Dim, kernel: int, step: int, pad: int, gap: int, ceil_mode: bool) -> Dim:
    """One pooled size (ATen/native/Pool.h, pooling_output_shape); ceil_mode only for static sizes."""
    span = size + 2 * pad - gap * (kernel - 1) - 1
    if not ceil_mode:
        return floor_div(span, step) + 1
    count = floor_div(span + step - 1, step) + 1
    if isinstance(count, int) and isinstance(size, int):
        return count - 1 if (count - 1) * step >= size + pad else count
    return NotImplemented


def _pooled(
    input: TensorType,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> TensorType | None:
    if input.ndim not in (3, 4) or 0 in input.shape:
        return None
    kernel, pad, gap = _spread(kernel_size, 2), _spread(padding, 2), _spread(dilation, 2)
    step = _spread(stride, 2) if stride else kernel
    sizes = [
        _window(n, k, s, p, g, ceil_mode)
        for n, k, s, p, g in zip(input.shape[-2:], kernel, step, pad, gap, strict=True)
    ]
    if any(size is NotImplemented or (isinstance(size, int) and size <= 0) for size in sizes):
        return None
    if any(2 * p > k for p, k in zip(pad, kernel, strict=True)):
        return None
    shape = (*input.shape[:-2], *sizes)
    return TensorType(shape, suggested_strides(input, shape), input.dtype, input.device)


def _max_pool(
    self: TensorType,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> object:
    found = _pooled(self, kernel_size, stride, padding, dilation, ceil_mode)
    if found is None:
        return NotImplemented
    return found, TensorType(found.shape, found.stride, torch.int64, found.device)


def _avg_pool(
    self: TensorType,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> object:
    if divisor_override == 0:
        return NotImplemented
    found = _pooled(self, kernel_size, stride, padding, (1,), ceil_mode)
    return NotImplemented if found is None or not self.dtype.is_floating_point else found


def _adaptive_avg_pool(self: TensorType, output_size: Sequence[Dim]) -> object:
    if self.ndim not in (3, 4) or 0 in self.shape:
        return NotImplemented
    shape = (*self.shape[:-2], *output_size)
    return TensorType(shape, suggested_strides(self, shape), self.dtype, self.device)


def _attention_cpu(
    query: TensorType,
    key: TensorType,
    value: TensorType,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: TensorType | None = None,
    scale: float | None = None,
) -> object:
    batch, heads, length, _ = query.shape
    sums = fresh((batch, length, heads), query, torch.float64 if query.dtype == torch.float64 else torch.float32)
    return TensorType(query.shape, preserved_strides(query), query.dtype, query.device), _transpose(sums, 1, 2)


def _embedding(
    weight: TensorType,
    indices: TensorType,
    padding_idx: Dim = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> object:
    if weight.ndim != 2 or indices.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    return fresh((*indices.shape, weight.shape[1]), weight)


def _embedding_backward(
    grad_output: TensorType, indices: TensorType, num_weights: Dim, padding_idx: Dim, scale_grad_by_freq: bool
) -> object:
    return fresh((num_weights, grad_output.shape[-1]), grad_output)


def _cat(tensors: Sequence[TensorType], dim: int = 0) -> object:
    first = tensors[0]
    if (
        any(t.dtype != first.dtype or t.ndim != first.ndim or t.device != first.device for t in tensors)
        or not first.shape
    ):
        return NotImplemented
    axis = dim % first.ndim
    if any(t.shape == (0,) for t in tensors) or not -first.ndim <= dim < first.ndim:
        return NotImplemented
    total: Dim = 0
    for t in tensors:
        if not same_shape((*t.shape[:axis], *t.shape[axis + 1 :]), (*first.shape[:axis], *first.shape[axis + 1 :])):
            return NotImplemented
        total = total + t.shape[axis]
    result = fresh((*first.shape[:axis], total, *first.shape[axis + 1 :]), first)
    last = all(suggests_channels_last(t) for t in tensors)  # of 4 or 5 dimensions
    return replace(result, stride=channels_last_strides(result.shape)) if last else result


def _stack(tensors: Sequence[TensorType], dim: int = 0) -> object:
    first = tensors[0]
    if any(t.dtype != first.dtype or not same_shape(t.shape, first.shape) or not is_contiguous(t) for t in tensors):
        return NotImplemented
    if not -first.ndim - 1 <= dim <= first.ndim or first.ndim >= 3:
        return NotImplemented
    axis = dim % (first.ndim + 1)
    return fresh((*first.shape[:axis], len(tensors), *first.shape[axis:]), first)


def _gather(self: TensorType, dim: int, index: TensorType, *, sparse_grad: bool = False) -> object:
    if self.ndim != index.ndim or index.dtype != torch.int64:
        return NotImplemented
    return fresh(index.shape, self)


def _index_select(self: TensorType, dim: int, index: TensorType) -> object:
    if not self.shape or index.ndim != 1 or index.dtype not in (torch.int64, torch.int32) or not is_contiguous(self):
        return NotImplemented
    axis = dim % self.ndim
    return fresh((*self.shape[:axis], index.shape[0], *self.shape[axis + 1 :]), self)


def _is_dense(t: TensorType) -> bool:
    return t.stride == contiguous_strides(t.shape)


def _index(self: TensorType, indices: Sequence[TensorType | None]) -> object:
    """The strides are those that eager's iterator gives a result over `self`, which takes no step along the dimensions
    of the places, and the places, which take none along the others (ATen's AdvancedIndex)."""
    axes = [axis for axis, place in enumerate(indices) if place is not None]
    places: list[TensorType] = [place for place in indices if place is not None]
    if not axes or len(indices) > self.ndim:
        return NotImplemented
    if any(place.dtype not in (torch.int64, torch.int32) or place.device != self.device for place in places):
        return NotImplemented
    shape = broadcast(*(place.shape for place in places))
    if axes[-1] - axes[0] != len(axes) - 1:  # with others between them, they come first
        self = _permute(self, axes + [axis for axis in range(self.ndim) if axis not in axes])
        axes = list(range(len(axes)))
    outer, inner = self.shape[: axes[0]], self.shape[axes[-1] + 1 :]
    whole = (*outer, *shape, *inner)
    if not outer and all(_is_dense(t) and 0 not in t.shape for t in (self, *places)):
        return fresh(whole, self)
    if 0 not in shape and any(size == 0 for size in self.shape[axes[0] : axes[-1] + 1]):
        return NotImplemented  # an error
    strides = (*self.stride[: axes[0]], *(0 for _ in shape), *self.stride[axes[-1] + 1 :])
    operands = [replace(self, shape=whole, stride=strides)]
    for place in places:
        shown = place if place.shape == shape else _expand(place, shape)
        if place.dtype == torch.int32:
            shown = replace(shown, stride=preserved_strides(shown))
        spread = view_strides(shown, (*(1 for _ in outer), *shape, *(1 for _ in inner)))
        if spread is None:
            return NotImplemented
        operands.append(replace(shown, shape=(*(1 for _ in outer), *shape, *(1 for _ in inner)), stride=spread))
    if self.device.type != "cpu" and len({place.stride for place in operands[1:]}) > 1:
        operands[1:] = [replace(place, stride=contiguous_strides(place.shape)) for place in operands[1:]]
    return replace(fresh(whole, self), stride=iterator_strides(whole, operands))


def _triangle(self: TensorType, diagonal: int = 0) -> object:
    return fresh(self.shape, self) if self.ndim >= 2 else NotImplemented


def _pad(self: TensorType, pad: Sequence[Dim], value: object = 0) -> object:
    if len(pad) > 2 * self.ndim:
        return NotImplemented
    shape = list(self.shape)
    for position in range(len(pad) // 2):
        axis = self.ndim - 1 - position
        shape[axis] = shape[axis] + pad[2 * position] + pad[2 * position + 1]
        if isinstance(shape[axis], int) and shape[axis] < 0:  # type: ignore[operator]
            return NotImplemented
    if all(isinstance(amount, int) and amount <= 0 for amount in pad):  # a copy of what is left
        left = replace(self, shape=tuple(maximum(d, 0) for d in shape))
        return replace(fresh(left.shape, self), stride=preserved_strides(left))
    if not is_contiguous(self) or self.ndim in (4, 5):
        return NotImplemented
    return fresh([maximum(d, 0) for d in shape], self)


def _diag_embed(self: TensorType, offset: int = 0, dim1: int = -2, dim2: int = -1) -> object:
    axes = sorted(axis_of(dim, self.ndim + 1) for dim in (dim1, dim2))
    if not self.shape or axes[0] == axes[1]:
        return NotImplemented
    *shape, size = self.shape
    for axis in axes:
        shape.insert(axis, size + abs(offset))
    return fresh(shape, self)


RULES: dict[OpOverload, Rule] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.mv.default: _mv,
    aten.dot.default: _dot,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.avg_pool2d.default: _avg_pool,
    aten._adaptive_avg_pool2d.default: _adaptive_avg_pool,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_cpu,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
    **dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), _index),
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
    aten.constant_pad_nd.default: _pad,
    aten.diag_embed.default: _diag_embed,
}
