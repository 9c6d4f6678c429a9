"""The names that functions look up which guards of the call do not see: PyTorch's own, and a program's in a backward.

Takes a function of PyTorch's that is run natively; says whether that does what eager does, for a program may have put
something else under a name. And takes what a program has autograd call in the backward; gives what that looks up.
Always holds: each name of a public namespace of PyTorch's that the function reads, or a function that it calls, is
guarded; one whose names lead to what is not PyTorch's is interpreted.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.values.cls import lookup
from fusewright.capture.border.values.dict import is_written, read_namespace
from fusewright.capture.bytecode.instructions import decoded
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.torch_state import TENSOR_METHODS

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

_NAMESPACES = frozenset({
    "torch", "torch.functional", "torch.nn.functional", "torch._tensor", "torch.linalg", "torch.special", "torch.fft",
    "torch._C", "torch._C._nn", "torch._C._linalg", "torch._C._special", "torch._C._fft", "torch._linalg_utils",
    "torch._lowrank", "torch._jit_internal",
})  # fmt: skip
# Operators that tensors have in Python, as the left side, as the right one, and in place.
_OPERATORS: dict[Any, tuple[str, ...]] = {
    getattr(operator, inplace + name): (f"__{name}__", f"__r{name}__", f"__i{name}__")
    for name in ("sub", "truediv", "floordiv", "pow", "mod", "lshift", "rshift", "matmul")
    for inplace in ("", "i")
}
_Path = tuple[str, ...]
_paths: dict[int, tuple[types.CodeType, list[_Path]]] = {}  # by the identity of a code of PyTorch's


def as_written(world: World, fn: Callable[..., Any]) -> bool:
    """Whether `fn`, run natively, calls nothing of the program's; guards what that rests on, and which one it is."""
    world.guard_identity(fn)
    pending = [fn] if type(fn) is types.FunctionType else list(_methods(_OPERATORS.get(fn, ())))
    if not pending:
        return True
    known = world.as_written.get(id(fn))
    if known is None or known[0] != world.store_count:
        known = world.as_written[id(fn)] = (world.store_count, _all_pytorchs(world, pending))
    return known[1]


