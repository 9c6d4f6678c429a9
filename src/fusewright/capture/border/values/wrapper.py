"""Tensor subclasses that wrap other tensors (quantised weights, say): their parts are graph inputs.

Takes a tensor whose class has PyTorch's contract for such classes (`__tensor_flatten__`, `__tensor_unflatten__`: all
that it is are its parts and a context); gives one of the same class, made of traced parts. Its own code
(`__torch_function__`, `__torch_dispatch__`) runs as in eager, under the recorder, and what it does to the parts is
recorded.
Always holds: the very object is guarded, its attributes too; one that its own code writes to, or that leaves the graph,
breaks it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusewright.base.records import dataclass
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.native import unwatched
from fusewright.capture.guards.sources import Attribute, InstanceDict, Item, Source
from fusewright.record.traced_tensor import TracedTensor

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

CODE = "unsupported-tensor"
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


@dataclass(slots=True)
class Wrapped:
    """A stand-in, and the attributes that it had when it was made."""

    value: torch.Tensor
    attributes: dict[str, object]


def is_wrapper(real: object) -> bool:
    """Whether the tensor is made of others, by the contract. PyTorch's own such classes (nested, distributed) have
    symbolic sizes and collectives of their own; they are not taken."""
    kind = type(real)
    if kind is TracedTensor or kind in PLAIN or not issubclass(kind, torch.Tensor):
        return False
    return is_traceable_wrapper_subclass(real) and not kind.__module__.startswith("torch.")  # type: ignore[arg-type]


def load_wrapper(world: World, real: torch.Tensor, source: Source) -> torch.Tensor:
    """The stand-in of a wrapper from outside. Its parts are found below `source`."""
    what = f"{source.text()}, a {type(real).__qualname__},"
    if world.recorder.level != "aten":
        world.recorder.lacks_form(CODE, f"{what} is a tensor subclass, which graphs at torch level do not take apart")
    if real.requires_grad:
        raise GraphBreak(CODE, f"{what} requires a gradient: tensor subclasses are traced where they need none")
    try:
        names, context = unwatched(real.__tensor_flatten__)  # type: ignore[attr-defined]
        held = {name: unwatched(getattr, real, name) for name in names}
    except UserException as error:  # its constructor may still be running
        raise GraphBreak(CODE, f"{what} cannot be taken apart ({error.exception})") from None
    world.guard("CALL", source, _IsStill(real))
    attributes = object.__getattribute__(real, "__dict__")
    parts: dict[str, torch.Tensor] = {}
    for name, part in held.items():
        where = Item(InstanceDict(source), name) if attributes.get(name) is part else Attribute(source, name)
        inside = world.load(part, where)
        if not (world.recorder_owns(inside) or is_wrapper(inside)):
            raise GraphBreak(CODE, f"{what} has a part {name!r} that is no tensor")
        if any(type(size) is not int for size in inside.shape):
            raise GraphBreak(CODE, f"{what} has a part {name!r} of symbolic size")
        parts[name] = inside
    for name, value in attributes.items():
        if name not in parts:
            _guard_attribute(world, value, Item(InstanceDict(source), name))
    with torch._C.DisableTorchFunctionSubclass():
        shape, stride = real.shape, real.stride()
    made = unwatched(type(real).__tensor_unflatten__, parts, context, shape, stride)  # type: ignore[attr-defined]
    if type(made) is not type(real) or made.requires_grad:
        raise GraphBreak(CODE, f"{what} is not what its __tensor_unflatten__ makes")
    for name, value in attributes.items():
        if name not in parts:
            made.__dict__.setdefault(name, value)
    world.wrappers.append(Wrapped(made, dict(made.__dict__)))
    return world.stand_in(real, source, made)  # type: ignore[no-any-return]


def check_result(world: World, fn: object, result: object) -> None:
    """Raises GraphBreak where a function has given a tensor, in whatever containers, that the graph knows nothing of:
    of a class that sees operators first and may hold traced tensors, or a real one."""
    if isinstance(result, torch.Tensor):
        functorch = torch._C._functorch.is_functorch_wrapped_tensor(result)
        known = world.recorder_owns(result) or functorch or (world.recorder.level == "aten" and is_wrapper(result))
        if not known and world.outside(result) is None:
            raise GraphBreak(
                CODE,
                f"{getattr(fn, '__qualname__', fn)} gives a {type(result).__qualname__} that is no part of the graph",
            )
    elif isinstance(result, (list, tuple)):
        for part in result:
            check_result(world, fn, part)
    elif isinstance(result, dict):
        for part in result.values():
            check_result(world, fn, part)


class _IsStill:
    """Guard callable: it is the very tensor. Does not keep it alive."""

    __slots__ = ("name", "reference")

    def __init__(self, real: torch.Tensor) -> None:
        self.name = type(real).__qualname__
        self.reference = weakref.ref(real)

    def __call__(self, subject: object) -> bool:
        return self.reference() is subject

    def __repr__(self) -> str:
        return f"is the same {self.name}"


def _guard_attribute(world: World, value: Any, source: Source) -> None:
    """Guards what the class's own code may read of an attribute: constants and containers by value, and what objects
    hold."""
    world.load(value, source)
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict) and not isinstance(value, (type, torch.Tensor)) and type(value).__flags__ & (1 << 9):
        for name, held in inner.items():
            if world.record_of(held) is None:
                _guard_attribute(world, held, Item(InstanceDict(source), name))


def check_unchanged(world: World) -> None:
    """Called at the end of an attempt. Raises GraphBreak for a wrapper from outside whose attributes were written
    to."""
    for one in world.wrappers:
        now = one.value.__dict__
        if now.keys() != one.attributes.keys() or any(now[name] is not held for name, held in one.attributes.items()):
            raise GraphBreak(CODE, f"an attribute of a {type(one.value).__qualname__} was written to")
