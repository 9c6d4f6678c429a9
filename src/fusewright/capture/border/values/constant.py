"""Constants: immutable values that a capture is specialised on.

Takes an outside object; gives it back as it is, with a guard by value (EQUALS) or by identity (IS).
Always holds: nothing reachable from a constant can change, so reading one natively needs no further guard.
Python ints and floats are captured by value here, and only here, until they change (number.py).
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import inspect
import operator
import pathlib
import re
import struct
import sys
import types
import typing
import uuid
from collections.abc import Callable
from dataclasses import Field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusewright._native import isinstance
from fusewright.capture.border.dynamic import from_argument
from fusewright.capture.border.values import number
from fusewright.capture.border.values.text import Carried
from fusewright.capture.guards.sources import Attribute, Source

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

EQUALS_TYPES: frozenset[type] = frozenset({int, float, complex, str, bytes, torch.device, torch.Size, range})

IS_TYPES: frozenset[type] = frozenset(
    {bool, type(None), type(Ellipsis), type(NotImplemented), torch.dtype, torch.layout, torch.memory_format}
)

# Placements of DTensors: PyTorch derives their classes, in a module that takes seconds to import, from these.
PLACEMENTS: tuple[type, ...] = tuple(
    found for found in vars(getattr(torch._C, "_distributed", None) or object).values() if isinstance(found, type)
)


class Types(frozenset[type]):
    """Types, and what is derived from `PLACEMENTS`."""

    def __contains__(self, kind: object) -> bool:
        return frozenset.__contains__(self, kind) or (isinstance(kind, type) and issubclass(kind, PLACEMENTS))


# What `def f[T]` and `type X = ...` make (PEP 695): written in C from CPython 3.12 on.
TYPE_PARAMETERS: tuple[type, ...] = (typing.TypeVar,)
if sys.version_info >= (3, 12):
    TYPE_PARAMETERS += (typing.ParamSpec, typing.TypeVarTuple, typing.TypeAliasType)
TYPE_ALIASES: tuple[type, ...] = (
    types.GenericAlias, types.UnionType, type(typing.Callable[..., int]),
    type(typing.Optional[int]),  # noqa: UP045
)  # fmt: skip

# Immutable in practice: guarded by identity once, then read natively.
FROZEN_TYPES: frozenset[type] = Types({
    types.CodeType, re.Pattern, re.Match, Field, inspect.Signature, inspect.Parameter, struct.Struct, decimal.Decimal,
    fractions.Fraction, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone,
    uuid.UUID, pathlib.PosixPath, pathlib.PurePosixPath,
    pathlib.WindowsPath, torch.finfo, torch.iinfo, torch.FunctionSchema, torch._C.Argument, torch.Tag,
    operator.itemgetter,
    operator.attrgetter, operator.methodcaller, *TYPE_PARAMETERS, *TYPE_ALIASES, type(typing.Any),
    type(typing.Callable), type(typing.Optional),
    types.GetSetDescriptorType, types.MemberDescriptorType,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType, property,
    functools.cached_property,
    *(type(np.dtype(code)) for code in np.typecodes["All"]),
    # enumerations that PyTorch defines in C++ (torch.nn.attention.SDPBackend)
    *(found for found in vars(torch._C).values() if isinstance(found, type) and hasattr(found, "__members__")),
})  # fmt: skip


# Those of them that compare by identity and may hold anything: one that the call makes is made again by each call.
MADE_AFRESH: dict[type, Callable[[Any], Any] | None] = {
    property: lambda made: (property, (made.fget, made.fset, made.fdel, made.__doc__)),
    **dict.fromkeys((operator.itemgetter, operator.attrgetter, operator.methodcaller), lambda made: made.__reduce__()),
    struct.Struct: lambda made: (struct.Struct, (made.format,)),
    **dict.fromkeys((functools.cached_property, Field, inspect.Signature, inspect.Parameter)),
}
"""How: a callable and its arguments; None where the attributes are filled in."""


# Those of them that a program makes afresh, and that are no callables: what only hands them on serves any.
CARRIED_TYPES: frozenset[type] = frozenset({
    re.Match, decimal.Decimal, fractions.Fraction, datetime.date, datetime.datetime, datetime.time, datetime.timedelta,
    datetime.timezone, uuid.UUID, pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath,
})  # fmt: skip


def is_literal(value: Any) -> bool:
    """Whether one EQUALS guard can compare `value`: a constant of a plain type, or a tuple of such."""
    kind = type(value)
    return kind in EQUALS_TYPES or kind in IS_TYPES or (kind is tuple and all(is_literal(element) for element in value))


def is_constant(value: Any) -> bool:
    """Whether `value` is a constant through and through (tuples and frozensets of constants included): what guards may
    compare by value."""
    kind = type(value)
    if kind in EQUALS_TYPES or kind in IS_TYPES or issubclass(kind, enum.Enum):
        return True
    if kind in (tuple, frozenset):
        return all(is_constant(element) for element in value)
    if kind is slice:
        return is_constant(value.start) and is_constant(value.stop) and is_constant(value.step)
    return False


def is_native_function(value: Any) -> bool:
    """Whether `value` is a function written in C that is bound to nothing for which another object stands inside. It
    equals what binds the same function to the same object."""
    return isinstance(value, _BOUND) and isinstance(value.__self__, _ITSELF)


_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
_ITSELF = (
    type(None), type, types.ModuleType, types.BuiltinFunctionType, types.GetSetDescriptorType,
    types.MemberDescriptorType,
)  # fmt: skip


def load_equals(world: World, real: object, source: Source) -> object:
    """int, float, str, …: same type and equal, unless it is a number that has been seen to change."""
    if type(real) is float and number.has_changed(world, real, source):
        return number.load_float(world, real, source)
    if type(real) is int and number.has_changed(world, real, source) and number.may_vary(world, real):
        return number.load_int(world, real, source)
    world.guard("EQUALS", source, real)
    return real


def load_is(world: World, real: object, source: Source) -> object:
    """None, booleans, dtypes, enumeration members and other objects known by identity."""
    world.guard("IS", source, real)
    if isinstance(real, enum.Enum):  # whose class may be assigned to
        world.guard("TYPE", source, type(real))
    return real


def load_carried(world: World, real: object, source: Source) -> object:
    """A date and the like. One that comes with the call is only handed on until somebody looks at it; then it is known
    by identity, unless three of them have been seen at this place."""
    tracer = world.tracer
    if tracer.options.exporting or not from_argument(source, world.module_sources):
        return load_is(world, real, source)
    key = (tracer.function.__code__, "carried", source)
    seen: Any = tracer.history.setdefault(key, (real,))
    if len(seen) < _IDENTITIES and not any(one is real for one in seen):
        seen = tracer.history[key] = (*seen, real) if len(seen) + 1 < _IDENTITIES else (None,) * _IDENTITIES
    changes = len(seen) == _IDENTITIES and not tracer.options.fullgraph
    if not (changes or tracer.assumptions.carries):
        return load_is(world, real, source)
    world.guard("TYPE", source, type(real))
    return world.stand_in(real, source, Carried(type(real), changes))


_IDENTITIES = 3


def load_slice(world: World, real: slice, source: Source) -> object:
    """A slice is rebuilt from its loaded parts."""
    world.guard("TYPE", source, slice)
    return slice(*(world.load(getattr(real, part), Attribute(source, part)) for part in ("start", "stop", "step")))


EXACT: dict[type, Any] = (
    dict.fromkeys(EQUALS_TYPES, load_equals)
    | dict.fromkeys(IS_TYPES | FROZEN_TYPES, load_is)
    | dict.fromkeys(CARRIED_TYPES, load_carried)
    | {slice: load_slice}
)
