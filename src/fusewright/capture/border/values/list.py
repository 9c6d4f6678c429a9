"""Lists and deques from outside: shadows.

Takes a list, deque or subclass; gives a new container of the same type, filled with loaded elements without running
user code. A list that is only appended to is not read: its length is not guarded, the shadow holds what is added. Of a
long one that is only indexed or measured, the elements that are asked for are read alone.
Always holds: the outside container is only read; `finish` writes the shadow's final content back if it changed.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.effects import Shadow, contents
from fusewright.capture.border.values import cls as classes
from fusewright.capture.bytecode.instructions import NULL
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
    if cls is base and (world.intent == "append" or (world.intent and cls is list and len(real) > LONG)):
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
    """The program looks at a list that was not read so far: its elements are loaded, in front of what was appended."""
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


def length(world: World, obj: Any) -> int:
    """Of a list that was not read, behind which the stand-in holds what was appended."""
    unread = world.unread[id(obj)]
    real: Any = unread.real
    world.guard("LENGTH", unread.source, len(real))
    limit = length_limit(real) if type(real) is deque else None
    return min(len(real) + len(obj), sys.maxsize if limit is None else limit)


def element(world: World, obj: Any, key: Any) -> Any:
    """`obj[key]`: of a list that was not read, this element alone."""
    unread = world.unread.get(id(obj))
    if unread is not None:
        real: Any = unread.real
        if type(key) is int and not obj and -len(real) <= key < len(real):
            key %= length(world, obj)
            return world.load(real[key], Item(unread.source, key))
        read_list(world, world.unread.pop(id(obj)))
    return world.getitem(obj, key)


LONG = 64
"""Of a list of as many elements it is cheaper to read all: calls that ask for others then fit."""
_PUSHES = frozenset({"LOAD_FAST", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF"})
_JUMPS = frozenset({"POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE"})


def intent_of(instructions: Sequence[Any], index: int) -> str:
    """What the instructions behind a load do with its value: "append" (or extend), "item", "len", "truth"; "" for
    anything else."""
    above = 0  # values on the stack above it
    for following in instructions[index + 1 :]:
        action, operand = following.action, following.operand
        if above == 0:
            if action in ("NULL_LOAD_ATTR", "LOAD_ATTR_NULL") and operand in APPEND:
                return "append"
            if action in ("CALL", "CALL_NULL_LAST") and operand == (1, ()):
                return "len"
            if action in _JUMPS:
                return "truth"
        if above == 1 and action == "BINARY_SUBSCR":
            return "item"
        if action in _PUSHES:
            above += 1
        elif action == "NOP":
            continue
        elif action in ("BINARY_OP", "BINARY_SUBSCR") and above > 1:
            above -= 1
        elif not (action in ("LOAD_ATTR", "UNARY_NEGATIVE") and above):
            return ""
    return ""


def load_for(intent: str, action: str, handler: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    """The handler of a load whose value is only asked for what a list need not be read for."""

    taken = {"LOAD_ATTR": 1, "BINARY_SUBSCR": 2}.get(action, 0)

    def load(frame: Any, operand: object) -> object:
        world, below = frame.world, len(frame.stack) - taken
        if intent == "len" and {*map(id, frame.stack[below - 2 : below])} != {id(NULL), id(len)}:
            return handler(frame, operand)
        before = set(world.unread)
        world.intent = intent
        try:
            result = handler(frame, operand)
        finally:
            world.intent = ""
        for key in world.unread.keys() - before:  # what else the load has met is asked for other things
            if world.unread[key].value is not frame.stack[-1]:
                world.use(world.unread[key].value)
        return result

    return load
