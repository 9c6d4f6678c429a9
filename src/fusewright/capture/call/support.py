"""What the rows for calls share: how many arguments a native callable takes, how iterables and callbacks are handed to
it, and which classes it may construct.

Takes real values; gives values that native code may consume. Always holds: whatever native code iterates or calls goes
through the border; rows of the tables are reached only with arguments that the callable takes, so that the complaint
about others is its own.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import functools
import inspect
import operator
import pathlib
import random
import struct
import threading
import types
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.native import Trampoline, TrampolineIterator, give_back, native
from fusewright.capture.border.native_ready import PLAIN, for_native
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.border.values.iterator import is_known
from fusewright.capture.bytecode.instructions import TUPLES_ASK_LENGTH

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

PURE_CLASSES: frozenset[type] = frozenset({
    object, slice, range, complex, bytes, bytearray, memoryview, types.SimpleNamespace, types.MethodType,
    types.MappingProxyType,
    functools.partial, operator.itemgetter, operator.attrgetter, operator.methodcaller, property, staticmethod,
    classmethod, super,
    types.FunctionType, types.GenericAlias, threading.local,
})  # fmt: skip

# Classes of immutable values, which constants determine.
VALUE_CLASSES: frozenset[type] = frozenset({
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal, uuid.UUID,
    pathlib.PurePosixPath, struct.Struct, np.dtype,
})  # fmt: skip


_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)


def native_iterable(world: World, obj: Any, sets: bool = False) -> Any:
    """An iterable that native code may consume: builtin containers as they are, others as an iterator through the
    border. sets: the code is a set's."""
    if type(obj) is OutsideDict:
        return for_native(world, obj)
    if type(obj) in PLAIN:
        return obj
    if sets and isinstance(obj, (set, frozenset)):  # which looks into sets without asking a subclass
        return obj
    if (
        isinstance(obj, _CONTAINERS)
        and classes.python_method(world, type(obj), "__iter__") is None
    ):
        return obj
    iterator = world.iterate(obj)
    method = classes.python_method(world, type(iterator), "__next__")
    if method is not None and not method.__module__.startswith("fusewright.capture"):
        return TrampolineIterator(world, iterator)
    if world.is_raw(iterator) and is_known(iterator):
        return TrampolineIterator(world, iterator)
    if world.is_raw(iterator):
        raise GraphBreak(
            "outside-iterator",
            f"a {type(iterator).__qualname__} that was made before the compiled function was called is consumed",
        )
    return iterator


def one_by_one(world: World, obj: Any) -> Iterator[Any]:
    """The elements of an iterable, each when it is asked for: what is done with one comes before the next is made."""
    iterator = world.iterate(obj)
    while True:
        try:
            element = world.next(iterator)
        except UserException as signal:
            if isinstance(signal.exception, StopIteration):
                return
            raise
        yield element


def listed(world: World, obj: Any) -> Any:
    """As `native_iterable`, for native code that makes a list of it."""
    ready = native_iterable(world, obj)
    if not isinstance(ready, _CONTAINERS):  # which native code asks itself
        world.ask_length(obj)
    return ready


tupled = listed if TUPLES_ASK_LENGTH else native_iterable
"""The same for native code that makes a tuple."""


class _NotIterable:
    """What no iterator can be made of: native code meets the error where it asks for one."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        give_back([self.error])


def or_error(take: Callable[..., Any], *given: Any) -> Any:
    """`take(*given)`, for native code; what cannot be taken raises there, where the code reads it."""
    try:
        return take(*given)
    except UserException as signal:
        error = signal.exception
    return given[-1] if type(given[-1]) in (type, types.FunctionType) else _NotIterable(error)


class _WhenAsked:
    """An iterable that native code takes when its turn has come."""

    __slots__ = ("given", "take")

    def __init__(self, take: Callable[..., Any], *given: Any) -> None:
        self.take = take
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return iter(or_error(self.take, *self.given))


def in_turn(take: Callable[..., Any], world: World, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each as `or_error(take, world, value)`, for native code that asks one after it is through with those before."""
    return tuple(
        _WhenAsked(take, world, value) if place and _is_asked(world, value) else or_error(take, world, value)
        for place, value in enumerate(values)
    )


def _is_asked(world: World, value: Any) -> bool:
    """Whether it is the program's `__iter__` that native code calls: into sets it looks without."""
    return not isinstance(value, (set, frozenset)) and asks_program(world, value)


def asks_program(world: World, value: Any) -> bool:
    """Whether to iterate over it calls an `__iter__` of the program's."""
    return type(value) not in PLAIN and classes.python_method(world, type(value), "__iter__") is not None


def iterable_for(cls: type) -> Callable[[World, Any], Any]:
    """How the builtin methods of a class take an iterable."""
    if issubclass(cls, (list, tuple)):
        return listed if issubclass(cls, list) else tupled
    return functools.partial(native_iterable, sets=True) if issubclass(cls, (set, frozenset)) else native_iterable


def drain(world: World, obj: Any) -> list[Any]:
    """All elements of an iterable."""
    return native(list, native_iterable(world, obj))


def attribute_name(name: Any) -> str:
    """`name`, or CPython's complaint about what is no text."""
    return name if isinstance(name, str) else native(getattr, None, name)


