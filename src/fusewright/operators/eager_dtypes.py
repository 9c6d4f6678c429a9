"""Whether eager has a kernel for these dtypes, and what it gives: meta kernels, and loops of ours, accept more than
PyTorch's kernels for CPUs and GPUs.

Takes a pointwise operator or a reduction with its arguments and the result type that was inferred (a TensorType in
each tensor's place); gives the reason why eager would do something else, else "". Always holds: the answer comes from
the operator itself, run once for each question on tensors of one element or two; a question holds all that it is run
with, so no answer serves another one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import NamedTuple

from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.base.signals import memory_was_short, raised_by_handler
from fusewright.operators.schema import functional_form
from fusewright.sizes.expressions import Expr
from fusewright.sizes.tensor_type import TensorType


class _Tensor(NamedTuple):
    """What of a tensor may decide."""

    dtype: torch.dtype
    rank: int
    device: str


class _Given(NamedTuple):
    """An argument that is no tensor: 1, 1.0 and True are equal, and are not the same."""

    kind: type
    value: object


def disagreement(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> str:
    """Why eager refuses the call, or that it gives another dtype; empty when it agrees, or when the operator is none
    that is asked about, or is for a device that this machine lacks."""
    if not _is_asked(func):
        return ""
    asked = _asked_with_ones if func in _SIZED else _asked_with
    if func in _WINDOWS or func in _HALVED:
        types = [value for value in args if isinstance(value, TensorType)]
        if func in _HALVED:  # along their only dimension
            types = [replace(t, shape=t.shape[:1], stride=t.stride[:1]) for t in types]
        args, kwargs = (*types, *_WINDOWS.get(func, (0,))), {}
    elif func is torch.ops.aten.convolution.default and not kwargs:  # without padding, one group
        args = (*args[:4], [0], *args[5:7], [0], 1)
    given = tuple(map(asked, args)), tuple((name, asked(value)) for name, value in kwargs.items())
    tensors = [*_tensors(given)]
    if any(tensor.device == "cuda" for tensor in tensors):
        if {tensor.dtype for tensor in tensors} in _PLAIN:  # what meta kernels are written after
            return ""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return ""  # what the program records is none of ours
    found = _answer(func, torch.get_default_dtype(), *given)
    if isinstance(found, str):
        return found
    inferred = _dtypes(result)
    return f"eager gives {found}, its meta kernel {inferred}" if found and found != inferred else ""


_PLAIN = ({torch.float32}, {torch.float64})


@cache
def _is_asked(func: OpOverload) -> bool:
    """Without random numbers: asking must change nothing."""
    tags = (functional_form(func) or func).tags  # in-place forms are not all tagged
    elementwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return elementwise or torch.Tag.reduction in tags or func in _OTHERS


# Losses go over their operands as pointwise operators do, and then reduce; others go along a dimension, or are
# pointwise without being tagged so.
_SIZED = frozenset(
    getattr(torch.ops.aten, name).default
    for name in """native_layer_norm native_layer_norm_backward native_group_norm
        native_group_norm_backward""".split()
)
"""Their integers are sizes of the tensors: 1."""
_PLACED = frozenset(
    getattr(torch.ops.aten, name).default
    for name in """index_put index_put_ _unsafe_index_put index_add index_add_ index_copy
        index_copy_ nll_loss_forward nll_loss_backward nll_loss2d_forward
        nll_loss2d_backward multi_margin_loss multilabel_margin_loss_forward""".split()
) | frozenset(
    getattr(packet, overload)
    for packet in (torch.ops.aten.index_fill, torch.ops.aten.index_fill_)
    for overload in ("int_Scalar", "int_Tensor")
)
"""Their tensors of integers tell places: 0."""
_HALVED = {torch.ops.aten.glu.default: 0, torch.ops.aten.glu_backward.default: 1}
"""They take a dimension in two halves: that of this argument."""
_PAIRED = {torch.ops.aten.gelu_backward.default: (0, 1), **{func: (place,) for func, place in _HALVED.items()}}
"""The arguments of which they are given two elements: of one, gelu's gradient is not computed by a library."""
_WINDOWS: dict[OpOverload, tuple[object, ...]] = {
    **{
        getattr(torch.ops.aten, name).default: ((1,) * int(name.partition("pool")[2][0]),)
        for name in """avg_pool2d avg_pool3d max_pool1d max_pool2d_with_indices max_pool3d_with_indices
            _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d""".split()
    },
    **{
        getattr(torch.ops.aten, f"avg_pool{rank}d_backward").default: (
            (1,) * rank, (1,) * rank, (0,) * rank, False, True, None,
        )
        for rank in (2, 3)
    },
    torch.ops.aten.kthvalue.default: (1,),
    torch.ops.aten.reflection_pad1d.default: ((0, 0),),
    torch.ops.aten.reflection_pad2d.default: ((0, 0, 0, 0),),
    torch.ops.aten.reflection_pad3d.default: ((0, 0, 0, 0, 0, 0),),
}
"""What they are asked with behind their tensors: windows and margins that fit into one element."""
_OTHERS = frozenset(
    getattr(torch.ops.aten, name).default
    for loss in ("huber_loss", "smooth_l1_loss", "mse_loss", "soft_margin_loss", "binary_cross_entropy")
    for name in (loss, f"{loss}_backward")
) | {
    *_SIZED,
    *_PLACED,
    *_HALVED,
    *_WINDOWS,
    torch.ops.aten.convolution.default,
    torch.ops.aten.rsub.Tensor,
    torch.ops.aten.rsub.Scalar,
} | {
    getattr(torch.ops.aten, name).default
    for name in """cumsum cumprod cummax cummin logcumsumexp sort median nanmedian upsample_nearest1d upsample_nearest2d
        upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
        upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d hardswish hardswish_
        hardswish_backward hardsigmoid_backward hardtanh_backward hardshrink_backward softshrink_backward
        softplus_backward mish_backward elu_backward leaky_relu_backward log_sigmoid_forward log_sigmoid_backward
        _prelu_kernel _prelu_kernel_backward complex polar bmm _trilinear geqrf ormqr _softmax _log_softmax
        _softmax_backward_data _log_softmax_backward_data _cdist_forward mode block_diag histc
        binary_cross_entropy_with_logits native_batch_norm _native_batch_norm_legit
        _native_batch_norm_legit_no_training
        _native_batch_norm_legit_functional native_batch_norm_backward cudnn_batch_norm""".split()
}


