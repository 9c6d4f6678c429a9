"""Objects that define `__torch_function__`: a torch function that meets one calls its override instead.

Takes a call of a torch function with its arguments; gives the override's result. Always holds: the overrides are asked
in PyTorch's order (subclasses first, then from left to right), and are interpreted; tensor subclasses never come this
far (they are no graph inputs).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.values import cls as classes
from fusewright.capture.guards import MISSING

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


def overriding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments (or elements of lists and tuples among them) whose class has an override, one of each class, in the
    order of asking."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        for element in value if type(value) in (list, tuple) else (value,):
            kind = type(element)
            if kind.__flags__ & (1 << 9) and not isinstance(element, torch.Tensor) and _override(kind) is not None:
                if any(type(other) is kind for other in found):
                    continue
                place = next((place for place, other in enumerate(found) if issubclass(kind, type(other))), len(found))
                found.insert(place, element)
    return found


def _override(kind: type) -> Any:
    found = classes.lookup(kind, "__torch_function__")
    return None if found is MISSING or kind.__module__.startswith(("torch.", "fusewright.")) else found


def call_override(
    world: World, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], objects: list[Any]
) -> Any:
    """What PyTorch's C++ does for a function with overloaded arguments."""
    if not isinstance(fn, (types.FunctionType, types.BuiltinFunctionType)):
        raise GraphBreak(
            "unsupported-tensor", f"an operator on a {type(objects[0]).__qualname__}, which has a __torch_function__"
        )
    kinds = tuple(type(one) for one in objects)
    for one in objects:
        override = world.getattr(type(one), "__torch_function__")
        result = world.tracer.call(override, (fn, kinds, args, kwargs))
        if result is not NotImplemented:
            return result
    name = f"'{fn.__module__}.{fn.__name__}'"
    message = f"no implementation found for {name} on types that implement __torch_function__: {list(kinds)!r}"
    raise UserException(TypeError(message))
