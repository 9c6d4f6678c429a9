"""Where PyTorch's meta kernels say something else than its kernels do.

Takes what the meta kernel said (TensorTypes on the real device) with the operator's arguments by position, defaults
filled in; gives what the CPU gives. Always holds: of GPUs' operators only those are corrected whose results lie as on a
CPU (`_ON_GPUS`, measured), and pointwise ones. tests/operators/test_meta_kernels.py compares every operator of
PyTorch's samples with the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._ops import OpOverload

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.operators.rules import pointwise, transforms
from fusewright.operators.rules.common import (
    Rule,
    channels_last_strides,
    convolves_channels_last,
    in_format,
    is_channels_last,
    is_contiguous,
    is_integral,
    less,
    preserved_strides,
    promote,
    same,
    suggested_strides,
    suggests_channels_last,
)
from fusewright.operators.rules.linear import follows_arguments, keeps_format
from fusewright.operators.rules.pointwise import promoting
from fusewright.sizes.expressions import Dim, floor_div
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

aten = torch.ops.aten
Correction = Callable[..., Any]


def _column_major(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Strides of a batch of column-major matrices, as LAPACK takes and gives them."""
    swapped = contiguous_strides((*shape[:-2], shape[-1], shape[-2]))
    return (*swapped[:-2], swapped[-1], swapped[-2])


def as_column_major(t: TensorType) -> TensorType:
    return replace(t, stride=_column_major(t.shape)) if t.ndim >= 2 else t


def _contiguous(t: TensorType) -> TensorType:
    return replace(t, stride=contiguous_strides(t.shape))