def interpreted(world: World, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of one that is not as written."""
    if type(fn) is not types.FunctionType:
        raise GraphBreak("untraceable-call", f"{fn.__name__} of a tensor calls what was replaced")
    return world.tracer.inline(fn, args, kwargs)


def _all_pytorchs(world: World, pending: list[types.FunctionType]) -> bool:
    seen = set()
    while pending:
        function = pending.pop()
        if function in seen or function.__globals__.get("__name__") not in _NAMESPACES:
            continue
        seen.add(function)
        called = [cell.cell_contents for cell in function.__closure__ or ()]
        code = function.__code__
        if id(code) not in _paths:
            _paths[id(code)] = code, _paths_of(code)
        for place, *path in _paths[id(code)][1]:
            if not TENSOR_METHODS.foreign.isdisjoint(path):
                return False
            called += _methods(path)
            namespace = function.__globals__
            for name in path if place == "global" else ():
                value = namespace.get(name)
                if not (callable(value) or isinstance(value, types.ModuleType)):
                    break
                origin = namespace["__name__"]
                stand_in = world.dict_stand_in(namespace, world.constant(namespace, f"names_of_{origin}"))
                if read_namespace(stand_in, name) is not value or not _is_pytorchs(value):
                    return False
                called.append(value)
                namespace = vars(value) if isinstance(value, types.ModuleType) else {}
                if namespace.get("__name__") not in _NAMESPACES:
                    break
        pending += [one for one in called if type(one) is types.FunctionType]
    return True


def _is_pytorchs(value: object) -> bool:
    """Whether what stands under a name of PyTorch's leads to no code of the program's."""
    if type(value) is types.FunctionType:  # `functools.wraps` gives it the `__module__` of another one
        origin = value.__globals__.get("__name__") or ""
    elif isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        return True
    else:
        origin = type(value).__module__
    return origin.partition(".")[0] in _OWN


_OWN = frozenset(("torch", "collections", "contextlib", "copy", "functools", "importlib", "typing", "warnings"))


def _methods(names: Iterable[str]) -> Iterable[types.FunctionType]:
    """Those methods of tensors that are written in Python."""
    found = (vars(torch.Tensor).get(name) for name in names)
    return (method for method in found if type(method) is types.FunctionType)


def _paths_of(code: types.CodeType) -> list[_Path]:
    """The dotted names that a function's code reads, each behind where the first one stands: "global" or "cell"; or "",
    where they are attributes of another value."""
    found = [path for inner in code.co_consts if isinstance(inner, types.CodeType) for path in _paths_of(inner)]
    info = decoded(code)
    path: _Path = ("",)
    for instruction in info.instructions:
        name: Any = instruction.operand
        if "LOAD_ATTR" in instruction.action:
            path = (*path, name)
            continue
        found.append(path)
        path = ("",)
        if "LOAD_GLOBAL" in instruction.action:
            path = ("global", name)
        elif instruction.action == "LOAD_DEREF":
            path = ("cell", info.slots[name])
    return [path for path in dict.fromkeys(found) if len(path) > 1]


Read = tuple[Callable[[str], Any], str, Callable[[], Any]]
"""(what gives the value of a name now, the name, what it gave then)."""


def reads_of(*functions: Any) -> tuple[Read, ...]:
    """What functions of a program look up by names that their code has: global names, variables of enclosing functions,
    attributes of classes, modules and objects that those are; their defaults; and the same of the functions that they
    call."""
    found: list[Read] = []
    seen: set[int] = set()
    pending = [*functions]
    while pending:
        function = pending.pop()
        function = getattr(function, "__func__", function)  # of static and class methods
        if type(function) is not types.FunctionType or _is_pytorchs(function) or id(function) in seen:
            continue
        seen.add(id(function))
        code, keywords = function.__code__, function.__kwdefaults__ or {}
        found += [_read(functools.partial(getattr, function), name) for name in ("__code__", "__defaults__")]
        names = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        found += [_read(functools.partial(_keyword_default, function), name) for name in names]
        pending += [*(function.__defaults__ or ()), *keywords.values()]
        cells = dict(zip(code.co_freevars, function.__closure__ or ()))
        places = {"global": function.__globals__.get, "cell": functools.partial(_content, cells), "": None}
        for place, *path in _paths_of(code):
            get: Any = places[place]
            for name in path if get is not None else ():
                value = get(name)
                found.append(_read(get, name))
                get = _names_of(value)
                if get is None:
                    pending.append(value)
                    break
    return tuple(found)


def method_reads(cls: type, *names: str) -> tuple[Read, ...]:
    """What methods of a class look up, and the methods themselves."""
    get = functools.partial(lookup, cls)
    return *(_read(get, name) for name in names), *reads_of(*map(get, names))


def as_read(reads: Iterable[Read]) -> bool:
    """Whether all that was looked up is what it was."""
    return all(get(name) is then() for get, name, then in reads)


def are_written(world: World, reads: Iterable[Read]) -> bool:
    """Whether the call itself writes to a place that was looked up: what is there then differs from what is there
    when the call begins."""
    return any(_is_written(world, get, name) for get, name, _ in reads)


def _is_written(world: World, get: Any, name: str) -> bool:
    holder = get.args[0] if isinstance(get, functools.partial) else get.__self__
    reader = get.func if isinstance(get, functools.partial) else dict.get
    if reader is _content:
        return id(holder.get(name)) in world.effects.cells
    if reader is _keyword_default and holder.__kwdefaults__ is not None:
        reader, holder = dict.get, holder.__kwdefaults__
    if reader is dict.get:
        return is_written(world.known_stand_in(holder), name)
    return any((id(one), name) in world.effects.slots for one in (holder.__mro__ if reader is lookup else (holder,)))


def _read(get: Callable[[str], Any], name: str) -> Read:
    value = get(name)
    try:
        return get, name, weakref.ref(value)  # a program may let go of it
    except TypeError:
        return get, name, lambda: value


def _names_of(value: Any) -> Callable[[str], Any] | None:
    """What gives the attributes that a class, a module or a plain object has."""
    if isinstance(value, type):
        return functools.partial(lookup, value)
    if type(value) in (types.FunctionType, staticmethod, classmethod):
        return None
    if isinstance(type(value).__getattribute__, types.WrapperDescriptorType):
        names = getattr(value, "__dict__", None)
        return names.get if type(names) is dict else None
    return None


def _keyword_default(function: types.FunctionType, name: str) -> Any:
    return (function.__kwdefaults__ or {}).get(name, MISSING)


def _content(cells: dict[str, types.CellType], name: str) -> Any:
    try:
        return cells[name].cell_contents
    except (KeyError, ValueError):  # a variable of the function itself; nothing yet
        return MISSING
