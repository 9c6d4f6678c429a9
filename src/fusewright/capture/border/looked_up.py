"""The names that PyTorch's own Python functions look up: a program may have put something else there.

Takes a function of PyTorch's that is run natively; says whether that does what eager does. Always holds: each name of a
public namespace of PyTorch's that the function reads, or a function that it calls, is guarded; one whose names lead to
what is not PyTorch's is interpreted.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.values.dict import read_namespace
from fusewright.capture.bytecode.instructions import decoded

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
_paths: dict[int, tuple[types.CodeType, list[_Path]]] = {}  # by the code's identity


def as_written(world: World, fn: Callable[..., Any]) -> bool:
    """Whether `fn`, run natively, calls nothing of the program's; guards what that rests on."""
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
        for path in _paths_of(function.__code__):
            called += _methods(path[1:])
            namespace = function.__globals__
            for name in path:
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
    """The dotted names that a function's code reads, from a global name or (after an empty one) from another value."""
    known = _paths.get(id(code))
    if known is None:
        known = _paths[id(code)] = code, []
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                known[1].extend(_paths_of(inner))
        path: _Path = ()
        for instruction in decoded(code).instructions:
            name: Any = instruction.operand
            if "LOAD_ATTR" in instruction.action:
                path = (*(path or ("",)), name)
                continue
            if path:
                known[1].append(path)
            path = (name,) if "LOAD_GLOBAL" in instruction.action else ()
    return known[1]
