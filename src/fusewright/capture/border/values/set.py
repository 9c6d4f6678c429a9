"""Sets from outside: shadows guarded as a whole, because the elements of a set have no place and so no source.

Takes a set or frozenset; gives a copy. Always holds: every element is a constant or known by identity (a function, a
class, an enumeration member, an object without `__eq__` of its own).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusewright import _native
from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.effects import Shadow, contents
from fusewright.capture.border.values.constant import is_constant, is_native_function
from fusewright.capture.border.values.list import check_no_slots, load_attributes
from fusewright.capture.guards.sources import Source

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


class HoldsElements:
    """Guard callable: the set has this type and holds just these elements, in this order (a program may iterate over
    it)."""

    __slots__ = ("cls", "elements")

    def __init__(self, cls: type, elements: tuple[Any, ...]) -> None:
        self.cls = cls
        self.elements = elements

    def __call__(self, candidate: Any) -> bool:
        return type(candidate) is self.cls and _native.constant_equal(self.elements, contents(candidate))

    def __repr__(self) -> str:
        return f"is the {self.cls.__name__} {list(self.elements)!r}"


def _comparable(element: object) -> bool:
    if isinstance(element, tuple):
        return all(_comparable(part) for part in element)
    return (
        is_constant(element)
        or (type(element).__eq__ is object.__eq__ and not isinstance(element, torch.Tensor))
        or isinstance(element, type)
        or is_native_function(element)
    )


def load_set(world: World, real: Any, source: Source) -> object:
    """One CALL guard over the whole content."""
    cls = type(real)
    check_no_slots(cls)
    base: Any = set if isinstance(real, set) else frozenset
    elements = contents(real)
    if not all(_comparable(element) for element in elements):
        raise GraphBreak(
            "set-of-objects", f"a {cls.__name__} whose elements define __eq__ came from outside ({source.text()})"
        )
    world.guard("CALL", source, HoldsElements(cls, elements))
    for element in elements:
        world.load(element, world.constant(element, "element"))
    if base is frozenset:
        return world.stand_in(real, source, real)
    known = (True,) * len(elements)  # in the same process, so each has the hash that it had
    shadow: Any = _native.set_filled(cls, _native.set_layout(real), known, list(elements))
    if any(mine is not theirs for mine, theirs in zip(contents(shadow), elements)):
        raise GraphBreak(
            "set-of-objects", f"a set whose order depends on its history came from outside ({source.text()})"
        )
    world.stand_in(real, source, shadow)
    attributes = load_attributes(world, real, source, shadow)
    world.effects.shadows.append(Shadow(real, source, shadow, contents(shadow), attributes))
    return shadow
