"""Methods of builtin types, called on whatever they are bound to.

Takes a bound builtin method (`[].append`), a slot wrapper (`object.__setattr__`) or a descriptor with its receiver;
gives the result.
Always holds: a receiver made inside is free to be changed natively; an outside receiver never reaches native code,
except for methods that look at its identity alone.
"""

from __future__ import annotations

import collections
import operator
import re
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak, SkipFrame, UserException
from fusewright.capture.border import formatting, protocols
from fusewright.capture.border.native import Trampoline, native
from fusewright.capture.border.native_ready import CONTENTS, PLAIN, SCALARS, for_native, guard_decimals, text_ready
from fusewright.capture.border.values import array as arrays, cls as classes, object as objects, tensor as tensors
from fusewright.capture.border.values.constant import FROZEN_TYPES, is_constant
from fusewright.capture.border.values.dict import OutsideDict, callback
from fusewright.capture.border.values.memory import Address, Storage
from fusewright.capture.border.values.symbolic import concrete_inside
from fusewright.capture.border.witness import asked
from fusewright.capture.call import (
    autograd as call_autograd,
    builtins as call_builtins,
    classes as call_classes,
    generators,
    host_random,
    iterables as call_iterables,
    reads,
    subclasses,
    support as call_support,
    torch as call_torch,
)
from fusewright.capture.guards import MISSING
from fusewright.operators import decompositions

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
# Classes that have other ones. What is written in C repeats what `object` has elsewhere.
_OWN_ATTRIBUTES = (super, threading.local)


