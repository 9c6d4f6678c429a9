"""Calls of classes: `type.__call__`, with native `__new__` and interpreted `__init__`.

Takes a class and arguments; gives the new instance, which is inside and free to mutate. Always holds: construction that
runs native code of a type that is not known to be harmless is a graph break.
"""

from __future__ import annotations

import builtins
import collections
import enum
import types
import typing
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak, SkipFrame, UserException
from fusewright.capture.border.native import native
from fusewright.capture.border.native_ready import for_native
from fusewright.capture.border.protocols import truth
from fusewright.capture.border.values import cls as classes, subclass, wrapper
from fusewright.capture.border.values.constant import FROZEN_TYPES, MADE_AFRESH, PLACEMENTS, is_constant
from fusewright.capture.call import subclasses, support as call_support, torch as call_torch
from fusewright.capture.guards import MISSING

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_BUILTIN_BASES = (dict, list, set, tuple, frozenset, collections.deque, str, int, float, BaseException)


def call_class(tracer: Tracer, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """`cls(*args, **kwargs)`."""
    world = tracer.world
    if cls is torch.Tensor or cls in call_torch.LEGACY_TENSOR_TYPES:
        return _legacy_tensor(tracer, cls, args, kwargs)
    if issubclass(cls, torch.Tensor):
        if wrapper.has_parts(cls):
            return wrapper.construct(world, cls, args, kwargs)
        if cls is torch.nn.Parameter:
            return subclasses.parameter(tracer, args, kwargs)
        if cls is torch.nn.Buffer:  # which is a function that looks like a class
            return tracer.call(torch.nn.Buffer.__new__, (cls, *args), kwargs)
        if not subclass.is_subclass(cls):
            raise GraphBreak("tensor-construction", f"a call of the class {cls.__qualname__}")
        return construct(tracer, cls, args, kwargs)
    if cls in subclasses.DISABLERS:
        return native(cls)
    if cls in call_torch.NATIVE_CLASSES or cls in call_support.PURE_CLASSES:
        named = {name: for_native(world, value) for name, value in kwargs.items()}
        return note_made(world, native(cls, *(for_native(world, value) for value in args), **named))
    if issubclass(cls, np.generic) and all(isinstance(value, (int, float, complex, str, np.generic)) for value in args):
        return native(cls, *args, **kwargs)
    if (cls in call_support.VALUE_CLASSES or issubclass(cls, PLACEMENTS)) and all(
        is_constant(value) or type(value) in FROZEN_TYPES or isinstance(value, type)
        for value in (*args, *kwargs.values())
    ):
        return note_made(world, native(cls, *args, **kwargs))
    meta = type(cls)
    if meta is not type:
        if issubclass(meta, enum.EnumMeta):
            return _call_enum(tracer, cls, args, kwargs)
        custom = classes.guarded_lookup(world, meta, "__call__")
        if isinstance(custom, types.FunctionType):
            return tracer.call(custom, (cls, *args), kwargs)
        if isinstance(custom, type):  # a class is not bound (`dict`, for typed dictionaries)
            return tracer.call(custom, args, kwargs)
    return construct(tracer, cls, args, kwargs)


def _legacy_tensor(tracer: Tracer, cls: Any, args: Args, kwargs: Kwargs) -> Any:
    """`torch.Tensor([1.0, 2.0])`, `torch.LongTensor(2, 3)`: numbers, or the sizes of a tensor that is not filled."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if not kwargs and not name.startswith("torch.cuda.") and (cls is torch.Tensor or name in _DTYPES):
        dtype = torch.get_default_dtype() if cls is torch.Tensor else _DTYPES[name]
        if len(args) == 1 and type(args[0]) in (list, tuple) and _holds_numbers(tracer.world, args[0]):
            return tracer.call(torch.tensor, args, {"dtype": dtype, "device": "cpu"})
        sizes = args or (0,)
        if all(type(size) in (int, torch.SymInt) for size in sizes) or (len(args) == 1 and type(args[0]) is torch.Size):
            return tracer.call(torch.empty, sizes, {"dtype": dtype, "device": "cpu"})
        if len(args) == 1 and tracer.world.recorder_owns(args[0]) and args[0].dtype is dtype:  # its memory, its layout
            if args[0].device.type == "cpu":
                return tracer.world.torch_call(torch.ops.aten.alias.default, args, {})
    raise GraphBreak("tensor-construction", f"a call of the class {name} with other things than numbers or sizes")


def _holds_numbers(world: World, values: Any) -> bool:
    return all(
        _holds_numbers(world, value)
        if type(value) in (list, tuple)
        else type(value) in (int, float, bool) or world.recorder_owns(value)
        for value in values
    )


_DTYPES = {
    "torch.FloatTensor": torch.float32, "torch.DoubleTensor": torch.float64, "torch.HalfTensor": torch.float16,
    "torch.BFloat16Tensor": torch.bfloat16, "torch.LongTensor": torch.int64, "torch.IntTensor": torch.int32,
    "torch.ShortTensor": torch.int16, "torch.CharTensor": torch.int8, "torch.ByteTensor": torch.uint8,
    "torch.BoolTensor": torch.bool,
}  # fmt: skip


def _call_enum(tracer: Tracer, cls: type, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 1 or kwargs or not is_constant(args[0]):
        raise GraphBreak(
            "untraceable-call", f"the enumeration {cls.__qualname__} with arguments that are not one constant"
        )
    known = args[0].__hash__ is None or args[0] in cls._value2member_map_ or type(args[0]) is cls  # type: ignore
    if not known and isinstance(look := classes.guarded_lookup(tracer.world, cls, "_missing_"), classmethod):
        if look.__func__.__module__ != "enum":  # the program's own
            return construct(tracer, cls, args, kwargs)
    member = native(cls, *args)
    return tracer.world.load(member, tracer.world.constant(member, cls.__name__))


def construct(tracer: Tracer, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """`type.__call__(cls, *args, **kwargs)`."""
    world = tracer.world
    if issubclass(cls, type):
        return _make_class(tracer, cls, args, kwargs)
    check_finalizer(world, cls)
    maker = classes.guarded_lookup(world, cls, "__new__")
    function = maker.__func__ if isinstance(maker, staticmethod) else maker
    initialiser = classes.guarded_lookup(world, cls, "__init__")
    if isinstance(function, types.FunctionType):
        instance = tracer.call(world.load(function, world.constant(function, "__new__")), (cls, *args), kwargs)
    else:
        instance = _native_new(tracer, cls, function, initialiser, args, kwargs)
    if cls not in world.type_of(instance).__mro__:
        return instance
    if isinstance(initialiser, types.FunctionType):
        world_init = world.load(initialiser, world.constant(initialiser, "__init__"))
        given = tracer.call(world_init, (instance, *args), kwargs)
        if given is not None:
            raise UserException(TypeError(f"__init__() should return None, not '{world.type_of(given).__name__}'"))
    elif (
        initialiser is not object.__init__
        and not isinstance(initialiser, types.FunctionType)
        and initialiser is not MISSING
    ):
        tracer.call(initialiser, (instance, *args), kwargs)
    return instance


def note_made(world: World, made: Any) -> Any:
    """`made`, which the program has just made."""
    if type(made) in MADE_AFRESH:
        world.made[id(made)] = made
    return made


def check_watched(world: World, args: Args) -> None:
    """As `check_finalizer`, of the arguments of a weak reference with a callback to what capture made."""
    if len(args) > 1 and world.outside(args[0]) is None:
        raise SkipFrame("finalizer", f"a {type(args[0]).__qualname__} that is made is watched by a weak reference")


def new_reference(tracer: Tracer, args: Args, kwargs: Kwargs) -> NoReturn:
    """A weak reference of a class of its own, as a WeakValueDictionary makes them."""
    check_watched(tracer.world, args[1:])
    raise GraphBreak("untraceable-call", "a weak reference of a subclass")


def check_finalizer(world: World, cls: type) -> None:
    """Refuses a class with a finalizer: an instance that capture made would run it when capture lets go of it, and the
    frame's end is no place for one that ran in the midst of the frame."""
    if isinstance(classes.guarded_lookup(world, cls, "__del__"), types.FunctionType):
        raise SkipFrame("finalizer", f"an instance of {cls.__module__}.{cls.__qualname__} is made")


_ABSTRACT = 1 << 20


def _native_new(tracer: Tracer, cls: type, maker: Any, initialiser: Any, args: Args, kwargs: Kwargs) -> Any:
    world = tracer.world
    if maker is object.__new__:
        if cls.__flags__ & classes.DISALLOW_INSTANTIATION:
            return native(cls, *args, **kwargs)  # its complaint
        if cls.__flags__ & _ABSTRACT or initialiser is object.__init__:
            return native(cls.__new__, cls, *args, **kwargs)  # CPython's own complaint, if there is one
        return note_made(world, native(object.__new__, cls))
    if issubclass(cls, torch.Tensor):
        return subclasses.new(tracer, cls, args, kwargs)
    if issubclass(cls, property) and isinstance(initialiser, types.FunctionType):
        return native(maker, cls)
    if issubclass(cls, _BUILTIN_BASES):
        if isinstance(initialiser, types.FunctionType) and issubclass(cls, (dict, list, set, collections.deque)):
            return native(maker, cls)
        ready = tuple(
            call_support.iterable_for(cls)(world, value)
            if issubclass(cls, (tuple, frozenset))
            else for_native(world, value)
            for value in args
        )
        return native(maker, cls, *ready, **kwargs)
    raise GraphBreak("untraceable-call", f"the class {cls.__module__}.{cls.__qualname__}, which is written in C")


def _make_class(tracer: Tracer, meta: type, args: Args, kwargs: Kwargs) -> Any:
    if meta is type and len(args) == 1 and not kwargs:
        return tracer.world.type_of(args[0])
    if meta is not type or kwargs or not isinstance(args[1], tuple) or any(type(base) is not type for base in args[1]):
        raise GraphBreak("class-creation", f"a class made by {meta.__qualname__}")
    made = native(type, *(for_native(tracer.world, value) for value in args))
    tracer.world.note_inside_class(made)
    return made


def is_instance(tracer: Tracer, obj: Any, cls: Any) -> bool:
    """`isinstance(obj, cls)`; for tensors and stand-ins it answers for the class of the original."""
    world = tracer.world
    if isinstance(cls, tuple):
        return any(is_instance(tracer, obj, one) for one in cls)
    if isinstance(cls, types.UnionType):
        return any(is_instance(tracer, obj, one) for one in cls.__args__)
    kind = world.type_of(obj)
    if kind is cls:
        return True
    check = classes.guarded_lookup(world, type(cls), "__instancecheck__")
    if isinstance(check, types.FunctionType) and not (isinstance(cls, type) and check.__module__ in _KNOWN_CHECKS):
        return truth(world, tracer.call(world.load(check, world.constant(check, "__instancecheck__")), (cls, obj)))
    if not isinstance(cls, type):
        return native(builtins.isinstance, obj, cls)
    world.guard_bases(kind)
    if cls in call_torch.LEGACY_TENSOR_TYPES and isinstance(obj, torch.Tensor):
        return f"torch.{cls.__name__}" == obj.type().replace("torch.cuda.", "torch.")
    if protocol := _is_protocol(cls):
        members = [
            _is_member(tracer, obj, cls, name)
            for name in sorted(typing._get_protocol_attrs(cls))  # type: ignore
        ]
    if kind is type(obj):
        answer = native(builtins.isinstance, obj, cls)
    elif (
        isinstance(obj, torch.Tensor)
        and cls in _FLAGS
        and (flag := _attribute(tracer, obj, _FLAGS[cls])) is not MISSING
    ):
        return truth(world, flag) or issubclass(kind, cls)
    else:
        native(isinstance, None, cls)  # what the class has against being asked does not depend on the object
        answer = (protocol and all(members)) or _derives(kind, cls)
    world.abstract_checks.note(kind, cls, answer)
    return answer


def is_of_type(tracer: Tracer, obj: Any, cls: type) -> bool:
    """`type.__instancecheck__(cls, obj)`: by the object's type, then by what it calls its class."""
    kind = tracer.world.type_of(obj)
    if cls in kind.__mro__:
        return True
    if not classes.is_hooked(kind) and classes.lookup(kind, "__class__") is vars(object)["__class__"]:
        return False
    named = _attribute(tracer, obj, "__class__")
    return isinstance(named, type) and cls in named.__mro__


_FLAGS = {torch.nn.Parameter: "_is_param", torch.nn.Buffer: "_is_buffer"}
"""Attributes of tensors by which they count as instances."""


def _is_protocol(cls: type) -> bool:
    """Read past what a metaclass has to say of attributes."""
    return classes.lookup(cls, "_is_protocol") is True


def _derives(kind: type, cls: type) -> bool:
    """`issubclass`, where protocols with data among their members refuse the question."""
    return cls in kind.__mro__ if _is_protocol(cls) else native(issubclass, kind, cls)


def _is_member(tracer: Tracer, obj: Any, cls: type, name: str) -> bool:
    """Whether an object has what a protocol asks for. Reading it through the border guards it."""
    value = _attribute(tracer, obj, name)
    return value is not MISSING and (value is not None or not callable(getattr(cls, name, None)))


def _attribute(tracer: Tracer, obj: Any, name: str) -> Any:
    try:
        return tracer.world.getattr(obj, name)
    except UserException as signal:
        if not isinstance(signal.exception, AttributeError):
            raise
        return MISSING


def is_subclass(tracer: Tracer, cls: Any, bases: Any) -> bool:
    """`issubclass(cls, bases)`."""
    world = tracer.world
    if not isinstance(cls, type):
        return native(issubclass, cls, bases)
    if isinstance(bases, tuple):
        return any(is_subclass(tracer, cls, one) for one in bases)
    if isinstance(bases, types.UnionType):
        return any(is_subclass(tracer, cls, one) for one in bases.__args__)
    check = classes.guarded_lookup(world, type(bases), "__subclasscheck__")
    if isinstance(check, types.FunctionType) and not (isinstance(bases, type) and check.__module__ in _KNOWN_CHECKS):
        return truth(world, tracer.call(world.load(check, world.constant(check, "__subclasscheck__")), (bases, cls)))
    answer = native(issubclass, cls, bases)
    if isinstance(bases, type):
        world.guard_bases(cls)
        world.abstract_checks.note(cls, bases, answer)
    return answer


# Checks of these modules look at nothing but the class.
_KNOWN_CHECKS = frozenset(
    {
        "abc",
        "typing",
        "torch.nn.parameter",
        "enum",
        "torch._C",
        "torch",
        "_py_abc",
        "typing_extensions",
        "torch.autograd.variable",
    }
)
