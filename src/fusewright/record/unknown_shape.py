"""Results whose shape depends on data (nonzero, unique, boolean masks): in the graph as long as nobody asks what they
look like.

Takes an operator and its arguments; gives the types of its results with a size that no input and no guard knows, and
the traced tensor that stands for such a result. Always holds: the tensor can be handed on, kept, returned, and asked
for what its shape does not decide; whatever else is done with it, an operator that takes it included, raises Retry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.pytorch import methods, torch
from fusewright.base.signals import Retry
from fusewright.graph.nodes import leaves
from fusewright.operators import size_checks
from fusewright.operators.data_dependent import OF_UNKNOWN_SHAPE
from fusewright.record.traced_tensor import TracedTensor, prepare
from fusewright.sizes.expressions import symbol
from fusewright.sizes.tensor_type import TensorType

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder

aten = torch.ops.aten


def result_types(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], stem: str
) -> tuple[TensorType, ...] | None:
    """The types of the results, of one dimension with a size of that name each; None when the operator is not known, or
    runs elsewhere than on the CPU, or has a gradient to keep (its shape is unknown as well)."""
    dtypes = OF_UNKNOWN_SHAPE.get(func)
    first = args[0] if args else None
    tensors = [t for t in leaves((args, kwargs)) if isinstance(t, TracedTensor)]
    if dtypes is None or not isinstance(first, TracedTensor) or any(t.device.type != "cpu" for t in tensors):
        return None
    if func is aten.bincount.default and len(tensors) > 1:
        return None  # weights decide the dtype
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    size_checks.check(None, func, [first.tensor_type, *args[1:]], dict(kwargs))
    named = {"same": first.dtype, "real": first.dtype.to_real()}
    return tuple(
        TensorType((symbol(f"{stem}_{place}"),), (1,), named[dtype] if isinstance(dtype, str) else dtype, first.device)
        for place, dtype in enumerate(dtypes)
    )


# What can be asked without knowing the shape.
_ANSWERED = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "dtype", "device", "requires_grad", "grad_fn", "is_leaf", "layout", "_version", "is_cpu", "is_cuda",
        "is_sparse", "is_quantized",
        "grad", "is_nested", "is_meta", "is_mkldnn", "is_sparse_csr", "is_xpu", "is_mps", "output_nr", "name",
    )
) | {methods.is_floating_point, methods.is_complex, methods.is_inference}  # fmt: skip


class UnknownShape(TracedTensor):
    """A traced tensor of unknown shape. `source`: the operator that made it."""

    source: OpOverload

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        if func not in _ANSWERED:
            raise Retry(unknown_shapes=False)  # the next attempt breaks at the operator that makes the tensor
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def make_unknown(recorder: Recorder, node: torch.fx.Node, type_: TensorType, source: OpOverload) -> UnknownShape:
    """The traced tensor for `node`; its own sizes are never seen."""
    traced = methods._make_wrapper_subclass(UnknownShape, (2,), dtype=type_.dtype, device=type_.device)
    prepare(traced, recorder, node, type_)
    traced.source = source
    return traced


__all__ = ["UnknownShape", "make_unknown", "result_types"]
