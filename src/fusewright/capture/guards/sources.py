"""Sources: where an outside object came from, as a path that can be evaluated again at every call.

Takes nothing; gives immutable, hashable descriptions. A source is evaluated three ways, which must agree:
by the native guard program (`csrc/guards.cpp`), by generated Python text (`text`, used by `finish` and in messages),
and by a person reading a recompile log.
"""

from __future__ import annotations

import builtins
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from fusewright._native import isinstance
from fusewright.base.records import KeepsHash, dataclass


def _is_literal(key: object) -> bool:
    if type(key) is tuple:
        return all(_is_literal(part) for part in key)  # type: ignore[attr-defined]
    return key is None or type(key) in (str, int, float, bool, bytes, complex)


def owner_name(owner: type) -> str:
    """The variable that stands for a builtin type whose methods are called on its subclasses."""
    return f"__{owner.__name__}"


@dataclass(frozen=True, slots=True)
class Source(KeepsHash):
    """Base of all sources. `text` is a Python expression over the names that `finish` has in scope."""

    def text(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Local(Source):
    """The argument in slot `index` of the root frame's locals (positional, keyword-only, `*args` tuple, `**kwargs`
    dict)."""

    index: int
    name: str

    def text(self) -> str:
        # A resume function's `.s0` is no identifier, and an argument called `list` would hide the builtin in `finish`.
        return self.name if self.name.isidentifier() and not hasattr(builtins, self.name) else f"__local_{self.index}"


@dataclass(frozen=True, slots=True)
class FunctionSource(Source):
    """The function object whose frame is being compiled."""

    def text(self) -> str:
        return "__function"


class Weak(weakref.ref[Any]):
    """How an object is held that the program makes anew: compiled code must not keep alive what it holds."""

    __slots__ = ()


class Gone:
    """Stands for an object that was held so, and is dead."""

    def __repr__(self) -> str:
        return "an object that is gone"


GONE = Gone()


def held(obj: object) -> object:
    """What stands for `obj` where it is known by identity: a Weak for functions made in a function's body and those
    with variables of an enclosing one, else the object itself."""
    made: Any = obj.__wrapped__ if type(obj) is functools._lru_cache_wrapper else obj
    anew = type(made) is types.FunctionType and (made.__closure__ or "<locals>" in made.__code__.co_qualname)
    return Weak(obj) if anew else obj


def unheld(one: object) -> object:
    """The object that `held` has given `one` for, or GONE."""
    if type(one) is not Weak:
        return one
    obj = one()
    return GONE if obj is None else obj


@dataclass(frozen=True, slots=True)
class Constant(Source):
    """An object known at capture, kept by the compiled code (a module's globals, a class, `sys.modules[...]`) unless
    the program makes such objects anew."""

    obj_id: int
    held: object
    name: str

    @classmethod
    def of(cls, obj: object, name: str) -> Constant:
        return cls(id(obj), held(obj), name)

    @property
    def obj(self) -> object:
        return unheld(self.held)

    def text(self) -> str:
        return f"{self.name}()" if self.is_weak else self.name

    @property
    def is_weak(self) -> bool:
        return type(self.held) is Weak

    def __hash__(self) -> int:
        return hash((Constant, self.obj_id))

    def __eq__(self, other: object) -> bool:
        return type(other) is Constant and (other.held is self.held or other.obj is self.obj is not GONE)


@dataclass(frozen=True, slots=True)
class Attribute(Source):
    """`getattr(base, name)` where the attribute is a slot, C descriptor or other cheap native attribute
    (`__globals__`, `__defaults__`, `__self__`, `cell_contents`, `__class__`, `tensor.grad`); never runs Python code."""

    base: Source
    name: str

    def text(self) -> str:
        return f"{self.base.text()}.{self.name}"


@dataclass(frozen=True, slots=True)
class InstanceDict(Source):
    """The instance dictionary of an object (`vars(base)`), or a module's / class's `__dict__`.

    hooked: the class has a `__getattribute__` of its own, which generated code must not run."""

    base: Source
    hooked: bool = False

    def text(self) -> str:
        return (
            f"object.__getattribute__({self.base.text()}, '__dict__')"
            if self.hooked
            else f"{self.base.text()}.__dict__"
        )


@dataclass(frozen=True, slots=True)
class ProxiedDict(Source):
    """The dict behind a mappingproxy. In text it is the proxy, which reads alike."""

    base: Source

    def text(self) -> str:
        return self.base.text()


@dataclass(frozen=True, slots=True)
class Item(Source):
    """`base[key]` by the builtin container's own method: an index of a list/tuple/deque, a key of a dict.

    A key that is a literal is compared by value, any other one by identity: equality may be the program's code, or give
    a tensor.
    Item(InstanceDict(x), "weight") prints as `x.weight`, Item(InstanceDict(m)._modules, ...) likewise readable.
    owner: that builtin type, of a container whose class may have a `__getitem__` of its own.
    """

    base: Source
    key: object
    owner: type | None = None

    def text(self) -> str:
        key = self.key_name() or repr(self.key)
        if self.owner is None:
            return f"{self.base.text()}[{key}]"
        return f"{owner_name(self.owner)}.__getitem__({self.base.text()}, {key})"

    def key_name(self) -> str | None:
        """The variable that stands for a key that is no literal (a parameter, in an optimizer's state); None for a
        literal."""
        return None if _is_literal(self.key) else f"__{type(self.key).__name__}_{id(self.key):x}"

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            found = hash((self.base, self.key if _is_literal(self.key) else id(self.key)))
            object.__setattr__(self, "_hash", found)
            return found

    def __eq__(self, other: object) -> bool:
        if type(other) is not Item:
            return NotImplemented
        same = self.key is other.key or (_is_literal(self.key) and _is_literal(other.key) and self.key == other.key)
        return same and self.base == other.base


@dataclass(frozen=True, slots=True)
class TypeOf(Source):
    """`type(base)`."""

    base: Source

    def text(self) -> str:
        return f"type({self.base.text()})"


@dataclass(frozen=True, slots=True)
class Referent(Source):
    """`base()` of a weak reference: the object it refers to, or None once that is gone."""

    base: Source

    def text(self) -> str:
        return f"{self.base.text()}()"


@dataclass(frozen=True, slots=True)
class Computed(Source):
    """`function(base)`: what a function of ours, or the `__get__` of a descriptor written in C, reads from an object,
    without changing it."""

    base: Source
    function: Callable[[Any], object]

    @property
    def name(self) -> str:
        if isinstance(self.function, types.MethodWrapperType):  # each class has a descriptor of its own under this name
            descriptor: Any = self.function.__self__
            return f"__{descriptor.__name__}_{id(descriptor):x}"
        return f"__{self.function.__name__}"

    def text(self) -> str:
        return f"{self.name}({self.base.text()})"


@dataclass(frozen=True, slots=True)
class DictKey(Source):
    """The `index`-th key, in order, of a dict (for keys that are not constants). owner: as of an Item."""

    base: Source
    index: int
    owner: type | None = None

    def text(self) -> str:
        base = self.base.text()
        keys = base if self.owner is None else f"{owner_name(self.owner)}.__iter__({base})"
        return f"list({keys})[{self.index}]"


@dataclass(frozen=True, slots=True)
class TensorSize(Source):
    """`base.size(dim)` of a tensor: the source of a symbolic size."""

    base: Source
    dim: int

    def text(self) -> str:
        return f"{self.base.text()}.size()[{self.dim}]"


@dataclass(frozen=True, slots=True)
class TensorStride(Source):
    """`base.stride(dim)` of a tensor."""

    base: Source
    dim: int

    def text(self) -> str:
        return f"{self.base.text()}.stride()[{self.dim}]"


@dataclass(frozen=True, slots=True)
class NumberTensor(Source):
    """A Python float as the 0-dimensional float64 tensor that the graph takes in its place."""

    base: Source

    def text(self) -> str:
        return self.base.text()


@dataclass(frozen=True, slots=True)
class ArrayTensor(Source):
    """`torch.from_numpy(base)`: a NumPy array as a graph input."""

    base: Source

    def text(self) -> str:
        return f"torch.from_numpy({self.base.text()})"


@dataclass(frozen=True, slots=True)
class GeneratorState(Source):
    """The state of a `torch.Generator`, as the tensor that the graph takes in its place."""

    base: Source

    def text(self) -> str:
        return f"{self.base.text()}.get_state()"


@dataclass(frozen=True, slots=True)
class PlainTensor(Source):
    """A tensor of a subclass, as the plain tensor that the graph takes in its place."""

    base: Source

    def text(self) -> str:
        return f"{self.base.text()}.as_subclass(torch.Tensor)"


@dataclass(frozen=True, slots=True)
class JaggedValues(Source):
    """The values of a jagged nested tensor that requires a gradient, with its history."""

    base: Source

    def text(self) -> str:
        return f"{self.base.text()}.values()"


@dataclass(frozen=True, slots=True)
class WrappedPart(Source):
    """A part of a tensor that wraps others and requires a gradient, so that the part's gradient becomes the tensor's.

    form: how the tensor crosses the border (record/apart.py); index: 0 for its carrier, then its parts in order."""

    base: Source
    form: object
    index: int

    def text(self) -> str:
        return f"part {self.index} of {self.base.text()}"


@dataclass(frozen=True, slots=True)
class Global(Source):
    """A global name of the root frame's function: `__globals__[name]`, falling to builtins."""

    name: str

    def text(self) -> str:
        return f"__globals[{self.name!r}]"


@dataclass(frozen=True, slots=True)
class Closure(Source):
    """The contents of closure cell `index` (name `name`) of the root frame's function."""

    index: int
    name: str

    def text(self) -> str:
        return f"__function.__closure__[{self.index}].cell_contents"


def module_path(source: Source) -> str:
    """The path of a module below the compiled one, as `named_modules` has it: "layers.0.norm"."""
    if type(source) is Local or type(source) is Closure:
        return "" if source.name == "self" else source.name
    base = getattr(source, "base", None)
    path = "" if base is None else module_path(base)
    if type(source) is not Item or source.key == "_modules":
        return path
    return f"{path}.{source.key}" if path else str(source.key)