def _batch_norm(
    said: tuple[Any, ...], input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> Any:
    """Inference saves no statistics; they are of the input's dtype unless a parameter of another asks for more
    precision. The result is contiguous or channels-last."""
    given = [t for t in (weight, bias, mean, var) if t is not None]
    dtype = torch.float32 if any(t.dtype == torch.float32 for t in given) else input.dtype
    saved = [replace(t, dtype=dtype) for t in said[1:3]]
    if not training and mean is not None:
        saved = [replace(t, shape=(0,), stride=(1,)) for t in saved]
    said = (replace(said[0], stride=suggested_strides(input)), *said[1:])
    if len(said) > 4:  # the functional forms give the new running statistics last
        return (said[0], *saved, *said[3:-2], replace(said[-2], dtype=mean.dtype), replace(said[-1], dtype=var.dtype))
    return (said[0], *saved, *said[3:])


def as_batch_norm(said: TensorType, gradient: TensorType, input: TensorType) -> TensorType:
    """The gradient in the input's memory format. Where single channels or positions leave that open, it is contiguous
    if the input is, unless the other gradient is laid out otherwise."""
    last, plain = suggests_channels_last(input), is_contiguous(input)
    if last == plain and (plain or is_channels_last(input)) and _has_format(gradient, last):
        last = not last
    return replace(said, stride=in_format(said.shape, last))


def _has_format(t: TensorType, last: bool) -> bool:
    return (is_contiguous(t) or is_channels_last(t)) and suggests_channels_last(t) == last


def _batch_norm_without_running(said: tuple[Any, ...], input: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    return _batch_norm(said, input, weight, bias, None, None, True)


def _batch_norm_with_update(
    said: tuple[Any, ...], input: Any, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any
) -> Any:
    return _batch_norm(said, input, weight, bias, mean, var, True)


def _embedding_bag(always_sized: bool) -> Correction:
    """(output, the bag of each index, bag sizes, positions of maxima). Summing by the fast path needs no map from
    indices to bags, and only a sum without gradient leaves the sizes as long as the offsets
    (ATen/native/EmbeddingBag.cpp, make_*_out)."""

    def correction(
        said: tuple[TensorType, ...], weight: TensorType, indices: TensorType, offsets: TensorType, scale: bool,
        mode: int, sparse: bool,
        per_sample_weights: TensorType | None, include_last_offset: bool, padding_idx: int,
    ) -> Any:  # fmt: skip
        fast = (
            weight.dtype in (torch.float32, torch.float16, torch.bfloat16) and weight.stride[1] == 1 and padding_idx < 0
        )
        if per_sample_weights is not None:
            fast = fast and per_sample_weights.stride[0] == 1
        bags = offsets.shape[0] - include_last_offset if always_sized or mode != 0 else offsets.shape[0]
        dtype = torch.promote_types(indices.dtype, offsets.dtype)
        most = said[3] if mode == 2 else replace(said[3], shape=(bags,), stride=(1,))
        owners = replace(said[1], shape=(0,) if mode == 0 and fast else indices.shape, stride=(1,))
        return said[0], *(replace(t, dtype=dtype) for t in (owners, replace(said[2], shape=(bags,), stride=(1,)), most))

    return correction


def _vectors_by_column(position: int) -> Correction:
    return lambda said, *args: (*said[:position], as_column_major(said[position]), *said[position + 1 :])


def _preserved(said: Any, self: TensorType, *rest: Any) -> Any:
    """Begun as empty_like(self) or clone(self)."""
    if isinstance(said, tuple):
        return tuple(_preserved(one, self) for one in said)
    return replace(said, stride=preserved_strides(self))


def _copied_with_gaps(said: TensorType, self: TensorType, *rest: Any) -> TensorType:
    """A copy of the whole memory that `self` lies in, unless some of its elements share memory."""
    overlaps = any(size != 1 and same(step, 0) and less(1, size) for size, step in zip(self.shape, self.stride))
    return replace(said, stride=preserved_strides(self) if overlaps else self.stride)


def _max_unpool2d(said: TensorType, input: TensorType, *rest: Any) -> TensorType:
    return replace(said, stride=suggested_strides(input, said.shape))


def _index_add(
    said: TensorType, self: TensorType, dim: int, index: TensorType, source: TensorType, *rest: Any
) -> TensorType:
    """The meta kernel does not look at the source. (Symbolic sizes: operators/size_checks.py.)"""
    others = [
        (self.shape[axis], source.shape[axis]) for axis in range(min(self.ndim, source.ndim)) if axis != dim % self.ndim
    ]
    if self.ndim and (
        source.ndim != self.ndim or any(a != b for a, b in others if isinstance(a, int) and isinstance(b, int))
    ):
        raise RuntimeError("index_add: the source's shape is not that of self")
    return _contiguous(said)


def _iterated(said: TensorType, *args: Any) -> TensorType:
    """Operators of TensorIterator whose meta kernel is a composition of others, which lays the result out otherwise."""
    operands = [value for value in args if isinstance(value, TensorType)]
    if not operands or not isinstance(said, TensorType):  # of two numbers
        return said
    numbers = [value for value in args[:2] if isinstance(value, (bool, int, float))]
    computed = promote(*operands, *numbers)
    if not computed.is_floating_point and said.dtype.is_floating_point:
        computed = said.dtype
    return replace(said, stride=promoting([*operands, *numbers], said.dtype, computed).stride)


def _loss(said: TensorType, self: TensorType, target: TensorType, reduction: int, *rest: Any) -> TensorType:
    return said if reduction else _iterated(said, self, target)


def _convolution(said: TensorType, input: TensorType, weight: TensorType, bias: Any, *rest: Any) -> TensorType:
    if not 2 < said.ndim < 6 or (input.device.type != "cpu" and (said.ndim == 5 or not follows_arguments(input))):
        return said
    last = convolves_channels_last(input, weight) and keeps_format(input, weight, *rest)
    return replace(said, stride=in_format(said.shape, last))


def _glu(said: TensorType, self: TensorType, *rest: Any) -> TensorType:
    """Of the tensor's two halves, which the meta kernel copies where they are float16 or bfloat16."""
    half = replace(self, shape=said.shape)
    return _iterated(said, half, half)


def _rrelu_backward(said: Any, gradient: TensorType, self: TensorType, noise: TensorType, *rest: Any) -> TensorType:
    """A product with the slopes that were drawn, or outside of training leaky_relu's."""
    factors = (noise, gradient) if rest[2] else (self, gradient)
    return _iterated(replace(said, dtype=promote(*factors)), *factors)


def _dropout_backward(said: TensorType, gradient: TensorType, mask: TensorType, scale: float) -> TensorType:
    """A product of gradient and mask, and then of the scale."""
    return _iterated(said, gradient, mask)


def _power_of_two_times(said: TensorType, self: TensorType, exponent: TensorType) -> TensorType:
    """A product with 2 ** exponent. Whether that keeps the layout of the exponent, these dtypes decide."""
    plain = is_integral(self.dtype) or (self.dtype == torch.float32 and not is_integral(exponent.dtype))
    if exponent.dtype.is_floating_point:
        said = replace(said, dtype=promote(self, exponent))
    return _iterated(said, self, _contiguous(exponent) if plain else exponent)


def _angle(said: TensorType, self: TensorType) -> TensorType:
    return _contiguous(said) if self.dtype.is_complex else _iterated(said, self)


def _roll(said: TensorType, self: TensorType, shifts: Sequence[int], dims: Sequence[int]) -> TensorType:
    """Along each dimension in turn the two parts change places: they are put together in their memory format."""
    if not dims or 0 in self.shape or self.ndim not in (4, 5):
        return said
    for shift, dim in zip(shifts, dims):
        size = self.shape[dim]
        start = size - shift - floor_div(size - shift, size) * size
        shapes = (self.shape[:dim] + (length,) + self.shape[dim % self.ndim + 1 :] for length in (size - start, start))
        last = not same(start, 0) and all(suggests_channels_last(replace(self, shape=shape)) for shape in shapes)
        self = replace(said, stride=channels_last_strides(said.shape)) if last else _contiguous(said)
    return self


def _loss_like_input(said: TensorType, self: TensorType, *rest: Any) -> TensorType:
    """Of the input's dtype, and without a reduction in its layout."""
    reduced = said.ndim < self.ndim or said.shape != self.shape
    return replace(said, dtype=self.dtype, stride=said.stride if reduced else preserved_strides(self))


def _soft_margin_loss(said: TensorType, self: TensorType, target: TensorType, reduction: int) -> TensorType:
    return _loss_like_input(said, self) if reduction else replace(_iterated(said, self), dtype=self.dtype)


def _soft_margin_loss_backward(said: TensorType, gradient: Any, self: TensorType, target: Any, *rest: Any) -> Any:
    """It begins as target * exp(-target * self)."""
    product = _iterated(said, _preserved(target, target), self)
    return _iterated(said, target, _iterated(said, product))


def _loss_like_target(said: TensorType, self: TensorType, target: TensorType, *rest: Any) -> TensorType:
    """It is computed where 1 - target is."""
    return said if rest[-1] else _preserved(said, target)


def _rot90(said: TensorType, self: TensorType, k: int, dims: Sequence[int]) -> TensorType:
    """A contiguous clone, or a flipped tensor of which half of the turns exchange two dimensions."""
    strides = list(preserved_strides(self))
    if k % 2:
        first, second = (axis % self.ndim for axis in dims)
        strides[first], strides[second] = strides[second], strides[first]
    return replace(said, stride=tuple(strides)) if k % 4 else _contiguous(said)


def _addr(said: TensorType, self: TensorType, vec1: TensorType, vec2: TensorType, *rest: Any) -> TensorType:
    """Over a column and a row, to which the matrix is expanded."""
    column = replace(vec1, shape=(*vec1.shape, 1), stride=(*vec1.stride, 1))
    self = self if self.ndim else replace(self, shape=(1,), stride=(0,))
    return _iterated(replace(said, dtype=promote(self, column, vec2)), self, column, vec2)


def _as_input_suggests(said: TensorType, self: TensorType, *rest: Any) -> TensorType:
    """In the input's memory format, which for one volume without a batch is that of images."""
    return replace(said, stride=suggested_strides(self, said.shape))


def _as_volumes(said: TensorType, self: TensorType) -> TensorType:
    """In the input's memory format; one volume without a batch is a batch of one, whose step does not matter."""
    if self.ndim == 5:
        return _as_input_suggests(said, self)
    if suggests_channels_last(self):
        raise RuntimeError("max_pool3d: a volume without a batch lies in memory as images do")
    batch = replace(self, shape=(1, *self.shape), stride=(0, *self.stride))
    return replace(said, stride=channels_last_strides((1, *said.shape))[1:]) if is_channels_last(batch) else said


def _group_norm(said: Any, input: TensorType, *rest: Any) -> Any:
    if not is_contiguous(input) and not is_channels_last(input):
        raise RuntimeError("native_group_norm: the input is not contiguous")
    return said


def _rnn_layer(said: tuple[TensorType, ...], input: TensorType, *rest: Any) -> Any:
    """In training the workspace travels as a view of no elements (graph/grad_mode.py); else there is none."""
    if any(same(size, 0) for size in input.shape):  # eager does not call it, and it ends the process
        raise RuntimeError("a recurrent layer of nothing")
    return said if rest[-1] else (*said[:3], None)


def _multi_margin_loss(said: TensorType, input: TensorType, target: TensorType, *rest: Any) -> TensorType:
    """Without a reduction there is one for each class that is aimed at."""
    return replace(said, shape=target.shape, stride=(1,) * target.ndim) if said.ndim else said


def _multilabel_margin_loss(said: tuple[TensorType, TensorType], input: TensorType, *rest: Any) -> Any:
    """One sample without a batch has a loss without dimensions, whatever the reduction."""
    return (replace(said[0], shape=(), stride=()) if input.ndim <= 1 else said[0]), said[1]


_SHUFFLES = ("pixel_shuffle", "channel_shuffle", "native_channel_shuffle")
_PADS = ("reflection_pad2d", "reflection_pad3d", "replication_pad2d", "replication_pad3d")
CORRECTIONS: dict[OpOverload, Correction] = {
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_running,
    aten._batch_norm_with_update.default: _batch_norm_with_update,
    aten._batch_norm_with_update_functional.default: _batch_norm_with_update,
    aten._embedding_bag.default: _embedding_bag(always_sized=True),
    aten._embedding_bag_forward_only.default: _embedding_bag(always_sized=False),
    aten._linalg_svd.default: _vectors_by_column(2),
    aten.linalg_eig.default: _vectors_by_column(1),
    aten.max_unpool2d.default: _max_unpool2d,
    aten.rrelu_with_noise.default: lambda said, *args: _contiguous(said),
    aten.rrelu_with_noise_functional.default: lambda said, *args: (_contiguous(said[0]), *said[1:]),
    **dict.fromkeys(
        (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.flip.default, aten.nan_to_num.default,
         aten.deg2rad.default, aten.rad2deg.default, aten.frexp.Tensor, aten.sort.default, aten.sort.stable,
         aten.fill.Scalar, aten.fill.Tensor, aten.index_put.default, aten._unsafe_index_put.default,
         aten._unsafe_masked_index_put_accumulate.default),
        _preserved,
    ),
    aten.nll_loss2d_backward.default: lambda said, gradient, self, *rest: _preserved(said, self),
    aten._prelu_kernel_backward.default: lambda said, gradient, self, weight: (  # of the second they forget the weight
        (_iterated(said[0], self, weight, gradient),) * 2
    ),
    **dict.fromkeys(
        (aten.native_batch_norm_backward.default, aten.batch_norm_backward.default),
        lambda said, gradient, input, *rest: (said[0] and as_batch_norm(said[0], gradient, input), *said[1:]),
    ),
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: lambda said, gradient, self, *rest: (
        said[0] and _as_input_suggests(said[0], self), *said[1:],
    ),
    aten.rot90.default: _rot90,
    aten.addr.default: _addr,
    aten.binary_cross_entropy_with_logits.default: _loss_like_target,
    **dict.fromkeys(
        (aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default), _copied_with_gaps
    ),
    aten.index_add.default: _index_add,
    aten.index_add_.default: lambda said, *args: (_index_add(said, *args), said)[1],
    aten.index_copy.default: lambda said, *args: _contiguous(said),
    aten.mkldnn_rnn_layer.default: _rnn_layer,
    # of halves too, which the meta function (up to PyTorch 2.11) does not say
    aten.mkldnn_rnn_layer_backward.default: lambda said, *_: tuple(replace(one, dtype=torch.float32) for one in said),
    **dict.fromkeys(
        (aten.polar.default, aten._add_relu.Tensor, aten.hardtanh_backward.default, aten.hardsigmoid_backward.default,
         aten.hardswish_backward.default, aten.mish_backward.default, aten.softplus_backward.default,
         aten.elu_backward.default),
        _iterated,
    ),
    **dict.fromkeys(
        (aten.rsub.Tensor, aten.leaky_relu_backward.default, aten.threshold_backward.default),
        lambda said, self, other, *rest: _iterated(said, other, self),
    ),
    **dict.fromkeys(
        (aten.log_sigmoid_backward.default, aten.abs.default, aten.conj_physical.default, aten._conj_physical.default,
         aten.hardtanh.default, aten.isinf.default),
        _preserved,
    ),
    aten.normal.Tensor_Tensor: lambda said, mean, std, *rest: replace(_contiguous(said), dtype=mean.dtype),
    **dict.fromkeys((aten.normal.float_Tensor, aten.poisson.default), lambda said, *args: _contiguous(said)),
    aten.rrelu_with_noise_backward.default: _rrelu_backward,
    aten.pow.Tensor_Scalar: lambda said, self, exponent: _iterated(said, self),
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default), _loss),
    aten.logit_backward.default: lambda said, gradient, self, *rest: _iterated(said, gradient, self),
    aten.convolution.default: _convolution,
    aten.glu.default: _glu,
    aten.native_dropout_backward.default: _dropout_backward,
    aten.multi_margin_loss.default: _multi_margin_loss,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    aten.log_sigmoid_forward.default: lambda said, *args: tuple(map(_contiguous, said)),
    aten.ldexp.Tensor: _power_of_two_times,
    aten.angle.default: _angle,
    aten.roll.default: _roll,
    **dict.fromkeys((aten.binary_cross_entropy.default, aten.huber_loss.default), _loss_like_input),
    aten.soft_margin_loss.default: _soft_margin_loss,
    aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
    aten.binary_cross_entropy_backward.default: lambda said, gradient, *args: _loss_like_input(said, *args),
    aten.max_pool3d_with_indices.default: lambda said, self, *rest: tuple(_as_volumes(one, self) for one in said),
    aten.max_pool3d_with_indices_backward.default: lambda said, gradient, self, *rest: _as_volumes(said, self),
    **dict.fromkeys((getattr(aten, name).default for name in (*_PADS, *_SHUFFLES)), _as_input_suggests),
    **dict.fromkeys(
        (getattr(aten, f"{name}_backward").default for name in _PADS),
        lambda said, gradient, self, *rest: _as_input_suggests(said, self),
    ),
    **dict.fromkeys(
        (aten.huber_loss_backward.default, aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
         aten.pow.Scalar, aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar,
         aten.nonzero_static.default, aten.renorm.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default,
         aten.glu_backward.default, aten.mvlgamma.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor),
        lambda said, *args: _contiguous(said),
    ),
    **transforms.CORRECTIONS,
}


