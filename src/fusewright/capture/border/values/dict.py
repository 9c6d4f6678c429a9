"""Dictionaries from outside: a lazy stand-in (exact dicts, instance dictionaries, globals) or a shadow (subclasses).

Takes a dict; gives an `OutsideDict`, which reads and guards key by key and holds stores back. As soon as its order,
length or whole content is asked for it is *materialised*: a real dict, its shadow, takes over for good.
Always holds: the outside dict is only read; whatever was written is in `stores` (not materialised) or in the shadow's
content.
"""

from __future__ import annotations

import gc
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.absent import LOOK_LIKE
from fusewright.capture.border.effects import DELETED, Shadow, contents
from fusewright.capture.border.native import Trampoline, native
from fusewright.capture.border.values.cls import check_plain, contents_owner, guarded_lookup
from fusewright.capture.border.values.constant import is_constant, is_native_function
from fusewright.capture.border.values.list import check_no_slots, load_attributes
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import Attribute, DictKey, Item, ProxiedDict, Source

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


class OutsideDict:
    """Stands for an outside dict (or a mappingproxy, which is read only).

    loaded  key → its value inside, MISSING when its absence was guarded
    stores  key → the value stored, or DELETED, in the order of the stores
    read_back  the keys that were read after they were stored
    shadow  the real dict that has taken over, once materialised
    """

    __slots__ = ("loaded", "read_back", "real", "shadow", "source", "stores", "world")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, world: World, real: dict | types.MappingProxyType, source: Source) -> None:
        self.world = world
        self.real = real
        self.source = source
        self.loaded: dict[object, object] = {}
        self.stores: dict[object, object] = {}
        self.read_back: set[object] = set()
        self.shadow: dict | None = None

    def lookup(self, key: object) -> object:
        """The value of `key` inside, or MISSING; guards just that."""
        if self.shadow is not None:
            return dict.get(self.shadow, key, MISSING)
        if type(key) is not str:  # a string is guarded by value where it comes from
            if not _is_plain_key(key):
                return native(dict.get, self.materialise(), key, MISSING)
            self.world.guard_identity(key)
        if key in self.stores:
            stored = self.stores[key]
            self.read_back.add(key)
            self.world.touched.append(stored)
            return MISSING if stored is DELETED else stored
        if key in self.loaded:
            self.world.touched.append(self.loaded[key])
            return self.world.use(self.loaded[key])
        real = self.real.get(key, MISSING)
        if real is MISSING:
            if self.real:
                self.world.guard("ABSENT", self.source, key)
            else:  # one guard for all names
                self.world.guard("LENGTH", self.source, 0)
            value: object = MISSING
        else:
            value = self.world.load(real, Item(self.source, key))
        self.loaded[key] = value
        return value

    def store(self, key: object, value: object) -> None:
        """Holds a store back until `finish`."""
        self._note_store()
        if self.shadow is not None:
            self.shadow[key] = value
        elif _is_plain_key(key) and self.stores.get(key) is not DELETED:
            self.stores[key] = value
        else:
            self.materialise()[key] = value

    def _note_store(self) -> None:
        self.world.stored[id(self.real)] = self
        self.world.store_count += 1

    def remove(self, key: object) -> None:
        """Deletes `key`; KeyError when it is not there."""
        self._note_store()
        if self.lookup(key) is MISSING:
            raise KeyError(key)
        if self.shadow is not None:
            del self.shadow[key]
        else:
            self.stores[key] = (
                DELETED  # a later store of the same key materialises, because it comes last in a real dict
            )

    def materialise(self) -> dict:
        """The real dict with everything loaded; from now on it stands for the outside one."""
        if self.shadow is None:
            keys = tuple(self.real)
            self.world.guard("KEYS", self.source, keys)
            shadow: dict = {}
            for index, key in enumerate(keys):
                loaded = self.world.use(self.loaded.get(key, MISSING))
                if loaded is MISSING:
                    loaded = self.world.load(self.real[key], Item(self.source, key))
                shadow[load_key(self.world, key, self.source, index)] = loaded
            before = contents(shadow)
            for key, stored in self.stores.items():
                if stored is DELETED:
                    shadow.pop(key, None)
                else:
                    shadow[key] = stored
            self.shadow = shadow
            if isinstance(self.real, dict):
                self.world.effects.shadows.append(Shadow(self.real, self.source, shadow, before))
            self.world.replace_stand_in(
                self.real, shadow if isinstance(self.real, dict) else types.MappingProxyType(shadow)
            )
        return self.shadow

    def as_native(self) -> dict | types.MappingProxyType:
        """What native code may see: of the type that the outside object has."""
        self.materialise()
        return self.world.known_stand_in(self.real)  # type: ignore[no-any-return]

    # What a program may do with a dict by key alone stays lazy.

    def __getitem__(self, key: object, /) -> object:
        value = self.lookup(key)
        if value is MISSING:
            raise KeyError(key)
        return value

    def get(self, key: object, default: object = None, /) -> object:
        value = self.lookup(key)
        return default if value is MISSING else value

    def __contains__(self, key: object, /) -> bool:
        return self.lookup(key) is not MISSING

    def __setitem__(self, key: object, value: object, /) -> None:
        self.check_writable()
        self.store(key, value)

    def __delitem__(self, key: object, /) -> None:
        self.check_writable()
        self.remove(key)

    def setdefault(self, key: object, default: object = None, /) -> object:
        self.check_writable()
        value = self.lookup(key)
        if value is MISSING:
            self.store(key, default)
            return default
        return value

    def pop(self, key: object, default: object = MISSING, /) -> object:
        self.check_writable()
        value = self.lookup(key)
        if value is MISSING:
            if default is not MISSING:
                return default
            raise KeyError(key)
        self.remove(key)
        return value

    def check_writable(self) -> None:
        """A mappingproxy has no item assignment."""
        if not isinstance(self.real, dict):
            raise TypeError("'mappingproxy' object does not support item assignment")

    # Native code that takes any mapping sees the materialised content.

    def __len__(self) -> int:
        if self.shadow is None and not self.stores and isinstance(self.real, dict):
            self.world.guard("LENGTH", self.source, len(self.real))
            return len(self.real)
        return len(self.materialise())

    def __iter__(self) -> Iterator[object]:
        return iter(self.materialise())

    def __eq__(self, other: object) -> bool:
        return self.materialise() == (other.materialise() if isinstance(other, OutsideDict) else other)

    def __repr__(self) -> str:
        return repr(self.as_native())

    def keys(self) -> object:
        return self.materialise().keys()

    def values(self) -> object:
        return self.materialise().values()

    def items(self) -> object:
        return self.materialise().items()

    def update(self, /, *others: object, **more: object) -> None:
        self.check_writable()
        plain = len(others) < 2 and all(type(other) in (dict, OutsideDict) for other in others)
        if not plain:  # making its pairs may look at this dict
            self._note_store()
            self.world.tracer.call(dict.update, (self.materialise(), *others), more)
            return
        for key, value in dict(*others, **more).items():
            self.store(key, value)


