"""Functions and other callables from outside.

Takes Python functions, builtins, bound methods, partials, cells; gives them raw (identity guarded) or, where a wrapper
object is made afresh on each access (bound methods, partials), rebuilt from its loaded parts.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.constant import load_is
from fusewright.capture.border.values.dict import attributes_of, handed_out, is_written, read_namespace
from fusewright.capture.border.values.list import APPEND
from fusewright.capture.bytecode.resume import HELD
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import Attribute, Constant, FunctionSource, InstanceDict, Item, Local, Source

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


def load_identity(world: World, real: object, source: Source) -> object:
    """Functions, classes, modules: guarded by identity, then known for good, so that their parts need no path from
    here."""
    world.guard("IS", source, real)
    kind = type(real)
    named = real if isinstance(real, type) or not kind.__flags__ & (1 << 9) else kind  # no instance of the program's
    return world.stand_in(real, world.constant(real, getattr(named, "__name__", kind.__name__)), real)


def load_function(world: World, real: types.FunctionType, source: Source) -> object:
    """A Python function by identity; one that the program makes afresh for each call (a closure in an attribute, an
    argument) by its code, with its cells and defaults loaded."""
    if isinstance(source, Constant) or not _is_made_afresh(world, real, source):
        return load_identity(world, real, source)
    world.guard("TYPE", source, types.FunctionType)
    world.guard("IS", Attribute(source, "__code__"), real.__code__)
    world.guard("IS", Attribute(source, "__globals__"), real.__globals__)
    world.guard("LENGTH", InstanceDict(source), 0)  # marks
    _load_parts(world, real, source)
    return world.stand_in(real, source, real)


def load_weak(world: World, real: types.FunctionType, source: Source) -> None:
    """The parts of a function that compiled code does not keep: by their places in it, so that it keeps none of
    them."""
    if isinstance(source, Constant) and source.is_weak:
        _load_parts(world, real, source)


def _load_parts(world: World, real: types.FunctionType, source: Source) -> None:
    defaults = Attribute(source, "__defaults__")
    world.guard("TYPE", defaults, type(real.__defaults__))
    if real.__defaults__ is not None:
        world.guard("LENGTH", defaults, len(real.__defaults__))
    for index, cell in enumerate(real.__closure__ or ()):
        world.load(cell, Item(Attribute(source, "__closure__"), index))


def keyword_defaults(world: World, real: types.FunctionType) -> dict[str, Any] | None:
    """As a call finds them: the frame's own writes to the dict are not there yet."""
    values = real.__kwdefaults__
    if is_written(world.known_stand_in(values)):
        raise GraphBreak("untraceable-call", f"{real.__qualname__}, to whose __kwdefaults__ the frame has written")
    return values


def guard_defaults(world: World, real: types.FunctionType, source: Source) -> None:
    """That it has the defaults that it has: a call that lacks an argument would be right with others."""
    for name in ("__defaults__", "__kwdefaults__"):
        world.guard("IS", Attribute(source, name), getattr(real, name))
    if real.__kwdefaults__ is not None:
        world.guard("LENGTH", Attribute(source, "__kwdefaults__"), len(real.__kwdefaults__))


def _is_made_afresh(world: World, real: types.FunctionType, source: Source) -> bool:
    """Whether an earlier capture of the frame met another function of the same code there."""
    history: Any = world.tracer.history
    key = (world.tracer.function.__code__, source, _FUNCTION)
    before = history.get(key)
    if before is None or before[0] is not real.__code__:
        history[key] = (real.__code__, weakref.ref(real))
        return False
    if before[1] is not None and before[1]() is real:
        return False
    history[key] = (real.__code__, None)
    return not real.__dict__


_FUNCTION = "function"


def is_free_function(function: types.BuiltinFunctionType) -> bool:
    """Whether a builtin is a module's function or a class's, rather than a method of an object (pybind11 binds
    functions to a record)."""
    owner = function.__self__
    return (
        owner is None
        or isinstance(owner, (types.ModuleType, type))
        or type(owner).__name__.startswith(("pybind11_", "PyCapsule"))
    )


def load_builtin(world: World, real: types.BuiltinFunctionType, source: Source) -> object:
    """A builtin function by identity; a bound builtin method (`[].append`) is rebuilt on the stand-in of its object."""
    owner = real.__self__
    if is_free_function(real):
        return load_identity(world, real, source)
    world.guard("TYPE", source, type(real))
    world.guard("EQUALS", Attribute(source, "__name__"), real.__name__)
    # What a resume function holds on its stack is about to be called.
    appends = real.__name__ in APPEND and isinstance(source, Local) and source.name.startswith(HELD)
    world.intent = "append" if appends else ""
    inside = world.load(owner, Attribute(source, "__self__"))
    world.intent = ""
    return world.stand_in(real, source, world.getattr(inside, real.__name__))


