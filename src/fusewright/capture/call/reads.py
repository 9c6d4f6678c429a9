"""Numbers that the program reads from tensors (`item()`, `int(x)`, `tolist()`), and tensors that it makes of such
numbers (`torch.as_tensor(rate / step)`).

`read` takes a tensor and the method's name; gives a number that is known, one that is known when the graph runs, or one
that is taken for granted; MISSING where the read is a graph break. A tensor is made by the graph where it is of a float
that is known only at run time, or of lists that hold one, or tensors of one element; else by PyTorch's own function.
`torch.asarray` stands here too: it may give its argument back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from fusewright._native import isinstance
from fusewright.base.pytorch import methods, torch
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.native import native, unwatched
from fusewright.capture.border.values import tensor as tensors
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
        return native(tensors.method_in_c(name), value, *args, **kwargs)
    symbolic = recorder.data_numbers or optimizers.asks(tracer)
    if symbolic and name in _NUMBERS_OF and not args and not kwargs:
        if name == "tolist" and all(type(size) is int for size in tensor.shape):
            return _listed(tracer, tensor)
        if tensor.numel() == 1 and name != "tolist" and tensor.dtype in _NUMBERS_OF[name]:
            return _number(tracer, tensor)
    if recorder.speculation is not None and name in ("item", "__float__") and _is_float(tensor):
        return _number(tracer, tensor)
    value = recorder.read(tensor)
    return MISSING if value is None else native(tensors.method_in_c(name), value, *args, **kwargs)


def _is_float(tensor: torch.Tensor) -> bool:
    """Whether a number that is read from the tensor may stay one that is known at run time."""
    return tensor.numel() == 1 and tensor.dtype in _FLOATS and tensor.device.type == "cpu"


def _number(tracer: Tracer, tensor: torch.Tensor) -> Any:
    """What `tensor.item()` gives, when the graph runs."""
    if not tensor.is_floating_point():
        return tracer.world.torch_call(torch._C.TensorBase.item, (tensor,), {})
    if tracer.recorder.level != "aten" and tracer.recorder.env is not None:
        tracer.recorder.lacks_form("data-dependent-scalar", "a float that is read from a tensor")
    return float_of_tensor(tracer.recorder, tensor, checked=not optimizers.asks(tracer))


def _listed(tracer: Tracer, tensor: torch.Tensor) -> Any:
    """What `tensor.tolist()` gives."""
    if tensor.dim():
        return [_listed(tracer, part) for part in tracer.world.torch_call(torch._C.TensorBase.unbind, (tensor,), {})]
    return tracer.call(torch._C.TensorBase.item, (tensor,))


def _made(fn: Callable[..., Any]) -> Callable[[Tracer, tuple[Any, ...], dict[str, Any]], Any]:
    def make(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = joined(tracer, dict(zip(("data", "dtype", "device"), args)) | kwargs)
        return tracer.world.torch_call(fn, args, kwargs) if made is MISSING else made

    return make


def joined(tracer: Tracer, given: dict[str, Any]) -> Any:
    """What `torch.tensor` makes of numbers and tensors of one element in nested lists. MISSING where nothing of it is
    known only at run time, and where PyTorch might refuse: its function is asked then, or the graph breaks."""
    found = _flat(given.get("data"))
    if found is None or not given.keys() <= {"data", "dtype", "device"}:
        return MISSING
    shape, parts = found
    owned = [tracer.world.recorder_owns(part) for part in parts]
    late = any(node_of(part) is not None for part in parts) or (bool(shape) and any(owned))
    kinds = [_kind(part, own) for part, own in zip(parts, owned)] if late else [None]
    if None in kinds:
        return MISSING
    device = torch.device(given.get("device") or torch.get_default_device())
    dtype: Any = given.get("dtype") or functools.reduce(torch.promote_types, kinds)  # type: ignore[arg-type]
    for part, own, kind in zip(parts, owned, kinds):
        if own and not (part.device == device and _converts(kind, dtype)):
            return MISSING
    parts = [native(_as_stored, part, dtype) if type(part) in (bool, int, float) else part for part in parts]

    def record() -> Any:
        tensors = [
            _stored(part, dtype) if own else torch.full((), part, dtype=dtype, device=device)
            for part, own in zip(parts, owned)
        ]
        return torch.reshape(torch.stack(tensors), shape) if shape else tensors[0]

    return tracer.world.torch_call(record, (), {})


def _flat(data: Any) -> tuple[tuple[int, ...], list[Any]] | None:
    """The shape of nested lists, and what they hold; None where their lengths differ."""
    if type(data) not in (list, tuple):
        return (), [data]
    rows = [_flat(part) for part in data]
    if not rows or rows[0] is None or any(row is None or row[0] != rows[0][0] for row in rows):
        return None
    return (len(rows), *rows[0][0]), [part for row in rows if row is not None for part in row[1]]


def _kind(part: Any, own: bool) -> torch.dtype | None:
    """The dtype that a part gives to the tensor; None of what has none."""
    if own:
        return part.dtype if all(type(size) is int and size == 1 for size in part.shape) else None
    if node_of(part) is not None:
        return torch.get_default_dtype()
    kinds = {bool: torch.bool, int: torch.int64, torch.SymInt: torch.int64, float: torch.get_default_dtype()}
    return kinds.get(type(part))


def _converts(kind: Any, dtype: torch.dtype) -> bool:
    """Whether the conversion of an element is no error, whatever its value."""
    return torch.promote_types(kind, dtype) is dtype or (kind.is_floating_point and dtype.is_floating_point)


def _as_stored(number: Any, dtype: torch.dtype) -> Any:
    """The number that a tensor of the dtype holds: `torch.full` refuses some that `torch.tensor` rounds."""
    return torch.tensor(number, dtype=dtype, device="cpu").item()


def _stored(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An element as a tensor of another dtype holds it, by way of a Python number."""
    part = torch.reshape(torch.detach(part), ())
    wide = part.dtype is torch.int64 and dtype.is_floating_point
    return cast(torch.Tensor, methods.to(methods.double(part) if wide else part, dtype))


def _given(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.asarray: it gives a tensor back of which nothing is to be converted, and changes whether that requires a
    gradient, by its argument (up to PyTorch 2.11 to False where none is given)."""
    world, given = tracer.world, args[0] if args else None
    if not isinstance(given, torch.Tensor) or world.outside(given) is None or world.recorder.level == "torch":
        return world.torch_call(torch.asarray, args, kwargs)
    world.requires_grad_matters = True
    before = tensors.requires_grad(world, given)
    world.getattr(given, "is_leaf")  # which one must be, and is guarded by that
    made = world.torch_call(torch.asarray, args, kwargs)
    if given.requires_grad is not before:
        unwatched(torch._C.TensorBase.requires_grad_, given, before)
        raise GraphBreak("tensor-attribute", "torch.asarray changes whether an input requires a gradient")
    return made


ROWS = [*((fn, _made(fn)) for fn in (torch.tensor, torch.as_tensor)), (torch.asarray, _given)]