LOOK_LIKE[OutsideDict] = lambda stand_in: {} if isinstance(stand_in.real, dict) else types.MappingProxyType({})

# Methods that work key by key; every other attribute of a dict materialises it first.
LAZY_METHODS = frozenset({
    "__getitem__", "get", "__contains__", "__setitem__", "__delitem__", "setdefault", "pop", "update", "__len__",
})  # fmt: skip


def read_namespace(namespace: Any, name: str) -> object:
    """An entry of an instance dictionary or its stand-in, or MISSING."""
    if namespace is None:
        return MISSING
    return namespace.lookup(name) if type(namespace) is OutsideDict else namespace.get(name, MISSING)


def _is_plain_key(key: object) -> bool:
    return (
        is_constant(key)
        or isinstance(key, (type, types.FunctionType))
        or is_native_function(key)
        or type(key).__hash__ is object.__hash__
    )


def load_key(world: World, key: object, source: Source, index: int, owner: type | None = None) -> object:
    """A key inside: constants are guarded by the KEYS guard already; others get their place as a source."""
    if is_constant(key):
        return key
    return world.load(key, DictKey(source, index, owner))


def attributes_of(world: World, real: dict, source: Source) -> Any:
    """The stand-in of an instance dictionary."""
    check_plain(real, source)
    return world.dict_stand_in(real, source)


def handed_out(namespace: Any) -> Any:
    """An instance dictionary that the program takes as an object, or that is written to: one of a subclass would be
    asked."""
    if type(namespace) is OutsideDict:
        namespace.world.guard("TYPE", namespace.source, type(namespace.real))
    return namespace


def is_written(stand_in: object, key: object = MISSING) -> bool:
    """Whether the call may have written to a dict that this stands for, at this key if one is given."""
    if type(stand_in) is not OutsideDict:
        return False
    return stand_in.shadow is not None or (bool(stand_in.stores) if key is MISSING else key in stand_in.stores)


