"""Methods of builtin types, called on whatever they are bound to.

Takes a bound builtin method (`[].append`), a slot wrapper (`object.__setattr__`) or a descriptor with its receiver;
gives the result.
Always holds: a receiver made inside is free to be changed natively; an outside receiver never reaches native code,
except for methods that look at its identity alone.
"""

from __future__ import annotations

import _string  # type: ignore[import-not-found]
import collections
import itertools
import operator
import re
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border import formatting, protocols
from fusewright.capture.border.native import Trampoline, native
from fusewright.capture.border.native_ready import CONTENTS, PLAIN, SCALARS, for_native, text_ready
from fusewright.capture.border.values import array as arrays, cls as classes, object as objects, tensor as tensors
from fusewright.capture.border.values.constant import FROZEN_TYPES, is_constant
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.border.values.memory import Address, Storage
from fusewright.capture.border.values.symbolic import concrete_inside
from fusewright.capture.border.values.text import joined
from fusewright.capture.border.witness import asked
from fusewright.capture.call import (
    autograd as call_autograd,
    builtins as call_builtins,
    classes as call_classes,
    generators,
    host_random,
    ordering,
    reads,
    subclasses,
    support as call_support,
    torch as call_torch,
)
from fusewright.capture.guards import MISSING

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# Tensor methods whose answer is not a tensor, and that are no part of a graph.
_TENSOR_QUERIES = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "is_signed", "element_size",
    "get_device", "is_inference", "is_pinned", "has_names", "is_conj", "is_neg", "is_same_size", "dense_dim",
    "sparse_dim", "is_coalesced", "__len__", "__hash__",
})  # fmt: skip

