"""What a call does: the policy for every kind of callable.

Takes a callable with its arguments; gives the result, by interpreting, by calling native code, or by a row of the
tables.
Always holds: the order is Python function (row, disabled, torch's native namespaces, interpreted), bound method, class,
builtin, object with `__call__`; what no rule allows is the graph break "untraceable-call", which names the callable.
"""

from __future__ import annotations

import collections
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak, SkipFrame, UserException
from fusewright.capture.border import native_ready, torch_function
from fusewright.capture.border.effects import let_go
from fusewright.capture.border.native import Trampoline, native
from fusewright.capture.border.values import (
    array_calls as arrays,
    cls as classes,
    function as functions,
    module as modules,
)
from fusewright.capture.border.values.constant import is_constant
from fusewright.capture.call import (
    attention as call_attention,
    builtins as call_builtins,
    classes as call_classes,
    generators,
    host_random,
    marked as call_marked,
    methods as call_methods,
    of_constants,
    optimizers,
    polyfills,
    reads,
    subclasses,
    support as call_support,
    torch as call_torch,
)
from fusewright.capture.call.cached import call_cached
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import Attribute, Referent
from fusewright.operators.higher_order import PLAIN

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Row = Callable[["Tracer", Args, Kwargs], Any]


# Keyed by identity, because a callable may be unhashable; the callables themselves are kept alive by their modules.
_TABLES = (
    call_builtins.ROWS, call_torch.ROWS, optimizers.ROWS, polyfills.ROWS, of_constants.ROWS, subclasses.ROWS,
    reads.ROWS, generators.ROWS, host_random.ROWS,
)  # fmt: skip
ROWS: dict[int, Row] = {
    id(function): call_support.checked(function, row) for table in _TABLES for function, row in table
}

