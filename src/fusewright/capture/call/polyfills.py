"""Library functions whose C or reflective parts are spelled out in terms of the border.

Takes the arguments of `copy.copy`, `copy.deepcopy` and a few more; gives what they give, copies without
`__reduce_ex__`, which is native code that reads whole objects. Always holds: an object copied from outside is read
through `World`, so whatever the copy depends on is guarded.
"""

from __future__ import annotations

import collections
import copy
import datetime
import decimal
import fractions
import functools
import operator
import re
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.absent import look_alike
from fusewright.capture.border.native import Trampoline, native, unwatched
from fusewright.capture.border.sequence_iterator import SequenceIterator
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.array import TracedArray
from fusewright.capture.border.values.constant import FROZEN_TYPES, MADE_AFRESH, is_constant
from fusewright.capture.border.values.dict import factory_of, set_factory
from fusewright.capture.border.values.text import Carried
from fusewright.capture.border.values.tuple import tuple_like
from fusewright.capture.call.builtins import call_pure, plain_data
from fusewright.capture.call.support import native_callback
from fusewright.capture.guards import MISSING
from fusewright.record.traced_tensor import TracedTensor, memory_root

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_ATOMIC = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)
_REFLECTIVE = (
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__",
    "__getattr__",  # asked for the others
)  # fmt: skip
_ASKED = ("__reduce_ex__", "__reduce__", "__getstate__")
"""What a copy asks the object for, behind `__deepcopy__`; then the new one, for `__setstate__` and `__dict__`."""
_OF_CONTENTS = ("__iter__", "__len__", "append", "items", "__setitem__")
"""What a copy calls for the elements of a container of a class of the program's."""
_BY_NAME = ("__reduce_ex__", "__getstate__", "__deepcopy__")
"""What a copy takes of the object itself, not of its class; so it does `items` of a dict and `append` of a list."""
_CALLED = (set, collections.OrderedDict, collections.defaultdict)
"""A copy of these is made by a call of the class."""


def _simply(value: Any, copier: Callable[[Any], Any]) -> Any:
    """The copy of what holds no object of the program's that might change; MISSING for anything else."""
    alike = look_alike(value)
    if alike is not None and type(alike) not in (dict, types.MappingProxyType, types.BuiltinFunctionType):
        raise GraphBreak("untraceable-call", f"a copy of a {type(alike).__name__}")
    if isinstance(value, _ATOMIC) or isinstance(alike, types.BuiltinFunctionType):
        return value
    if type(value) is Carried:
        return value if value.kind in _THEIR_OWN else Carried(value.kind, value.changes, (copier, value))
    if type(value) in FROZEN_TYPES:
        made = native(copier, value)
        if made is not value and type(value) in MADE_AFRESH:
            raise GraphBreak("untraceable-call", f"a copy of a {type(value).__name__}")
        return made
    if is_constant(value):
        return native(copier, value) if type(value) in (torch.Size, torch.device, slice, frozenset) else value
    return MISSING


_THEIR_OWN = (decimal.Decimal, fractions.Fraction, re.Match, datetime.timezone)
"""Types of which a copy is the object itself."""


def _check_plain(world: World, value: Any) -> None:
    kind = type(value)
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        raise GraphBreak("untraceable-call", f"a copy of a {kind.__qualname__}")
    contents = _OF_CONTENTS if isinstance(value, (list, dict, set, collections.deque)) else ()
    for name in (*_REFLECTIVE, *contents, *(("__setattr__",) if classes.slots(kind) else ())):
        found = classes.guarded_lookup(world, kind, name)
        if found not in (classes.lookup(object, name), *_builtin_hooks(value, name)):
            raise GraphBreak("untraceable-call", f"a copy of a {kind.__qualname__}, which defines {name}")
    slots = classes.slots(kind)
    hidden = any(classes.guarded_lookup(world, kind, name) is not slot for name, slot in slots)
    if hidden or len(slots) != sum(map(_declared_slots, kind.__mro__)):  # a copy asks for them by name
        raise GraphBreak("untraceable-call", f"a copy of a {kind.__qualname__}, whose class hides a slot")
    called = ("__new__", "__init__") if isinstance(value, _CALLED) else ("__new__",)
    if any(isinstance(classes.guarded_lookup(world, kind, name), types.FunctionType | staticmethod) for name in called):
        raise GraphBreak("untraceable-call", f"a copy of a {kind.__qualname__}, whose making runs its code")
    if classes.native_new(kind) not in (
        object.__new__,
        dict.__new__,
        list.__new__,
        set.__new__,
        tuple.__new__,
        collections.OrderedDict.__new__,
    ):
        raise GraphBreak("untraceable-call", f"a copy of a {kind.__module__}.{kind.__qualname__}")


def _declared_slots(kind: type) -> int:
    """How many slots a class declares; -1 where only the making of the class could tell (an iterator)."""
    declared = kind.__dict__.get("__slots__", ())
    names = (declared,) if isinstance(declared, str) else declared
    if not isinstance(names, (tuple, list, dict, set, frozenset)):
        return -1
    return sum(name not in ("__dict__", "__weakref__") for name in names)


