"""Builtins over iterables: `zip`, `map` and other classes of iterators, those of itertools, `sorted`, `min`, `max`.

Takes the tracer and real arguments; gives what the builtin gives, over iterables that are read through the border.
Always holds: the program's `__iter__` is called when CPython would call it; comparisons of objects and of tensors go
through the border; elements of which no comparison has an effect are compared natively.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.base.signals import UserException
from fusewright.capture.border.native import give_back, native
from fusewright.capture.border.native_ready import PLAIN, SCALARS
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.constant import is_constant
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.call.support import (
    asks_program,
    listed,
    native_callback,
    native_iterable,
    one_by_one,
    or_error,
    tupled,
)
from fusewright.capture.guards import MISSING
from fusewright.sizes.symfloat import FloatNode, node_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Row = Callable[["Tracer", Args, Kwargs], Any]

# --- classes of iterators ---------------------------------------------------------------------------------------------


def is_iterable(world: World, value: Any) -> bool:
    kind = type(value)
    if kind in SCALARS and kind not in (str, bytes, range, torch.Size):
        return False
    if kind is OutsideDict or isinstance(value, torch.Tensor):
        return True
    return (
        classes.lookup(kind, "__iter__") is not MISSING or classes.python_method(world, kind, "__getitem__") is not None
    )


def _over_iterables(
    cls: Callable[..., Any], callbacks: int = 0, take: Any = native_iterable, most: int | None = None
) -> Row:
    """An iterator class: its first `callbacks` arguments are called, iterables (`most` of them; None: all) are read
    through the border, by `take`, up to one that is none: numbers come behind it, or an error."""

    def make(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        world = tracer.world
        ready = [native_callback(tracer, value) for value in args[:callbacks]]
        asked = True
        for place, value in enumerate(args[callbacks:]):
            asked = asked and place != most and is_iterable(world, value)
            ready.append(take(world, value) if asked else _number(tracer, value))
        keywords = {
            name: native_callback(tracer, value) if name in ("key", "func") else value for name, value in kwargs.items()
        }
        return native(cls, *ready, **keywords)

    return make


def _number(tracer: Tracer, value: Any) -> Any:
    """Of a tensor the integer that it holds: some classes ask for it and then hide what that raises, a break too."""
    whole = isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex)
    return tracer.call(operator.index, (value,)) if whole and value.numel() == 1 else value


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
    return native(tuple, tupled(world, obj))


# --- comparing --------------------------------------------------------------------------------------------------------


def extreme(fn: Callable[..., Any], op: str) -> Row:
    def pick(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        world = tracer.world
        elements = args if len(args) > 1 else args[0]
        key = kwargs.get("key")
        if key is None and type(elements) in (list, tuple):
            if len(elements) == 2 and (number := _larger(elements[1], elements[0], op)) is not None:
                return number
            if all(type(element) in SCALARS for element in elements):
                return native(fn, elements, **{name: value for name, value in kwargs.items() if name == "default"})
        if len(args) > 1 and "default" in kwargs:
            return native(fn, *args, **kwargs)
        rest = one_by_one(world, elements)
        best = next(rest, MISSING)
        if best is MISSING:
            return native(fn, [], **kwargs)
        best_key = best if key is None else tracer.call(key, (best,))
        for element in rest:
            candidate = element if key is None else tracer.call(key, (element,))
            if world.truth(world.compare(op, candidate, best_key)):
                best, best_key = element, candidate
        return best

    return pick


_COMPARISONS = {">": torch.ops.aten.gt.Tensor, "<": torch.ops.aten.lt.Tensor}


def _larger(candidate: object, best: object, op: str) -> torch.SymFloat | None:
    """The larger (">") or smaller of two floats, of which the graph has one in a tensor, as Python chooses it: without
    asking which it is. None for other numbers."""
    nodes = [node_of(candidate), node_of(best)]
    known = next((one for one in nodes if one is not None and one.history is None), None)
    if known is None:
        return None
    pair = [
        known.wrap_float(number) if one is None and type(number) is float else one
        for one, number in zip(nodes, (candidate, best), strict=True)
    ]
    if None in pair:
        return None
    recorder = known.recorder
    left, right = (one.operand() for one in pair if one is not None)
    with recorder.recording():
        chosen = recorder.dispatch(_COMPARISONS[op], (left, right), {})
        tensor = recorder.dispatch(torch.ops.aten.where.self, (chosen, left, right), {})
    return torch.SymFloat(FloatNode(recorder, tensor, None))  # type: ignore[arg-type]


class _Ordered:
    """Wraps an element (or its key) for native sorting, so that comparisons go through the border."""

    __slots__ = ("value", "world")

    def __init__(self, world: World, value: Any) -> None:
        self.world = world
        self.value = value

    def __lt__(self, other: _Ordered) -> bool:
        try:
            return self.world.truth(self.world.compare("<", self.value, other.value))
        except UserException as signal:
            held = [signal.exception]
        give_back(held)


def sort(tracer: Tracer, elements: list[Any], kwargs: Kwargs) -> None:
    """`elements.sort(**kwargs)`: where a comparison fails, the elements are in the order in which that leaves them."""
    world = tracer.world
    key = kwargs.get("key")
    keys = elements if key is None else [tracer.call(key, (element,)) for element in elements]
    if all(type(one) in SCALARS or (type(one) is tuple and is_constant(one)) for one in keys):
        ranks: list[Any] = keys
    else:
        ranks = [_Ordered(world, one) for one in keys]
    reverse = kwargs.get("reverse", False)
    if type(reverse) in SCALARS or isinstance(reverse, torch.Tensor):
        reverse = world.truth(reverse)
    order = list(range(len(elements)))
    try:
        native(list.sort, order, key=ranks.__getitem__, reverse=reverse)
    finally:
        elements[:] = [elements[index] for index in order]


def sorted_row(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    elements = native(list, listed(tracer.world, args[0]))
    sort(tracer, elements, kwargs)
    return elements


# --- rows -------------------------------------------------------------------------------------------------------------

# Methods of C classes that meet iterables; each access makes a new object, so they are known by class and name.
CLASS_METHODS: dict[tuple[type, str], Row] = {(itertools.chain, "from_iterable"): _flattened}

ITERABLE_ROWS: list[tuple[Any, Row]] = [
    (map, _over_iterables(map, 1)), (filter, _over_iterables(filter, 1)), (zip, _over_iterables(zip)),
    (enumerate, _over_iterables(enumerate, most=1)), (itertools.accumulate, _accumulate), (itertools.groupby, _groupby),
    (itertools.chain, _chain),
    (min, extreme(min, "<")), (max, extreme(max, ">")), (sorted, sorted_row),
    *((getattr(itertools, name), _over_iterables(getattr(itertools, name), 1)) for name in (
        "starmap", "takewhile", "dropwhile", "filterfalse")),
    *((getattr(itertools, name), _over_iterables(getattr(itertools, name))) for name in (
        "cycle", "zip_longest", "compress", "pairwise")),
    *((getattr(itertools, name), _over_iterables(getattr(itertools, name), most=1)) for name in (
        "islice", "batched"  # `batched`: from Python 3.12 on
    ) if hasattr(itertools, name)),
    (itertools.product, _over_iterables(itertools.product, take=_pool)),
    *((cls, _over_iterables(cls, take=_pool, most=1)) for cls in (
        itertools.permutations, itertools.combinations, itertools.combinations_with_replacement)),
    *((cls, functools.partial(_made_natively, cls)) for cls in (itertools.count, itertools.repeat)),
]  # fmt: skip
