"""Functions with a kernel of their own in eager, which knows fewer dtypes and layouts than the operators that they are
recorded as.

Takes a call's arguments; gives None where the function is recorded as it comes. Raises GraphBreak for dtypes that eager
refuses, so that eager raises its own error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch._ops import OpOverload

from fusewright.base.pytorch import functional as F, methods, torch
from fusewright.base.signals import GraphBreak
from fusewright.operators.eager_dtypes import disagreement
from fusewright.sizes.interfaces import Recorder

aten = torch.ops.aten


def refuse_dtypes(recorder: Recorder, operator: OpOverload, tensors: tuple[Any, ...], *others: Any) -> None:
    """Raises GraphBreak where eager's `operator` does not take tensors of these dtypes. `others`: what it is asked
    with besides."""
    if recorder.level != "aten" or not all(isinstance(t, torch.Tensor) and recorder.owns(t) for t in tensors):
        return
    types = [tensor.tensor_type for tensor in tensors]
    results = types[:1] * len(operator._schema.returns)
    if why := disagreement(operator, (*types, *others), {}, results):
        raise GraphBreak("operator-failed", f"{operator}: {why}")


def _max_pool1d(
    function: Any, recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """With indices, and where gradients are wanted, it is the pooling over two dimensions; else its result is
    contiguous."""
    if kwargs.get("return_indices") or len(args) >= len("input size stride padding dilation ceil indices".split()):
        return None
    given = args[0] if args else kwargs.get("input")
    refuse_dtypes(recorder, aten.max_pool1d.default, (given,))
    if not isinstance(given, torch.Tensor) or given.device.type != "cpu" or recorder.level != "aten":
        return None
    if given.requires_grad and torch.is_grad_enabled():
        return None
    return call(torch.clone, (call(function, args, kwargs),), {"memory_format": torch.contiguous_format})


def _linear(recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where the product is apart, eager adds the bias to it in place, so that it keeps its dtype; to what is traced, as
    under the transforms of `torch.func`, it adds it out of place."""
    given = dict(zip(("input", "weight", "bias"), args)) | kwargs
    x, weight, bias = (given.get(name) for name in ("input", "weight", "bias"))
    if not isinstance(bias, torch.Tensor) or not isinstance(x, torch.Tensor) or bias.dtype == x.dtype:
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    made = call(F.linear, (x, weight, bias), {})
    product = call(F.linear, (x, weight), {})  # of which nothing is left if that is not so
    return made if made.dtype == product.dtype else call(methods.add_, (product, bias), {})


def _of_classes(
    operator: OpOverload,
    others: tuple[Any, ...],
    recorder: Recorder,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    given = dict(zip(("input", "target"), args)) | kwargs
    refuse_dtypes(recorder, operator, (given.get("input"), given.get("target")), *others)


_multi_margin = partial(_of_classes, aten.multi_margin_loss.default, ())
_multilabel_margin = partial(_of_classes, aten.multilabel_margin_loss_forward.default, (0,))  # with no reduction
EAGER_KERNELS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **{function: partial(_max_pool1d, function) for function in (F.max_pool1d, torch.max_pool1d)},
    F.multi_margin_loss: _multi_margin,
    torch._C._nn.multi_margin_loss: _multi_margin,
    F.multilabel_margin_loss: _multilabel_margin,
    torch._C._nn.multilabel_margin_loss: _multilabel_margin,
}