_ON_GPUS = frozenset({
    aten.convolution.default, aten.native_batch_norm_backward.default, aten.batch_norm_backward.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default, aten.huber_loss_backward.default,
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.hardtanh_backward.default,
    aten.hardswish_backward.default, aten.leaky_relu_backward.default, aten.logit_backward.default, aten.ldexp.Tensor,
    aten.rsub.Tensor, aten.pow.Scalar, aten.polar.default, aten.normal.Tensor_Tensor, aten.normal.float_Tensor,
    aten.poisson.default, aten.select_scatter.default, aten.slice_scatter.default, aten.angle.default,
    aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar,
})  # fmt: skip
_OF_GPUS: dict[OpOverload, Correction] = {
    aten.pixel_unshuffle.default: lambda said, *rest: _contiguous(said),
    # the buffer is the CPU's
    aten.log_sigmoid_forward.default: lambda said, *rest: (said[0], replace(said[1], shape=(0,), stride=(1,))),
}


def correction_of(op: OpOverload, device: torch.device | None) -> Rule | None:
    """What takes the result that the meta kernel said and then the operator's arguments, and gives the real result."""
    rule = pointwise.FUNCTIONAL.get(op)
    correction = CORRECTIONS.get(op)
    if device is not None and device.type == "cuda":
        correction = _OF_GPUS.get(op) or (correction if op in _ON_GPUS else None)
    if op not in CORRECTIONS and op not in _OF_GPUS and torch.Tag.pointwise in op.tags:
        correction = _iterated
    if device is None or device.type not in ("cpu", "cuda"):
        correction = None
    if rule is None and correction is None:
        return None

    def corrected(said: Any, *args: object, **kwargs: object) -> object:
        # it was open which sizes are equal, which the kernel has asked
        found = NotImplemented if rule is None else rule(*args, **kwargs)
        if found is not NotImplemented or correction is None:
            return found
        more = (kwargs.get(argument.name, argument.default_value) for argument in op._schema.arguments[len(args) :])
        bound = (*args, *more)
        if correction is _iterated and "scalar" not in op._overloadname.lower():  # other numbers are no operands
            bound = tuple(value for value, one in zip(bound, op._schema.arguments) if "Tensor" in str(one.type))
        return correction(said, *bound)

    return corrected


__all__ = ["CORRECTIONS", "as_batch_norm", "as_column_major", "correction_of"]
