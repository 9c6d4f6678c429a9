"""Classes of iterators, called inside a frame: `zip`, `map`, those of itertools.

Takes the tracer and real arguments; gives the real iterator, over iterables that are read through the border. Always
holds: the program's `__iter__` is called when CPython would call it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.capture.border.native import native
from fusewright.capture.border.native_ready import PLAIN, SCALARS
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.call.support import (
    asks_program,
    listed,
    native_callback,
    native_iterable,
    one_by_one,
    or_error,
)
from fusewright.capture.guards import MISSING

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Row = Callable[["Tracer", Args, Kwargs], Any]


def is_iterable(world: World, value: Any) -> bool:
    kind = type(value)
    if kind in SCALARS and kind not in (str, bytes, range, torch.Size):
        return False
    if kind is OutsideDict or isinstance(value, torch.Tensor):
        return True
    return (
        classes.lookup(kind, "__iter__") is not MISSING or classes.python_method(world, kind, "__getitem__") is not None
    )


def _over_iterables(cls: Callable[..., Any], callbacks: int = 0, take: Any = native_iterable) -> Row:
    """An iterator class: its first `callbacks` arguments are called, iterables are read through the border, by
    `take`, up to one that is none: numbers come behind it, or an error."""

    def make(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        world = tracer.world
        ready = [native_callback(tracer, value) for value in args[:callbacks]]
        asked = True
        for value in args[callbacks:]:
            asked = asked and is_iterable(world, value)
            ready.append(take(world, value) if asked else value)
        keywords = {
            name: native_callback(tracer, value) if name in ("key", "func") else value for name, value in kwargs.items()
        }
        return native(cls, *ready, **keywords)

    return make


def _made_natively(cls: Callable[..., Any], tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """An iterator class that only keeps its arguments."""
    return native(cls, *args, **kwargs)


def _accumulate(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    iterable, *rest = args
    if rest:
        kwargs = {**kwargs, "func": rest[0]}
    fn = kwargs.pop("func", None)
    fn = native_callback(tracer, operator.add if fn is None else fn)
    return native(itertools.accumulate, native_iterable(tracer.world, iterable), fn, **kwargs)


def _groupby(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    iterable, *rest = args
    key = rest[0] if rest else kwargs.get("key")
    return native(itertools.groupby, native_iterable(tracer.world, iterable), native_callback(tracer, key))


def _chain(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """Asks the program for an iterator when the one before has ended."""
    if kwargs or not any(asks_program(tracer.world, value) for value in args):
        return _over_iterables(itertools.chain)(tracer, args, kwargs)
    return _flattened(tracer, (args,), {})


def _flattened(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    (held,) = args
    if type(held) in (list, tuple) and all(type(one) in PLAIN for one in held):
        return native(itertools.chain.from_iterable, held)
    world = tracer.world
    each = world.iterate(held)  # which gives one when the one before has ended
    ready = (or_error(native_iterable, world, one) for one in one_by_one(world, each))
    return native(itertools.chain.from_iterable, ready)


def _pool(world: World, obj: Any) -> tuple[Any, ...]:
    """For native code that makes a tuple of each argument before it asks the next one."""
    return native(tuple, listed(world, obj))


# Methods of C classes that meet iterables; each access makes a new object, so they are known by class and name.
CLASS_METHODS: dict[tuple[type, str], Row] = {(itertools.chain, "from_iterable"): _flattened}

ITERABLE_ROWS: list[tuple[Any, Row]] = [
    (map, _over_iterables(map, 1)), (filter, _over_iterables(filter, 1)), (zip, _over_iterables(zip)),
    (enumerate, _over_iterables(enumerate)), (itertools.accumulate, _accumulate), (itertools.groupby, _groupby),
    (itertools.chain, _chain),
    *((getattr(itertools, name), _over_iterables(getattr(itertools, name), 1)) for name in (
        "starmap", "takewhile", "dropwhile", "filterfalse")),
    *((getattr(itertools, name), _over_iterables(getattr(itertools, name))) for name in (
        "cycle", "islice", "zip_longest", "compress", "pairwise", "batched"  # `batched`: from Python 3.12 on
    ) if hasattr(itertools, name)),
    *((cls, _over_iterables(cls, take=_pool)) for cls in (
        itertools.product, itertools.permutations, itertools.combinations, itertools.combinations_with_replacement)),
    *((cls, functools.partial(_made_natively, cls)) for cls in (itertools.count, itertools.repeat)),
]  # fmt: skip
