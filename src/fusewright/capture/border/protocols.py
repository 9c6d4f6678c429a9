"""Python's operators, subscripts, truth and iteration on values at the border.

Takes real values; gives what eager would. A special method written in Python is interpreted; tensors go through the
recorder; plain builtin values go to native code. Always holds: an outside object is never handed to native code that
would look into it.
"""

from __future__ import annotations

import collections
import operator
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.native import native, unwatched
from fusewright.capture.border.native_ready import (
    CONTAINERS,
    CONTENTS,
    PLAIN,
    SCALARS,
    TRANSPARENT,
    for_native,
    guard_decimals,
    plain_numbers,
    text_ready,
)
from fusewright.capture.border.sequence_iterator import SequenceIterator
from fusewright.capture.border.symbolic_index import WHOLE, selected
from fusewright.capture.border.torch_function import refuse_asking
from fusewright.capture.border.values import array as arrays, cls as classes, iterator as outside_iterators
from fusewright.capture.border.values.array import TracedArray
from fusewright.capture.border.values.constant import FROZEN_TYPES, is_constant
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.border.values.symbolic import (
    NUMBERS,
    SYMBOLIC,
    concrete,
    concrete_inside,
    holds_symbols,
    is_open,
    one_small,
    stays_symbolic,
)
from fusewright.capture.border.values.text import Carried
from fusewright.capture.bytecode.resume import HELD
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import Local
from fusewright.sizes import symfloat as runtime_float

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


@dataclass(frozen=True, slots=True)
class Operator:
    """One binary operator: special methods and the native functions."""

    name: str
    reflected: str
    inplace: str
    function: Callable[[Any, Any], Any]
    inplace_function: Callable[[Any, Any], Any]


def _operator(stem: str, function: Callable[[Any, Any], Any], inplace_function: Callable[[Any, Any], Any]) -> Operator:
    return Operator(f"__{stem}__", f"__r{stem}__", f"__i{stem}__", function, inplace_function)


BINARY: dict[str, Operator] = {
    "+": _operator("add", operator.add, operator.iadd),
    "-": _operator("sub", operator.sub, operator.isub),
    "*": _operator("mul", operator.mul, operator.imul),
    "/": _operator("truediv", operator.truediv, operator.itruediv),
    "//": _operator("floordiv", operator.floordiv, operator.ifloordiv),
    "%": _operator("mod", operator.mod, operator.imod),
    "**": _operator("pow", operator.pow, operator.ipow),
    "@": _operator("matmul", operator.matmul, operator.imatmul),
    "<<": _operator("lshift", operator.lshift, operator.ilshift),
    ">>": _operator("rshift", operator.rshift, operator.irshift),
    "&": _operator("and", operator.and_, operator.iand),
    "|": _operator("or", operator.or_, operator.ior),
    "^": _operator("xor", operator.xor, operator.ixor),
}

DIVMOD = _operator("divmod", divmod, divmod)

COMPARE: dict[str, Operator] = {
    symbol: Operator(f"__{name}__", f"__{reflected}__", "", function, function)
    for symbol, name, reflected, function in (
        ("<", "lt", "gt", operator.lt), ("<=", "le", "ge", operator.le), ("==", "eq", "eq", operator.eq),
        ("!=", "ne", "ne", operator.ne), (">", "gt", "lt", operator.gt), (">=", "ge", "le", operator.ge),
    )
}  # fmt: skip

UNARY: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "-": ("__neg__", operator.neg),
    "+": ("__pos__", operator.pos),
    "~": ("__invert__", operator.invert),
}


def refuse_opaque(world: World, obj: Any, method: str) -> None:
    """Native code of an outside object would read what no guard covers."""
    if type(obj) in PLAIN or not world.is_raw(obj) or isinstance(obj, TRANSPARENT) or type(obj) in FROZEN_TYPES:
        return
    found = classes.lookup(type(obj), method)
    # what it holds is guarded
    if any(isinstance(obj, base) and found is base.__dict__.get(method) for base in CONTENTS):
        return
    if found is not MISSING and found is not object.__dict__.get(method):
        raise GraphBreak("opaque-object", f"{type(obj).__qualname__}.{method}, which is written in C")


