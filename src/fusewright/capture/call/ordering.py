"""Builtins that compare: `sorted`, `min`, `max`.

Takes real values; gives what the builtin gives. Always holds: comparisons of objects and of tensors go through the
border; elements of which no comparison has an effect are compared natively.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.base.signals import UserException
from fusewright.capture.border.native import give_back, native
from fusewright.capture.border.native_ready import SCALARS
from fusewright.capture.border.values.constant import is_constant
from fusewright.capture.call.support import listed, one_by_one
from fusewright.capture.guards import MISSING
from fusewright.sizes.symfloat import FloatNode, node_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def extreme(fn: Callable[..., Any], op: str) -> Callable[[Tracer, Args, Kwargs], Any]:
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