def _control_flow(place: tuple[str, str]) -> Row:
    def run(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        from fusewright.capture.call import higher_order  # lazy: few programs have any, and it defines operators

        return higher_order.ROWS[place](tracer, args, kwargs)

    return run


_WATCHERS = frozenset({
    "sys.settrace", "sys.setprofile", "sys.monitoring.set_events", "sys.monitoring.set_local_events",
    "builtins.breakpoint",
})  # fmt: skip


def _watched(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """A row: a debugger, tracer or profiler begins, which is to see the program's frames and none of ours."""
    raise SkipFrame("untraceable-call", "a debugger, a tracer or a profiler begins")


NAMED_ROWS: dict[tuple[str, str], Row] = {
    **call_torch.NAMED_ROWS, **optimizers.NAMED_ROWS, **generators.NAMED_ROWS, ("pdb", "set_trace"): _watched,
    **{place: _control_flow(place) for place in PLAIN},
    # What torch.compiler.nested_compile_region marks: parts of a graph that repeat are found without being told.
    ("torch._higher_order_ops.invoke_subgraph", "invoke_subgraph_placeholder"): lambda tracer, args, kwargs: (
        tracer.call(args[0], args[1:], kwargs)
    ),
}  # fmt: skip


def call(tracer: Tracer, fn: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
    """Calls `fn` the way that this kind of callable is called."""
    kwargs = kwargs or {}
    if tracer.world.overridden:
        answer = torch_function.intercept(tracer, fn, args, kwargs)
        if answer is not MISSING:
            return answer
    marked = call_marked.registered(fn)
    if marked is None and tracer.world.uses_arrays:
        marked = arrays.takes(fn, args, kwargs)
    row = ROWS.get(id(fn))
    if marked is not None or row is not None:
        tracer.world.guard_identity(fn)  # what is known of it is known of no other one
        return marked(tracer, fn, args, kwargs) if marked is not None else row(tracer, args, kwargs)  # type: ignore
    handler = KINDS.get(type(fn))
    if handler is None:
        handler = next((handler for base, handler in BASE_KINDS if isinstance(fn, base)), _call_object)
    return handler(tracer, fn, args, kwargs)


def describe(fn: Any) -> str:
    """A callable's name for messages."""
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__qualname__
    origin = getattr(fn, "__module__", None) or type(fn).__module__
    return f"{origin}.{name}"


def refuse(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """The graph break of a callable that nothing is known about."""
    rule = call_marked.by_torch(fn)
    if rule is not None:
        tracer.world.guard_identity(fn)
        return rule(tracer, fn, args, kwargs)
    if describe(fn) in _WATCHERS:
        _watched(tracer, args, kwargs)
    raise GraphBreak(call_support.break_code(fn, "untraceable-call"), describe(fn))


def _call_function(tracer: Tracer, fn: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
    marked = call_marked.of_function(fn) if fn.__dict__ else None
    if marked is not None:
        return marked(tracer, fn, args, kwargs)
    wrapper = BY_CODE.get(fn.__code__)
    if wrapper is not None:
        return wrapper(tracer, fn, args, kwargs)
    origin = fn.__globals__.get("__name__") or ""
    row = NAMED_ROWS.get((origin, fn.__qualname__))
    if row is not None:
        return row(tracer, args, kwargs)
    policy = call_torch.policy(origin)
    if policy is not None:
        return policy(tracer, fn, args, kwargs)
    rule = call_marked.by_torch(fn)
    if rule is not None:
        tracer.world.guard_identity(fn)
        return rule(tracer, fn, args, kwargs)
    return tracer.inline(fn, args, kwargs)


def _dispatch(tracer: Tracer, fn: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
    """`functools.singledispatch`'s question which function serves a class: asked natively, and again at each call."""
    world = tracer.world
    if (
        world.outside(fn) is None
        or kwargs
        or len(args) != 1
        or not isinstance(args[0], type)
        or world.is_inside_class(args[0])
    ):
        return tracer.inline(fn, args, kwargs)
    found = fn(args[0])
    world.guard_identity(fn)
    world.guard_answer(fn, args, found, identical=True)
    return world.load(found, world.constant(found, getattr(found, "__name__", "dispatched")))


BY_CODE: dict[types.CodeType, Any] = {
    **optimizers.WRAPPERS,
    functools.singledispatch(len).dispatch.__code__: _dispatch,  # type: ignore[attr-defined]
}


def _call_method(tracer: Tracer, fn: types.MethodType, args: Args, kwargs: Kwargs) -> Any:
    if host_random.is_generator(fn.__self__) and host_random.draws(fn.__self__, fn.__func__):
        return host_random.call_method(tracer, fn.__func__.__name__, fn.__self__, args, kwargs)
    return call(tracer, fn.__func__, (fn.__self__, *args), kwargs)


def _call_partial(tracer: Tracer, fn: functools.partial, args: Args, kwargs: Kwargs) -> Any:
    # A subclass may have attributes of its own under these names: the call does not look at them.
    function, first, named = (_PARTIAL[name].__get__(fn) for name in ("func", "args", "keywords"))
    return call(tracer, function, (*first, *args), {**named, **kwargs})


_PARTIAL: Any = vars(functools.partial)


def _call_trampoline(tracer: Tracer, fn: Trampoline, args: Args, kwargs: Kwargs) -> Any:
    return call(tracer, fn.function, args, kwargs)


def _call_reference(tracer: Tracer, fn: weakref.ref[Any], args: Args, kwargs: Kwargs) -> Any:
    """A weak reference from outside: what it refers to now (its class is guarded when it is loaded)."""
    source = tracer.world.source_of(fn)
    if source is None and type(fn) is weakref.ref and not (args or kwargs):
        return _referent(tracer, fn)
    if source is None or args or kwargs or type(fn).__call__ is not weakref.ref.__call__:
        return refuse(tracer, fn, args, kwargs)
    found, world = fn(), tracer.world
    for gone in let_go(world.effects, world.written_dicts()) if found is not None else ():
        if gone is found or not (is_constant(gone) or isinstance(gone, torch.Tensor)):
            raise GraphBreak("untraceable-call", "a weak reference to what the call may have let go of")
    return world.load(found, Referent(source))


def _referent(tracer: Tracer, reference: weakref.ref[Any]) -> Any:
    """`reference()` of one made inside. What is reached from the frames is alive; of what is not, eager may have let
    go."""
    found = reference()
    if found is None or tracer.world.outside(found) is not None:
        return found
    seen: set[int] = set()
    pending: list[Any] = []
    frame: Any = tracer.frame
    while frame is not None:
        pending += [*frame.locals, *frame.stack]
        frame = frame.back
    while pending:
        value = pending.pop()
        if value is found:
            return found
        if isinstance(value, torch.Tensor):
            pending.append(value._backward_hooks)  # to which the handle of a hook refers
        if id(value) in seen or isinstance(value, (torch.Tensor, type, types.ModuleType, torch.nn.Module)):
            continue
        seen.add(id(value))
        inner = {} if type(value) in native_ready.PLAIN else classes.own_attributes(value)
        if isinstance(value, (list, tuple, set, frozenset, dict, types.CellType, collections.deque)):
            pending += gc.get_referents(value)
        elif isinstance(value, types.FunctionType):
            pending += value.__closure__ or ()
        elif inner and tracer.world.outside(value) is None:
            pending.append(inner)
    raise GraphBreak("untraceable-call", "a weak reference to what may be gone: the frame does not lead there")


def _call_static(tracer: Tracer, fn: staticmethod, args: Args, kwargs: Kwargs) -> Any:
    return call(tracer, fn.__func__, args, kwargs)


def _call_module(tracer: Tracer, fn: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
    return call_attention.encoder_layer(tracer, fn, modules.call_module(tracer.world, fn, args, kwargs), kwargs)


def _call_native_object(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """operator.itemgetter and friends: simple accessors, spelled out through the border."""
    world = tracer.world
    if len(args) != 1 or kwargs:
        return native(fn, *args, **kwargs)  # it refuses them, unseen
    maker, parts = fn.__reduce__()[:2]
    if isinstance(fn, call_builtins.ITEM_GETTER):
        values = tuple(world.getitem(args[0], key) for key in parts)
        return values[0] if len(values) == 1 else values
    if isinstance(fn, call_builtins.ATTR_GETTER):
        values = tuple(functools.reduce(world.getattr, path.split("."), args[0]) for path in parts)
        return values[0] if len(values) == 1 else values
    name, *more = parts if maker is type(fn) else (maker.args[0], *parts)
    keywords = {} if maker is type(fn) else maker.keywords
    return call(tracer, world.getattr(args[0], name), tuple(more), keywords)


def _original_of(world: World, fn: Any, names: tuple[str, ...]) -> Any:
    """The Python function or module behind a callable written in C, read from there at each call; or None."""
    source = world.source_of(fn)
    for name in names:
        original = getattr(fn, name, None)
        if source is not None and isinstance(original, (types.FunctionType, types.MethodType, torch.nn.Module)):
            return world.load(original, Attribute(source, name))
    return None


# Of what was compiled; functools.wraps copies the last one.
_ORIGINALS = ("_fusewright_original", "__wrapped__", "_torchdynamo_orig_callable")


def _call_object(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """An object with `__call__`."""
    world = tracer.world
    kind = type(fn)
    found = classes.guarded_lookup(world, kind, "__call__")
    if found is MISSING:
        raise UserException(TypeError(f"'{classes.said_name(world.type_of(fn))}' object is not callable"))
    if isinstance(found, types.WrapperDescriptorType):
        original = _original_of(world, fn, _ORIGINALS)
        return (refuse if original is None else call)(tracer, fn if original is None else original, args, kwargs)
    return call(tracer, world.bind(found, fn, kind, "__call__"), args, kwargs)


def _call_scripted(tracer: Tracer, fn: torch.jit.ScriptFunction, args: Args, kwargs: Kwargs) -> Any:
    """What torch.jit.script made of a function: the function. (Of one that was traced, there is none.)"""
    original = _original_of(tracer.world, fn, ("_torchdynamo_inline",))
    return (refuse if original is None else call)(tracer, fn if original is None else original, args, kwargs)


def _call_torch_operator(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    return tracer.world.torch_call(fn, args, kwargs)


def _call_builtin(tracer: Tracer, fn: types.BuiltinFunctionType, args: Args, kwargs: Kwargs) -> Any:
    owner = fn.__self__
    if not isinstance(owner, type) and functions.is_free_function(fn):
        name = owner.__name__ if isinstance(owner, types.ModuleType) else (fn.__module__ or "")
        if owner is None and name == "torch":  # torch.add and the like: static methods of a C class
            return call_torch.call_operator(tracer, fn, args, kwargs)
        if name.startswith("torch"):
            return call_torch.call_c_function(tracer, fn, name, args, kwargs)
        if name in call_builtins.PURE_MODULES or fn in call_builtins.PURE_FUNCTIONS:
            return call_builtins.call_pure(tracer, fn, args, kwargs)
        return refuse(tracer, fn, args, kwargs)
    return call_methods.call_bound(tracer, fn, owner, args, kwargs)


def _call_wrapper(tracer: Tracer, fn: types.MethodWrapperType, args: Args, kwargs: Kwargs) -> Any:
    accessor = subclasses.accessor(fn, args)
    if accessor is not None:
        return accessor(tracer, fn, args)
    return call_methods.call_bound(tracer, fn, fn.__self__, args, kwargs)


def _call_descriptor(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    if not args:
        return native(fn, *args, **kwargs)
    return call_methods.call_unbound(tracer, fn, args[0], args[1:], kwargs)


def _call_class(tracer: Tracer, fn: type, args: Args, kwargs: Kwargs) -> Any:
    return call_classes.call_class(tracer, fn, args, kwargs)


def _call_ufunc(tracer: Tracer, fn: np.ufunc, args: Args, kwargs: Kwargs) -> Any:
    """NumPy arithmetic on numbers (`np.sqrt(dimension)`) is simply done."""
    if kwargs or not all(isinstance(value, (int, float, complex, np.generic)) for value in args):
        return refuse(tracer, fn, args, kwargs)
    return native(fn, *args)


def _call_alias(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    return call(tracer, fn.__origin__, args, kwargs)


def _call_higher_order(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    row = call_attention.HIGHER_ORDER.get(fn.name())
    if row is None or tracer.recorder.level != "aten":
        raise GraphBreak("higher-order-operator", describe(fn))
    return row(tracer, args, kwargs)


KINDS: dict[type, Callable[[Any, Any, Args, Kwargs], Any]] = {
    types.FunctionType: _call_function,
    types.MethodType: _call_method,
    types.BuiltinFunctionType: _call_builtin,
    classes.BUILTIN_METHOD: _call_builtin,
    types.MethodDescriptorType: _call_descriptor,
    types.WrapperDescriptorType: _call_descriptor,
    types.MethodWrapperType: _call_wrapper,
    types.ClassMethodDescriptorType: _call_descriptor,
    functools.partial: _call_partial,
    functools._lru_cache_wrapper: call_cached,
    staticmethod: _call_static,
    weakref.ref: _call_reference,
    Trampoline: _call_trampoline,
    type: _call_class,
    types.GenericAlias: _call_alias,
    np.ufunc: _call_ufunc,
    arrays.ArrayMethod: arrays.call_method,
    call_builtins.ITEM_GETTER: _call_native_object,
    call_builtins.ATTR_GETTER: _call_native_object,
    call_builtins.METHOD_CALLER: _call_native_object,
    torch.jit.ScriptFunction: _call_scripted,
    torch._ops.OpOverload: _call_torch_operator,
    torch._ops.OpOverloadPacket: _call_torch_operator,
}
BASE_KINDS: tuple[tuple[type, Callable[[Any, Any, Args, Kwargs], Any]], ...] = (
    (type, _call_class),
    (torch.nn.Module, _call_module),
    (torch._ops.HigherOrderOperator, _call_higher_order),
    (functools.partial, _call_partial),
    (weakref.ref, _call_reference),
)
