"""Builtin functions and classes: rows for those that meet user objects or call back, and the list of those that are
simply called.

Takes real values; gives what the builtin gives. Always holds: a builtin that runs natively sees no lazy stand-in, and
no outside object that it would look into; a callback that it makes enters the interpreter through a trampoline.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import functools
import inspect
import math
import operator
import os
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import methods, torch
from fusewright.base.records import dataclass
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border import formatting, protocols
from fusewright.capture.border.absent import look_alike
from fusewright.capture.border.native import native
from fusewright.capture.border.native_ready import PLAIN, SCALARS, TRANSPARENT, for_native
from fusewright.capture.border.protocols import BINARY, COMPARE
from fusewright.capture.border.sequence_iterator import ReversedSequence
from fusewright.capture.border.values import cls as classes, list as lists
from fusewright.capture.border.values.array import TracedArray
from fusewright.capture.border.values.constant import FROZEN_TYPES, is_constant
from fusewright.capture.border.values.dict import OutsideDict, callback, is_copied_whole, read_namespace
from fusewright.capture.border.values.symbolic import NUMBERS, SYMBOLIC, concrete, stays_symbolic
from fusewright.capture.bytecode.instructions import VERSION
from fusewright.capture.call import classes as call_classes
from fusewright.capture.call.iterables import ITERABLE_ROWS, is_iterable
from fusewright.capture.call.output import WARNING_ROWS, print_row, warn_row
from fusewright.capture.call.support import (
    attribute_name,
    drain,
    iterable_for,
    native_callback,
    native_iterable,
    one_by_one,
    or_error,
)
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import Attribute, Constant
from fusewright.sizes import symfloat as runtime_float

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Row = Callable[["Tracer", Args, Kwargs], Any]

ITEM_GETTER, ATTR_GETTER, METHOD_CALLER = operator.itemgetter, operator.attrgetter, operator.methodcaller

# C modules whose functions compute from their arguments alone (builtins that do more are refused below or have rows).
PURE_MODULES = frozenset({
    "math", "cmath", "_operator", "operator", "itertools", "_functools", "_bisect", "_struct", "_string",
    "unicodedata", "binascii",
    "_statistics", "_heapq",
    "_abc", "_json", "_collections",
})  # fmt: skip
PURE_FUNCTIONS: frozenset[Any] = frozenset({
    abs, ascii, bin, callable, chr, divmod, format, hex, oct, ord, pow, round, len, repr, hash, sorted, min, max,
    sum, any, all, builtins.isinstance, issubclass, os.fspath, str.maketrans, bytes.maketrans, sys.intern,
})  # fmt: skip


def call_pure(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Native, after a look at the arguments."""
    world = tracer.world
    if len(args) == 1 and type(args[0]) in (torch.SymFloat, torch.SymInt):
        known = native(runtime_float.apply, fn, args[0])
        if known is not None:
            return known
    for value in (*args, *kwargs.values()):
        if type(value) not in PLAIN and world.is_raw(value) and not isinstance(value, (TRANSPARENT, torch.Tensor)):
            raise GraphBreak("opaque-object", f"{fn.__qualname__} of a {type(value).__qualname__}")
        if isinstance(value, torch.Tensor) and fn.__name__ in _NUMBERS:
            raise GraphBreak("data-dependent-scalar", f"{fn.__module__}.{fn.__name__} of a tensor")
    ready = [concrete(for_native(world, value)) for value in args]
    return native(fn, *ready, **{name: concrete(for_native(world, value)) for name, value in kwargs.items()})


_NUMBERS = frozenset(name for name in dir(math) if not name.startswith("_"))


# Types and attributes.


