"""Lists and deques from outside: shadows.

Takes a list, deque or subclass; gives a new container of the same type, filled with loaded elements without running
user code. A list that is only appended to is not read: its length is not guarded, the shadow holds what is added.
Always holds: the outside container is only read; `finish` writes the shadow's final content back if it changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.effects import Shadow, contents
from fusewright.capture.border.values import cls as classes
from fusewright.capture.guards.sources import Item, Source

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


_MAXLEN: Any = vars(deque)["maxlen"]
length_limit: Callable[[Any], int | None] = _MAXLEN.__get__
APPEND = frozenset({"append", "extend"})


def load_attributes(world: World, real: object, source: Source, shadow: object) -> dict[str, object] | None:
    """Copies the instance dictionary of a container subclass's instance to its shadow; gives what was loaded, None
    without a dictionary."""
    if not classes.has_dict(type(real)) or not classes.is_heap_type(type(real)):
        return None
    attributes = object.__getattribute__(real, "__dict__")
    where = classes.dict_source(type(real), source)
    classes.check_plain(attributes, where)
    world.guard("TYPE", where, dict)
    world.guard("KEYS", where, tuple(attributes))
    loaded = {name: world.load(value, Item(where, name)) for name, value in attributes.items()}
    inside = object.__getattribute__(shadow, "__dict__")
    inside.update(loaded)
    if world.known_stand_in(attributes) is not None:
        raise GraphBreak("opaque-object", f"a {type(real).__qualname__} and its __dict__, each by itself")
    world.stand_in(attributes, where, inside)
    return loaded


def check_no_slots(cls: type) -> None:
    """A container subclass with `__slots__` of its own would lose them in a shadow."""
    for base in cls.__mro__:
        if classes.is_heap_type(base) and base.__dict__.get("__slots__"):
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
    shadow = base.__new__(cls)
    if base is deque:
        limit = length_limit(real)
        where = classes.field_source(cls, source, _MAXLEN, "maxlen")
        world.guard("EQUALS" if limit is not None else "IS", where, limit)
        deque.__init__(shadow, (), limit)
    world.stand_in(real, source, shadow)
    if world.intends_append and cls is base:
        unread = world.unread[id(shadow)] = Shadow(real, source, shadow, (), appended=True)
        world.effects.shadows.append(unread)
        return shadow
    world.guard("LENGTH", source, base.__len__(real))
    owner = classes.contents_owner(cls, base)
    for index, element in enumerate(base.__iter__(real)):
        base.append(shadow, world.load(element, Item(source, index, owner)))
    attributes = load_attributes(world, real, source, shadow)
    world.effects.shadows.append(Shadow(real, source, shadow, contents(shadow), attributes))
    return shadow


def read_list(world: World, unread: Shadow) -> None:
    """The program looks at a list that it has only appended to so far: its elements are loaded, in front of what was
    appended."""
    real: Any = unread.real
    shadow: Any = unread.value
    source = unread.source
    world.guard("LENGTH", source, len(real))
    loaded = [world.load(element, Item(source, index)) for index, element in enumerate(real)]
    added = list(shadow)
    shadow.clear()
    shadow.extend(loaded)
    unread.items, unread.appended = tuple(shadow), False
    shadow.extend(added)


def load_to_append(handler: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    """The handler of a load whose value the next instruction asks for `append` or `extend`: a list need not be read for
    that."""

    def load(frame: Any, operand: object) -> object:
        world = frame.world
        before = set(world.unread)
        world.intends_append = True
        try:
            result = handler(frame, operand)
        finally:
            world.intends_append = False
        for key in world.unread.keys() - before:  # what else the load has met is not what is appended to
            if world.unread[key].value is not frame.stack[-1]:
                world.use(world.unread[key].value)
        return result

    return load
