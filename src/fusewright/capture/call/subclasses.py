"""Calls that concern tensor subclasses without parts: their construction, PyTorch's own `__torch_function__`, and the
contexts in which no class is asked.

Takes the arguments of a call; gives its result. Always holds: what stands here takes no part in asking overrides.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.overrides import get_default_nowrap_functions

from fusewright._native import isinstance
from fusewright.base.pytorch import methods, torch
from fusewright.base.signals import GraphBreak
from fusewright.capture.border import torch_function
from fusewright.capture.border.native import native
from fusewright.capture.border.values import subclass, tensor as tensors
from fusewright.capture.call import autograd as call_autograd
from fusewright.record.traced_tensor import TracedTensor

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

DISABLERS: tuple[Any, ...] = (torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction)


def disabler_method(tracer: Tracer, name: str, owner: Any, args: Args) -> Any:
    """Enters or leaves such a context; a world closes what a capture leaves open."""
    world = tracer.world
    if name == "__enter__" and type(owner) is DISABLERS[0]:
        native(owner.__enter__)
        world.disablers.append(owner)
        return None
    if name == "__exit__" and world.disablers and world.disablers[-1] is owner:
        world.disablers.pop()
        return native(owner.__exit__, None, None, None)
    raise GraphBreak("open-context", f"{name} of a {type(owner).__qualname__}")


def _default_override(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """`torch.Tensor.__torch_function__`, which `super().__torch_function__` reaches."""
    given = dict(zip(("cls", "func", "types", "args", "kwargs"), args)) | kwargs
    if not isinstance(given.get("types"), (tuple, list, set, frozenset)):
        raise GraphBreak("untraceable-call", "__torch_function__() without classes")
    cls, func = given["cls"], given["func"]
    if not all(kind in cls.__mro__ for kind in given["types"]):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        result = tracer.call(func, tuple(given.get("args") or ()), dict(given.get("kwargs") or {}))
        if isinstance(func, types.MethodWrapperType) and func in get_default_nowrap_functions():
            return result
        return subclass.converted(tracer.world, result, cls)


def _accessor(tracer: Tracer, fn: Any, args: Args) -> Any:
    """`torch.Tensor.shape.__get__(x)`."""
    world, owner = tracer.world, fn.__self__
    name = getattr(owner.fget if type(owner) is property else owner, "__name__", "")
    if fn.__name__ == "__get__":
        return tensors.getattr_plain(world, args[0], name)
    if fn.__name__ == "__set__":
        return tensors.setattr_plain(world, args[0], name, args[1])
    raise GraphBreak("tensor-attribute", f"Tensor.{name} is deleted")


def accessor(fn: Any, args: Args) -> Callable[[Tracer, Any, Args], Any] | None:
    """The rule for what an override is told of a read or a store of an attribute, if `fn` is that."""
    if args and isinstance(args[0], torch.Tensor) and torch_function.is_accessor(fn):
        return _accessor
    return None


def _as_subclass(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    given = dict(zip(("self", "cls"), args)) | kwargs
    if len(args) + len(kwargs) != 2 or "cls" not in given:
        raise GraphBreak("tensor-construction", "as_subclass() with other arguments than a class")
    return subclass.as_subclass(tracer.world, args[0], given["cls"])


def _make_subclass(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """`torch.Tensor._make_subclass(cls, data)`: cut off from its history."""
    if len(args) not in (2, 3) or kwargs.keys() - {"require_grad"}:
        raise GraphBreak("tensor-construction", "_make_subclass with further arguments")
    kind, data, required = args[0], args[1], tracer.world.truth((*args[2:], *kwargs.values(), False)[0])
    if kind is torch.nn.Parameter:
        return parameter(tracer, (data, required), {})
    made = subclass.as_subclass(tracer.world, data, kind, detach=True)
    return _leaf(tracer, made) if required else made


def _leaf(tracer: Tracer, made: Any) -> Any:
    """A tensor that was cut off, made to require a gradient."""
    if not (made.is_floating_point() or made.is_complex()) or made.is_inference():
        raise GraphBreak("tensor-construction", "a tensor that cannot require a gradient is made to")
    return call_autograd.METHODS["requires_grad_"](tracer, made, (), {})


def parameter(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """`torch.nn.Parameter(data, requires_grad)`: a tensor on the same memory, cut off from its history."""
    world, given = tracer.world, dict(zip(("data", "requires_grad"), args)) | kwargs
    data = given.get("data")
    data = tracer.call(torch.empty, (0,)) if data is None else data
    if not world.recorder_owns(data) or world.type_of(data) not in (torch.Tensor, torch.nn.Parameter):
        raise GraphBreak("tensor-construction", f"a Parameter of a {world.type_of(data).__qualname__}")
    with torch._C.DisableTorchFunctionSubclass():
        made = world.torch_call(torch._C.TensorBase.detach, (data,), {})
    if world.truth(given.get("requires_grad", True)):
        made = _leaf(tracer, made)
    made.python_class = torch.nn.Parameter
    return made


def new(tracer: Tracer, kind: type, args: Args, kwargs: Kwargs) -> Any:
    """`torch.Tensor.__new__(kind, data)`."""
    if not subclass.is_subclass(kind):
        raise GraphBreak("tensor-construction", f"a call of the class {kind.__qualname__}")
    given = len(args) == 1 and not kwargs and type(args[0]) is TracedTensor
    return subclass.as_subclass(tracer.world, args[0] if given else tracer.call(torch.Tensor, args, kwargs), kind)


def setattr_of(tracer: Tracer, owner: Any, args: Args) -> Any:
    """`super().__setattr__(name, value)`."""
    if torch_function.is_traced_subclass(owner):
        name, value = args
        return subclass.store_plainly(tracer.world, owner, name, value, tensors.setattr_plain)
    return tensors.setattr_tensor(tracer.world, owner, *args)


ROWS: list[tuple[Any, Any]] = [
    (vars(torch.Tensor)["__torch_function__"].__func__, _default_override),
    (methods.as_subclass, _as_subclass),
    (methods._make_subclass, _make_subclass),
]