def _getattr(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    obj, name, *default = args
    name = attribute_name(name)
    try:
        return tracer.world.getattr(obj, name)
    except UserException as signal:
        if default and isinstance(signal.exception, AttributeError):
            return default[0]
        raise


def _hasattr(tracer: Tracer, args: Args, kwargs: Kwargs) -> bool:
    obj, name = args
    name = attribute_name(name)
    try:
        tracer.world.getattr(obj, name)
    except UserException as signal:
        if isinstance(signal.exception, AttributeError):
            return False
        raise
    return True


def _setattr(tracer: Tracer, args: Args, kwargs: Kwargs) -> None:
    tracer.world.setattr(args[0], attribute_name(args[1]), args[2])


def _delattr(tracer: Tracer, args: Args, kwargs: Kwargs) -> None:
    tracer.world.delattr(args[0], attribute_name(args[1]))


def _vars(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    try:
        return tracer.world.getattr(args[0], "__dict__")
    except UserException as signal:
        if isinstance(signal.exception, AttributeError):
            raise UserException(TypeError("vars() argument must have __dict__ attribute")) from None
        raise


def _callable(tracer: Tracer, args: Args, kwargs: Kwargs) -> bool:
    world = tracer.world
    classes.guarded_lookup(world, world.type_of(args[0]), "__call__")
    alike = look_alike(args[0])
    return native(callable, world.materialise(args[0]) if alike is None else alike)


def _id(tracer: Tracer, args: Args, kwargs: Kwargs) -> int:
    world = tracer.world
    if isinstance(args[0], torch.Tensor):
        world.recorder.identity_asked = True
    record = world.outside(args[0])
    if record is None:
        if not is_constant(args[0]):
            world.identities[id(args[0])] = args[0]
        return id(args[0])
    world.guard("IS", record.source, record.real)
    return id(record.real)


def _hash(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    world, obj = tracer.world, args[0]
    if type(obj) in SCALARS:
        return native(hash, concrete(obj))
    method = classes.python_method(world, type(obj), "__hash__") if type(obj) not in PLAIN else None
    if method is not None and not is_constant(obj):
        return protocols.answered(world, obj, "__hash__", hash, tracer.call(method, (obj,)))
    made: list[Any] = []
    number = native(hash, _as_known_by(world, obj, made))
    if made:
        world.identities[number] = made
    return number


def _as_known_by(world: World, key: Any, made: list[Any]) -> Any:
    """A key as outside: what its hash is made of that is known by its identity is guarded, and the object itself; or
    noted, if the call has made it."""
    if type(key) in (tuple, frozenset):
        return type(key)(_as_known_by(world, part, made) for part in key)
    if world.outside(key) is not None:
        world.guard_identity(key)
        return world.real_of(key)
    if not is_constant(key) and (type(key).__hash__ is object.__hash__ or isinstance(key, torch.Tensor)):
        made.append(key)
    return key


# Length, iteration, folding.


def _len(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    world, obj = tracer.world, args[0]
    if id(obj) in world.unread:
        return lists.length(world, obj)
    if type(obj) in PLAIN:
        return native(len, obj)
    if isinstance(obj, torch.Tensor):
        return obj.shape[0] if obj.dim() else tracer.call(world.getattr(obj, "__len__"), ())  # which raises
    if type(obj) is OutsideDict:
        return len(obj)
    method = classes.python_method(world, type(obj), "__len__")
    if method is not None:
        return protocols.answered(world, obj, "__len__", len, tracer.call(method, (obj,)))
    protocols.refuse_opaque(world, obj, "__len__")
    return native(len, obj)


def _iter(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 2:
        return native(iter, native_callback(tracer, args[0]), args[1])
    return tracer.world.iterate(args[0])


def _next(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    iterator, *default = args
    try:
        return tracer.world.next(iterator)
    except UserException as signal:
        if default and isinstance(signal.exception, StopIteration):
            return default[0]
        raise


def _sum(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    world = tracer.world
    start = args[1] if len(args) > 1 else kwargs.get("start", 0)
    if type(args[0]) in (list, tuple) and all(type(element) in SCALARS for element in (start, *args[0])):
        return native(sum, args[0], start)
    if isinstance(start, (str, bytes, bytearray)):
        return native(sum, or_error(native_iterable, world, args[0]), start)  # its complaint
    for element in one_by_one(world, args[0]):
        start = world.binary("+", start, element)
    return start


def _prod(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """math.prod: of numbers that are known at run time too, and of what multiplies them by a method of its own."""
    start = kwargs.get("start", 1)
    if len(args) != 1 or kwargs.keys() - {"start"}:
        return native(math.prod, *args, **kwargs)  # its complaint
    if type(args[0]) in (list, tuple) and all(type(element) in SCALARS for element in (start, *args[0])):
        return native(math.prod, args[0], start=start)
    for element in one_by_one(tracer.world, args[0]):
        start = tracer.world.binary("*", start, element)
    return start


def _any_or_all(stop_at: bool) -> Row:
    def fold(tracer: Tracer, args: Args, kwargs: Kwargs) -> bool:
        world = tracer.world
        found = any(world.truth(element) is stop_at for element in one_by_one(world, args[0]))
        return found is stop_at

    return fold


def _reduce(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    fn, iterable, *initial = (*args, *kwargs.values())  # CPython 3.14 and newer take `initial` by name
    if not is_iterable(tracer.world, iterable):
        return native(functools.reduce, None, iterable)  # its complaint
    elements = one_by_one(tracer.world, iterable)
    result = initial[0] if initial else next(elements, MISSING)
    if result is MISSING:
        raise UserException(TypeError("reduce() of empty iterable with no initial value"))
    for element in elements:
        result = tracer.call(fn, (result, element))
    return result


def _reversed(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    world, obj = tracer.world, args[0]
    if isinstance(obj, torch.Tensor):
        return tracer.call(world.getattr(obj, "__reversed__"), ())  # a tensor
    method = classes.python_method(world, type(obj), "__reversed__") if type(obj) not in PLAIN else None
    if method is not None:
        return tracer.call(method, (obj,))
    by_index = type(obj) not in PLAIN and classes.python_method(world, type(obj), "__getitem__") is not None
    if by_index and classes.lookup(type(obj), "__reversed__") is MISSING:
        return ReversedSequence(world, obj, _len(tracer, (obj,), {}) - 1)
    return native(reversed, for_native(world, obj))


# Conversions.


_FALLBACKS = {int: ("__index__",), float: ("__index__",), complex: ("__float__", "__index__")}
"""The special methods that a conversion asks for next."""


def _convert(cls: type, method: str, code: str) -> Row:
    def convert(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        world = tracer.world
        if not args:
            return native(cls, **kwargs)
        obj = args[0]
        if isinstance(obj, torch.Tensor):
            value = tracer.recorder.known_value(obj)
            if value is None:
                recorder = tracer.recorder
                symbolic = recorder.data_numbers or (recorder.speculation is not None and cls is float)
                if symbolic and cls is not complex and len(args) == 1 and not kwargs:
                    return tracer.call(getattr(obj, method))
                value = recorder.read(obj)
            if value is None:
                raise GraphBreak(code, f"{cls.__name__}(tensor)")
            return native(cls, value)
        if type(obj) is TracedArray and len(args) == 1 and obj.dtype.kind == ("f" if cls is float else "i"):
            return tracer.call(world.getattr(obj, "item"))
        if isinstance(obj, torch.SymInt) and cls is int:
            return obj
        if isinstance(obj, (torch.SymFloat, torch.SymInt)) and cls is float:
            return native(torch.sym_float, obj)
        if type(obj) not in PLAIN:
            alone = len(args) == 1 and not kwargs and not (cls is complex and isinstance(obj, str))
            # From CPython 3.14 on what is a float is one for `complex`.
            asked = () if cls is complex and isinstance(obj, float) and VERSION >= (3, 14) else _FALLBACKS[cls]
            for name in dict.fromkeys((method, *asked)) if alone else ():
                function = classes.python_method(world, type(obj), name)
                if function is not None:
                    ask = operator.index if name == "__index__" else float if name == "__float__" else cls
                    return native(cls, protocols.answered(world, obj, name, ask, tracer.call(function, (obj,))))
                if classes.lookup(type(obj), name) is not MISSING:  # the base's, which comes first
                    break
            protocols.refuse_opaque(world, obj, method)
        return native(cls, *(for_native(world, value) for value in args), **kwargs)

    return convert


def _bool(tracer: Tracer, args: Args, kwargs: Kwargs) -> bool:
    return tracer.world.truth(args[0]) if args else False


def _str(tracer: Tracer, args: Args, kwargs: Kwargs) -> str:
    if len(args) != 1 or kwargs:
        return native(str, *args, **kwargs)
    return formatting.to_text(tracer.world, args[0], "str")


def _repr(tracer: Tracer, args: Args, kwargs: Kwargs) -> str:
    return formatting.to_text(tracer.world, args[0], "repr")


def _format(tracer: Tracer, args: Args, kwargs: Kwargs) -> str:
    spec = args[1] if len(args) > 1 else ""
    if not isinstance(spec, str):
        return native(format, None, spec)  # its complaint
    return tracer.world.format(args[0], 0, spec)


def _collect(cls: type) -> Row:
    def make(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        ready = (or_error(iterable_for(cls), tracer.world, args[0]), *args[1:]) if args else ()
        return native(cls, *ready, **kwargs)

    return make


def pairs_of(tracer: Tracer, cls: type, obj: Any) -> Any:
    """What `cls(obj)` reads, of a class of dicts: a mapping's pairs, or an iterable of pairs, each when it is asked
    for."""
    world = tracer.world
    if type(obj) is OutsideDict or type(obj) in (dict, collections.OrderedDict, collections.defaultdict):
        return for_native(world, obj)
    try:
        keys = world.getattr(obj, "keys")
    except UserException as signal:
        if not isinstance(signal.exception, AttributeError):
            raise
        keys = MISSING
    if keys is not MISSING:
        if not issubclass(cls, collections.OrderedDict) and is_copied_whole(world, obj):
            return dict.copy(obj)
        return map(lambda key: (key, world.getitem(obj, key)), drain(world, tracer.call(keys)))  # noqa: C417
    pairs = native_iterable(world, obj)
    return native(map, lambda pair: pair if type(pair) in PLAIN else tuple(drain(world, pair)), pairs)


def _dict(cls: type) -> Row:
    def make(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        return native(cls, *(or_error(pairs_of, tracer, cls, value) for value in args), **kwargs)

    return make


def _defaultdict(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    factory = callback(tracer.world, args[0]) if args else None
    pairs = (or_error(pairs_of, tracer, dict, value) for value in args[1:])
    return native(collections.defaultdict, factory, *pairs, **kwargs)


def _rounding(fn: Callable[..., Any], method: str) -> Row:
    def apply(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        world, obj = tracer.world, concrete(args[0])
        args = (obj, *args[1:])
        if isinstance(obj, torch.Tensor):
            if not hasattr(torch.Tensor, method):
                if fn in (math.floor, math.ceil):
                    return apply(tracer, (tracer.call(float, args),), kwargs)
                raise UserException(TypeError(f"type {world.type_of(obj).__name__} doesn't define {method} method"))
            return world.torch_call(fn, args, kwargs)
        special = classes.python_method(world, type(obj), method) if type(obj) not in PLAIN else None
        if special is not None:
            return tracer.call(special, args, kwargs)
        return call_pure(tracer, fn, args, kwargs)

    return apply


def _divmod(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    if type(args[0]) in SCALARS and type(args[1]) in SCALARS:
        return native(divmod, *map(concrete, args))
    if all(isinstance(value, torch.Tensor) or type(value) in PLAIN for value in args):
        return native(divmod, *args)  # tensors have none
    return protocols.dispatch(tracer.world, protocols.DIVMOD, divmod, "divmod()", *args)


def _float_power(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """math.pow, which for these numbers is what `**` of floats is (a bias correction, a schedule)."""
    kinds = set(map(type, args))
    if len(args) == 2 and not kwargs and kinds <= NUMBERS and not kinds.isdisjoint(SYMBOLIC):
        base, exponent = (value if type(value) in SYMBOLIC else float(value) for value in args)
        raised = type(exponent) in SYMBOLIC or exponent >= 0  # of 0 to a negative power both say something else
        if raised and stays_symbolic("**", base, exponent):
            return native(runtime_float.power, base, exponent)
    return call_pure(tracer, math.pow, args, kwargs)


def _pow(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    return native(pow, *args, **kwargs) if len(args) != 2 or kwargs else tracer.world.binary("**", *args)


# Output.


def _binary_row(symbol: str, inplace: bool = False) -> Row:
    return lambda tracer, args, kwargs: tracer.world.binary(symbol, args[0], args[1], inplace)


def _compare_row(symbol: str) -> Row:
    return lambda tracer, args, kwargs: tracer.world.compare(symbol, args[0], args[1])


def _world_row(name: str) -> Row:
    return lambda tracer, args, kwargs: getattr(tracer.world, name)(*args)


def _unary_row(symbol: str) -> Row:
    return lambda tracer, args, kwargs: tracer.world.unary(symbol, args[0])


def _fields(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """dataclasses.fields: read from what the class statement has fixed, without interpreting the library's loop."""
    world, subject = tracer.world, args[0]
    if not isinstance(subject, type):
        subject = type(subject) if world.outside(subject) is not None else world.type_of(subject)
    found = classes.guarded_lookup(world, subject, "__dataclass_fields__")
    if type(found) is dict and type(subject) is type:  # a metaclass might have code of the program's
        known = world.is_inside_class(subject)
        table = world.materialise(found if known else world.load(found, world.constant(found, "fields")))
        if all(type(one) is dataclasses.Field for one in dict.values(table)):
            return tuple([one for one in dict.values(table) if one._field_type is _FIELD])  # type: ignore[attr-defined]
    return native(dataclasses.fields, subject)


_FIELD: Any = dataclasses._FIELD  # type: ignore[attr-defined]


def _guard_signature(world: World, function: Any) -> None:
    """What inspect.signature reads of a Python function and of those that it wraps."""
    while isinstance(function, types.FunctionType) and world.load_function(function):
        world.guard_identity(function)
        where = world.constant(function, function.__name__)
        for name in ("__defaults__", "__kwdefaults__", "__annotations__"):
            world.guard("IS", Attribute(where, name), getattr(function, name))
        attributes = world.getattr(function, "__dict__")
        read_namespace(attributes, "__signature__")
        function = read_namespace(attributes, "__wrapped__")


_LASTING = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def _signature(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    subject = args[0]
    if isinstance(subject, types.MethodType) and (alike := look_alike(subject)) is not None:
        return native(inspect.signature, alike, **kwargs)
    _guard_signature(tracer.world, subject.__func__ if isinstance(subject, types.MethodType) else subject)
    if isinstance(subject, types.MethodType):
        known = tracer.world.outside(subject.__func__) is not None
    else:
        known = isinstance(subject, type) or tracer.world.outside(subject) is not None
    if not known or isinstance(subject, torch.nn.Module):
        raise GraphBreak("untraceable-call", "inspect.signature of a function that was made inside")
    value = native(inspect.signature, subject, **kwargs)
    if not all(is_constant(one.default) or isinstance(one.default, _LASTING) for one in value.parameters.values()):
        raise GraphBreak("untraceable-call", "inspect.signature of a function with a default that may change")
    return tracer.world.load(value, tracer.world.constant(value, "signature"))


def plain_data(tracer: Tracer, value: Any) -> Any:
    """`value` for native code: a constant, a builtin container of such, a Python function as a trampoline; MISSING for
    anything else."""
    value = concrete(tracer.world.materialise(value))
    kind = type(value)
    if is_constant(value) or kind in FROZEN_TYPES or kind is type:
        return value
    if kind in (types.FunctionType, types.MethodType, functools.partial):
        return native_callback(tracer, value)
    if kind in (list, tuple, set):
        ready = [plain_data(tracer, element) for element in value]
        return MISSING if any(element is MISSING for element in ready) else kind(ready)
    if kind in (dict, collections.OrderedDict):
        pairs = [(plain_data(tracer, key), plain_data(tracer, element)) for key, element in value.items()]
        return MISSING if any(part is MISSING for pair in pairs for part in pair) else kind(pairs)
    return MISSING


def _weak_reference(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """Of what existed before, which outlives the call, or of an instance made inside."""
    world = tracer.world
    call_classes.check_watched(world, args)
    if len(args) != 1 or kwargs or (world.outside(args[0]) is not None and not world.is_raw(args[0])):
        raise GraphBreak("untraceable-call", "a weak reference with a callback, or to a container from outside")
    reference, record = native(weakref.ref, args[0]), world.outside(args[0])
    if record is not None and not isinstance(record.source, Constant):  # what it refers to tells what it equals
        world.guard("CALL", record.source, _Refers(reference))
    return reference


@dataclass(frozen=True, slots=True, eq=False)
class _Refers:
    """A CALL guard's callable: this is the object, which the guard does not keep alive."""

    reference: weakref.ref[Any]

    def __call__(self, value: object) -> bool:
        return self.reference() is value


def _thread_identity(tracer: Tracer, args: Args, kwargs: Kwargs) -> int:
    """For the recursion checks of `repr`, which look it up in a set of their own; anywhere else its value could outlive
    the thread."""
    frame = tracer.frame
    if frame is None or frame.function.__globals__.get("__name__") not in ("dataclasses", "reprlib"):
        raise GraphBreak("untraceable-call", "threading.get_ident")
    return threading.get_ident()


ROWS: list[tuple[Any, Row]] = [
    (builtins.isinstance, lambda tracer, args, kwargs: call_classes.is_instance(tracer, *args)),
    (issubclass, lambda tracer, args, kwargs: call_classes.is_subclass(tracer, *args)),
    (type, lambda tracer, args, kwargs: call_classes.construct(tracer, type, args, kwargs)), (getattr, _getattr),
    (hasattr, _hasattr), (setattr, _setattr),
    (delattr, _delattr), (vars, _vars), (callable, _callable), (id, _id), (hash, _hash), (len, _len),
    (methods.__hash__, _id), (iter, _iter),
    (next, _next),
    (sum, _sum), (any, _any_or_all(True)), (all, _any_or_all(False)), (functools.reduce, _reduce),
    (reversed, _reversed), *ITERABLE_ROWS,
    (int, _convert(int, "__int__", "data-dependent-scalar")),
    (float, _convert(float, "__float__", "data-dependent-scalar")),
    (complex, _convert(complex, "__complex__", "data-dependent-scalar")), (bool, _bool), (str, _str), (repr, _repr),
    (format, _format),
    (ascii, lambda tracer, args, kwargs: formatting.to_text(tracer.world, args[0], "ascii")),
    (list, _collect(list)), (tuple, _collect(tuple)), (set, _collect(set)), (frozenset, _collect(frozenset)),
    (collections.deque, _collect(collections.deque)),
    (dict, _dict(dict)), (collections.OrderedDict, _dict(collections.OrderedDict)),
    (collections.defaultdict, _defaultdict),
    (abs, _rounding(abs, "__abs__")), (round, _rounding(round, "__round__")),
    (math.floor, _rounding(math.floor, "__floor__")),
    (math.ceil, _rounding(math.ceil, "__ceil__")), (math.trunc, _rounding(math.trunc, "__trunc__")), (divmod, _divmod),
    (pow, _pow), (math.pow, _float_power), (math.prod, _prod),
    (print, print_row), (warnings.warn, warn_row), *WARNING_ROWS,
    *((row.function, _binary_row(symbol)) for symbol, row in BINARY.items()),
    *((row.inplace_function, _binary_row(symbol, True)) for symbol, row in BINARY.items()),
    *((row.function, _compare_row(symbol)) for symbol, row in COMPARE.items()),
    (operator.is_, _compare_row("is")), (operator.is_not, _compare_row("is not")),
    (operator.contains, _world_row("contains")),
    (operator.getitem, _world_row("getitem")), (operator.setitem, _world_row("setitem")),
    (operator.delitem, _world_row("delitem")),
    (operator.truth, _bool), (operator.not_, lambda tracer, args, kwargs: not tracer.world.truth(args[0])),
    (operator.neg, _unary_row("-")), (operator.pos, _unary_row("+")), (operator.invert, _unary_row("~")),
    (operator.inv, _unary_row("~")),
    (dataclasses.fields, _fields), (inspect.signature, _signature),
    (threading.get_ident, _thread_identity), (weakref.ref, _weak_reference),
    (weakref.ref.__new__, call_classes.new_reference),
]  # fmt: skip
