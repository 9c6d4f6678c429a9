"""Tensor subclasses that hold no other tensors: the graph has the plain tensor, and its traced tensor knows the class.

Takes a tensor of a class with, or without, `__torch_function__` from outside, or a traced tensor and a class; gives a
traced tensor of that class. Always holds: what the class defines is interpreted; the graph never sees the class, and a
result gets it behind the graph, by `as_subclass`, as in eager.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak, Retry, UserException
from fusewright.capture.border import torch_function
from fusewright.capture.border.values import cls as classes
from fusewright.capture.guards import MISSING

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

Plain = Callable[..., Any]
_NOT_TAKEN = ("torch.", "fusewright.")


def is_subclass(kind: type) -> bool:
    """Whether tensors of this class are plain ones with Python code of their own."""
    if kind.__module__.startswith(_NOT_TAKEN) or issubclass(kind, torch.nn.Parameter):
        return False
    if classes.lookup(kind, "__torch_dispatch__") is not _NO_DISPATCH or hasattr(kind, "__tensor_flatten__"):
        return False
    return type(kind) is type(torch.Tensor) and not classes.slots(kind)


_NO_DISPATCH = classes.lookup(torch.Tensor, "__torch_dispatch__")


def plain(real: torch.Tensor) -> torch.Tensor:
    """The tensor itself, without its class: a leaf of autograd stays one."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        if not real.requires_grad or not real.is_leaf or real.is_inference():
            return real.as_subclass(torch.Tensor)
        return real.detach().as_subclass(torch.Tensor).requires_grad_()


def announce(world: World) -> None:
    """Called before the first tensor of such a class is made."""
    if world.recorder.unknown_shapes:
        raise Retry(unknown_shapes=False)
    world.overridden = True
    world.recorder.refuse_unasked = torch_function.refuse_unasked
    world.repeats.enabled = world.tracer.branches.enabled = False


def give_class(world: World, traced: torch.Tensor, kind: type) -> torch.Tensor:
    """From now on the traced tensor is one of this class."""
    announce(world)
    traced.python_class = kind  # type: ignore[attr-defined]
    return traced


def as_subclass(world: World, tensor: torch.Tensor, kind: type, detach: bool = False) -> torch.Tensor:
    """`tensor.as_subclass(kind)`: another tensor on the same memory, with the same history."""
    if not isinstance(kind, type) or (kind is not torch.Tensor and not is_subclass(kind)):
        raise GraphBreak("tensor-construction", "as_subclass() of no class of tensors, or of one with its own layout")
    if not world.recorder_owns(tensor):
        raise GraphBreak("tensor-construction", f"a {type(tensor).__qualname__} as a {kind.__qualname__}")
    alias = torch.ops.aten.detach.default if detach else torch.ops.aten.alias.default
    with torch._C.DisableTorchFunctionSubclass():
        made = world.torch_call(alias, (tensor,), {})
    if kind is torch.Tensor:
        return made
    world.guard_bases(kind)
    return give_class(world, made, kind)


def converted(world: World, value: Any, kind: type) -> Any:
    """What PyTorch's own `__torch_function__` makes of a result."""
    if kind is torch.Tensor:
        return value
    if isinstance(value, torch.Tensor) and not issubclass(world.type_of(value), kind):
        return as_subclass(world, value, kind)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(converted(world, part, kind) for part in value)  # type: ignore[call-arg]
    return value


def _of_torch(kind: type, name: str) -> bool:
    """Whether the class has this attribute from PyTorch, or not at all."""
    owner = next((base for base in kind.__mro__ if name in base.__dict__), object)
    return owner in (torch.Tensor, torch._C.TensorBase, object)


_SILENT = frozenset({"__class__", "__dict__", "__doc__", "__module__"})


def getattr_subclass(world: World, tensor: Any, name: str, plainly: Plain) -> Any:
    """`tensor.name`; `plainly`: for a plain tensor."""
    kind = tensor.python_class
    own = classes.python_method(world, kind, "__getattribute__")
    if own is not None:
        return world.tracer.call(own, (tensor, name))
    found = classes.guarded_lookup(world, kind, name)
    if found is not MISSING and _of_torch(kind, name):
        accessor = isinstance(found, (types.GetSetDescriptorType, property))
        if accessor and name not in _SILENT and torch_function.enabled() and torch_function.override_of(kind):
            return world.torch_call(found.__get__, (tensor,), {})
        with torch._C.DisableTorchFunctionSubclass():
            return plainly(world, tensor, name)
    if found is not MISSING and world.is_data_descriptor(found, reads=True):
        return world.bind(found, tensor, kind, name)
    with torch._C.DisableTorchFunctionSubclass():
        value = plainly(world, tensor, "__dict__").get(name, MISSING)
    if value is not MISSING:
        return value
    if found is not MISSING:
        return world.bind(found, tensor, kind, name)
    fallback = classes.python_method(world, kind, "__getattr__")
    if fallback is not None:
        return world.tracer.call(fallback, (tensor, name))
    raise UserException(AttributeError(f"'{kind.__name__}' object has no attribute '{name}'", name=name, obj=tensor))


def setattr_subclass(world: World, tensor: Any, name: str, value: object, plainly: Plain) -> None:
    """`tensor.name = value`."""
    kind = tensor.python_class
    own = classes.python_method(world, kind, "__setattr__")
    if own is not None:
        world.tracer.call(own, (tensor, name, value))
        return
    store_plainly(world, tensor, name, value, plainly)


def store_plainly(world: World, tensor: Any, name: str, value: object, plainly: Plain) -> None:
    """`object.__setattr__(tensor, name, value)`."""
    kind = tensor.python_class
    found = classes.guarded_lookup(world, kind, name)
    if found is not MISSING and world.is_data_descriptor(found):
        if not _of_torch(kind, name):
            if type(found) is not property:
                raise GraphBreak("tensor-attribute", f"a store to {kind.__qualname__}.{name}")
            if found.fset is None:
                raise UserException(AttributeError(f"property '{name}' of '{kind.__qualname__}' object has no setter"))
            world.tracer.call(world.load(found.fset, world.constant(found.fset, name)), (tensor, value))
            return
        if name not in _SILENT and torch_function.enabled() and torch_function.override_of(kind):
            world.torch_call(found.__set__, (tensor, value), {})
            return
        with torch._C.DisableTorchFunctionSubclass():
            plainly(world, tensor, name, value)
        return
    with torch._C.DisableTorchFunctionSubclass():
        namespace = world.getattr(tensor, "__dict__")
    if hasattr(namespace, "store"):
        namespace.store(name, value)
    else:
        namespace[name] = value
