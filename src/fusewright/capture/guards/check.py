"""Python's own evaluation of sources and guards: the reference that the native program must agree with, and the text
for people.

Takes sources and guards with a frame's locals and function; gives objects, truth values and phrases like `x.size()[0]
was 32, is 64`.
Always holds: a source that cannot be evaluated raises `SourceError`, nothing else; `guard_holds` never raises.
"""

from __future__ import annotations

import gc
import itertools
import struct
import types
import weakref
from collections import ChainMap, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch

from fusewright import _native
from fusewright._native import isinstance
from fusewright.capture.guards.sources import (
    GONE,
    Attribute,
    Closure,
    Computed,
    Constant,
    DictKey,
    FunctionSource,
    Global,
    InstanceDict,
    Item,
    Local,
    ProxiedDict,
    Referent,
    Source,
    TensorSize,
    TensorStride,
    TypeOf,
)
from fusewright.capture.guards.text import text_of
from fusewright.capture.guards.torch_state import capture_global_state, key_sets
from fusewright.capture.guards.types import ASKED_AT, MISSING, Guard, Missing, TensorGuard
from fusewright.sizes.expressions import Relation, to_tuples
from fusewright.sizes.symfloat import OutsideFloat

Tree = Any  # a nested tuple of operators over ("sym", name), ("const", n) and ints


class SourceError(LookupError):
    """The source leads nowhere now (a key is gone, a cell is empty…)."""


CONSTANT_TYPES = (bool, int, float, complex, str, bytes, type(None), type(...))


def is_constant_key(key: object) -> bool:
    """Whether a dict key is compared by value: a builtin constant, a device, or a tuple of them. Others are objects,
    compared by identity."""
    return (
        type(key) in CONSTANT_TYPES
        or type(key) is torch.device
        or (type(key) is tuple and all(map(is_constant_key, key)))
    )


# --- sources ---------------------------------------------------------------------------------------------------------


def evaluate(source: Source, locals: tuple[object, ...], function: types.FunctionType) -> Any:
    """The object at `source`, by the meaning that sources.py gives it. Raises SourceError."""
    try:
        return _EVALUATE[type(source)](source, locals, function)
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"{source.text()}: {type(error).__name__}: {error}") from error


def _living(source: Constant) -> object:
    if source.obj is GONE:
        raise SourceError(f"{source.text()} is gone")
    return source.obj


def _instance_dict(source: InstanceDict, locals: tuple[object, ...], function: types.FunctionType) -> object:
    base = evaluate(source.base, locals, function)
    if issubclass(type(base), type):
        return type.__dict__["__dict__"].__get__(base)
    return object.__getattribute__(base, "__dict__")


def _find_key(container: dict[Any, Any], key: object) -> object:
    if is_constant_key(key):
        return dict.__getitem__(container, key)
    return next(value for candidate, value in dict.items(container) if candidate is key)


_SEQUENCES: tuple[Any, ...] = (list, tuple, deque, range)
_SIZED: tuple[Any, ...] = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    str,
    bytes,
    bytearray,
    deque,
    range,
    types.MappingProxyType,
)


def _item(source: Item, locals: tuple[object, ...], function: types.FunctionType) -> object:
    base = evaluate(source.base, locals, function)
    if isinstance(base, types.MappingProxyType):
        return base[source.key]
    if isinstance(base, dict):
        return _find_key(base, source.key)
    for builtin in _SEQUENCES:
        if isinstance(base, builtin):
            return builtin.__getitem__(base, source.key)
    raise SourceError(f"{source.text()}: not a builtin container")


def _dict_key(source: DictKey, locals: tuple[object, ...], function: types.FunctionType) -> object:
    base = evaluate(source.base, locals, function)
    keys = OrderedDict.__iter__(base) if isinstance(base, OrderedDict) else dict.__iter__(base)
    for index, key in enumerate(keys):
        if index == source.index:
            return key
    raise SourceError(f"{source.text()}: the dict is too short")


def _global(source: Global, function: types.FunctionType) -> object:
    if source.name in function.__globals__:
        return function.__globals__[source.name]
    return function.__builtins__[source.name]  # type: ignore[attr-defined]


def _closure(source: Closure, function: types.FunctionType) -> object:
    return (function.__closure__ or ())[source.index].cell_contents


def _referent(source: Referent, locals: tuple[object, ...], function: types.FunctionType) -> object:
    reference = evaluate(source.base, locals, function)
    if not isinstance(reference, weakref.ref) or type(reference).__call__ is not weakref.ref.__call__:
        raise SourceError(f"{source.text()}: not a weak reference")
    return reference()


