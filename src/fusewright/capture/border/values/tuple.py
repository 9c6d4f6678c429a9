"""Tuples from outside: rebuilt from loaded elements.

Takes a tuple, a namedtuple or another subclass; gives a tuple of the same type. Always holds: type and length are
guarded, each element has its own source, and a tuple whose elements load as themselves is handed out as it is (its
identity is kept).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusewright.capture.border.values.cls import contents_owner
from fusewright.capture.border.values.constant import is_literal
from fusewright.capture.border.values.number import tuple_has_changed
from fusewright.capture.guards.sources import Item, Source

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


def load_tuple(world: World, real: tuple, source: Source) -> object:
    """A tuple of constants is guarded by value in one step; others, and one whose numbers change (betas), element by
    element."""
    if is_literal(real) and not tuple_has_changed(world, real, source):
        world.guard("EQUALS", source, real)
        return real
    world.guard("TYPE", source, type(real))
    world.guard("LENGTH", source, tuple.__len__(real))
    owner = contents_owner(type(real), tuple)
    elements = [world.load(element, Item(source, index, owner)) for index, element in enumerate(tuple.__iter__(real))]
    if all(new is old for new, old in zip(elements, tuple.__iter__(real), strict=False)):
        return world.stand_in(real, source, real)
    return world.stand_in(real, source, tuple_like(real, elements))


def tuple_like(real: tuple, elements: list[object]) -> tuple:
    """A tuple of the type of `real`. The result types of native operators have a constructor of their own, which takes
    a sequence."""
    kind = type(real)
    return kind(elements) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, elements)
