"""Numbers that the program reads from tensors: `item()`, `int(x)`, `tolist()` and the like.

Takes a tensor and the method's name; gives a number that is known, one that is known when the graph runs, or one that
is taken for granted; MISSING where the read is a graph break.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusewright.capture.border.native import native
from fusewright.capture.call import optimizers
from fusewright.capture.guards import MISSING
from fusewright.sizes.symfloat import float_of_tensor

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# The reads of a tensor that give a number which the graph may know, and of which dtypes.
_NUMBERS_OF = {
    "item": (*_INTEGERS, *_FLOATS),
    "__int__": _INTEGERS,
    "__index__": _INTEGERS,
    "__float__": _FLOATS,
    "tolist": (*_INTEGERS, *_FLOATS),
}


def read(tracer: Tracer, name: str, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the method `name` of a tensor gives."""
    recorder = tracer.recorder
    value = recorder.known_value(tensor)
    if value is not None:
        return native(getattr(torch.Tensor, name), value, *args, **kwargs)
    symbolic = recorder.data_numbers or optimizers.asks(tracer)
    if symbolic and name in _NUMBERS_OF and not args and not kwargs:
        if name == "tolist" and all(type(size) is int for size in tensor.shape):
            return _listed(tracer, tensor)
        if tensor.numel() == 1 and name != "tolist" and tensor.dtype in _NUMBERS_OF[name]:
            return _number(tracer, tensor)
    if recorder.speculation is not None and name in ("item", "__float__") and _is_float(tensor):
        return _number(tracer, tensor)
    value = recorder.read(tensor)
    return MISSING if value is None else native(getattr(torch.Tensor, name), value, *args, **kwargs)


def _is_float(tensor: torch.Tensor) -> bool:
    """Whether a number that is read from the tensor may stay one that is known at run time."""
    return tensor.numel() == 1 and tensor.dtype in _FLOATS and tensor.device.type == "cpu"


def _number(tracer: Tracer, tensor: torch.Tensor) -> Any:
    """What `tensor.item()` gives, when the graph runs."""
    if not tensor.is_floating_point():
        return tracer.world.torch_call(torch.Tensor.item, (tensor,), {})
    if tracer.recorder.level != "aten" and tracer.recorder.env is not None:
        tracer.recorder.lacks_form("data-dependent-scalar", "a float that is read from a tensor")
    return float_of_tensor(tracer.recorder, tensor, checked=not optimizers.asks(tracer))


def _listed(tracer: Tracer, tensor: torch.Tensor) -> Any:
    """What `tensor.tolist()` gives."""
    if tensor.dim():
        return [_listed(tracer, part) for part in tracer.world.torch_call(torch.Tensor.unbind, (tensor,), {})]
    return tracer.call(torch.Tensor.item, (tensor,))
