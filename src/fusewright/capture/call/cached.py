"""Functions that keep their results (functools.lru_cache).

Takes such a function and its arguments; gives what its cache holds, or what interpreting its body gives. Always holds:
the cache afterwards is what eager leaves: what is computed inside is entered behind the graph, at its place among the
effects; whether an argument is in the cache is guarded.
"""

from __future__ import annotations

import functools
import gc
import types
from typing import TYPE_CHECKING, Any, cast

import torch

from fusewright import _native
from fusewright._native import isinstance
from fusewright.base.records import dataclass, replace
from fusewright.base.signals import GraphBreak, Retry, SkipFrame, UserException
from fusewright.capture.border.effects import DeferredCall, Effects, stamp
from fusewright.capture.border.native import is_library, native, unwatched
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.constant import is_constant
from fusewright.capture.border.values.symbolic import concrete, concrete_inside, holds_symbols
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import FunctionSource

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def call_cached(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A functools.lru_cache function of constants and objects: what its cache holds, which a guard looks up again (the
    cache may be cleared). Where the cache lacks them, the body is interpreted.

    A library's is asked of constants alone, and its answer kept: by contract it is the same at every call. Otherwise
    its body is interpreted; output that it defers (a `warning_once`) is replayed by calling the cached function, so
    that it still comes once.
    """
    world = tracer.world
    args, kwargs = tuple(map(concrete, args)), {name: concrete(value) for name, value in kwargs.items()}
    if world.outside(fn) is None:
        return native(fn, *args, **kwargs)  # made inside: its cache is a part of this capture
    body = _held(fn)[1]
    library = isinstance(body, types.FunctionType) and is_library(body)
    if not library:
        args, kwargs = concrete_inside(args), concrete_inside(kwargs)
    values = (*args, *kwargs.values())
    known = (is_constant(value) or isinstance(value, (type, types.FunctionType)) for value in values)
    # A body that is interpreted may keep a size in a tuple symbolic; a cache asks for its hash.
    asked = not holds_symbols(values) and all(
        fixed or (not library and world.is_raw(value)) for fixed, value in zip(known, values)
    )
    if not library and not isinstance(body, types.FunctionType):
        raise GraphBreak("cached-function", f"what keeps the results of a {type(body).__qualname__}")
    if asked and not library:
        return _of_constants(tracer, fn, args, kwargs)
    if asked:
        return _asked(tracer, fn, args, kwargs)
    if not library:
        return _of_tensors(tracer, fn, args, kwargs)
    before = len(world.effects.calls)
    result = _body(tracer, fn, args, kwargs)
    if result is None and len(world.effects.calls) > before:
        del world.effects.calls[before:]
        world.effects.defer(fn, args, kwargs)
    return result


def _asked(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """What the function itself says now."""
    world = tracer.world
    for value in (*args, *kwargs.values()):
        world.guard_identity(value)
    with torch.utils._python_dispatch._disable_current_modes():
        value = unwatched(fn, *args, **kwargs)
    return world.load(value, world.constant(value, getattr(fn, "__name__", "cached")))


def _of_constants(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of constants and of objects from outside, for a function of the program's."""
    world, values = tracer.world, (*args, *kwargs.values())
    if _has_own_hash(values) or type(fn) is not functools._lru_cache_wrapper:
        return _called(tracer, fn, args, kwargs)
    for value in values:
        world.guard_identity(value)
    keys, key, most = _keys(fn), _key(fn, args, kwargs), fn.cache_parameters()["maxsize"]
    table = world.cached.setdefault(id(fn), {})
    if key in table:
        result = table[key]
    elif key in keys:
        if table and most is not None and len(keys) + len(table) > most:
            raise GraphBreak("cached-function", f"{_name(fn)}, whose cache may drop an entry before it is asked for")
        result = _known(tracer, fn, key, len(table))
        if most is None:
            return result
    elif not tracer.assumptions.caches:
        return _called(tracer, fn, args, kwargs)
    else:
        before, calls = stamp(world.effects)[:3], len(world.effects.calls)
        tensors = _tensors_met(tracer)
        result = _computed(tracer, fn, args, kwargs)
        if result is None and not world.written_dicts() and stamp(world.effects)[:3] == before:
            if len(world.effects.calls) > calls:  # output, which comes if the function itself says so
                del world.effects.calls[calls:]
                world.effects.defer(fn, args, kwargs)
                return None
        meets_tensors = tensors != _tensors_met(tracer)
        # It makes no difference when the body runs where nothing was changed, and nothing is dropped for its result.
        if (most is None or len(keys) < most) and _nothing_changed(tracer, meets_tensors):
            _asked(tracer, fn, args, kwargs)
            result = _known(tracer, fn, key, 0)
            if most is None:
                return result
        elif most != 0:
            world.guard("CALL", FunctionSource(), _Entry(fn, keys, key))
            table[key] = result
        if most and len(table) > most:
            raise GraphBreak("cached-function", f"{_name(fn)}, whose cache is too small for what one call keeps in it")
    world.effects.defer(_remembering(fn), (fn, args, kwargs, result), {})  # (a cache knows who was asked for last)
    return result


def _known(tracer: Tracer, fn: Any, key: Any, room: int) -> Any:
    """What the cache holds for a key, which is guarded, with room for so many others."""
    world, keys = tracer.world, _keys(fn)
    most = fn.cache_parameters()["maxsize"]
    value = keys[key] if most is None else _result(fn, keys, key)
    world.guard("CALL", FunctionSource(), _Entry(fn, keys, key, keys[key], value, most, room))
    return world.load(value, world.constant(value, getattr(fn, "__name__", "cached")))


def _called(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function whose body cannot be interpreted: it is called as the capture meets it."""
    world = tracer.world
    if not _nothing_changed(tracer):  # its body may read what is not written yet
        raise GraphBreak("cached-function", f"{_name(fn)} after stores that it may read")
    parameters = fn.cache_parameters() if type(fn) is functools._lru_cache_wrapper else None
    if parameters is None:
        result = _asked(tracer, fn, args, kwargs)
        asked = functools.partial(fn, **kwargs) if kwargs else fn
        world.guard_answer(asked, args, world.real_of(result), identical=True)
        return result
    most, table = parameters["maxsize"], world.cached.setdefault(id(fn), {})
    table[object()] = None  # what a key's own equality says is not asked
    if most is not None and len(table) > most:  # the next attempt would run a body again
        raise GraphBreak("cached-function", f"{_name(fn)}, whose cache is too small for what one call keeps in it")
    try:
        _asked(tracer, fn, args, kwargs)
    except UserException:
        once = [fn]  # it is to raise anew at each call
        world.guard("CALL", FunctionSource(), _Holding(once))
        world.effects.defer(list.clear, (world.load(once, world.constant(once, "once")),), {})
        raise
    result = _known(tracer, fn, _key(fn, args, kwargs), 0)
    if most is not None:
        world.effects.defer(_remembering(fn), (fn, args, kwargs, result), {})
    return result


def _tensors_met(tracer: Tracer) -> tuple[object, ...]:
    """Differs where tensors were asked for anything in between."""
    recorder = tracer.recorder
    return len(recorder.graph.nodes), len(recorder.inputs), recorder.op_count


def _nothing_changed(tracer: Tracer, tensors: bool = True) -> bool:
    """Whether the frame, with what it called, has written to nothing yet, and drawn nothing, so that a body may run now
    (without `tensors`: one that meets none)."""
    world, recorder = tracer.world, tracer.recorder
    if tensors and (recorder.wrote or recorder.changes or recorder.drawn or recorder.drew):
        return False
    told = world.effects.data or world.effects.hooked  # of tensors, without an operator
    if told or world.generators or world.written_dicts():
        return False
    own = sum(call.function is list.clear or _changes_nothing(call) for call in world.effects.calls)  # see `_called`
    return stamp(world.effects) == (*stamp(Effects())[:3], own)


def _changes_nothing(call: DeferredCall) -> bool:
    """Whether it asks a cached function for what its cache holds, which drops nothing if another is asked before it."""
    if type(call.function) is not functools.partial or call.function.func is not remember:
        return False
    fn, args, kwargs, result = cast(tuple[Any, Args, Kwargs, Any], call.args)
    keys, most = _keys(fn), fn.cache_parameters()["maxsize"]
    values = (*args, *kwargs.values())
    own = _has_own_hash(values) or any(isinstance(value, torch.Tensor) for value in values)
    if own or result is Refused:
        return False
    return _key(fn, args, kwargs) in keys and (most is None or len(keys) < most)


def _has_own_hash(values: Args) -> bool:
    """Whether one has a hash of the program's, or none."""
    hashes = [classes.lookup(type(value), "__hash__") for value in values]  # a class with __eq__ alone has None
    return any(one is None or isinstance(one, types.FunctionType) for one in hashes)


def _computed(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """What the body gives; the caller notes it for the cache."""
    try:
        return _body(tracer, fn, args, kwargs)
    except UserException:
        tracer.world.effects.defer(_remembering(fn), (fn, args, kwargs, Refused), {})
        raise
    except (GraphBreak, SkipFrame):
        raise Retry(caches=False) from None


def _name(fn: Any) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def _body(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    world, body = tracer.world, _held(fn)[1]
    return tracer.call(world.load(body, world.constant(body, "wrapped")), args, kwargs)


def _of_tensors(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of tensors, and of objects that this call has made, which a cache knows by identity."""
    world, values = tracer.world, (*args, *kwargs.values())
    plain = all(is_constant(value) or world.is_raw(value) or _is_by_identity(world, value) for value in values)
    if not plain or type(fn) is not functools._lru_cache_wrapper:
        raise GraphBreak("cached-function", f"{_name(fn)} of a container")
    parameters = fn.cache_parameters()
    kinds = tuple(map(world.type_of, values)) if parameters["typed"] else ()
    key = (tuple(map(_part, args)), tuple((name, _part(value)) for name, value in kwargs.items()), kinds)
    table = world.cached.setdefault(id(fn), {})
    if key in table:
        result = table[key]
    else:
        result = _held_before(tracer, fn, args, kwargs)
        if result is MISSING:
            result = _body(tracer, fn, args, kwargs)
        table[key] = result
        if parameters["maxsize"] is not None and len(table) > parameters["maxsize"]:
            raise GraphBreak("cached-function", f"{_name(fn)}, whose cache is too small for what one call keeps in it")
    world.effects.defer(_remembering(fn), (fn, args, kwargs, result), {})
    return result


def _is_by_identity(world: World, value: Any) -> bool:
    """Whether it is a tensor, or was made inside and has neither hash nor equality of its own."""
    if isinstance(value, torch.Tensor):
        return True
    kind = world.type_of(value)
    own = (classes.lookup(kind, name) is not getattr(object, name) for name in ("__hash__", "__eq__"))
    return world.outside(value) is None and not any(own)


def _part(value: Any) -> Any:
    return value if is_constant(value) else ("", id(value))  # what an object's own equality says is not asked


def _held_before(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """What the cache holds for these arguments as the call begins; MISSING for nothing. Either is guarded."""
    world = tracer.world
    values = (*args, *kwargs.values())
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any(world.outside(value) is None for value in values if not is_constant(value)):
        return MISSING  # no cache knows what this call has made
    record = world.outside(tensors[0])
    assert record is not None
    lacks = _Lacks(fn)
    if lacks(record.real):
        world.guard("CALL", record.source, lacks)
        return MISSING
    alone = not kwargs and not fn.cache_parameters()["typed"] and all(
        is_constant(value) for value in args if value is not tensors[0]
    )
    holds = _Holds(fn, tuple(None if value is tensors[0] else value for value in args), MISSING)
    held = holds.entry(record.real) if alone else MISSING
    if held is MISSING:
        raise GraphBreak("cached-function", f"{_name(fn)}, whose cache knows a tensor together with other arguments")
    if world.cached[id(fn)] and fn.cache_parameters()["maxsize"] is not None:
        raise GraphBreak("cached-function", f"{_name(fn)}, whose cache may drop an entry before it is asked for")
    world.guard("CALL", record.source, replace(holds, held=held))
    return world.load(held, world.constant(held, "cached"))


def _held(fn: Any) -> tuple[dict[Any, Any], Any, object]:
    """The cache itself, the function that fills it (`__wrapped__` may be another by now), and what marks keywords in a
    key: the last dict that it holds beside its attributes, and what comes behind that. (Before it come results.)"""
    held = gc.get_referents(fn)
    dicts = (place for place in reversed(range(len(held))) if type(held[place]) is dict)
    place = next(place for place in dicts if held[place] is not fn.__dict__)
    return held[place], held[place + 1], held[place + 2]


def _keys(fn: Any) -> dict[Any, Any]:
    return _held(fn)[0]


def _key(fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """The key that the cache has for these arguments, as functools makes it."""
    typed = fn.cache_parameters()["typed"]
    if not typed and not kwargs and len(args) == 1 and type(args[0]) in (int, str):
        return args[0]
    key: tuple[Any, ...] = args
    if kwargs:
        key += (_held(fn)[2], *(part for pair in kwargs.items() for part in pair))
    return (*key, *map(type, (*args, *kwargs.values()))) if typed else key


def _result(fn: Any, keys: dict[Any, Any], key: Any) -> Any:
    """What a cache with a limit, whose dict holds the links of a list, has under a key that it has."""
    each = iter(gc.get_referents(fn)[1 : 1 + 3 * len(keys)])  # key, result and class of each link
    links = ((one, result) for one, result, _ in zip(each, each, each) if type(one) is type(key))
    return next(result for one, result in links if (_same(one, key) if type(key) is tuple else one == key))


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A CALL guard's callable: under the key the dict of the cache has this very entry (MISSING: none), which leads to
    this result, and the cache has room for more."""

    fn: Any
    keys: dict[Any, Any]
    key: Any
    held: Any = MISSING
    result: Any = None
    most: int | None = None
    room: int = 0

    def __call__(self, subject: object) -> bool:
        if self.keys.get(self.key, MISSING) is not self.held:
            return False
        if self.held is MISSING or self.most is None:
            return True
        # A full cache makes its oldest link the link of what it keeps next, perhaps of this key again.
        known = len(self.keys) < self.most or _result(self.fn, self.keys, self.key) is self.result
        return known and len(self.keys) + self.room <= self.most

    def __repr__(self) -> str:
        return f"the cache of {self.fn.__qualname__} {'lacks' if self.held is MISSING else 'holds'} {self.key!r}"


@dataclass(frozen=True, slots=True, eq=False)
class _Holding:
    """A CALL guard's callable: the list has not been emptied, as the call does that was captured."""

    once: list[Any]

    def __call__(self, subject: object) -> bool:
        return bool(self.once)

    def __repr__(self) -> str:
        return "the body of a function that keeps its results raised, and is to be run again"


@dataclass(frozen=True, slots=True)
class _Lacks:
    """A CALL guard's callable: no key of the cache has this tensor in it."""

    fn: Any

    def __call__(self, tensor: Any) -> bool:
        return all(part is not tensor for key in _keys(self.fn) if isinstance(key, tuple | list) for part in key)

    def __repr__(self) -> str:
        return f"is not in the cache of {self.fn.__qualname__}"


@dataclass(frozen=True, slots=True, eq=False)
class _Holds:
    """A CALL guard's callable: the cache holds this very object for the arguments, of which the tensor is None."""

    fn: Any
    args: Args
    held: Any

    def __call__(self, tensor: Any) -> bool:
        return self.entry(tensor) is self.held

    def entry(self, tensor: Any) -> Any:
        """What the cache holds; MISSING for nothing."""
        key = tuple(tensor if value is None else value for value in self.args)
        if key not in _keys(self.fn):
            return MISSING
        if self.fn.cache_parameters()["maxsize"] is None:
            return _keys(self.fn)[key]
        parts = iter(gc.get_referents(self.fn))  # of a cache with a limit: each key, and then its result
        return next((next(parts) for part in parts if type(part) is tuple and _same(part, key)), MISSING)

    def __repr__(self) -> str:
        return f"has the same entry in the cache of {self.fn.__qualname__}"


def _same(key: Args, other: Args) -> bool:
    """As for the cache, which compares what has one hash: a tensor equals itself alone."""
    return len(key) == len(other) and all(
        one is two or not (isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor) or one != two)
        for one, two in zip(key, other)
    )


class Refused(Exception):
    """In the place of a result: the body has raised."""


def _remembering(fn: Any) -> Any:
    """`remember` of a function whose body need not be looked for at each call, behind all that the cache holds."""
    return functools.partial(remember, _held(fn)[1])


def remember(body: Any, fn: Any, args: Args, kwargs: Kwargs, result: Any) -> None:
    """Calls the cached function; where it does not know the arguments, its body's result is the one given."""

    def answer(function: Any, values: Args) -> Any:
        if function is not body:
            return (function(*values),)  # a `__hash__` or an `__eq__`
        if result is Refused:
            raise Refused
        return (result,)

    before = _native.set_interceptor(answer)
    try:
        _native.call_watched(fn, *args, **kwargs)
    except (Refused, TypeError):  # or the arguments are not those that the body takes, and no frame began
        if result is not Refused:
            raise
    finally:
        _native.set_interceptor(before)