def unary(world: World, op: str, obj: Any) -> Any:
    """`op obj`."""
    if op == "not":
        return not truth(world, obj)
    name, function = UNARY[op]
    if type(obj) in PLAIN:
        return native(function, concrete(obj) if op == "~" else obj)
    if isinstance(obj, torch.Tensor):
        return world.torch_call(function, (obj,), {})
    method = classes.python_method(world, type(obj), name)
    if method is not None:
        return world.tracer.call(method, (obj,))
    guard_decimals(world, obj)
    refuse_opaque(world, obj, name)
    return native(function, obj)


def binary(world: World, op: str, left: Any, right: Any, inplace: bool) -> Any:
    """`left op right`."""
    if op.endswith("=") and op not in COMPARE:
        op, inplace = op[:-1], True
    row = BINARY[op]
    function = row.inplace_function if inplace else row.function
    if op == "%" and isinstance(left, (str, bytes)):
        return native(operator.mod, left, text_ready(world, right))
    if type(left) in PLAIN and type(right) in PLAIN:
        if (type(left) in SYMBOLIC or type(right) in SYMBOLIC) and not stays_symbolic(op, left, right):
            left, right = concrete(left), concrete(right)
        power = op == "**" and type(left) in NUMBERS and type(right) in NUMBERS
        return native(runtime_float.power if power else function, left, right)
    if isinstance(left, torch.Tensor) and (isinstance(right, torch.Tensor) or type(right) in PLAIN):
        return world.torch_call(function, (left, right), {})
    if inplace and op != "@" and isinstance(left, torch.Tensor) and isinstance(right, (int, float, complex)):
        return world.torch_call(function, (left, right), {})
    if isinstance(right, torch.Tensor) and type(left) in PLAIN:
        return world.torch_call(row.function, (left, right), {})
    if type(left) is TracedArray or type(right) is TracedArray:
        return arrays.binary(world, op, left, right, inplace)
    if (numbers := plain_numbers(world, (row.name, row.reflected, row.inplace), left, right)) is not None:
        return binary(world, op, *numbers, inplace)
    if inplace:
        method: Any = classes.python_method(world, world.type_of(left), row.inplace)
        if method is None and isinstance(left, set | dict):  # which have some of their own
            method = vars(set if isinstance(left, set) else dict).get(row.inplace)
        if method is not None:
            result = world.tracer.call(method, (left, right))
            if result is not NotImplemented:
                return result
    return dispatch(world, row, function, f"{op}=" if inplace else ("** or pow()" if op == "**" else op), left, right)


def dispatch(
    world: World, row: Operator, function: Callable[[Any, Any], Any], shown: str, left: Any, right: Any
) -> Any:
    """A binary operator by its special methods, with Python's TypeError where neither side has one; `shown` names it
    there."""
    result = _dispatch(world, row, function, left, right)
    if result is NotImplemented:
        names = f"'{classes.said_name(world.type_of(left))}' and '{classes.said_name(world.type_of(right))}'"
        raise UserException(TypeError(f"unsupported operand type(s) for {shown}: {names}"))
    return result


