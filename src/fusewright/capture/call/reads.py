"""Numbers that the program reads from tensors (`item()`, `int(x)`, `tolist()`), and tensors that it makes of such
numbers (`torch.as_tensor(rate / step)`).

`read` takes a tensor and the method's name; gives a number that is known, one that is known when the graph runs, or one
that is taken for granted; MISSING where the read is a graph break. A tensor is made by the graph where it is of a float
that is known only at run time, or of a flat list of numbers with one; else by PyTorch's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fusewright.capture.border.native import native
from fusewright.capture.call import optimizers
from fusewright.capture.guards import MISSING
from fusewright.sizes.symfloat import float_of_tensor, node_of

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


def _made(fn: Callable[..., Any]) -> Callable[[Tracer, tuple[Any, ...], dict[str, Any]], Any]:
    def make(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: dict[str, Any] = dict(zip(("data", "dtype", "device"), args)) | kwargs
        data: Any = given.get("data")
        listed = type(data) in (list, tuple)
        parts = list(data) if listed else [data]
        floats = any(node_of(part) is not None for part in parts)
        plain = all(node_of(part) is not None or type(part) in (int, float) for part in parts)
        if not floats or not plain or not given.keys() <= {"data", "dtype", "device"}:
            return tracer.world.torch_call(fn, args, kwargs)
        dtype: Any = given.get("dtype") or torch.get_default_dtype()
        device = given.get("device") or torch.get_default_device()

        def record() -> Any:
            tensors = [torch.full((), part, dtype=dtype, device=device) for part in parts]
            return torch.stack(tensors) if listed else tensors[0]

        return tracer.world.torch_call(record, (), {})

    return make


ROWS = [(fn, _made(fn)) for fn in (torch.tensor, torch.as_tensor)]