def _call(tracer: Tracer, fn: Any, name: str, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    world = tracer.world
    if issubclass(type(owner), torch.Tensor):
        return call_tensor_method(tracer, name, owner, args, kwargs)
    if name in _ORDERED and issubclass(world.type_of(owner), collections.OrderedDict) and not _of_order(fn, owner):
        raise GraphBreak("untraceable-call", f"dict.{name} of an OrderedDict, whose order does not hear of it")
    if type(owner) in subclasses.DISABLERS:
        return subclasses.disabler_method(tracer, name, owner, args)
    if type(owner) is OutsideDict:
        return tracer.call(world.getattr(owner, name), args, kwargs)
    defined_by = getattr(fn, "__objclass__", None) or _definer(type(owner), name)
    of_object = defined_by in (object, type) or issubclass(type(owner), (types.FunctionType, types.ModuleType))
    if name in _OF_STAND_INS:
        of_object = (of_object or type(owner) not in PLAIN) and not issubclass(type(owner), _OWN_ATTRIBUTES)
    row = _OBJECT_ROWS.get(name) if of_object else None
    if row is None and isinstance(owner, property) and defined_by is property:
        row = _PROPERTY_ROWS.get(name)
    if name == "__getattribute__" and defined_by is types.ModuleType:
        row = _module_getattribute
    if row is not None:
        if not call_support.method_takes(fn, owner, args, kwargs):
            return native(fn, *call_support.receiver_and_rest(fn, owner, args), **kwargs)  # its complaint
        return row(tracer, owner, args, kwargs)
    if type(owner) in PLAIN:
        special = _TEXT_ROWS.get(name) if isinstance(owner, (str, bytes)) else None
        return _by_row(tracer, special or _CONTAINER_ROWS.get(name), fn, owner, (args, kwargs))
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
            guard_decimals(world, owner)
            result = native(fn, *call_support.receiver_and_rest(fn, owner, args), **kwargs)
            return call_classes.note_made(world, result) if type(result) is type(owner) else result  # property.setter
        raise GraphBreak("untraceable-call", f"{type(owner).__qualname__}.{name} of something that is no constant")
    if world.is_raw(owner):
        bound = fn.__get__(owner, type(owner)) if hasattr(type(fn), "__get__") else fn  # `getattr` may be the program's
        if name == "enable" and any(base.__module__ == "_lsprof" for base in type(owner).__mro__):
            raise SkipFrame("untraceable-call", "a profiler begins, which is to see the program's frames")
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
        return _by_row(tracer, _CONTAINER_ROWS.get(name), fn, owner, (args, kwargs))
    if _is_harmless(type(owner)):
        return _native_method(tracer, fn, owner, args, kwargs)
    code = call_support.break_code(getattr(owner, name, None), "untraceable-call")
    raise GraphBreak(code, f"{type(owner).__module__}.{type(owner).__qualname__}.{name}")


_ORDERED = frozenset("clear pop popitem setdefault update __delitem__ __setitem__ __ior__ __init__".split())
"""Methods of a dict that write to it, of which an OrderedDict has its own."""


def _of_order(fn: Any, owner: Any) -> bool:
    own = vars(collections.OrderedDict)[fn.__name__]
    return bool(getattr(fn, "__objclass__", None) is collections.OrderedDict or own.__get__(owner) == fn)


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


def _by_row(tracer: Tracer, row: Any, fn: Any, owner: Any, given: tuple[Args, Kwargs]) -> Any:
    """A method of a builtin type, by its row if it has one and takes these arguments."""
    if row is None or not call_support.method_takes(fn, owner, *given):
        return _native_method(tracer, fn, owner, *given)
    return row(tracer, fn, owner, *given)


_TEXT_ROWS: dict[str, Callable[[Tracer, Any, Any, Args, Kwargs], Any]] = {
    "format": lambda tracer, fn, owner, args, kwargs: formatting.format_text(tracer.world, owner, args, kwargs),
    "format_map": lambda tracer, fn, owner, args, kwargs: native(
        str.format_map, owner, text_ready(tracer.world, args[0])
    ),
    "__mod__": lambda tracer, fn, owner, args, kwargs: tracer.world.binary("%", owner, args[0]),
}
_LOOKS_AT_NO_ELEMENT = frozenset(
    """append appendleft insert pop popleft popitem clear reverse rotate get setdefault
    __len__ __getitem__ __setitem__ __delitem__""".split()
)


def _native_method(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    world = tracer.world
    ready: Args = args
    if not (fn.__name__ in _LOOKS_AT_NO_ELEMENT and isinstance(owner, (list, collections.deque))):
        ready = tuple(for_native(world, value) for value in args)
    if isinstance(owner, _KEYED):  # keys, texts; what a list takes in may stay symbolic
        ready = (
            (*map(concrete_inside, ready[:1]), *ready[1:])
            if isinstance(owner, dict)
            else tuple(map(concrete_inside, ready))
        )
    if fn.__name__ not in _LOOKS_AT_NO_ELEMENT:  # else each call would walk through all of it
        for_native(world, owner)
    keywords = {name: for_native(world, value) for name, value in kwargs.items()}
    return native(fn, *call_support.receiver_and_rest(fn, owner, ready), **keywords)


_OF_MEMORY: dict[str, Any] = {"numpy": arrays.of_tensor, "data_ptr": Address, "untyped_storage": Storage}
_TENSOR_PROTOCOL: dict[str, tuple[int, Callable[..., Any]]] = {  # with how many arguments
    "__getattribute__": (1, lambda tracer, owner, args: tensors.getattr_tensor(tracer.world, owner, *args)),
    "__delattr__": (1, lambda tracer, owner, args: tensors.delattr_tensor(tracer.world, owner, *args)),
    "__setattr__": (2, subclasses.setattr_of),
}


def call_tensor_method(tracer: Tracer, name: str, owner: torch.Tensor, args: Args, kwargs: Kwargs) -> Any:
    """A method of a tensor that is written in C."""
    row = call_autograd.METHODS.get(name)
    if row is not None:
        return row(tracer, owner, args, kwargs)
    if name == "__init__":
        return None
    if name == "as_subclass":
        return tracer.call(torch._C.TensorBase.as_subclass, (owner, *args), kwargs)
    if name in tensors.DATA_DEPENDENT:
        value = reads.read(tracer, name, owner, args, kwargs)
        if value is not MISSING:
            return value
    if name in _OF_MEMORY and not args and not kwargs and tracer.world.recorder_owns(owner):
        return _OF_MEMORY[name](tracer.world, owner)
    tensors.refuse_method(name)
    protocol = _TENSOR_PROTOCOL.get(name)
    if protocol is not None:
        if len(args) != protocol[0] or kwargs or not isinstance(args[0], str):
            return native(tensors.method_in_c(name), owner, *args, **kwargs)  # which raises
        return protocol[1](tracer, owner, args)
    if name == "storage_offset":
        asked(tracer.recorder, torch._C.TensorBase.storage_offset, (owner,), {})
        return tensors.storage_offset(tracer.world, owner)
    if name == "_is_view":
        return tensors.guarded_fact(tracer.world, owner, "_is_view()", torch._C.TensorBase._is_view)
    if name in _LAYOUT_QUERIES:
        return asked(tracer.recorder, tensors.method_in_c(name), (owner, *args), kwargs)
    if name == "copy_" and args and type(args[0]) in (bool, int, float):  # no operator takes a number
        number = tracer.call(torch.tensor, args[:1], {"dtype": _NUMBERS[type(args[0])], "device": "cpu"})
        args = (number, *args[1:])
    if name in _TENSOR_QUERIES or (name == "type" and not args and not kwargs):
        return native(tensors.method_in_c(name), owner, *args, **kwargs)
    if name == "new_tensor":
        own = dict(zip(("data",), args)) | {"dtype": owner.dtype, "device": owner.device}
        parts = reads.joined(tracer, own | {key: value for key, value in kwargs.items() if value is not None})
        if parts is not MISSING:
            return parts
    method, given = tensors.method_in_c(name), (owner, *args)
    otherwise = decompositions.FUNCTIONS.get(method)
    made = None if otherwise is None else otherwise(tracer.recorder, tracer.world.torch_call, given, kwargs)
    return tracer.world.torch_call(method, given, kwargs) if made is None else made


# Methods of `object` and `type`.


def _object_setattr(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> None:
    args = (call_support.attribute_name(args[0]), *args[1:])
    if issubclass(type(owner), type):
        classes.setattr_class(tracer.world, owner, *args)
    elif type(owner) in (types.ModuleType, types.FunctionType):
        tracer.world.setattr(owner, *args)
    else:
        objects.generic_setattr(tracer.world, owner, *args)


def _object_getattribute(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    args = (call_support.attribute_name(args[0]), *args[1:])
    if issubclass(type(owner), type):
        return classes.getattr_class(tracer.world, owner, *args)
    if type(owner) is types.FunctionType or tracer.world.type_of(owner) is not type(owner):
        return tracer.world.getattr(owner, *args)
    return objects.generic_getattr(tracer.world, owner, *args)


def _module_getattribute(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    return objects.getattr_module(tracer.world, owner, call_support.attribute_name(args[0]))


def _object_delattr(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> None:
    args = (call_support.attribute_name(args[0]), *args[1:])
    objects.generic_delattr(tracer.world, owner, *args)


def _object_init(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(owner, type):
        return native(type.__init__, owner, *args, **kwargs) if args or kwargs else None
    if (args or kwargs) and tracer.world.type_of(owner) is type(owner):
        for name in ("__init__", "__new__"):  # by which it tells whether there may be arguments
            classes.guarded_lookup(tracer.world, type(owner), name)
        native(object.__init__, owner, *args, **kwargs)
    return None


def _object_eq(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    return True if protocols.identical(owner, args[0]) else NotImplemented


def _object_ne(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    world, kind = tracer.world, type(owner)
    compare = classes.python_method(world, kind, "__eq__") or classes.guarded_lookup(world, kind, "__eq__")
    equal = tracer.call(compare, (owner, *args))
    return equal if equal is NotImplemented else not world.truth(equal)


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
        else call_classes.is_of_type(tracer, args[0], owner)
    )


def _bind_explicitly(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    if args[0] is None:
        return native(types.FunctionType.__get__, owner, *args)
    return types.MethodType(owner, args[0])


def _call_explicitly(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    return tracer.call(owner, args, kwargs)


def _property_get(tracer: Tracer, owner: property, args: Args, kwargs: Kwargs) -> Any:
    if args[0] is None:
        return native(property.__get__, owner, *args)
    return objects.bind(tracer.world, owner, args[0], tracer.world.type_of(args[0]), "property")


def _property_set(tracer: Tracer, owner: property, args: Args, kwargs: Kwargs) -> Any:
    if owner.fset is None:
        return native(property.__set__, owner, *args)  # its complaint
    return tracer.call(tracer.world.load(owner.fset, tracer.world.constant(owner.fset, "fset")), args)


def _property_delete(tracer: Tracer, owner: property, args: Args, kwargs: Kwargs) -> Any:
    if owner.fdel is None:
        return native(property.__delete__, owner, *args)  # its complaint
    return tracer.call(tracer.world.load(owner.fdel, tracer.world.constant(owner.fdel, "fdel")), args)


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
    "__format__": lambda tracer, owner, args, kwargs: (
        formatting.to_text(tracer.world, owner, "str")
        if type(args[0]) is str and not args[0]
        else native(object.__format__, owner, args[0])  # its complaint
    ),
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


def _on_class(tracer: Tracer, fn: Any, name: str, owner: type, args: Args, kwargs: Kwargs) -> Any:
    """`object.__new__`, `dict.fromkeys`, C class methods, and slots bound to a class (`Cls.__call__`)."""
    world = tracer.world
    if name == "__new__":
        return _explicit_new(tracer, fn, owner, args, kwargs)
    if owner is torch._C._VariableFunctions or getattr(fn, "__module__", None) == "torch._C._VariableFunctions":
        return call_torch.call_operator(tracer, fn, args, kwargs)
    if isinstance(fn, types.MethodWrapperType):
        slot = _OBJECT_ROWS.get(name)
        if slot is not None and call_support.method_takes(fn, owner, args, kwargs):
            return slot(tracer, owner, args, kwargs)
        return native(fn, *args, **kwargs)
    if name == "__init_subclass__" or name == "__subclasshook__":
        return native(fn, *args, **kwargs)
    row = call_iterables.CLASS_METHODS.get((owner, name))
    if row is not None:
        return row(tracer, args, kwargs)
    if name == "__setattr__":
        return classes.setattr_class(world, owner, *args)
    if owner.__module__ in ("builtins", "collections") or owner in call_support.PURE_CLASSES:
        first = [value if type(value) in SCALARS else call_support.native_iterable(world, value) for value in args[:1]]
        return native(fn, *first, *args[1:], **kwargs)
    if name in ("__instancecheck__", "__subclasscheck__") and classes.lookup(type, name).__get__(owner) == fn:
        asked = name == "__instancecheck__"
        return call_classes.is_of_type(tracer, args[0], owner) if asked else native(fn, *args)
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
    take = call_support.iterable_for(type(owner))
    ready = call_support.in_turn(take, tracer.world, args)
    return native(fn, *call_support.receiver_and_rest(fn, owner, ready), **kwargs)


def _update(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(owner, BaseException):
        return _native_method(tracer, fn, owner, args, kwargs)
    if not isinstance(owner, dict):
        return _takes_iterables(tracer, fn, owner, args, kwargs)
    ready = [call_support.or_error(call_builtins.pairs_of, tracer, type(owner), value) for value in args]
    if args and fn.__name__ == "__init__" and fn.__objclass__ is collections.defaultdict:
        ready[0] = callback(tracer.world, args[0])
    return native(fn, *call_support.receiver_and_rest(fn, owner, tuple(ready)), **kwargs)


def _update_by_items(tracer: Tracer, owner: Any, args: Args, kwargs: Kwargs) -> None:
    for key, value in dict(*(call_builtins.pairs_of(tracer, type(owner), value) for value in args), **kwargs).items():
        tracer.world.setitem(owner, key, value)


def _split(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    made = _native_method(tracer, fn, owner, args, kwargs)
    if isinstance(owner, BaseExceptionGroup):
        for part in made if isinstance(made, tuple) else (made,):
            if part is not None:
                tracer.copy_traceback(owner, part)
    return made


def _sort(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> None:
    if type(owner) not in PLAIN and not isinstance(owner, list):
        return native(fn, *args, **kwargs)
    elements = list(list.__iter__(owner))
    list.clear(owner)  # what a key or a comparison sees of the list
    try:
        call_iterables.sort(tracer, elements, kwargs)
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
        return native(fn, *call_support.receiver_and_rest(fn, owner, args), **kwargs)
    item, *limits = args
    if not all(hasattr(type(limit), "__index__") for limit in limits):
        return native(fn, *call_support.receiver_and_rest(fn, owner, (None, *limits)), **kwargs)  # its complaint
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
    "split": _split,
    "subgroup": _split,
    "index": _find,
    "count": _find,
    "remove": _find,
}  # fmt: skip