def _dispatch(world: World, row: Operator, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """The protocol of binary special methods when a side is a user object."""
    left_type, right_type = world.type_of(left), world.type_of(right)
    forward = classes.python_method(world, left_type, row.name)
    backward = (
        classes.python_method(world, right_type, row.reflected)
        if right_type is not left_type or row.inplace == ""
        else None
    )
    if forward is None and backward is None:
        if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
            return world.torch_call(function, (left, right), {})
        guard_decimals(world, left, right)
        refuse_opaque(world, left, row.name)
        refuse_opaque(world, right, row.reflected)
    symbolic = type(left) in SYMBOLIC or type(right) in SYMBOLIC
    if forward is None and backward is None and not (symbolic and row.inplace == ""):
        if symbolic:
            left, right = concrete(left), concrete(right)
        return native(function, for_native(world, left), for_native(world, right))
    name, later = row.name, _is_sequences_own(left_type, row, row.name)
    if later and function is row.inplace_function and classes.lookup(left_type, row.inplace) is not MISSING:
        name = row.inplace
    steps = [(name, forward, left, right)]
    if right_type is not left_type or row.inplace == "":
        steps.append((row.reflected, backward, right, left))
    if backward is not None and right_type is not left_type and issubclass(right_type, left_type):
        # arithmetic asks a subclass first only if its method is one of its own
        later |= row.inplace == "" or backward is not classes.guarded_lookup(world, left_type, row.reflected)
    if later:  # a sequence repeats and joins when no number has answered
        steps.reverse()
    for name, method, receiver, other in steps:
        result = _one_side(world, row, name, method, receiver, other)
        if result is not NotImplemented:
            return result
    return NotImplemented


_SEQUENCES = (str, bytes, bytearray, list, tuple, collections.deque)
_JOINING = ("__add__", "__mul__", "__rmul__", "__iadd__", "__imul__")
_OF_SEQUENCES = frozenset(vars(base).get(name, MISSING) for base in _SEQUENCES for name in _JOINING) - {MISSING}


def _is_sequences_own(cls: type, row: Operator, name: str) -> bool:
    """Whether a method is what a sequence has, of a class without one in Python: it is asked when no number answers."""
    if classes.lookup(cls, name) not in _OF_SEQUENCES:
        return False
    return not any(isinstance(classes.lookup(cls, one), types.FunctionType) for one in (row.name, row.reflected))


def _one_side(
    world: World, row: Operator, name: str, method: types.FunctionType | None, receiver: Any, other: Any
) -> Any:
    if method is not None:
        return world.tracer.call(method, (receiver, other))
    if isinstance(receiver, torch.Tensor):
        return _side_of_tensor(world, name, receiver, other)
    if type(receiver) in SYMBOLIC:  # an int or a float: it knows numbers, and asks others nothing, as PyTorch's would
        if not isinstance(other, int | float | complex):
            return NotImplemented
        receiver = concrete(receiver)
    slot = classes.lookup(world.type_of(receiver), name)
    if slot is MISSING:
        return NotImplemented
    refuse_opaque(world, receiver, name)
    if _is_sequences_own(world.type_of(receiver), row, name):
        kind = world.type_of(other)
        if name.endswith("mul__") and classes.lookup(kind, "__index__") is MISSING:
            raise UserException(TypeError(f"can't multiply sequence by non-int of type '{classes.said_name(kind)}'"))
        return world.tracer.call(slot, (receiver, other))
    if slot is not vars(object).get(name):
        other = concrete(other)
    return native(slot, for_native(world, receiver), for_native(world, other))


def _side_of_tensor(world: World, name: str, receiver: torch.Tensor, other: Any) -> Any:
    """A tensor takes numbers, those of a class of the program's too. Of anything else it asks what it is."""
    method = getattr(torch.Tensor, name, None)
    if method is None:
        return NotImplemented
    if isinstance(other, (int, float, complex)):
        if name in ("__matmul__", "__rmatmul__"):
            raise GraphBreak("opaque-object", f"a tensor's {name} of a {world.type_of(other).__qualname__}")
        return world.torch_call(method, (receiver, other), {})
    refuse_asking(world, method, (other,))
    return NotImplemented


def compare(world: World, op: str, left: Any, right: Any) -> Any:
    """`left op right` for the six rich comparisons, `is`, and `in`."""
    row = COMPARE.get(op)
    if row is None:
        return _MEMBERSHIP[op](world, left, right)
    left_type, right_type = type(left), type(right)
    if left_type in SCALARS and right_type in SCALARS:
        if left_type not in NUMBERS or right_type not in NUMBERS:
            left, right = concrete(left), concrete(right)
        answer = native(row.function, left, right)
        if type(answer) is torch.SymBool and not is_open(answer):
            return world.tracer.branches.answer(world.tracer, answer)
        return concrete(answer) if type(answer) is not torch.SymBool else answer
    if left_type is TracedArray or right_type is TracedArray:
        return arrays.binary(world, op, left, right)
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        other = right if isinstance(left, torch.Tensor) else left
        if isinstance(other, torch.Tensor) or type(other) in PLAIN:
            return world.torch_call(row.function, (left, right), {})
    if left_type in CONTAINERS and right_type in CONTAINERS:
        if left_type is right_type and left_type in (list, tuple) and (holds_symbols(left) or holds_symbols(right)):
            return _compare_elements(world, op, left, right)
        return native(row.function, concrete_inside(for_native(world, left)), concrete_inside(for_native(world, right)))
    if (numbers := plain_numbers(world, (row.name, row.reflected, row.inplace), left, right)) is not None:
        return compare(world, op, *numbers)
    if op == "!=" and _inherits_ne(world, left) and _inherits_ne(world, right):
        equal = compare(world, "==", left, right)
        return not truth(world, equal)
    result = _dispatch(world, row, row.function, left, right)
    if result is NotImplemented:
        if op in ("==", "!="):
            return identical(left, right) is (op == "==")
        names = f"'{classes.said_name(world.type_of(left))}' and '{classes.said_name(world.type_of(right))}'"
        raise UserException(TypeError(f"'{op}' not supported between instances of {names}"))
    return result


def _compare_elements(world: World, op: str, left: Any, right: Any) -> Any:
    """Lists or tuples, element by element as Python does it: sizes in them stay symbolic."""
    for one, other in zip(left, right):
        if not (identical(one, other) or truth(world, compare(world, "==", one, other))):
            return op == "!=" if op in ("==", "!=") else compare(world, op, one, other)
    return COMPARE[op].function(len(left), len(right))


def _inherits_ne(world: World, obj: Any) -> bool:
    """Whether `!=` of this object is `not ==` (object's own `__ne__`)."""
    return classes.lookup(world.type_of(obj), "__ne__") is object.__ne__


def identical(left: Any, right: Any) -> bool:
    """`left is right`, where a materialised dict and its lazy stand-in are one object."""
    return _canonical(left) is _canonical(right)


def _same_object(world: World, left: Any, right: Any) -> bool:
    """`left is right`, as a question of the program: tensors that are not the same must stay so."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        world.recorder.identity_asked = True
    for value in (left, right):
        if type(value) is types.FunctionType:
            world.guard_identity(value)  # one that is made afresh may be another one next time
        if type(value) is Carried and not identical(left, right) and world.type_of(left) is world.type_of(right):
            value.refuse()
    if torch.SymInt in (kinds := {type(left), type(right)}) and kinds <= {int, torch.SymInt}:
        return identical(left, right) or one_small(left, right)
    return identical(left, right)


def _canonical(value: Any) -> Any:
    return value.shadow if type(value) is OutsideDict and value.shadow is not None else value


_MEMBERSHIP: dict[str, Callable[[World, Any, Any], bool]] = {
    "is": lambda world, left, right: _same_object(world, left, right),
    "is not": lambda world, left, right: not _same_object(world, left, right),
    "in": lambda world, left, right: contains(world, right, left),
    "not in": lambda world, left, right: not contains(world, right, left),
}


def contains(world: World, container: Any, item: Any) -> bool:
    """`item in container`."""
    kind = type(container)
    if kind is OutsideDict:
        return native(OutsideDict.__contains__, container, item)
    if kind in (list, tuple, collections.deque) and not (
        type(item) in SCALARS and all(type(element) in SCALARS for element in container)
    ):
        return any(
            identical(element, item) or truth(world, compare(world, "==", element, item))
            for element in tuple(container)
        )
    if kind in PLAIN:
        return native(operator.contains, container, concrete_inside(for_native(world, item)))
    if isinstance(container, torch.Tensor):
        raise GraphBreak("data-dependent-branch", "`in` on a tensor")
    method = classes.python_method(world, kind, "__contains__")
    if method is not None:
        return truth(world, world.tracer.call(method, (container, item)))
    if classes.lookup(kind, "__contains__") is MISSING:
        try:
            iterator = iterate(world, container)
        except UserException as signal:
            if isinstance(signal.exception, TypeError):  # CPython's own complaint is about `in`
                native(operator.contains, type(classes.said_name(kind), (), {})(), item)
            raise
        while True:
            try:
                element = advance(world, iterator)
            except UserException as signal:
                if isinstance(signal.exception, StopIteration):
                    return False
                raise
            if identical(element, item) or truth(world, compare(world, "==", element, item)):
                return True
    refuse_opaque(world, container, "__contains__")
    return native(operator.contains, container, item)


def getitem(world: World, obj: Any, key: Any) -> Any:
    """`obj[key]`."""
    kind = type(obj)
    if kind is OutsideDict:
        return native(OutsideDict.__getitem__, obj, concrete_inside(key))
    if kind in PLAIN:
        return native(operator.getitem, obj, concrete_inside(key))
    if isinstance(obj, torch.Tensor):
        view, rest = selected(world, obj, key)
        return view if rest is WHOLE else world.torch_call(operator.getitem, (view, rest), {})
    if kind.__module__ == "typing" and _is_annotation(key):
        value = unwatched(operator.getitem, obj, key)  # typing_extensions puts Python code of its own in
        return world.load(value, world.constant(value, "annotation"))
    method = classes.python_method(world, kind, "__getitem__")
    if method is not None:
        return world.tracer.call(method, (obj, key))
    if isinstance(obj, type):
        return _subscript_class(world, obj, key)
    if isinstance(obj, dict):
        missing = classes.python_method(world, kind, "__missing__")
        if missing is not None and not dict.__contains__(obj, key):
            return world.tracer.call(missing, (obj, key))
    refuse_opaque(world, obj, "__getitem__")
    return native(operator.getitem, obj, key)


def _is_annotation(key: Any) -> bool:
    """What stands between the brackets of `typing.List[…]`: `typing` keeps what it makes of it, so the same comes back
    each time."""
    if type(key) in (tuple, list):
        return all(_is_annotation(part) for part in key)
    return key is None or key is Ellipsis or isinstance(key, (type, str)) or type(key).__module__ in ("typing", "types")


def _subscript_class(world: World, cls: type, key: Any) -> Any:
    method = classes.python_method(world, type(cls), "__getitem__")
    if method is not None and not type(cls).__module__ == "enum":
        return world.tracer.call(method, (cls, key))
    subscript = classes.lookup(cls, "__class_getitem__")
    if (
        isinstance(subscript, classmethod)
        and isinstance(subscript.__func__, types.FunctionType)
        and subscript.__func__.__module__ != "typing"
    ):
        return world.tracer.call(classes.bind_classmethod(world, subscript, cls), (key,))
    for part in key if type(key) is tuple else (key,):  # an alias is known by identity, with what it holds
        if not (_is_annotation(part) or is_constant(part)):
            if world.outside(part) is None:
                raise GraphBreak("opaque-object", f"{cls.__qualname__}[] of an object that the function makes")
            world.guard_identity(part)
    value = (unwatched if _is_annotation(key) else native)(operator.getitem, cls, key)
    return world.load(value, world.constant(value, "item"))


def setitem(world: World, obj: Any, key: Any, value: Any) -> None:
    """`obj[key] = value`."""
    kind = type(obj)
    if kind is OutsideDict:
        native(OutsideDict.__setitem__, obj, concrete_inside(key), value)
        return
    if kind in PLAIN:
        native(operator.setitem, obj, concrete_inside(key), value)
        return
    if isinstance(obj, torch.Tensor):
        view, rest = selected(world, obj, key)
        world.torch_call(operator.setitem, (view, Ellipsis if rest is WHOLE else rest, value), {})
        return
    method = classes.python_method(world, kind, "__setitem__")
    if method is not None:
        world.tracer.call(method, (obj, key, value))
        return
    _refuse_raw_store(world, obj)
    native(operator.setitem, obj, key, value)


def delitem(world: World, obj: Any, key: Any) -> None:
    """`del obj[key]`."""
    kind = type(obj)
    if not isinstance(obj, torch.Tensor):
        key = concrete_inside(key)
    if kind is OutsideDict:
        native(OutsideDict.__delitem__, obj, key)
        return
    method = None if kind in PLAIN else classes.python_method(world, kind, "__delitem__")
    if method is not None:
        world.tracer.call(method, (obj, key))
        return
    _refuse_raw_store(world, obj)
    native(operator.delitem, obj, key)


def _refuse_raw_store(world: World, obj: Any) -> None:
    if type(obj) not in PLAIN and world.is_raw(obj):
        raise GraphBreak("opaque-object", f"a store into a {type(obj).__qualname__}")


_ANSWERS: dict[str, type] = {
    "__bool__": bool, "__len__": int, "__hash__": int, "__index__": int, "__int__": int, "__float__": float,
    "__complex__": complex,
    "__str__": str, "__repr__": str, "__format__": str,
}  # fmt: skip
_SMALL = range(1 << 60)


def answered(world: World, obj: Any, name: str, ask: Callable[[Any], Any], value: Any) -> Any:
    """What `ask(obj)` makes of `value`, which the special method `name` of `obj` has given: CPython checks it, and
    converts some."""
    wanted, kind = _ANSWERS[name], world.type_of(value)
    if kind is wanted and (
        wanted is not int or type(value) is not int or name in ("__index__", "__int__") or value in _SMALL
    ):
        return concrete(value) if name == "__hash__" else value
    if kind is not type(value) and type(value) not in SYMBOLIC:
        raise GraphBreak("untraceable-call", f"{name} gives a {kind.__qualname__}")
    value = concrete(value)
    if issubclass(kind, wanted) and kind is not wanted and name in ("__index__", "__int__", "__float__", "__complex__"):
        raise GraphBreak("untraceable-call", f"{name} gives a {kind.__qualname__}, about which Python warns")
    return native(ask, type(classes.said_name(world.type_of(obj)), (), {name: lambda *_: value})())


def truth(world: World, obj: Any) -> bool:
    """`bool(obj)`."""
    kind = type(obj)
    if kind in PLAIN:
        if kind is torch.SymInt:
            return world.tracer.branches.answer(world.tracer, native(operator.ne, obj, 0))
        return native(bool, obj)
    if isinstance(obj, torch.Tensor):
        value = world.recorder.read(obj) if obj.numel() == 1 else world.recorder.known_value(obj)
        if value is None:
            raise GraphBreak("data-dependent-branch", "the truth value of a tensor decides what the program does next")
        return native(bool, value)
    if kind is OutsideDict:
        return len(obj) > 0
    for name in ("__bool__", "__len__"):
        method = classes.python_method(world, kind, name)
        if method is not None:
            return native(
                bool, answered(world, obj, name, bool if name == "__bool__" else len, world.tracer.call(method, (obj,)))
            )
        refuse_opaque(world, obj, name)
        if classes.lookup(kind, name) is not MISSING:
            break
    return native(bool, obj)


def iterate(world: World, obj: Any) -> Iterator[Any]:
    """`iter(obj)`."""
    kind = type(obj)
    if kind is OutsideDict:
        return iter(obj.materialise())
    if kind in PLAIN:
        return native(iter, obj)
    if isinstance(obj, torch.Tensor):
        if obj.dim() == 0:
            world.tracer.call(world.getattr(obj, "__iter__"), ())  # which raises
        return iter(world.tracer.call(world.getattr(obj, "unbind"), (0,)))
    method = classes.python_method(world, kind, "__iter__")
    if method is not None:
        if method.__module__.startswith("fusewright.capture"):
            return native(iter, obj)
        iterator: Any = world.tracer.call(method, (obj,))
        if classes.lookup(type(iterator), "__next__") is MISSING:
            raise UserException(
                TypeError(f"iter() returned non-iterator of type '{classes.said_name(world.type_of(iterator))}'")
            )
        return iterator  # type: ignore[no-any-return]
    if classes.lookup(kind, "__iter__") is MISSING and classes.python_method(world, kind, "__getitem__") is not None:
        return SequenceIterator(world, obj)
    if isinstance(obj, type) and type(obj).__module__ == "enum":
        return iter([world.load(member, world.constant(member, "member")) for member in obj])  # type: ignore
    if world.is_raw(obj) and classes.lookup(kind, "__next__") is not MISSING and kind.__module__ in _ITERATOR_MODULES:
        return obj  # iterators and generators are their own
    refuse_opaque(world, obj, "__iter__")
    return native(iter, obj)


def ask_length(world: World, obj: Any) -> None:
    """What CPython asks of an iterable when it makes a list or a tuple of it: how long it will be, once its iterator is
    there. The answer changes no result, but to ask may."""
    if isinstance(obj, SequenceIterator):
        obj = obj.sequence if obj.index >= 0 else ()
    if type(obj) not in PLAIN and not isinstance(obj, torch.Tensor):
        for name in ("__len__", "__length_hint__"):
            method = classes.python_method(world, type(obj), name)
            if method is not None and not method.__module__.startswith("fusewright."):
                native(operator.length_hint, obj)
                return


_ITERATOR_MODULES = frozenset({"builtins", "itertools", "collections"})


def advance(world: World, iterator: Any) -> Any:
    """`next(iterator)`."""
    kind = type(iterator)
    method = classes.python_method(world, kind, "__next__")
    if method is not None and not method.__module__.startswith("fusewright.capture"):
        return world.tracer.call(method, (iterator,))
    if world.is_raw(iterator):
        made = f"a {kind.__qualname__} that was made before"
        source = world.source_of(iterator)
        if isinstance(source, Local) and source.name.startswith(HELD):  # on the stack of a resume function
            raise GraphBreak("loop-goes-on", f"{made} the break")
        if not outside_iterators.is_known(iterator):
            raise GraphBreak("outside-iterator", f"{made} the compiled function was called is advanced")
        value = outside_iterators.next_of(world, iterator)
        if value is MISSING:
            raise UserException(StopIteration())
        return value
    return outside_iterators.next_natively(world, iterator)