def _attribute(value: object, name: str) -> object:
    """A slot is read by its descriptor: where it is empty, `getattr` would run the class's `__getattr__`."""
    found = next((base.__dict__[name] for base in type(value).__mro__ if name in base.__dict__), None)
    return found.__get__(value) if isinstance(found, types.MemberDescriptorType) else getattr(value, name)


_EVALUATE: dict[type, Callable[..., object]] = {
    Local: lambda s, locals, f: locals[s.index],
    FunctionSource: lambda s, locals, f: f,
    Constant: lambda s, locals, f: _living(s),
    Attribute: lambda s, locals, f: _attribute(evaluate(s.base, locals, f), s.name),
    InstanceDict: _instance_dict,
    ProxiedDict: lambda s, locals, f: gc.get_referents(evaluate(s.base, locals, f))[0],
    Item: _item,
    TypeOf: lambda s, locals, f: type(evaluate(s.base, locals, f)),
    Referent: _referent,
    Computed: lambda s, locals, f: s.function(evaluate(s.base, locals, f)),
    DictKey: _dict_key,
    TensorSize: lambda s, locals, f: evaluate(s.base, locals, f).size(s.dim),
    TensorStride: lambda s, locals, f: evaluate(s.base, locals, f).stride(s.dim),
    Global: lambda s, locals, f: _global(s, f),
    Closure: lambda s, locals, f: _closure(s, f),
}

_MODULE_TABLES = ("_modules", "_parameters", "_buffers")


def readable(source: Source) -> str:
    """The source as its owner would write it: `self.encoder.layer[0].dense.weight`, or `L['x']` for an argument x."""
    match source:
        case Item(Item(InstanceDict(base), table), str(name)) if table in _MODULE_TABLES:
            return f"{readable(base)}[{name}]" if name.isdigit() else f"{readable(base)}.{name}"
        case Item(InstanceDict(base), str(name)) if name.isidentifier():
            return f"{readable(base)}.{name}"
        case InstanceDict(base):
            return f"{readable(base)}.__dict__"
        case Item(base, key):
            return f"{readable(base)}[{key!r}]"
        case Attribute(base, name):
            return f"{readable(base)}.{name}"
        case ProxiedDict(base):
            return readable(base)
        case TypeOf(base):
            return f"type({readable(base)})"
        case Referent(base):
            return f"{readable(base)}()"
        case Computed(base, function):
            return f"{function.__name__}({readable(base)})"
        case DictKey(base, index):
            return f"list({readable(base)})[{index}]"
        case TensorSize(base, dim):
            return f"{readable(base)}.size()[{dim}]"
        case TensorStride(base, dim):
            return f"{readable(base)}.stride()[{dim}]"
        case FunctionSource():
            return "the function"
        case Local(_, name):
            return name if name == "self" else f"L[{name!r}]"
        case Global(name) | Closure(_, name) | Constant(_, _, name):
            return name
    return source.text()


# --- guards ----------------------------------------------------------------------------------------------------------


def same_constant(expected: object, actual: object) -> bool:
    """Same type and value; floats bit for bit."""
    if expected is actual:
        return True
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, float) and isinstance(actual, float):
        return struct.pack("d", expected) == struct.pack("d", actual)
    if isinstance(expected, complex) and isinstance(actual, complex):
        return same_constant(expected.real, actual.real) and same_constant(expected.imag, actual.imag)
    if isinstance(expected, tuple) and isinstance(actual, tuple):
        return len(expected) == len(actual) and all(map(same_constant, expected, actual))
    if type(expected) in CONSTANT_TYPES:
        return expected == actual
    # numpy scalars, sets, slices, devices: the native rule is the only one, user classes are compared by identity
    return _native.constant_equal(expected, actual)


