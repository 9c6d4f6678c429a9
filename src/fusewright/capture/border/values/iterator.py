"""Iterators from outside that are advanced inside: over lists, tuples, ranges, texts, dicts and sets, and `zip`,
`enumerate` and `reversed` of such.

Takes an iterator; gives its next element, read from a copy. Always holds: the iterator itself is advanced by `finish`;
each element has a source of its own, so how many there are is guarded only where the end is met; an iterator whose
elements are made by the program's code (a generator, a map) is a graph break.
"""

from __future__ import annotations

import collections
import gc
import itertools
import types
import warnings
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.records import dataclass
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.effects import DeferredCall, changed
from fusewright.capture.border.native import native
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import Computed

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

MOST = 256
"""Elements that one call may take from an iterator: each is found by going through those before it."""

_DICTS: tuple[Any, ...] = ({}, {}.values(), {}.items())
_LEAVES: tuple[type, ...] = (
    *(type(iter(one)) for one in ([], (), "", b"", range(0), range(1 << 70), set(), collections.deque(), *_DICTS)),
    type(reversed([])),
)
_JOINED = (zip, enumerate)
_MAKERS: dict[Any, str] = {iter: "__iter__", reversed: "__reversed__"}


def own_maker(maker: Any, args: tuple[Any, ...]) -> Any:
    """What makes an iterator that says it is `maker(*args)`: the base's method, of which a subclass is not asked."""
    if maker not in _MAKERS or not args:
        return maker
    base = next((base for base in (list, tuple, str, bytes, bytearray) if isinstance(args[0], base)), type(args[0]))
    return maker if base is type(args[0]) else getattr(base, _MAKERS[maker], maker)


def _quietly(iterator: Any, method: str, *args: Any) -> Any:
    """CPython 3.12 and 3.13 warn that iterators of itertools will not be copied any more: the program asks for none."""
    if type(iterator).__module__ != "itertools":
        return getattr(iterator, method)(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(iterator, method)(*args)


def reduced(iterator: Any) -> Any:
    """What makes the iterator again, where it stands: a callable, its arguments, and perhaps a state."""
    return _quietly(iterator, "__reduce__")


def set_state(iterator: Any, state: Any) -> None:
    """Puts an iterator where the other one stood."""
    _quietly(iterator, "__setstate__", state)


def _copied(iterator: Any, known: dict[int, Any]) -> Any:
    """A copy that goes on where the iterator stands. known: the iterators that it is made of, by identity."""
    if id(iterator) not in known:
        kind = type(iterator)
        if kind not in _LEAVES and kind not in _JOINED:
            raise TypeError(f"a {kind.__name__}")
        maker, args, *state = iterator.__reduce__()
        if kind in _LEAVES:
            made = own_maker(maker, args)(*args)
        else:
            made = maker(*(one if type(one) is int else _copied(one, known) for one in args))
        if state and state[0] is not None:  # from CPython 3.12 on a range's iterator has None
            made.__setstate__(*state)
        known[id(iterator)] = made
    return known[id(iterator)]


@dataclass(frozen=True, slots=True)
class Upcoming:
    """What an iterator gives after `before` others; MISSING at its end. The iterator stays where it is."""

    before: int

    def __call__(self, iterator: Any) -> Any:
        return next(itertools.islice(_copied(iterator, {}), self.before, None), MISSING)

    @property
    def __name__(self) -> str:
        return f"upcoming_{self.before}"


@dataclass(frozen=True, slots=True)
class _Ends:
    """A CALL guard's callable: nothing comes after `before` elements."""

    before: int

    def __call__(self, iterator: Any) -> bool:
        return Upcoming(self.before)(iterator) is MISSING

    def __repr__(self) -> str:
        return f"has {self.before} elements left"


def is_known(iterator: Any) -> bool:
    """Whether it can be copied."""
    try:
        _copied(iterator, {})
    except (TypeError, RuntimeError):  # the latter of a dict that has changed its size
        return False
    return True


def _parts(iterator: Any) -> dict[int, Any]:
    """The iterators that it is made of, and what those go over."""
    known: dict[int, Any] = {}
    _copied(iterator, known)
    held = [one for part in _inner(iterator) for one in gc.get_referents(part)]
    return dict.fromkeys(known) | {id(one): one for one in held if not isinstance(one, int)}


def _inner(iterator: Any) -> list[Any]:
    if type(iterator) in _LEAVES:
        return [iterator]
    return [part for one in iterator.__reduce__()[1] if type(one) is not int for part in _inner(one)]


def next_of(world: World, iterator: Any) -> Any:
    """The next element; MISSING at the end."""
    record = world.outside(iterator)
    assert record is not None
    taken = world.iterators.get(id(iterator))
    if taken is None:
        for other in world.iterators.values():
            if _parts(other.args[0]).keys() & {id(part) for part in (iterator, *_inner(iterator))}:
                raise GraphBreak("outside-iterator", "two iterators of which one advances the other")
        taken = world.iterators[id(iterator)] = DeferredCall(advance, (iterator, 0), {}, changes="an iterator")
        world.effects.calls.append(taken)
    count: Any = taken.args[1]
    written = {id(shadow.real) for shadow in world.effects.shadows if changed(shadow)}
    written.update(id(namespace.real) for namespace in world.written_dicts())
    if count >= MOST or not written.isdisjoint(_parts(iterator)):
        raise GraphBreak("outside-iterator", "many elements are taken from it, or what it goes over was written to")
    taken.args = (iterator, count + 1)
    value = Upcoming(count)(iterator)
    if value is MISSING:
        world.guard("CALL", record.source, _Ends(count))
        return MISSING
    return world.load(value, Computed(record.source, Upcoming(count)))


def advance(iterator: Any, count: int) -> None:
    """Takes so many elements; fewer, where it ends."""
    collections.deque(itertools.islice(iterator, count), maxlen=0)


def next_natively(world: World, iterator: Any) -> Any:
    """`next(iterator)`, of one that was made inside."""
    if type(iterator) is types.GeneratorType:
        world.advanced[id(iterator)] = iterator
    return native(next, iterator)


def close(world: World) -> None:
    """At an attempt's end, generators that it has left where they stood: what such a one puts back only when it ends (a
    mode that it took off PyTorch's stack) is not left to the collector."""
    while world.advanced:
        world.advanced.popitem()[1].close()