_SPREAD = frozenset(getattr(torch.ops.aten, name).correction for name in ("var", "std", "var_mean", "std_mean"))
"""Of one element they warn, unless nothing is taken from its number. PyTorch gives the warnings of what runs inside
another of its functions when that ends, so none can be caught here."""


def _asked_with(value: object) -> object:
    if isinstance(value, TensorType):
        return _Tensor(value.dtype, len(value.shape), value.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(map(_asked_with, value))
    return _Given(int, 1) if isinstance(value, Expr) else _Given(type(value), value)


def _asked_with_ones(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(map(_asked_with_ones, value))
    return _Given(int, 1) if type(value) is int else _asked_with(value)


@lru_cache(maxsize=1 << 12)
def _answer(
    func: OpOverload, default: torch.dtype, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...]
) -> tuple[torch.dtype, ...] | str:
    """The result dtypes, or the error. `default`: the default dtype, which results may depend on."""
    here = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    if any(tensor.device not in here for tensor in _tensors((args, kwargs))):
        return ()
    if any(map(torch._C._dispatch_tls_is_dispatch_key_included, _OF_TRANSFORMS)):
        # A transform of torch.func sees what runs in its thread, and the answer is for all calls that come.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_answer_here, func, args, kwargs).result()
    return _answer_here(func, args, kwargs)


_OF_TRANSFORMS = (
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
    torch._C.DispatchKey.FuncTorchDynamicLayerBackMode,
)


def _answer_here(
    func: OpOverload, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...]
) -> tuple[torch.dtype, ...] | str:
    # The question may be asked while something records whatever runs: it is no part of that.
    with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = _placed if func in _PLACED else _made
            named = {name: made(value) for name, value in kwargs}
            if func in _SPREAD:
                named["correction"] = 0
            pairs = _PAIRED.get(func, ())
            given = (_pair(value) if place in pairs else made(value) for place, value in enumerate(args))
            return _dtypes(func(*given, **named))
        except RecursionError:  # of this moment, not of the question
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            if memory_was_short(error):
                raise MemoryError(str(error)) from error
            return f"{type(error).__name__}: {error}"


def _tensors(value: object) -> Iterator[_Tensor]:
    if isinstance(value, _Tensor):
        yield value
    elif type(value) is tuple:
        for one in value:
            yield from _tensors(one)


def _dtypes(result: object) -> tuple[torch.dtype, ...]:
    return tuple(
        t.dtype
        for t in (result if isinstance(result, (tuple, list)) else (result,))
        if isinstance(t, (torch.Tensor, TensorType))
    )


def _made(value: object) -> object:
    if isinstance(value, _Tensor):
        return torch.ones([1] * value.rank, dtype=value.dtype, device=value.device)
    return value.value if isinstance(value, _Given) else list(map(_made, value))  # type: ignore[call-overload]


def _pair(value: object) -> object:
    made = _made(value)
    return made.repeat_interleave(2) if isinstance(made, torch.Tensor) else made


def _placed(value: object) -> object:
    if type(value) is tuple:
        return list(map(_placed, value))
    made = _made(value)
    places = isinstance(made, torch.Tensor) and not made.dtype.is_floating_point and not made.dtype.is_complex
    return made.zero_() if places and made.dtype != torch.bool else made  # type: ignore[attr-defined]


__all__ = ["disagreement"]
