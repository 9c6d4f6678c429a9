"""How a call of a torch function stands in a graph at torch level."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Sequence

import torch

from fusewright.record.traced_tensor import TracedTensor

# What a torch-level graph can hold as an argument besides tensors, sizes and containers of them.
NODE_ARGUMENTS = (
    int, float, complex, str, bytes, range, type(None), type(Ellipsis), type, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
    torch.Generator, enum.Enum, types.FunctionType, types.BuiltinFunctionType, torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch.finfo, torch.iinfo, torch.nn.Module, torch.ScriptObject,
)  # fmt: skip


def torch_target(fn: Callable[..., object], args: Sequence[object]) -> tuple[str, object, Sequence[object]]:
    """(node kind, target, arguments) for a torch-level call: methods of Tensor by name, so that a subclass would be
    honoured."""
    owner = getattr(fn, "__self__", None)
    if (
        isinstance(fn, types.MethodWrapperType)
        and fn.__name__ == "__get__"
        and isinstance(owner, types.GetSetDescriptorType)
    ):
        return "call_function", getattr, (args[0], owner.__name__)
    if isinstance(owner, TracedTensor):
        return "call_method", fn.__name__, (owner, *args)
    name = getattr(fn, "__name__", "")
    if name and args and isinstance(args[0], TracedTensor) and getattr(torch.Tensor, name, None) is fn:
        return "call_method", name, args
    return "call_function", fn, args