def load_proxy(world: World, real: types.MappingProxyType, source: Source) -> object:
    """A read-only view of a dict, which is loaded."""
    (mapping,) = gc.get_referents(real)
    if type(mapping) is not dict:
        raise GraphBreak("opaque-object", f"{source.text()}, a mappingproxy of a {type(mapping).__qualname__}")
    world.guard("TYPE", source, types.MappingProxyType)
    inside = world.materialise(world.load(mapping, ProxiedDict(source)))
    return world.stand_in(real, source, types.MappingProxyType(inside))


def load_exact(world: World, real: dict, source: Source) -> object:
    """A lazy stand-in; only the type is guarded at first."""
    world.guard("TYPE", source, type(real))
    return world.stand_in(real, source, OutsideDict(world, real, source))


def is_copied_whole(world: World, obj: Any) -> bool:
    """Whether CPython copies the entries of this dict as they lie there: it calls a subclass's `keys` and
    `__getitem__` only where the class has an `__iter__` of its own, as OrderedDict has."""
    return isinstance(obj, dict) and guarded_lookup(world, type(obj), "__iter__") is dict.__iter__


_MAPPINGS: tuple[dict[str, object], ...] = ({}, OrderedDict())
VIEWS: dict[type, Any] = {
    type(getattr(mapping, name)()): getattr(type(mapping), name)
    for mapping in _MAPPINGS
    for name in ("keys", "values", "items")
}
"""The types of views, with what gives one of a dict: a subclass may have other methods under these names."""


def load_view(world: World, real: Any, source: Source) -> object:
    """A view shows a dict, which is loaded."""
    (mapping,) = gc.get_referents(real)
    shown = ProxiedDict(Attribute(source, "mapping"))
    world.guard("TYPE", source, type(real))
    inside = world.materialise(world.load(mapping, shown))
    return world.stand_in(real, source, VIEWS[type(real)](inside))


def load_subclass(world: World, real: Any, source: Source) -> object:
    """OrderedDict, defaultdict, and user subclasses: a shadow of the same type, made without running user code."""
    cls = type(real)
    check_no_slots(cls)
    base: Any = next(kind for kind in (OrderedDict, defaultdict, dict) if isinstance(real, kind))
    world.guard("TYPE", source, cls)
    try:
        held = contents(real)
    except KeyError:
        held = ()
    if len(held) != 2 * dict.__len__(real):
        raise GraphBreak("opaque-object", "an OrderedDict that a dict's method has written to")
    keys = held[::2]
    world.guard("KEYS", source, keys)
    shadow: Any = base.__new__(cls)
    if base is defaultdict:
        maker = factory_of(real)
        factory = world.load(maker, world.constant(maker, "default_factory"))
        world.guard("CALL", source, _HasFactory(maker))
        defaultdict.__init__(shadow, callback(world, factory))
    world.stand_in(real, source, shadow)
    owner = contents_owner(cls, base)
    for index, (key, value) in enumerate(zip(keys, held[1::2], strict=True)):
        inside = world.load(value, Item(source, key, owner))
        base.__setitem__(shadow, load_key(world, key, source, index, owner), inside)
    attributes = None if cls is OrderedDict else load_attributes(world, real, source, shadow)
    world.effects.shadows.append(Shadow(real, source, shadow, contents(shadow), attributes))
    return shadow


_FACTORY: Any = vars(defaultdict)["default_factory"]
factory_of: Callable[[Any], Any] = _FACTORY.__get__
set_factory: Callable[[Any, Any], None] = _FACTORY.__set__


def callback(world: World, function: Any) -> Any:
    """A default factory that native code may call: interpreted functions go through a trampoline."""
    if function is None or (isinstance(function, type) and function.__module__ == "builtins"):
        return function
    if isinstance(function, Trampoline):
        return function
    if not callable(function):
        raise GraphBreak("untraceable-call", "a defaultdict's factory is not callable")
    return Trampoline(world.tracer, function)


class _HasFactory:
    """Guard callable: a defaultdict still has this factory."""

    __slots__ = ("factory",)

    def __init__(self, factory: object) -> None:
        self.factory = factory

    def __call__(self, candidate: defaultdict) -> bool:
        return factory_of(candidate) is self.factory

    def __repr__(self) -> str:
        return f"has the default factory {self.factory!r}"
