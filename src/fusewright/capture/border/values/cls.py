"""Classes: known by identity; their attributes through the method resolution order.

Takes classes (from outside, or reached as `type(x)`); gives attribute reads as `type.__getattribute__` would do them,
with a TYPE_ATTRIBUTE guard for each name that was looked up. Always holds: a store to a class is held back and read
back from the overlay.
"""

from __future__ import annotations

import re
import types
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.effects import DELETED
from fusewright.capture.border.native import native
from fusewright.capture.border.values.constant import is_constant
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import Attribute, Computed, InstanceDict, Item, Source

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def lookup(cls: type, name: str) -> Any:
    """What the method resolution order of `cls` holds under `name`, raw, or MISSING; no guard."""
    for base in cls.__mro__:
        found = base.__dict__.get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING


# The type of builtin methods that know their class (`re.compile("").match`), a subclass of BuiltinFunctionType.
BUILTIN_METHOD: type = type(re.compile("").match)


def descriptor_of(method: Any, owner: Any) -> Any:
    """The descriptor in a class of the owner's MRO that a bound method written in C was made from; None if there is
    none."""
    for base in type(owner).__mro__:
        found: Any = base.__dict__.get(method.__name__)
        if (
            type(found) in (types.MethodDescriptorType, types.WrapperDescriptorType)
            and found.__get__(owner, type(owner)) == method
        ):
            return found
    return None


def native_new(cls: type) -> Any:
    """The `__new__` of the nearest base that is written in C: what really allocates an instance. None for a class that
    nobody may call (a type of iterators)."""
    base: Any = cls
    while not isinstance(base.__new__, types.BuiltinFunctionType):
        base = base.__base__
    return None if base.__flags__ & DISALLOW_INSTANTIATION else base.__new__


DISALLOW_INSTANTIATION = 1 << 7


def said_name(cls: type) -> str:
    """The name under which CPython's messages speak of a class: a type that is written in C may say its module too."""
    try:
        type.__getattribute__(cls, "")
    except AttributeError as error:
        return str(error).split("'")[1]
    return cls.__name__


def has_dict(cls: type) -> bool:
    """Whether instances have a dictionary to read: TypeVar, from CPython 3.12 on, keeps one to itself."""
    return cls.__dictoffset__ != 0 and lookup(cls, "__dict__") is not MISSING


def is_hooked(cls: type) -> bool:
    """Whether `getattr` of an instance runs code of the program's, whatever the name is."""
    return isinstance(lookup(cls, "__getattribute__"), types.FunctionType)


def own_attributes(value: object) -> dict[str, Any]:
    """The instance dictionary, of which no code of the program's is asked; an empty one where there is none."""
    found = lookup(type(value), "__dict__")
    return found.__get__(value) if isinstance(found, types.GetSetDescriptorType) else {}


def is_heap_type(cls: type) -> bool:
    return bool(cls.__flags__ & (1 << 9))


def contents_owner(cls: type, base: type) -> type | None:
    """The builtin type whose methods read what an instance of this container class holds; None if that is the class
    itself, or another one written in C. One of Python may get methods of its own at any time."""
    return base if is_heap_type(cls) else None


def dict_source(cls: type, source: Source) -> InstanceDict:
    """Where the instance dictionary of an object of this class lies."""
    return InstanceDict(source, is_hooked(cls))


def check_plain(namespace: object, source: Source) -> None:
    """Python looks into an instance dictionary of a subclass of dict without asking it: that is a graph break."""
    if type(namespace) is not dict:
        raise GraphBreak("opaque-object", f"{source.text()}, a {type(namespace).__qualname__}")


def field_source(cls: type, source: Source, field: Any, name: str) -> Source:
    """Where a descriptor written in C, which stands under this name in a class of the MRO, finds what it shows."""
    plain = lookup(cls, name) is field and not is_hooked(cls)
    return Attribute(source, name) if plain else Computed(source, field.__get__)


def slots(cls: type) -> list[tuple[str, types.MemberDescriptorType]]:
    """Names and descriptors of the `__slots__` that Python classes of the MRO define."""
    return [
        (name, member)
        for base in cls.__mro__
        if "__slots__" in base.__dict__
        for name, member in base.__dict__.items()
        if isinstance(member, types.MemberDescriptorType)
    ]


_UNKNOWN = object()


def guarded_lookup(world: World, cls: type, name: str) -> Any:
    """`lookup`, guarded, and through the overlay of stores to classes."""
    if not world.effects.slots:
        found = world.looked_up.get((cls, name), _UNKNOWN)
        if found is not _UNKNOWN:
            return found
    else:
        for base in cls.__mro__:
            stored = world.effects.read_slot(base, name)
            if stored is not None and stored.value is not DELETED:
                return stored.value
            if stored is None and name in base.__dict__:
                break
    found = lookup(cls, name)
    if not cls.__flags__ & _IMMUTABLE or not all(base.__flags__ & _IMMUTABLE for base in cls.__mro__):
        world.guard_type_attribute(cls, name, found)
    if not world.effects.slots and not world.is_inside_class(cls):
        world.looked_up[cls, name] = found
    return found


def python_method(world: World, cls: type, name: str) -> types.FunctionType | None:
    """The Python function that implements the special method `name` for instances of `cls`, or None (a C slot, or
    nothing)."""
    if not cls.__flags__ & (1 << 9):  # a static type has C slots only
        return None
    found = guarded_lookup(world, cls, name)
    if not isinstance(found, types.FunctionType):
        return None
    world.load_function(found)
    return found