def tensor_difference(guard: TensorGuard, tensor: object) -> str | None:
    """What about `tensor` is not as `guard` wants, as `.dtype was torch.float32, is torch.float16`; None when all
    is."""
    if type(tensor) is not guard.cls:
        return f" was a {guard.cls.__name__}, is a {type(tensor).__name__}"
    assert isinstance(tensor, torch.Tensor)
    for name in ("dtype", "device"):
        if (now := getattr(tensor, name)) != getattr(guard, name):
            return f".{name} was {getattr(guard, name)}, is {now}"
    if guard.requires_grad is not None and tensor.requires_grad != guard.requires_grad:
        return f".requires_grad was {guard.requires_grad}, is {tensor.requires_grad}"
    normal, inference = key_sets(guard.device)
    wanted = (normal, inference) if guard.inference is None else (inference,) if guard.inference else (normal,)
    if torch._C._dispatch_keys(tensor).raw_repr() not in wanted:
        if guard.inference is not None and tensor.is_inference() != guard.inference:
            return f".is_inference() was {guard.inference}, is {tensor.is_inference()}"
        return " was a plain dense tensor, is one with other dispatch keys (conjugate, negative, sparse, functorch…)"
    if tensor.dim() != len(guard.shape):
        return f".dim() was {len(guard.shape)}, is {tensor.dim()}"
    for what, wanted_extents, now_extents in (
        ("size", guard.shape, tensor.shape),
        ("stride", guard.stride, tensor.stride()),
    ):
        for dim, (before, now) in enumerate(zip(wanted_extents, now_extents, strict=True)):
            if before is not None and before != now:
                return f".{what}()[{dim}] was {before}, is {now}"
    return None


def tensor_matches(guard: TensorGuard) -> Callable[[object], bool]:
    """The fallback of a native tensor guard."""
    return lambda tensor: tensor_difference(guard, tensor) is None


def storages_are_apart(tensors: tuple[Any, ...]) -> bool:
    """Whether no two of the tensors' whole storages share a byte. Of a NumPy array (with no negative strides) it is
    the range that its elements lie in."""
    ranges = []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            start = tensor.__array_interface__["data"][0]
            if tensor.size:
                last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides))
                ranges.append((start, start + last + tensor.itemsize))
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() and storage.nbytes():
            ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    ranges.sort()
    return all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


def relation_of(guard: Guard, symbols: Mapping[str, Source]) -> tuple[Tree, Mapping[str, Source]]:
    """A SIZE guard's relation as nested tuples, and the source of each symbol."""
    value = guard.value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        # no copy: there may be thousands of such guards
        value, symbols = value[0], ChainMap(value[1], symbols)  # type: ignore[arg-type]
    if isinstance(value, Relation):
        value = (value.op, to_tuples(value.left), to_tuples(value.right))
    return value, symbols


OPERATORS: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
    "neg": lambda a: -a,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": lambda a: not a,
}


def relation_value(tree: Tree, values: Mapping[str, int]) -> int | bool:
    """The value of a relation's tree. Raises OverflowError where int64 would overflow, ZeroDivisionError."""
    if isinstance(tree, int):
        return tree
    if tree[0] == "const":
        return tree[1]
    result = (
        values[tree[1]]
        if tree[0] == "sym"
        else OPERATORS[tree[0]](*(relation_value(operand, values) for operand in tree[1:]))
    )
    if not -(2**63) <= result < 2**63:
        raise OverflowError("a size does not fit int64")
    return result


def _size_name(source: Source) -> str:
    """A size as it stands in a relation: `x.shape[0]`."""
    if isinstance(source, TensorSize):
        base = source.base.name if isinstance(source.base, Local) else readable(source.base)
        return f"{base}.shape[{source.dim}]"
    if isinstance(source, TensorStride):
        base = source.base.name if isinstance(source.base, Local) else readable(source.base)
        return f"{base}.stride({source.dim})"
    return readable(source)


def relation_text(tree: Tree, symbols: Mapping[str, Source]) -> str:
    if isinstance(tree, int):
        return str(tree)
    if tree[0] == "sym":
        return _size_name(symbols[tree[1]]) if tree[1] in symbols else tree[1]
    if tree[0] == "const":
        return str(tree[1])
    operands = [relation_text(operand, symbols) for operand in tree[1:]]
    if len(operands) == 1 or tree[0] in ("min", "max"):
        return f"{tree[0]}({', '.join(operands)})"
    return f"({f' {tree[0]} '.join(operands)})"


def _symbols_in(tree: Tree) -> Iterator[str]:
    if isinstance(tree, tuple):
        if tree[0] == "sym":
            yield tree[1]
        else:
            for operand in tree[1:]:
                yield from _symbols_in(operand)


def symbols_in(tree: Tree) -> tuple[str, ...]:
    """The names of a relation's symbols, in order of appearance."""
    return tuple(dict.fromkeys(_symbols_in(tree)))


def _keys(container: dict[Any, Any]) -> list[object]:
    return (
        list(OrderedDict.__iter__(container)) if isinstance(container, OrderedDict) else list(dict.__iter__(container))
    )