def load_wrapper(world: World, real: types.MethodWrapperType, source: Source) -> object:
    """A method that C has through a slot (`[].__len__`), as `load_builtin`; itself where its object is what stands for
    it."""
    owner, name = real.__self__, real.__name__
    found = classes.lookup(type(owner), name)
    if isinstance(owner, torch.Tensor) or classes.descriptor_of(real, owner) is not found:
        return load_identity(world, real, source)
    world.guard("TYPE", source, type(real))
    world.guard("EQUALS", Attribute(source, "__name__"), real.__name__)
    world.guard("IS", Attribute(source, "__objclass__"), real.__objclass__)  # type: ignore[attr-defined]
    inside = world.load(owner, Attribute(source, "__self__"))
    return world.stand_in(real, source, real if isinstance(owner, _OWNERS) else world.getattr(inside, name))


# Their methods are those of no content.
_OWNERS = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType, types.MethodWrapperType,
)  # fmt: skip


def load_method(world: World, real: types.MethodType, source: Source) -> object:
    """A bound method: its function by identity, its object loaded."""
    world.guard("TYPE", source, types.MethodType)
    function = world.load(real.__func__, Attribute(source, "__func__"))
    owner = world.load(real.__self__, Attribute(source, "__self__"))
    return world.stand_in(real, source, types.MethodType(function, owner))


def attributes_of_partial(partial: functools.partial) -> dict[str, Any] | None:
    """Its instance dictionary, if it has one yet: to ask for it makes one, and a partial of the partial would tell."""
    _, _, state, *_ = cast(Any, functools.partial.__reduce__(partial))
    return cast("dict[str, Any] | None", state[3])


def load_partial(world: World, real: functools.partial, source: Source) -> object:
    """functools.partial: function, arguments and keywords loaded."""
    world.guard("TYPE", source, functools.partial)
    if attributes_of_partial(real):
        raise GraphBreak("opaque-object", "a functools.partial with attributes of its own came from outside")
    function = world.load(real.func, Attribute(source, "func"))
    args = world.load(real.args, Attribute(source, "args"))
    keywords = world.materialise(world.load(real.keywords, Attribute(source, "keywords")))
    made = functools.partial(function)
    cast(Any, made).__setstate__((function, args, keywords, None))  # the very dict, which the program may write to
    return world.stand_in(real, source, made)


def load_cell(world: World, real: types.CellType, source: Source) -> object:
    """A closure cell: raw; its content is read through `World.load_cell`. One that a resume function gets is another
    one at each call. Whether it is a cell of the compiled function's own, too, may change."""
    root = world.tracer.function
    for index, cell in enumerate(root.__closure__ or ()):
        if world.outside(cell) is None:
            world.stand_in(cell, Item(Attribute(FunctionSource(), "__closure__"), index), cell)
    if world.outside(real) is not None:
        return world.load(real, source)
    if isinstance(source, Constant):
        return load_identity(world, real, source)
    world.guard("TYPE", source, types.CellType)
    return world.stand_in(real, source, real)


# Attributes of a function that an assignment changes, read from it at every check; the others never change.
_SETTABLE = frozenset({
    "__defaults__", "__kwdefaults__", "__closure__", "__code__", "__name__", "__qualname__", "__module__", "__doc__",
    "__annotations__", "__annotate__", "__type_params__",
})  # fmt: skip


def getattr_function(world: World, function: types.FunctionType, name: str) -> object:
    """Attributes of a function, whether it was made inside or not."""
    record = world.outside(function)
    if record is None:
        if name == "__globals__":
            return world.globals_dict(function)
        try:
            found = getattr(function, name)
        except AttributeError as missing:
            raise UserException(missing) from None
        if name == "__dict__":
            world.owners[id(found)] = function, name
        return found
    if name == "__globals__":
        return world.globals_dict(function)
    if name == "__builtins__":
        return world.load(getattr(function, name), world.constant(getattr(function, name), name))
    if name in _SETTABLE:
        return world.load(getattr(function, name), Attribute(record.source, name))
    namespace = attributes_of(world, function.__dict__, InstanceDict(record.source))
    if name == "__dict__":
        return handed_out(namespace)
    found = read_namespace(namespace, name)
    if found is MISSING and classes.lookup(types.FunctionType, name) is MISSING:
        text = f"'function' object has no attribute '{name}'"
        raise UserException(AttributeError(text, name=name, obj=function))
    return getattr(function, name) if found is MISSING else found  # a method of the type: __get__, __call__, __repr__…


IDENTITY_TYPES: tuple[type, ...] = (
    types.FunctionType, functools._lru_cache_wrapper, staticmethod, classmethod,
    torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator, np.ufunc, type(np.concatenate),
)  # fmt: skip

EXACT: dict[type, Any] = dict.fromkeys(IDENTITY_TYPES, load_identity) | {
    types.BuiltinFunctionType: load_builtin,
    types.MethodWrapperType: load_wrapper,
    types.MethodType: load_method,
    types.CellType: load_cell,
    functools.partial: load_partial,
    torch.Generator: load_is,
    torch.ScriptObject: load_is,
    types.FunctionType: load_function,
}
