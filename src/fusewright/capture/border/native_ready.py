"""What native code may be handed: plain values, and containers made ready for it.

Takes real values; gives values that native code may look into, or print. Always holds: what is given holds no stand-in,
and what would print a tensor or an outside object breaks the graph.
"""

from __future__ import annotations

import collections
import decimal
import gc
import operator
import types
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance, may_hold
from fusewright.base.exception_fields import args_of
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.absent import look_alike
from fusewright.capture.border.native import Trampoline
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.constant import is_constant
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.border.values.symbolic import (
    SYMBOLIC,
    concrete_inside,
)
from fusewright.capture.border.values.text import TensorText

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


SCALARS: frozenset[type] = frozenset({
    int, float, complex, bool, str, bytes, bytearray, type(None), type(Ellipsis), type(NotImplemented), range, slice,
    torch.dtype,
    torch.device,
    torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size,
})  # fmt: skip


CONTAINERS: frozenset[type] = frozenset({
    list, tuple, dict, set, frozenset, collections.deque, collections.OrderedDict, collections.defaultdict,
    type({}.keys()), type({}.values()), type({}.items()), type(collections.OrderedDict().keys()),
    type(collections.OrderedDict().items()),
    type(collections.OrderedDict().values()), types.MappingProxyType,
})  # fmt: skip


PLAIN = SCALARS | CONTAINERS


# What an instance of a subclass of these holds is guarded, or consists of constants.
CONTENTS: tuple[type, ...] = (tuple, int, float, complex, str, bytes)


# Raw objects that native code may look at freely: what they show does not change, or is guarded by identity.
TRANSPARENT = (
    type,
    types.FunctionType,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CellType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)


def for_native(world: World, value: Any) -> Any:
    """`value` as native code may see it: lazy stand-ins replaced by real dicts, also inside builtin containers and
    their subclasses."""
    if _nests(value) and world.has_stand_ins() and may_hold(value, _LOOKED_INTO):
        return _ready(world, value, set())
    return value


_NESTING = (OutsideDict, list, dict, tuple, collections.deque)
_LOOKED_INTO = (OutsideDict, collections.deque)


def _nests(value: Any) -> bool:
    """By the real type: what an object says its class is may be another (a mock's), and to ask it may run its code."""
    return issubclass(type(value), _NESTING)


def _ready(world: World, value: Any, seen: set[int]) -> Any:
    if type(value) is OutsideDict:
        _ready(world, value.materialise(), seen)
        return value.as_native()
    if id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, tuple):
        elements = tuple(_ready(world, part, seen) if _nests(part) else part for part in tuple.__iter__(value))
        return (
            _with_elements(world, value, elements)
            if any(map(operator.is_not, elements, tuple.__iter__(value)))
            else value
        )
    base: Any = next(
        base for base in (list, collections.OrderedDict, dict, collections.deque) if isinstance(value, base)
    )
    exchanged: dict[int, object] = {}
    for place, part in tuple(base.items(value) if isinstance(value, dict) else enumerate(base.__iter__(value))):
        if _nests(part):
            ready = _ready(world, part, seen)
            if ready is not part:
                base.__setitem__(value, place, ready)
                exchanged[id(part)] = ready
    if exchanged:
        world.effects.exchanged(value, exchanged)
    return value


def _with_elements(world: World, value: tuple, elements: tuple) -> tuple:
    """A tuple in the place of another."""
    made = elements if type(value) is tuple else tuple.__new__(type(value), elements)
    if hasattr(made, "__dict__"):
        made.__dict__.update(object.__getattribute__(value, "__dict__"))
    record = world.outside(value)
    if record is not None:
        world.replace_stand_in(record.real, made)
    return made


def plain_numbers(world: World, methods: tuple[str, ...], left: Any, right: Any) -> tuple[Any, Any] | None:
    """A symbolic number and, for an instance of a class that has these methods from int or float, the plain
    number: PyTorch's symbolic numbers would ask the object what it is. None for other operands."""
    symbolic = type(left) in SYMBOLIC
    if symbolic is (type(right) in SYMBOLIC):
        return None
    other = right if symbolic else left
    kind, base = type(other), int if isinstance(other, int) else float
    if kind in PLAIN or not isinstance(other, base):
        return None
    for name in filter(None, methods):
        if classes.guarded_lookup(world, kind, name) is not classes.lookup(base, name):
            return None
    number = int.__int__(other) if isinstance(other, int) else float.__float__(other)
    return (left, number) if symbolic else (number, right)


def _decimal_context() -> tuple[object, ...]:
    now = decimal.getcontext()
    traps = tuple(signal.__name__ for signal, trapped in now.traps.items() if trapped)
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, traps


def guard_decimals(world: World, *operands: Any) -> None:
    """Decimal arithmetic rounds as the thread's context says."""
    if any(isinstance(operand, decimal.Decimal) for operand in operands):
        world.guard_answer(_decimal_context, (), _decimal_context())


def text_ready(world: World, value: Any, around: frozenset[int] = frozenset()) -> Any:
    """`value`, if native code may turn it into text: no tensor and no outside object in it. around: what shows it, by
    identity."""
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind is TensorText:
        raise GraphBreak("print-tensor", "a tensor turned into text")
    if kind in SYMBOLIC or kind is torch.Size:
        return concrete_inside(value)
    if kind in SCALARS and kind is not slice:
        return value
    if kind is OutsideDict:
        value = value.as_native()
        kind = type(value)
    if look_alike(value) is not None or (kind in _BUILTIN_METHODS and _is_of_object(world, value.__self__)):
        raise GraphBreak("opaque-object", "the text of an iterator or a method, which says where it lies in memory")
    if kind is Trampoline and not value.is_plain:
        raise GraphBreak("opaque-object", "the text of an object that native code may call")
    if isinstance(value, TRANSPARENT):
        return value
    contains = kind in CONTAINERS or isinstance(value, (tuple, list, dict, set, frozenset))
    if not contains and world.is_raw(value):
        raise GraphBreak("opaque-object", f"the text of a {kind.__qualname__}")
    if id(value) not in around:
        within = around | {id(value)}
        for part in elements_of(value) if contains else _shown(world, value, bool(around)):
            text_ready(world, part, within)
    return concrete_inside(for_native(world, value)) if contains else value


_BUILTIN_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)


def _is_of_object(world: World, owner: Any) -> bool:
    """Whether what a builtin method is bound to lies elsewhere in eager."""
    if isinstance(owner, (type, types.ModuleType)):
        return False
    return isinstance(owner, torch.Tensor) or (world.outside(owner) is not None and not is_constant(owner))


def elements_of(value: Any) -> tuple[Any, ...]:
    """Of a subclass too without asking it."""
    if isinstance(value, (dict, types.MappingProxyType)):
        factory = (value.default_factory,) if isinstance(value, collections.defaultdict) else ()
        return (*factory, *(dict.items(value) if isinstance(value, dict) else value.items()))
    base = next((base for base in (list, tuple, set, frozenset) if isinstance(value, base)), type(value))
    return tuple(base.__iter__(value))


def _shown(world: World, value: Any, inside: bool) -> Iterable[Any]:
    """What native code may show of a fresh object. inside: of another one, so that native code runs its `__repr__`."""
    if isinstance(value, BaseException):
        return args_of(value)
    kind = type(value)
    if classes.python_method(world, kind, "__repr__") is not None:
        return classes.own_attributes(value).values() if inside and kind.__module__ != "enum" else ()
    if kind is weakref.ref:
        return (value(),)
    return gc.get_referents(value) if classes.lookup(kind, "__repr__") is not object.__repr__ else ()