def _length(container: object) -> int:
    for builtin in _SIZED:
        if isinstance(container, builtin):
            return builtin.__len__(container)
    raise TypeError("not a builtin container")


def type_lookup(cls: type, name: str) -> object:
    """The attribute that the MRO gives, raw; MISSING when none does. Under `__mro__`, the MRO itself."""
    if name == "__mro__":
        return cls.__mro__
    for base in cls.__mro__:
        if name in (namespace := type.__dict__["__dict__"].__get__(base)):
            return namespace[name]
    return MISSING


def _absent(container: object, key: object) -> bool:
    if isinstance(container, types.MappingProxyType):
        return key not in container
    if not isinstance(container, dict):
        return False
    if is_constant_key(key):
        return not dict.__contains__(container, key)
    return all(candidate is not key for candidate in dict.keys(container))


def _all_different(objects: list[object]) -> bool:
    return len(set(map(id, objects))) == len(objects)


HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "TYPE": lambda value, now: type(now) is value,
    "IS": lambda value, now: now is value,
    "EQUALS": same_constant,
    "LENGTH": lambda value, now: _length(now) == value,
    "KEYS": lambda value, now: len(_keys(now)) == len(value) and all(map(same_constant, value, _keys(now))),
    "ABSENT": lambda value, now: _absent(now, value),
    "TENSOR": lambda value, now: tensor_difference(value, now) is None,
    "CALL": lambda value, now: bool(value(now)),
}


def guard_holds(
    guard: Guard, locals: tuple[object, ...], function: types.FunctionType, symbols: Mapping[str, Source] = {}
) -> bool:
    """Whether the guard holds on this frame now. An exception on the way is a guard that does not hold."""

    def at(source: Source) -> Any:
        return evaluate(source, locals, function)

    try:
        match guard.kind:
            case "STATE":
                return capture_global_state() == guard.value
            case "TYPE_ATTRIBUTE":
                cls, name, wanted = cast("tuple[type, str, object]", guard.value)
                found = type_lookup(cls, name)
                return isinstance(found, Missing) if isinstance(wanted, Missing) else found is wanted
            case "SAME":
                return at(guard.source) is at(guard.value)  # type: ignore[arg-type]
            case "DIFFERENT":
                return _all_different([at(source) for source in guard.value])  # type: ignore[attr-defined]
            case "NO_OVERLAP":
                return storages_are_apart(tuple(at(source) for source in guard.value))  # type: ignore[attr-defined]
            case "BOUND":
                try:
                    at(guard.source)
                except SourceError:
                    return not guard.value
                return bool(guard.value)
            case "SIZE":
                tree, sources = relation_of(guard, symbols)
                return bool(relation_value(tree, {name: at(sources[name]) for name in symbols_in(tree)}))
            case kind:
                return HOLDS[kind](guard.value, at(guard.source))
    except Exception:
        # By contract an exception (a missing key, an object of another type) is the answer "no", whatever it is.
        return False


# --- text ------------------------------------------------------------------------------------------------------------


def guard_text(guard: Guard) -> str:
    """What the guard wants, in one line."""
    name = readable(guard.source)
    value: Any = guard.value
    match guard.kind:
        case "TYPE":
            return f"type({name}) is {value.__name__}"
        case "IS":
            return f"{name} is {text_of(value)}"
        case "EQUALS":
            return f"{name} == {text_of(value)}"
        case "LENGTH":
            return f"len({name}) == {value}"
        case "KEYS":
            return f"list({name}) == {text_of(list(value))}"
        case "ABSENT":
            return f"{text_of(value)} not in {name}"
        case "TYPE_ATTRIBUTE":
            missing = isinstance(value[2], Missing)
            return (
                f"{value[0].__name__}.{value[1]} does not exist"
                if missing
                else f"{value[0].__name__}.{value[1]} is {text_of(value[2])}"
            )
        case "TENSOR":
            grad = "" if value.requires_grad is None else f", requires_grad={value.requires_grad}"
            layout = f"shape={value.shape} stride={value.stride}".replace("None", "*")
            return f"{name} is a {value.cls.__name__} {value.dtype} {value.device} {layout}{grad}"
        case "SAME":
            return f"{name} is {readable(value)}"
        case "DIFFERENT":
            return f"{', '.join(map(readable, value))} are different objects"
        case "NO_OVERLAP":
            return f"{', '.join(map(readable, value))} share no storage"
        case "BOUND":
            return f"{name} is {'bound' if value else 'unbound'}"
        case "SIZE":
            return relation_text(*relation_of(guard, {}))
        case "STATE":
            return f"global state is {value}"
        case _:
            return text_of(value) if isinstance(guard.source, FunctionSource) else f"{name} {text_of(value)}"