def native_callback(tracer: Tracer, fn: Any) -> Any:
    """A callable that native code may call."""
    if fn is None or isinstance(fn, Trampoline) or fn in _SAFE_CALLBACKS:
        return fn
    return Trampoline(tracer, fn)


_SAFE_CALLBACKS: tuple[Any, ...] = (str.lower, str.upper, str.strip)


_CLOCKS = frozenset({"now", "today", "utcnow"})


def break_code(fn: Any, otherwise: str) -> str:
    """The row of the break catalogue for a native callable that nothing is known about."""
    owner = getattr(fn, "__self__", None)
    kind = owner if isinstance(owner, type) else type(owner)
    origins = (getattr(fn, "__module__", None) or "", kind.__module__)
    if origins[0] == "time" or (origins[1] == "datetime" and getattr(fn, "__name__", "") in _CLOCKS):
        return "clock"
    drawn = issubclass(kind, random.Random) or any(origin.startswith("numpy.random") for origin in origins)
    return "host-random" if drawn else otherwise


def receiver_and_rest(fn: Any, owner: Any, args: Args) -> Args:
    """The arguments for calling `fn` natively: a descriptor needs its receiver."""
    return args if hasattr(fn, "__self__") and fn.__self__ is owner else (owner, *args)


_ANY = 1 << 30


@dataclass(frozen=True, slots=True)
class _Arity:
    """How many arguments a function takes at least, how many by position at least and at most, and the names that it
    knows (None: any)."""

    least: int
    first: int
    most: int
    names: frozenset[str] | None

    def allows(self, args: Args, kwargs: Kwargs) -> bool:
        count = len(args)
        if not self.first <= count <= self.most or count + len(kwargs) < self.least:
            return False
        return not kwargs or self.names is None or self.names.issuperset(kwargs)


def _by_position(first: int, most: int, *names: str) -> _Arity:
    return _Arity(first, first, most, frozenset(names))


# Those without a signature, in CPython 3.11, whose rows do not look for themselves.
_UNSIGNED: dict[Any, _Arity] = {
    getattr: _by_position(2, 3), iter: _by_position(1, 2), next: _by_position(1, 2), vars: _by_position(0, 1),
    dir: _by_position(0, 1), bool: _by_position(0, 1), functools.reduce: _by_position(2, 3),
    min: _by_position(1, _ANY, "key", "default"), max: _by_position(1, _ANY, "key", "default"),
    type: _Arity(1, 1, 3, None), dict: _Arity(0, 0, 1, None), collections.OrderedDict: _Arity(0, 0, 1, None),
    collections.defaultdict: _Arity(0, 0, 2, None),
    functools._lru_cache_wrapper: _Arity(1, 0, _ANY, None),  # type: ignore[attr-defined]
    str.format_map: _by_position(2, 2), collections.deque.count: _by_position(2, 2),
    collections.deque.index: _by_position(2, 4), collections.deque.remove: _by_position(2, 2),
}  # fmt: skip


@functools.cache
def _arity(function: Any) -> _Arity | None:
    """None for a function without a signature: its row looks for itself."""
    if type(function) is types.WrapperDescriptorType and function.__name__ == "__get__":
        return _by_position(2, 3)  # its signature asks for the owner
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _UNSIGNED.get(function)
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return _Arity(
        least=sum(one.default is one.empty for one in positional),
        first=sum(one.default is one.empty for one in positional if one.kind is one.POSITIONAL_ONLY),
        most=_ANY if any(one.kind is one.VAR_POSITIONAL for one in parameters) else len(positional),
        names=None
        if any(one.kind is one.VAR_KEYWORD for one in parameters)
        else frozenset(one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY),
    )


def checked(function: Any, row: Callable[[Any, Args, Kwargs], Any]) -> Callable[[Any, Args, Kwargs], Any]:
    """The row, reached only with arguments that `function` takes: the complaint about others is its own."""

    def run(tracer: Any, args: Args, kwargs: Kwargs) -> Any:
        arity = _arity(function)  # asked when it is needed: 300 signatures would take a tenth of a warm start
        if arity is not None and not arity.allows(args, kwargs):
            return native(function, *args, **kwargs)
        return row(tracer, args, kwargs)

    return run


def method_takes(fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether a method of a builtin type, bound to `owner` or the descriptor itself, takes these arguments."""
    descriptor = _descriptor(fn, type(owner))
    arity = None if descriptor is None else _arity(descriptor)
    return arity is None or arity.allows((owner, *args), kwargs)


_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType)


def _descriptor(fn: Any, kind: type) -> Any:
    """What was bound, if it was: the class may have a method in Python of that name, which calls it."""
    kinds = (fn.__objclass__,) if hasattr(fn, "__objclass__") else kind.__mro__
    found = (base.__dict__.get(fn.__name__) for base in kinds)
    return next((one for one in found if type(one) in _DESCRIPTORS), None)


def saved_hooked() -> bool:
    """Whether hooks on saved tensors are on: then what takes gradients by a transform raises."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def guard_saved_hooked(world: World) -> bool:
    """`saved_hooked`, guarded: those that the frame has entered itself are its own."""
    hooked = saved_hooked()
    if not any(hasattr(one, "saving") for one in world.disablers):
        world.guard_answer(saved_hooked, (), hooked)
    return hooked