_LAYOUT_QUERIES = frozenset({"stride", "is_contiguous"})

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def call_bound(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """A bound builtin method."""
    name = fn.__name__
    if issubclass(type(owner), type):
        return _on_class(tracer, fn, name, owner, args, kwargs)
    return _call(tracer, fn, name, owner, args, kwargs)


def call_unbound(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """`list.append(owner, *args)`; `fn` is the descriptor."""
    kind = tracer.world.type_of(owner)
    if not issubclass(kind, fn.__objclass__) and not isinstance(fn, types.ClassMethodDescriptorType):
        if kind is type(owner):
            return native(fn, owner, *args, **kwargs)  # CPython's own complaint
        raise GraphBreak("untraceable-call", f"{fn.__qualname__} of a {kind.__qualname__}")
    if kind is not type(owner) and fn.__name__ not in _OF_STAND_INS and classes.lookup(kind, fn.__name__) is not fn:
        if fn is object.__eq__:
            return _object_eq(tracer, owner, args, kwargs)
        if fn.__objclass__ is object:
            raise GraphBreak("untraceable-call", f"{fn.__qualname__} of a {kind.__qualname__}")
    return _call(tracer, fn, fn.__name__, owner, args, kwargs)


_OF_STAND_INS = frozenset({"__setattr__", "__getattribute__", "__delattr__"})


def _call(tracer: Tracer, fn: Any, name: str, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    world = tracer.world
    if issubclass(type(owner), torch.Tensor):
        return call_tensor_method(tracer, name, owner, args, kwargs)
    if type(owner) in subclasses.DISABLERS:
        return subclasses.disabler_method(tracer, name, owner, args)
    if type(owner) is OutsideDict:
        return tracer.call(world.getattr(owner, name), args, kwargs)
    defined_by = getattr(fn, "__objclass__", None) or _definer(type(owner), name)
    row = (
        _OBJECT_ROWS.get(name)
        if defined_by in (object, type) or issubclass(type(owner), (types.FunctionType, types.ModuleType))
        else None
    )
    if row is None and isinstance(owner, property) and defined_by is property:
        row = _PROPERTY_ROWS.get(name)
    if row is not None:
        if name in _TAKES and (kwargs or len(args) != _TAKES[name]):
            return native(fn, *_receiver_and_rest(fn, owner, args), **kwargs)  # its complaint
        return row(tracer, owner, args, kwargs)
    if type(owner) in PLAIN:
        special = _CONTAINER_ROWS.get(name) or (_TEXT_ROWS.get(name) if isinstance(owner, (str, bytes)) else None)
        if special is not None:
            return special(tracer, fn, owner, args, kwargs)
        return _native_method(tracer, fn, owner, args, kwargs)
    if host_random.is_generator(owner):
        return host_random.call_method(tracer, name, owner, args, kwargs)
    if isinstance(owner, torch._C.Generator):
        return generators.call_method(tracer, name, owner, args, kwargs)
    if isinstance(owner, torch._C.ScriptModule):
        raise GraphBreak("untraceable-call", f"{type(owner).__qualname__}.{name}")
    holds_constant = defined_by in CONTENTS and defined_by is not tuple and isinstance(owner, defined_by)
    if (
        type(owner) in FROZEN_TYPES
        or is_constant(owner)
        or isinstance(owner, (type, types.FunctionType))
        or holds_constant
    ):
        if type(owner) is re.Pattern:
            args = tuple(
                call_support.native_callback(tracer, value) if type(value) is types.FunctionType else value
                for value in args
            )
        if all(_known(value) for value in (*args, *kwargs.values())):
            protocols.guard_decimals(world, owner)
            if holds_constant:  # the class may define another method of this name
                return native(getattr(defined_by, name), owner, *args, **kwargs)
            return native(getattr(owner, name), *args, **kwargs)
        raise GraphBreak("untraceable-call", f"{type(owner).__qualname__}.{name} of something that is no constant")
    if world.is_raw(owner):
        bound = fn.__get__(owner, type(owner)) if hasattr(type(fn), "__get__") else fn  # `getattr` may be the program's
        code = call_support.break_code(bound, "opaque-object")
        raise GraphBreak(code, f"{type(owner).__qualname__}.{name}, which is written in C")
    base = next((base for base in _CONTAINER_BASES if isinstance(owner, base)), None)
    if base is not None:
        if (
            defined_by is collections.OrderedDict
            and name in ("update", "__init__")
            and classes.python_method(world, type(owner), "__setitem__") is not None
        ):
            return _update_by_items(tracer, owner, args, kwargs)
        special = _CONTAINER_ROWS.get(name)
        return (
            special(tracer, fn, owner, args, kwargs)
            if special is not None
            else _native_method(tracer, fn, owner, args, kwargs)
        )
    if _is_harmless(type(owner)):
        return _native_method(tracer, fn, owner, args, kwargs)
    code = call_support.break_code(getattr(owner, name, None), "untraceable-call")
    raise GraphBreak(code, f"{type(owner).__module__}.{type(owner).__qualname__}.{name}")


_KEYED = (dict, set, frozenset, str, bytes, int, float, range)
_CONTAINER_BASES = (dict, list, set, tuple, frozenset, collections.deque, str, int, float, BaseException)


def _definer(kind: type, name: str) -> type | None:
    return next((base for base in kind.__mro__ if name in base.__dict__), None)


def _known(value: Any) -> bool:
    return (
        is_constant(value)
        or type(value) in FROZEN_TYPES
        or isinstance(value, (type, types.FunctionType, str, Trampoline))
    )


def _is_harmless(kind: type) -> bool:
    """Iterators, views and the like that were made inside: their methods touch nothing else."""
    modules = ("builtins", "itertools", "collections", "types", "functools", "operator", "re", "_struct")
    return kind.__module__ in modules or kind in FROZEN_TYPES


def _receiver_and_rest(fn: Any, owner: Any, args: Args) -> Args:
    """The arguments for calling `fn` natively: a descriptor needs its receiver."""
    return args if hasattr(fn, "__self__") and fn.__self__ is owner else (owner, *args)


def _native_method(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    world = tracer.world
    ready = tuple(for_native(world, value) for value in args)
    if isinstance(owner, _KEYED):  # keys, texts; what a list takes in may stay symbolic
        ready = (
            (*map(concrete_inside, ready[:1]), *ready[1:])
            if isinstance(owner, dict)
            else tuple(map(concrete_inside, ready))
        )
    for_native(world, owner)
    return native(
        fn, *_receiver_and_rest(fn, owner, ready), **{name: for_native(world, value) for name, value in kwargs.items()}
    )


_OF_MEMORY: dict[str, Any] = {"numpy": arrays.of_tensor, "data_ptr": Address, "untyped_storage": Storage}
_TENSOR_PROTOCOL: dict[str, Callable[..., Any]] = {
    "__getattribute__": tensors.getattr_tensor,
    "__delattr__": tensors.delattr_tensor,
}


def call_tensor_method(tracer: Tracer, name: str, owner: torch.Tensor, args: Args, kwargs: Kwargs) -> Any:
    """A method of a tensor that is written in C."""
    row = call_autograd.METHODS.get(name)
    if row is not None:
        return row(tracer, owner, args, kwargs)
    if name == "__init__":
        return None
    if name == "as_subclass":
        return tracer.call(torch.Tensor.as_subclass, (owner, *args), kwargs)
    if name == "__setattr__":
        return subclasses.setattr_of(tracer, owner, args)
    if name in tensors.DATA_DEPENDENT:
        value = reads.read(tracer, name, owner, args, kwargs)
        if value is not MISSING:
            return value
    if name in _OF_MEMORY and not args and not kwargs and tracer.world.recorder_owns(owner):
        return _OF_MEMORY[name](tracer.world, owner)
    tensors.refuse_method(name)
    protocol = _TENSOR_PROTOCOL.get(name)
    if protocol is not None:
        return protocol(tracer.world, owner, *args)
    if name == "storage_offset":
        asked(tracer.recorder, torch.Tensor.storage_offset, (owner,), {})
        return tensors.storage_offset(tracer.world, owner)
    if name in _LAYOUT_QUERIES:
        return asked(tracer.recorder, getattr(torch.Tensor, name), (owner, *args), kwargs)
    if name == "copy_" and args and type(args[0]) in (bool, int, float):  # no operator takes a number
        number = tracer.call(torch.tensor, args[:1], {"dtype": _NUMBERS[type(args[0])], "device": "cpu"})
        args = (number, *args[1:])
    if name in _TENSOR_QUERIES or (name == "type" and not args and not kwargs):
        return native(getattr(torch.Tensor, name), owner, *args, **kwargs)
    return tracer.world.torch_call(getattr(torch.Tensor, name), (owner, *args), kwargs)


# Methods of `object` and `type`.


def _object_setattr(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> None:
    if issubclass(type(owner), type):
        classes.setattr_class(tracer.world, owner, *args)
    elif issubclass(type(owner), (types.ModuleType, types.FunctionType)):
        tracer.world.setattr(owner, *args)
    else:
        objects.generic_setattr(tracer.world, owner, *args)


def _object_getattribute(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    if issubclass(type(owner), type):
        return classes.getattr_class(tracer.world, owner, *args)
    if issubclass(type(owner), (types.FunctionType, types.ModuleType)) or tracer.world.type_of(owner) is not type(
        owner
    ):
        return tracer.world.getattr(owner, *args)
    return objects.generic_getattr(tracer.world, owner, *args)


def _object_delattr(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> None:
    objects.generic_delattr(tracer.world, owner, *args)


def _object_init(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> None:
    if (args or kwargs) and not isinstance(owner, type):
        kind = type(owner)
        if classes.guarded_lookup(tracer.world, kind, "__init__") is not object.__init__:
            raise UserException(TypeError("object.__init__() takes exactly one argument (the instance to initialize)"))
        if classes.guarded_lookup(tracer.world, kind, "__new__") is object.__new__:
            raise UserException(
                TypeError(f"{kind.__name__}.__init__() takes exactly one argument (the instance to initialize)")
            )


def _object_eq(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    return True if protocols.identical(owner, args[0]) else NotImplemented


def _object_ne(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    return tracer.world.compare("!=", owner, args[0])


def _object_hash(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> int:
    return call_builtins._id(tracer, (owner,), {}) and native(object.__hash__, tracer.world.real_of(owner))


def _object_text(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> str:
    if tracer.world.is_raw(owner) and not isinstance(owner, (type, types.FunctionType, types.ModuleType)):
        raise GraphBreak("opaque-object", f"the default text of a {type(owner).__qualname__}, which holds its address")
    return (
        native(repr, owner)
        if isinstance(owner, (type, types.FunctionType, types.ModuleType))
        else native(object.__repr__, owner)
    )


def _type_call(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    return call_classes.construct(tracer, owner, args, kwargs)


def _instancecheck(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    return (
        call_classes.is_instance(tracer, args[0], owner)
        if classes.lookup(type(owner), "__instancecheck__") is type.__instancecheck__
        else native(issubclass, tracer.world.type_of(args[0]), owner)
    )


def _bind_explicitly(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    instance = args[0]
    return owner if instance is None else types.MethodType(owner, instance)


def _call_explicitly(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    return tracer.call(owner, args, kwargs)


def _property_get(tracer: Tracer, owner: property, args: Args, kwargs: Kwargs) -> Any:
    return (
        owner
        if args[0] is None
        else objects.bind(tracer.world, owner, args[0], tracer.world.type_of(args[0]), "property")
    )


def _property_set(tracer: Tracer, owner: property, args: Args, kwargs: Kwargs) -> None:
    if owner.fset is None:
        raise UserException(AttributeError("property has no setter"))
    tracer.call(tracer.world.load(owner.fset, tracer.world.constant(owner.fset, "fset")), args)


def _property_delete(tracer: Tracer, owner: property, args: Args, kwargs: Kwargs) -> None:
    if owner.fdel is None:
        raise UserException(AttributeError("property has no deleter"))
    tracer.call(tracer.world.load(owner.fdel, tracer.world.constant(owner.fdel, "fdel")), args)


def _property_init(tracer: Tracer, owner: property, args: Args, kwargs: Kwargs) -> None:
    if tracer.world.is_raw(owner):
        raise GraphBreak("opaque-object", "property.__init__ of an object from outside")
    native(property.__init__, owner, *args, **kwargs)


_PROPERTY_ROWS: dict[str, Callable[[Any, Any, Args, Kwargs], Any]] = {
    "__init__": _property_init,
    "__get__": _property_get,
    "__set__": _property_set,
    "__delete__": _property_delete,
}

_OBJECT_ROWS: dict[str, Callable[[Any, Any, Args, Kwargs], Any]] = {
    "__setattr__": _object_setattr,
    "__getattribute__": _object_getattribute,
    "__delattr__": _object_delattr,
    "__init__": _object_init,
    "__init_subclass__": lambda tracer, owner, args, kwargs: None,
    "__eq__": _object_eq,
    "__ne__": _object_ne,
    "__hash__": _object_hash,
    "__repr__": _object_text,
    "__str__": lambda tracer, owner, args, kwargs: formatting.to_text(tracer.world, owner, "repr"),
    "__format__": lambda tracer, owner, args, kwargs: formatting.to_text(tracer.world, owner, "str"),
    "__call__": lambda tracer, owner, args, kwargs: (
        _type_call(tracer, owner, args, kwargs)
        if isinstance(owner, type)
        else _call_explicitly(tracer, owner, args, kwargs)
    ),
    "__instancecheck__": _instancecheck,
    "__get__": _bind_explicitly,
    "__subclasscheck__": lambda tracer, owner, args, kwargs: native(issubclass, args[0], owner),
    "mro": lambda tracer, owner, args, kwargs: list(owner.__mro__),
}

# How many arguments those of them take that always take as many.
_TAKES = {
    "__setattr__": 2, "__getattribute__": 1, "__delattr__": 1, "__eq__": 1, "__ne__": 1, "__hash__": 0, "__repr__": 0,
    "__str__": 0, "__format__": 1, "__instancecheck__": 1, "__subclasscheck__": 1, "mro": 0,
}  # fmt: skip


def _on_class(tracer: Tracer, fn: Any, name: str, owner: type, args: Args, kwargs: Kwargs) -> Any:
    """`object.__new__`, `dict.fromkeys`, C class methods, and slots bound to a class (`Cls.__call__`)."""
    world = tracer.world
    if name == "__new__":
        return _explicit_new(tracer, fn, owner, args, kwargs)
    if owner is torch._C._VariableFunctions or getattr(fn, "__module__", None) == "torch._C._VariableFunctions":
        return call_torch.call_operator(tracer, fn, args, kwargs)
    if isinstance(fn, types.MethodWrapperType):
        slot = _OBJECT_ROWS.get(name)
        if slot is not None:
            return slot(tracer, owner, args, kwargs)
        return native(fn, *args, **kwargs)
    if name == "__init_subclass__" or name == "__subclasshook__":
        return native(fn, *args, **kwargs)
    row = call_builtins.CLASS_METHODS.get((owner, name))
    if row is not None:
        return row(tracer, args, kwargs)
    if name == "__setattr__":
        return classes.setattr_class(world, owner, *args)
    if owner.__module__ in ("builtins", "collections") or owner in call_support.PURE_CLASSES:
        first = [value if type(value) in SCALARS else call_support.native_iterable(world, value) for value in args[:1]]
        return native(fn, *first, *args[1:], **kwargs)
    if name in ("__instancecheck__", "__subclasscheck__") and classes.lookup(type, name).__get__(owner) == fn:
        return native(issubclass, world.type_of(args[0]), owner) if name == "__instancecheck__" else native(fn, *args)
    if issubclass(owner, type) or (isinstance(fn.__self__, type) and _definer(type(owner), name) is type):
        return native(fn, *args, **kwargs)
    if issubclass(owner, (dict, list, str, int, float)) and all(_known(value) for value in args):
        return native(fn, *args, **kwargs)
    code = call_support.break_code(getattr(owner, name, None), "untraceable-call")
    raise GraphBreak(code, f"{owner.__module__}.{owner.__qualname__}.{name}")


def _explicit_new(tracer: Tracer, fn: Any, owner: type, args: Args, kwargs: Kwargs) -> Any:
    world = tracer.world
    if not args or not isinstance(args[0], type):
        return native(fn, *args, **kwargs)
    if issubclass(args[0], type):
        return call_classes.construct(tracer, args[0], args[1:], kwargs)
    if issubclass(args[0], torch.Tensor):
        return subclasses.new(tracer, args[0], args[1:], kwargs)
    call_classes.check_finalizer(world, args[0])
    if owner is object:
        return native(object.__new__, args[0])
    if not issubclass(owner, _CONTAINER_BASES) and owner not in call_support.PURE_CLASSES:
        raise GraphBreak("untraceable-call", f"{owner.__module__}.{owner.__qualname__}.__new__")
    ready = tuple(
        call_support.iterable_for(owner)(world, value)
        if issubclass(owner, (tuple, frozenset))
        else for_native(world, value)
        for value in args[1:]
    )
    return native(fn, args[0], *ready, **kwargs)


# Methods of builtin containers and strings that meet iterables, callbacks, user equality or text.


def _takes_iterables(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    world = tracer.world
    try:
        take = call_support.iterable_for(type(owner))
        ready = tuple(take(world, value) for value in args)
    except UserException as signal:
        if fn.__name__ == "join" and isinstance(signal.exception, TypeError):  # which has a complaint of its own
            ready = (object(),)
        else:
            raise
    return native(fn, *_receiver_and_rest(fn, owner, ready), **kwargs)


def _update(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(owner, BaseException):
        return _native_method(tracer, fn, owner, args, kwargs)
    if not isinstance(owner, dict):
        return _takes_iterables(tracer, fn, owner, args, kwargs)
    ready = tuple(call_builtins.pairs_of(tracer, value) for value in args)
    return native(fn, *_receiver_and_rest(fn, owner, ready), **kwargs)


def _update_by_items(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> None:
    for key, value in dict(*(call_builtins.pairs_of(tracer, value) for value in args), **kwargs).items():
        tracer.world.setitem(owner, key, value)


def _sort(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> None:
    if type(owner) not in PLAIN and not isinstance(owner, list):
        return native(fn, *args, **kwargs)
    elements = list(list.__iter__(owner))
    list.clear(owner)  # what a key or a comparison sees of the list
    try:
        ordering.sort(tracer, elements, kwargs)
        if list.__len__(owner):
            raise UserException(ValueError("list modified during sort"))
    finally:
        list.__setitem__(owner, slice(None), elements)
    return None


def _find(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """index, count and remove compare elements: through the border, unless all are scalars."""
    world, name = tracer.world, fn.__name__
    base: Any = next((base for base in (list, tuple, collections.deque) if isinstance(owner, base)), None)
    if base is None or all(type(element) in SCALARS for element in (*base.__iter__(owner), *args)):
        return native(fn, *_receiver_and_rest(fn, owner, args), **kwargs)
    item, *limits = args
    limits = [native(operator.index, limit) for limit in limits]
    positions = range(base.__len__(owner))
    matches = (
        index
        for index in (positions[slice(limits[0], *limits[1:2] or (None,))] if limits else positions)
        if protocols.identical(element := base.__getitem__(owner, index), item)
        or world.truth(world.compare("==", element, item))
    )
    if name == "count":
        return sum(1 for _ in matches)
    found = next(matches, None)
    if found is None:  # an empty container says so in Python's words
        empty = next(one for one in _EMPTY if isinstance(owner, type(one)))
        return native(getattr(empty, name), text_ready(world, item))
    if name == "remove":
        base.__delitem__(owner, found)
        return None
    return found


_EMPTY: tuple[Any, ...] = ((), [], collections.deque())


_CONTAINER_ROWS: dict[str, Callable[[Any, Any, Any, Args, Kwargs], Any]] = {
    **dict.fromkeys(
        """extend extendleft union intersection difference symmetric_difference issubset issuperset isdisjoint
        intersection_update difference_update symmetric_difference_update __iadd__ join""".split(),
        _takes_iterables,
    ),
    "update": _update,
    "__init__": _update,
    "sort": _sort,
    "index": _find,
    "count": _find,
    "remove": _find,
}  # fmt: skip


def _format_text(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    world = tracer.world
    if any(_formats_itself(world, value) for value in (*args, *kwargs.values())):
        # complaints about the template itself
        native(owner.format, *(_Anything() for _ in args), **dict.fromkeys(kwargs, _Anything()))
        return joined(_fields(world, owner, args, kwargs, itertools.count()))
    ready = tuple(text_ready(world, value) for value in args)
    return native(
        fn,
        *_receiver_and_rest(fn, owner, ready),
        **{name: text_ready(world, value) for name, value in kwargs.items()},
    )


class _Anything:
    """Has every attribute and every element, and no text."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, key: object) -> _Anything:
        return self

    def __format__(self, spec: str) -> str:
        return ""

    __str__ = __repr__ = lambda self: ""


def _formats_itself(world: Any, value: Any) -> bool:
    names = ("__format__", "__str__", "__repr__") if type(value) not in PLAIN else ()
    return any(classes.python_method(world, type(value), name) is not None for name in names)


def _fields(world: Any, template: str, args: Args, kwargs: Kwargs, numbers: Iterator[int]) -> list[Any]:
    """The parts of a formatted string, each value formatted through the border. `numbers`: of the fields that name no
    argument."""
    parts: list[Any] = []
    for literal, field, spec, conversion in native(_string.formatter_parser, template):
        parts.append(literal)
        if field is not None:
            name, path = native(_string.formatter_field_name_split, field)
            name = next(numbers) if name == "" else name
            value = native(operator.getitem, args if type(name) is int else kwargs, name)
            for is_attribute, key in path:
                value = world.getattr(value, key) if is_attribute else world.getitem(value, key)
            inner = joined(_fields(world, spec, args, kwargs, numbers))
            parts.append(world.format(value, ord(conversion) if conversion else 0, inner))
    return parts


_TEXT_ROWS: dict[str, Callable[[Any, Any, Any, Args, Kwargs], Any]] = {
    "format": _format_text,
    "format_map": lambda tracer, fn, owner, args, kwargs: native(
        fn, *_receiver_and_rest(fn, owner, (text_ready(tracer.world, args[0]),))
    ),
    "__mod__": lambda tracer, fn, owner, args, kwargs: tracer.world.binary("%", owner, args[0]),
}