def getattr_class(world: World, cls: type, name: str) -> object:
    """`cls.name`."""
    meta = type(cls)
    from_meta = guarded_lookup(world, meta, name)
    if from_meta is not MISSING and world.is_data_descriptor(from_meta, reads=True):
        if isinstance(from_meta, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            if name == "__dict__":
                return world.dict_stand_in(cls.__dict__, dict_source(meta, world.constant(cls, cls.__name__)))
            value = native(getattr, cls, name)
            if name == "__mro__" or not cls.__flags__ & (1 << 9):
                world.guard_bases(cls)
                return world.load(value, world.constant(value, name))
            return world.load(value, Attribute(world.constant(cls, cls.__name__), name))
        return world.bind(from_meta, cls, meta, name)
    getattribute = python_method(world, meta, "__getattribute__")
    if getattribute is not None:
        return world.tracer.call(getattribute, (cls, name))
    found = guarded_lookup(world, cls, name)
    if found is not MISSING:
        return _bind_to_class(world, found, cls, name)
    if from_meta is not MISSING:
        return world.bind(from_meta, cls, meta, name)
    fallback = python_method(world, meta, "__getattr__")
    if fallback is not None:
        return world.tracer.call(fallback, (cls, name))
    raise UserException(AttributeError(f"type object '{said_name(cls)}' has no attribute '{name}'", name=name, obj=cls))


def _bind_to_class(world: World, found: Any, cls: type, name: str) -> object:
    kind = type(found)
    if kind is types.FunctionType:
        return world.load(found, world.constant(found, name))
    if kind is staticmethod:
        return world.load(found.__func__, world.constant(found.__func__, name))
    if kind is classmethod:
        return bind_classmethod(world, found, cls)
    getter = lookup(kind, "__get__")
    if getter is MISSING:
        return world.load(found, world.constant(found, f"{cls.__name__}_{name}"))
    if isinstance(getter, types.FunctionType) and kind.__module__ not in ("enum", "types"):
        return world.tracer.call(getter, (world.load(found, world.constant(found, name)), None, cls))
    if isinstance(found, types.ClassMethodDescriptorType):
        return native(found.__get__, None, cls)  # not `cls.name`: for `super()` the lookup began further on
    value = native(type.__getattribute__, cls, name)
    return (
        value
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType))
        else world.load(value, world.constant(value, name))
    )


def bind_classmethod(world: World, found: classmethod, cls: type) -> object:
    """A classmethod's function bound to the class."""
    function = found.__func__
    if isinstance(function, types.FunctionType):
        return types.MethodType(world.load(function, world.constant(function, function.__name__)), cls)
    return native(found.__get__, None, cls)


def held_inside(world: World, cls: type) -> list[object]:
    """What a class that this capture has made holds, other than constants, and what existed before."""
    held = [one for one in vars(cls).values() if not (isinstance(one, type) or is_constant(one))]
    return [one for one in held if world.outside(one) is None]


def setattr_class(world: World, cls: type, name: str, value: object) -> None:
    """`cls.name = value`: held back; only plain metaclasses, because others run code at a store."""
    if world.is_inside_class(cls):
        native(type.__setattr__, cls, name, value)
        world.note_inside_class(cls)
        return
    if cls.__flags__ & _IMMUTABLE or lookup(type(cls), "__setattr__") is not type.__dict__["__setattr__"]:
        raise GraphBreak("class-mutation", f"a store to {cls.__qualname__}.{name}")
    if name.startswith("__") and name.endswith("__"):
        raise GraphBreak("class-mutation", f"a store to the special attribute {cls.__qualname__}.{name}")
    guarded_lookup(world, cls, name)
    world.load(cls, world.constant(cls, cls.__name__))
    world.effects.store_slot(cls, name, value)


def delattr_class(world: World, cls: type, name: str) -> None:
    """Deleting a class's attribute changes what its bases show: left to eager."""
    raise GraphBreak("class-mutation", f"del {cls.__qualname__}.{name}")


def getattr_super(world: World, proxy: Any, name: str) -> object:
    """An attribute of `super(...)`: the lookup starts behind `__thisclass__`; each class passed over is guarded."""
    this, instance, owner = proxy.__thisclass__, proxy.__self__, proxy.__self_class__
    if owner is None or name == "__class__":
        return native(getattr, proxy, name)
    world.guard_bases(owner)
    mro = owner.__mro__
    for base in mro[mro.index(this) + 1 :]:
        found = base.__dict__.get(name, MISSING)
        where = InstanceDict(world.constant(base, base.__name__))
        if found is MISSING:
            if not base.__flags__ & _IMMUTABLE:
                world.guard("ABSENT", where, name)
            continue
        if not base.__flags__ & _IMMUTABLE:
            world.guard("IS", Item(where, name), found)
        if issubclass(type(instance), type) and issubclass(instance, this) and instance is owner:
            return _bind_super_class(world, found, instance, name)
        return world.bind(found, instance, owner, name)
    raise UserException(AttributeError(f"'super' object has no attribute '{name}'", name=name, obj=proxy))


def _bind_super_class(world: World, found: Any, cls: type, name: str) -> object:
    if isinstance(found, classmethod):
        return bind_classmethod(world, found, cls)
    # looked up on the class, the name would give what `super` passes over
    if isinstance(found, types.ClassMethodDescriptorType):
        return native(found.__get__, None, cls)
    return _bind_to_class(world, found, cls, name)
