"""Lists and deques from outside: shadows.

Takes a list, deque or subclass; gives a new container of the same type, filled with loaded elements without running user code.
Always holds: the outside container is only read; `finish` writes the shadow's final content back if it changed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from fusewright.capture.effects import Shadow, contents
from fusewright.capture.signals import GraphBreak
from fusewright.capture.sources import Attribute, InstanceDict, Item, Source

if TYPE_CHECKING:
    from fusewright.capture.world import World


def load_attributes(world: World, real: object, source: Source, shadow: object) -> dict[str, object] | None:
    """Copies the instance dictionary of a container subclass's instance to its shadow; gives what was loaded, None without a dictionary."""
    if type(real).__dictoffset__ == 0 or not _is_heap_type(type(real)):
        return None
    attributes = object.__getattribute__(real, "__dict__")
    where = InstanceDict(source)
    world.guard("KEYS", where, tuple(attributes))
    loaded = {name: world.load(value, Item(where, name)) for name, value in attributes.items()}
    object.__getattribute__(shadow, "__dict__").update(loaded)
    return loaded


def _is_heap_type(cls: type) -> bool:
    return bool(cls.__flags__ & (1 << 9))


def check_no_slots(cls: type) -> None:
    """A container subclass with `__slots__` of its own would lose them in a shadow."""
    for base in cls.__mro__:
        if _is_heap_type(base) and base.__dict__.get("__slots__"):
            raise GraphBreak("container-with-slots", f"{cls.__qualname__} derives from a container and has __slots__")


class HoldsBytes:
    """Guard callable: the bytearray has this content."""

    __slots__ = ("content",)

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __call__(self, candidate: object) -> bool:
        return type(candidate) is bytearray and candidate == self.content

    def __repr__(self) -> str:
        return f"is {bytearray(self.content)!r}"


def load_bytearray(world: World, real: bytearray, source: Source) -> object:
    """A shadow, guarded as a whole."""
    world.guard("CALL", source, HoldsBytes(bytes(real)))
    shadow = world.stand_in(real, source, bytearray(real))
    world.effects.shadows.append(Shadow(real, source, shadow, contents(shadow)))
    return shadow


def load_list(world: World, real: Any, source: Source) -> object:
    """Type and length are guarded, elements are loaded with an Item source each."""
    cls = type(real)
    check_no_slots(cls)
    base: Any = list if isinstance(real, list) else deque
    world.guard("TYPE", source, cls)
    world.guard("LENGTH", source, base.__len__(real))
    shadow = base.__new__(cls)
    if base is deque:
        world.guard("EQUALS" if real.maxlen is not None else "IS", Attribute(source, "maxlen"), real.maxlen)
        deque.__init__(shadow, (), real.maxlen)
    world.stand_in(real, source, shadow)
    for index, element in enumerate(base.__iter__(real)):
        base.append(shadow, world.load(element, Item(source, index)))
    attributes = load_attributes(world, real, source, shadow)
    world.effects.shadows.append(Shadow(real, source, shadow, contents(shadow), attributes))
    return shadow