def _check_own(value: Any, name: str, found: Any) -> None:
    """Whether what the object's `__getattribute__` gave is what it has of `object`."""
    if not isinstance(found, types.BuiltinMethodType) or found.__self__ is not value or found.__name__ != name:
        raise GraphBreak("untraceable-call", f"a copy of a {type(value).__qualname__}, which gives a {name} of its own")


def _builtin_hooks(value: Any, name: str) -> tuple[Any, ...]:
    bases = (dict, list, set, tuple, collections.OrderedDict, collections.defaultdict, collections.deque)
    return tuple(classes.lookup(base, name) for base in bases if isinstance(value, base))


def copy_shallow(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """`copy.copy(value)`."""
    world = tracer.world
    value = world.materialise(args[0])
    kind = type(value)
    if (made := _simply(value, copy.copy)) is not MISSING or kind in (tuple, frozenset):
        return value if made is MISSING else made
    if isinstance(value, torch.Tensor):
        raise GraphBreak("untraceable-call", "copy.copy of a tensor")
    custom = classes.guarded_lookup(world, kind, "__copy__")
    if isinstance(custom, types.FunctionType):
        return tracer.call(custom, (value,))
    if kind in (list, dict, set, collections.deque, collections.defaultdict, collections.OrderedDict):
        return copy.copy(value)
    if custom is not MISSING:  # one in C, which calls the class
        raise GraphBreak("untraceable-call", f"a copy of a {kind.__qualname__}")
    return _rebuild(tracer, value, lambda part: part)


def copy_deep(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """`copy.deepcopy(value, memo)`."""
    memo = args[1] if len(args) > 1 else kwargs.get("memo")
    if memo is not None and not isinstance(memo, dict):
        raise GraphBreak("untraceable-call", "copy.deepcopy with a memo that is no dict")
    memo = {} if memo is None else memo
    made = _deep(tracer, args[0], memo)
    _guard_memories(tracer.world, memo)
    return made


def _deep(tracer: Tracer, value: Any, memo: dict[int, Any]) -> Any:
    value = tracer.world.materialise(value)
    if id(value) in memo:
        return memo[id(value)]
    made = _simply(value, copy.deepcopy)
    if made is MISSING:
        made = _deep_copy(tracer, value, memo)
    if made is not value:
        memo[id(value)] = made
    return made


def _deep_copy(tracer: Tracer, value: Any, memo: dict[int, Any]) -> Any:
    made: Any
    world = tracer.world
    kind = type(value)
    if (
        isinstance(value, torch.Tensor)
        and not value.requires_grad
        and value.is_contiguous()
        and world.type_of(value) is torch.Tensor
    ):
        _note_memory(world, value, memo)  # type: ignore[arg-type]
        return world.torch_call(torch.clone, (value,), {})
    custom = classes.guarded_lookup(world, kind, "__deepcopy__") if not isinstance(value, torch.Tensor) else None
    if isinstance(custom, types.FunctionType):
        return tracer.call(custom, (value, memo))
    if kind is list:
        made = memo[id(value)] = []
        made.extend(_deep(tracer, element, memo) for element in value)
        return made
    if kind is dict:
        made = memo[id(value)] = {}
        for key, element in value.items():
            made[_deep(tracer, key, memo)] = _deep(tracer, element, memo)
        return made
    if kind in (set, frozenset):
        return kind(_deep(tracer, element, memo) for element in value)
    if kind is tuple:
        elements = tuple(_deep(tracer, element, memo) for element in value)
        return value if all(new is old for new, old in zip(elements, value, strict=False)) else elements
    if kind is types.MethodType:
        return types.MethodType(value.__func__, _deep(tracer, value.__self__, memo))
    return _rebuild(tracer, value, lambda part: _deep(tracer, part, memo), memo)


def _note_memory(world: World, tensor: TracedTensor, memo: dict[int, Any]) -> None:
    """Of tensors that share memory, the copies that one deep copy makes do so too: a graph break, once there is a
    second."""
    _, memories = world.deep_copies.setdefault(id(memo), (memo, {}))
    root = memory_root(tensor)
    record = world.outside(root)
    memory = id(root) if record is None else record.real.untyped_storage()._cdata
    if root.reshaped or (record is None, memory) in memories:
        raise GraphBreak("untraceable-call", "a deep copy of tensors that share memory")
    memories[record is None, memory] = (root, record)


def _guard_memories(world: World, memo: dict[int, Any]) -> None:
    """The tensors from outside that a deep copy has met share no memory."""
    _, memories = world.deep_copies.get(id(memo), (memo, {}))
    sources = tuple(record.source for _, record in memories.values() if record is not None)
    if len(sources) > 1:
        world.guard("NO_OVERLAP", sources[0], sources)


def _rebuild(tracer: Tracer, value: Any, convert: Any, memo: dict[int, Any] | None = None) -> Any:
    """A new object of the same class with converted content, attributes and slots."""
    world = tracer.world
    _check_plain(world, value)
    kind = type(value)
    asks = isinstance(classes.guarded_lookup(world, kind, "__getattribute__"), types.FunctionType)
    if asks:
        if classes.slots(kind) or isinstance(value, (dict, list, set, tuple)):
            raise GraphBreak("untraceable-call", f"a copy of a {kind.__qualname__}, which defines __getattribute__")
        if memo is not None and tracer.call(hasattr, (value, "__deepcopy__")):
            raise GraphBreak("untraceable-call", f"a copy of a {kind.__qualname__}, which gives a __deepcopy__")
        for name in _ASKED:
            _check_own(value, name, tracer.call(getattr, (value, name)))
    maker = classes.native_new(kind)
    if isinstance(value, collections.defaultdict) and kind is not collections.defaultdict:
        raise GraphBreak("untraceable-call", f"a copy of a {kind.__qualname__}")  # it leaves out the attributes
    made: Any
    if isinstance(value, tuple):
        made = tuple_like(value, [convert(element) for element in tuple.__iter__(value)])
    else:
        made = maker(kind)
    if memo is not None:
        memo[id(value)] = made
    if isinstance(value, dict):
        base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        for key in list(base.__iter__(value)):
            base.__setitem__(made, convert(key), convert(dict.__getitem__(value, key)))
        if isinstance(value, collections.defaultdict):
            factory = factory_of(value)
            maker = factory.function if type(factory) is Trampoline else factory
            if _simply(maker, copy.copy) is not maker:
                raise GraphBreak("untraceable-call", "a copy of a defaultdict whose factory is an object")
            set_factory(made, factory)
    elif isinstance(value, list):
        list.extend(made, [convert(element) for element in list.__iter__(value)])
    elif isinstance(value, set):
        set.update(made, [convert(element) for element in set.__iter__(value)])
    if classes.has_dict(kind):
        attributes = world.materialise(tracer.call(object.__getattribute__, (value, "__dict__")))
        contents = ("items",) if isinstance(value, dict) else ("append",) if isinstance(value, list) else ()
        if not asks and any(name in attributes for name in (*_BY_NAME, *contents)):
            raise GraphBreak("untraceable-call", f"a copy of a {kind.__qualname__} that holds what a copy asks it for")
        if attributes:
            attributes = convert(attributes)  # before the new object is asked for anything
        if asks and attributes:
            if tracer.call(hasattr, (made, "__setstate__")):
                raise GraphBreak("untraceable-call", f"a copy of a {kind.__qualname__}, which gives a __setstate__")
            tracer.call(getattr, (made, "__dict__"))
        object.__getattribute__(made, "__dict__").update(attributes)
    for name, _ in classes.slots(kind):
        present = tracer.call(hasattr, (value, name))
        if present:
            object.__setattr__(made, name, convert(world.getattr(value, name)))
    return made


def named_tuple(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """`collections.namedtuple(...)`: a class of this capture, as if a class statement had made it."""
    ready = [plain_data(tracer, value) for value in args]
    keywords = {name: plain_data(tracer, value) for name, value in kwargs.items()}
    if any(value is MISSING for value in (*ready, *keywords.values())):
        raise GraphBreak("class-creation", "a collections.namedtuple whose fields or defaults are no constants")
    if keywords.get("module") is None and tracer.frame is not None:
        keywords["module"] = tracer.frame.function.__globals__.get("__name__", "__main__")
    made = unwatched(collections.namedtuple, *ready, **keywords)
    tracer.world.note_inside_class(made)
    for found in vars(made).values():
        function = getattr(found, "__func__", found)
        if isinstance(function, types.FunctionType):
            tracer.world.note_inside_function(function)
    return made


def cached(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """What `functools.lru_cache` makes of a function: its cache lives as long as this capture, and calls back."""
    function = native_callback(tracer, args[0]) if callable(args[0]) else args[0]
    return native(functools._lru_cache_wrapper, function, *args[1:], **kwargs)


def all_names(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    known = tracer.world.outside(args[0]) is None and not isinstance(args[0], (torch.Tensor, TracedArray))
    if not known and not isinstance(args[0], type):
        raise GraphBreak("opaque-object", f"dir() of a {type(args[0]).__qualname__}")
    alike = look_alike(args[0])
    return native(dir, *(args if alike is None else (alike,)))


def length_hint(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], SequenceIterator):
        raise GraphBreak("opaque-object", "the length of an iterator over an object by its __getitem__")
    return call_pure(tracer, operator.length_hint, args, kwargs)


ROWS = [
    (dir, all_names), (operator.length_hint, length_hint),
    (copy.copy, copy_shallow), (copy.deepcopy, copy_deep), (collections.namedtuple, named_tuple),
    (functools._lru_cache_wrapper, cached),
]  # fmt: skip