_DYNAMIC = "If a size changes from call to call, compile with dynamic=True or mark the dimension (mark_dynamic). "
_FLAG = "Each value has a version of its own: keep it the same, or pass a tensor and choose by torch.where. "
_ADVICE = {
    "TENSOR": "Keep dtype, device, strides and requires_grad the same, or compile one function for each. ",
    "SIZE": _DYNAMIC,
    "EQUALS": "If a Python value changes from call to call, pass it as a tensor. ",
    "IS": "The object is another one at each call: make it once and keep it (a function or class made for each call "
          "is new each time). ",
    "TYPE": "Pass the same types, or compile one function for each. ",
    "LENGTH": "Keep the length of the container the same, or pass one tensor. ",
    "KEYS": "Keep the keys of the dictionary and their order the same. ",
    "STATE": "A setting of PyTorch changes between the calls: set it once, around them. ",
    "TYPE_ATTRIBUTE": "A class is changed between the calls. ",
    "DIFFERENT": "Some calls pass one object twice. ",
    "SAME": "Some calls pass one object twice. ",
    "NO_OVERLAP": "Some calls pass tensors that share memory, one of which is written to. ",
}


def recompile_advice(guard: Guard, failure: str) -> str:
    """What a user can do about a guard that fails so: a sentence, or nothing."""
    if guard.kind == "TENSOR" and ".size()" in failure:
        return _DYNAMIC
    if type(guard.value) is OutsideFloat or (guard.kind == "IS" and type(guard.value) in (bool, type(None))):
        return _FLAG
    return _ADVICE.get(guard.kind, "")


def _state_difference(wanted: Any) -> str:
    now = capture_global_state()
    changed = [name for name in wanted.__slots__ if getattr(wanted, name) != getattr(now, name)]
    phrases = (f"{name.replace('_', ' ')} was {getattr(wanted, name)}, is {getattr(now, name)}" for name in changed)
    return "; ".join(phrases) or "global state changed"


def failure_text(
    guard: Guard, locals: tuple[object, ...], function: types.FunctionType, symbols: Mapping[str, Source] = {}
) -> str:
    """How the present differs from what the guard wants: `x.size()[0] was 32, is 64`."""
    name, value = readable(guard.source), guard.value
    match guard.kind:
        case "STATE":
            return _state_difference(value)
        case "TYPE_ATTRIBUTE":
            cls, attribute, wanted = cast("tuple[type, str, object]", value)
            return f"{cls.__name__}.{attribute} was {text_of(wanted)}, is {text_of(type_lookup(cls, attribute))}"
        case "SAME" | "DIFFERENT" | "NO_OVERLAP":
            return f"{guard_text(guard)} no longer holds"
        case "BOUND":
            return f"{name} was {'bound' if value else 'unbound'}, is {'unbound' if value else 'bound'}"
        case "SIZE":
            tree, sources = relation_of(guard, symbols)
            values = []
            for symbol in symbols_in(tree):
                try:
                    values.append(f"{_size_name(sources[symbol])} is {evaluate(sources[symbol], locals, function)}")
                except SourceError:
                    values.append(f"{_size_name(sources[symbol])} is gone")
            line = f" ({guard.why})" if guard.why.startswith(ASKED_AT) else ""
            return f"{relation_text(tree, sources)} no longer holds{line}: {', '.join(values)}"
    try:
        now = evaluate(guard.source, locals, function)
    except SourceError:
        return f"{name} is gone"
    match guard.kind:
        case "TYPE":
            return f"type({name}) was {value.__name__}, is {type(now).__name__}"  # type: ignore[attr-defined]
        case "LENGTH":
            return f"len({name}) was {value}, is {_length(now) if isinstance(now, _SIZED) else text_of(now)}"
        case "KEYS":
            found = text_of(_keys(now) if isinstance(now, dict) else now)
            return f"list({name}) was {text_of(list(value))}, is {found}"  # type: ignore[call-overload]
        case "ABSENT":
            return f"{text_of(value)} was not in {name}, is"
        case "TENSOR":
            return f"{name}{tensor_difference(value, now) or ' is as before'}"  # type: ignore[arg-type]
        case "CALL":
            asked = isinstance(guard.source, FunctionSource)
            return f"{guard_text(guard)} no longer holds{'' if asked else f': it is {text_of(now)}'}"
    return f"{name} was {text_of(value)}, is {text_of(now)}"
