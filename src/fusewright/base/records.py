"""Dataclasses that cost little to define.

Takes a class with annotated fields; gives it what `dataclasses.dataclass(slots=True)` would: constructor, equality,
hash, text, and what the `dataclasses` module's `fields` and `replace` need. Always holds: no code is generated when a
class is defined. The standard decorator generates and compiles up to six functions a class, 0.3 ms, and this package
has 200 such classes: half of the time of its imports. Here equality, hash and text are closures over one getter of the
fields, and the constructor is generated when the first object is made. What the decorator does besides is done by hand
too (0.1 ms): fields are what is annotated, without ClassVar, InitVar and keyword-only ones.
"""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, FrozenInstanceError, field, fields, replace
from typing import Any, Literal, TypeVar, dataclass_transform

__all__ = ["KeepsHash", "dataclass", "field", "fields", "replace"]

Class = TypeVar("Class", bound=type)
Getter = Callable[[Any], tuple[Any, ...]]


class KeepsHash:
    """Base of frozen records that hold one another (a path, an expression): each computes its hash once."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass_transform(field_specifiers=(field,))
def dataclass(
    *, slots: Literal[True], frozen: bool = False, eq: bool = True, weakref_slot: bool = False
) -> Callable[[Class], Class]:
    """`dataclasses.dataclass` with those of its arguments that this package uses. What the class itself defines is
    kept."""

    def define(cls: Class) -> Class:
        own = {name for name, value in cls.__dict__.items() if not (name == "__hash__" and value is None)}
        if not cls.__doc__:
            cls.__doc__ = cls.__name__  # the standard module would format a signature
        made: Any = _slotted(cls, weakref_slot)
        made.__dataclass_params__ = _Parameters(eq, frozen, weakref_slot)
        methods: dict[str, Any] = {"__init__": _first_constructor(made, frozen), "__repr__": _text}
        if eq:
            get = _getter(f.name for f in fields(made) if f.compare)
            methods |= {
                "__eq__": _equality(get),
                "__hash__": _hash(get, issubclass(cls, KeepsHash)) if frozen else None,
            }
        if frozen:
            methods |= {
                "__setattr__": _no_store,
                "__delattr__": _no_delete,
                "__getstate__": _state,
                "__setstate__": _set_state,
            }
        for name, method in methods.items():
            if name not in own:
                setattr(made, name, method)
        return made

    return define


class _Parameters:
    """What the `dataclasses` and `pprint` modules ask of a class that they know as a dataclass."""

    init = repr = match_args = slots = True
    order = unsafe_hash = kw_only = False

    def __init__(self, eq: bool, frozen: bool, weakref_slot: bool) -> None:
        self.eq, self.frozen, self.weakref_slot = eq, frozen, weakref_slot


def _slotted(cls: Any, weakref_slot: bool) -> Any:
    """The class once more, with slots, and with its fields where the standard module keeps them."""
    known: dict[str, dataclasses.Field[Any]] = {}
    taken: set[str] = set()
    for base in reversed(cls.__mro__[1:]):
        known.update(base.__dict__.get("__dataclass_fields__", ()))
        taken.update(base.__dict__.get("__slots__", ()))
    namespace = dict(cls.__dict__)
    for name, kind in cls.__annotations__.items():
        default = namespace.pop(name, MISSING)
        made: Any = default if isinstance(default, dataclasses.Field) else field(default=default)
        made.name, made.type, made.kw_only, made._field_type = name, kind, False, _FIELD
        known[name] = made
    for name in ("__dict__", "__weakref__"):
        namespace.pop(name, None)
    slots = (*known, "__weakref__") if weakref_slot else tuple(known)
    namespace["__qualname__"] = cls.__qualname__
    namespace["__slots__"] = tuple([name for name in slots if name not in taken])
    namespace["__dataclass_fields__"] = known
    namespace["__match_args__"] = tuple([name for name, one in known.items() if one.init])
    return type(cls)(cls.__name__, cls.__bases__, namespace)


_FIELD: Any = dataclasses._FIELD  # type: ignore[attr-defined]
"""How the standard module marks a field that is none of its special kinds."""


def _getter(names: Iterable[str]) -> Getter:
    """The values of these attributes of an object, as a tuple."""
    chosen = tuple(names)
    if len(chosen) > 1:
        return operator.attrgetter(*chosen)
    return lambda record: tuple(getattr(record, name) for name in chosen)


def _equality(get: Getter) -> Callable[[Any, object], bool]:
    def __eq__(self: Any, other: object) -> bool:
        return get(self) == get(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(get: Getter, kept: bool) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        return hash(get(self))

    def kept_hash(self: Any) -> int:
        try:
            return self._hash
        except AttributeError:
            found = hash(get(self))
            object.__setattr__(self, "_hash", found)
            return found

    return kept_hash if kept else __hash__


@reprlib.recursive_repr()
def _text(self: Any) -> str:
    return (
        f"{type(self).__qualname__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self) if f.repr)})"
    )


def _no_store(self: Any, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _no_delete(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for f, value in zip(fields(self), state):
        object.__setattr__(self, f.name, value)


def _first_constructor(cls: Any, frozen: bool) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__ = constructor = _constructor(cls, frozen)
        constructor(self, *args, **kwargs)

    return __init__


def _constructor(cls: Any, frozen: bool) -> Callable[..., None]:
    """`__init__` of `cls`, as the standard module would make it. A slot of a frozen class is set by its descriptor: the
    quickest way."""
    scope: dict[str, Any] = {"MISSING": MISSING}
    parameters, body = ["self"], []
    for f in fields(cls):
        name, value = f.name, f.name
        if f.default_factory is not MISSING:
            scope[f"make_{name}"] = f.default_factory
            value = f"make_{name}() if {name} is MISSING else {name}" if f.init else f"make_{name}()"
        elif f.default is not MISSING:
            scope[f"default_{name}"] = f.default
            value = name if f.init else f"default_{name}"
        elif not f.init:
            continue  # __post_init__ sets it
        if f.init:
            default = (
                "=MISSING" if f.default_factory is not MISSING else "" if f.default is MISSING else f"=default_{name}"
            )
            parameters.append(name + default)
        if frozen:
            scope[f"set_{name}"] = getattr(cls, name).__set__
            body.append(f"set_{name}(self, {value})")
        else:
            body.append(f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(body or ["pass"]), scope)
    made = scope["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    return made
