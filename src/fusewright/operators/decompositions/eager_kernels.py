"""Functions with a kernel of their own in eager, which knows fewer dtypes than the operators that they are recorded as.

Takes a call's arguments; gives None, since the function is recorded as it comes. Raises GraphBreak for dtypes that
eager refuses, so that eager raises its own error. Always holds: nothing is recorded here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.nn import functional as F

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
    if why := disagreement(operator, (*types, *others), {}, types[0]):
        raise GraphBreak("operator-failed", f"{operator}: {why}")


def _max_pool1d(recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """With indices it is the pooling over two dimensions."""
    if not kwargs.get("return_indices") and len(args) < len("input size stride padding dilation ceil indices".split()):
        refuse_dtypes(recorder, aten.max_pool1d.default, (args[0] if args else kwargs.get("input"),))


def _of_classes(
    operator: OpOverload, recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = dict(zip(("input", "target"), args)) | kwargs
    refuse_dtypes(recorder, operator, (given.get("input"), given.get("target")))


_multi_margin = partial(_of_classes, aten.multi_margin_loss.default)
_multilabel_margin = partial(_of_classes, aten.multilabel_margin_loss_forward.default)
EAGER_KERNELS: dict[Any, Callable[..., None]] = {
    F.max_pool1d: _max_pool1d,
    torch.max_pool1d: _max_pool1d,
    F.multi_margin_loss: _multi_margin,
    torch._C._nn.multi_margin_loss: _multi_margin,
    F.multilabel_margin_loss: _multilabel_margin,
    torch._C._nn.multilabel_margin_loss: _multilabel_margin,
}
