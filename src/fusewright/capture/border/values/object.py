"""Objects of user classes: Python's attribute protocol, with a guard for whatever the lookup depended on.

Takes any object that has no file of its own here, made inside or outside; gives attribute reads and stores.
Always holds: an outside object is never written to; its instance dictionary is read through a lazy stand-in that holds
the stores.
"""

from __future__ import annotations

import collections
import enum
import functools
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from fusewright._native import isinstance
from fusewright.base.exception_fields import args_of, context_of, has_no_dict
from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.absent import AbsentTraceback
from fusewright.capture.border.effects import DELETED
from fusewright.capture.border.native import native
from fusewright.capture.border.values import cls as classes, function as functions
from fusewright.capture.border.values.constant import CARRIED_TYPES
from fusewright.capture.border.values.dict import OutsideDict, attributes_of, handed_out, read_namespace
from fusewright.capture.border.values.memory import Address
from fusewright.capture.border.values.symbolic import concrete
from fusewright.capture.border.values.text import TensorText
from fusewright.capture.bytecode.instructions import PARTIAL_WILL_BIND, VERSION
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import Attribute, Constant, InstanceDict, Source
from fusewright.capture.guards.types import HoldsValue

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


# Attributes of these belong to another object, to which there is no path.
_ELUSIVE = (weakref.ProxyType, weakref.CallableProxyType)

# Process groups and reductions of torch.distributed are guarded by identity; a group's name, ranks and size are
# constants then.
OF_PROCESSES: tuple[type, ...] = ()
_GROUP_METHOD: type = type(None)
"""What a method of a class of theirs is."""
if torch.distributed.is_available():
    _c10d = cast(Any, torch.distributed)
    OF_PROCESSES = (_c10d.ProcessGroup, _c10d.ReduceOp, _c10d.ReduceOp.RedOpType)
    _GROUP_METHOD = type(vars(_c10d.ProcessGroup)["size"])


def load_object(world: World, real: object, source: Source) -> object:
    """Raw; only its type is guarded, its attributes are loaded when they are read."""
    kind = type(real)
    if issubclass(kind, _ELUSIVE):
        raise GraphBreak("opaque-object", f"{source.text()}, a {kind.__qualname__}")
    world.guard("TYPE", source, kind)
    # native containers compare and hash what they hold: a method added later would go unnoticed
    for name in (
        "__eq__",
        "__hash__",
    ):
        classes.guarded_lookup(world, kind, name)
    if issubclass(kind, torch.nn.Module):
        world.module_sources.add(source)
    return world.stand_in(real, source, real)


def load_derived(world: World, real: object, source: Source) -> object:
    """An instance of a subclass of int, float, complex, str or bytes: an object that holds a constant, made anew at
    each call perhaps."""
    if isinstance(source, Constant):
        return functions.load_identity(world, real, source)
    base = next(base for base in (int, float, complex, str, bytes) if isinstance(real, base))
    world.guard("CALL", source, HoldsValue.of(base, real))
    return load_object(world, real, source)


def instance_dict(world: World, obj: object) -> Any:
    """The object's instance dictionary: real when it was made inside, a stand-in otherwise, None when it has none."""
    kind = type(obj)
    if issubclass(kind, threading.local):
        return _of_thread(world, obj)  # type: ignore[arg-type]
    if not classes.has_dict(kind) and not issubclass(kind, types.ModuleType):
        return None
    record = world.outside(obj)
    if issubclass(kind, enum.Enum) and not world.is_inside_class(kind):
        return world.dict_stand_in(_raw_dict(obj), classes.dict_source(kind, world.constant(obj, kind.__name__)))
    facts = world.dict_kinds.get(kind)
    if facts is None:
        facts = "__dict__" in _shadowed(kind), classes.is_hooked(kind)
        if not world.is_inside_class(kind):
            world.dict_kinds[kind] = facts
    shadowed, hooked = facts
    namespace = _namespace(obj if record is None else record.real, shadowed)
    if record is None:
        return namespace
    known = world.record_of(namespace)
    if known is not None and getattr(known.source, "base", None) is record.source and type(namespace) is dict:
        return known.value
    return attributes_of(world, namespace, InstanceDict(record.source, hooked))


def _namespace(obj: object, shadowed: bool) -> Any:
    return _raw_dict(obj) if shadowed else object.__getattribute__(obj, "__dict__")


def _of_thread(world: World, obj: threading.local) -> Any:
    """The attributes of a `threading.local` in this thread; guards ask for those of the thread that calls."""
    record = world.outside(obj)
    namespace = threading.local.__getattribute__(obj, "__dict__")
    return namespace if record is None else world.dict_stand_in(namespace, Attribute(record.source, "__dict__"))


def _shadowed(kind: type) -> tuple[str, ...]:
    """("__dict__",) when a class in the MRO defines something else under `__dict__` than the plain descriptor."""
    found = classes.lookup(kind, "__dict__")
    return (
        ()
        if isinstance(found, types.GetSetDescriptorType)
        or found is MISSING
        or isinstance(found, types.MemberDescriptorType)
        else ("__dict__",)
    )


def _raw_dict(obj: object) -> dict:
    for base in type(obj).__mro__:
        found = base.__dict__.get("__dict__")
        if isinstance(found, types.GetSetDescriptorType):
            return found.__get__(obj)
    raise GraphBreak("opaque-object", f"{type(obj).__qualname__} hides its instance dictionary")


def getattr_object(world: World, obj: object, name: str) -> object:
    """`obj.name`: `__getattribute__`, then `__getattr__` when that raises AttributeError."""
    kind = type(obj)
    getattribute = classes.python_method(world, kind, "__getattribute__")
    try:
        if getattribute is not None:
            return world.tracer.call(getattribute, (obj, name))
        return (getattr_module if issubclass(kind, types.ModuleType) else generic_getattr)(world, obj, name)
    except UserException as signal:
        if not isinstance(signal.exception, AttributeError):
            raise
        fallback = classes.python_method(world, kind, "__getattr__")
        if fallback is None:
            raise
        return world.tracer.call(fallback, (obj, name))


def generic_getattr(world: World, obj: object, name: str) -> object:
    """`object.__getattribute__(obj, name)`: data descriptor, instance dictionary, then whatever the class holds."""
    kind = type(obj)
    if name in _TRACEBACKS and issubclass(kind, BaseException):
        if name != "__traceback__" or (world.is_raw(obj) and not world.tracer.is_handled(obj)):
            raise GraphBreak("frame-access", f"{name} of an exception: interpreted frames leave no traceback")
        return world.tracer.traceback_of(obj)  # type: ignore[arg-type]
    if (
        name == "__context__"
        and issubclass(kind, BaseException)
        and id(obj) in world.tracer.open_contexts
        and context_of(obj) is None  # type: ignore[arg-type]
    ):
        world.tracer.ask_around()
    found = classes.guarded_lookup(world, kind, name)
    if found is not MISSING and is_data_descriptor(world, found, reads=True):
        return bind(world, found, obj, kind, name)
    if isinstance(obj, BaseException) and has_no_dict(obj):
        if world.is_raw(obj):
            world.guard("CALL", world.outside(obj).source, has_no_dict)  # type: ignore[union-attr]
        value: object = MISSING
    else:
        value = read_namespace(instance_dict(world, obj), name)
    if value is not MISSING:
        return value
    if found is not MISSING:
        return bind(world, found, obj, kind, name)
    said = f"'{classes.said_name(world.type_of(obj))}' object has no attribute '{name}'"
    raise UserException(AttributeError(said, name=name, obj=obj))


def getattr_module(world: World, module: object, name: str) -> object:
    """`types.ModuleType.__getattribute__(module, name)`."""
    try:
        return generic_getattr(world, module, name)
    except UserException as signal:
        if not isinstance(signal.exception, AttributeError):
            raise
    return not_in_module(world, module, name, instance_dict(world, module))


def not_in_module(world: World, module: object, name: str, namespace: object) -> object:
    """An attribute that neither the module's dictionary nor its class holds."""
    fallback = read_namespace(namespace, "__getattr__")
    if fallback is not MISSING:
        return world.tracer.call(fallback, (name,))
    said = read_namespace(namespace, "__name__")  # a program may have deleted it
    known_as = f"module '{said}'" if type(said) is str else "module"
    raise UserException(AttributeError(f"{known_as} has no attribute '{name}'", name=name, obj=module))


def note_missing(world: World, error: BaseException, obj: object, name: str) -> None:
    """An AttributeError that comes out of a read says of what from then on, whoever raised it."""
    if isinstance(error, AttributeError) and all(world.getattr(error, part) is None for part in ("name", "obj")):
        generic_setattr(world, error, "name", name)
        generic_setattr(world, error, "obj", obj)


_TRACEBACKS = ("__traceback__", "with_traceback")


# Immutable types of what classes hold most: none of them has __set__ or __delete__.
_NO_DATA = frozenset(
    {
        types.FunctionType,
        types.BuiltinFunctionType,
        staticmethod,
        classmethod,
        str,
        int,
        bool,
        type(None),
        tuple,
        list,
        dict,
    }
)


def is_data_descriptor(world: World, found: object, reads: bool = False) -> bool:
    """Whether the descriptor comes before the instance dictionary at a store, or at reads too."""
    kind = type(found)
    if kind in _NO_DATA or (reads and classes.guarded_lookup(world, kind, "__get__") is MISSING):
        return False
    return any(classes.guarded_lookup(world, kind, name) is not MISSING for name in ("__set__", "__delete__"))


def bind(world: World, found: object, obj: object, kind: type, name: str) -> object:
    """What reading `found` (an entry of a class in the MRO of `kind`) through the instance `obj` gives."""
    handler = _BINDERS.get(type(found))
    if handler is not None:
        return handler(world, found, obj, kind, name)
    getter = classes.guarded_lookup(world, type(found), "__get__")
    if getter is MISSING:
        return world.load(found, world.constant(found, f"{kind.__name__}_{name}"))
    descriptor = world.load(found, world.constant(found, name))
    if isinstance(getter, types.FunctionType):
        return world.tracer.call(getter, (descriptor, obj, kind))
    if getter is property.__get__:
        return _BINDERS[property](world, found, obj, kind, name)
    if getter is _PARTIAL_BINDS:
        return _bind_partial(world, descriptor, obj)
    if world.is_raw(obj):
        raise GraphBreak(
            "opaque-object", f"{kind.__qualname__}.{name} is a descriptor written in C ({type(found).__qualname__})"
        )
    return native(getter.__get__(found), obj, kind)


def _bind_function(world: World, found: Any, obj: object, kind: type, name: str) -> object:
    return types.MethodType(world.load(found, world.constant(found, name)), obj)


_PARTIAL_BINDS = vars(functools.partial).get("__get__", MISSING)


def _bind_partial(world: World, partial: Any, obj: object) -> object:
    if VERSION >= (3, 14):
        return types.MethodType(partial, obj)
    world.tracer.call(warnings.warn, (PARTIAL_WILL_BIND, FutureWarning))
    return partial


def _bind_static(world: World, found: staticmethod, obj: object, kind: type, name: str) -> object:
    return world.load(found.__func__, world.constant(found.__func__, name))


def _bind_classmethod(world: World, found: classmethod, obj: object, kind: type, name: str) -> object:
    return classes.bind_classmethod(world, found, kind)


_BOUND_IN_C = type(vars(torch.jit.ScriptFunction)["__call__"])
"""What methods of classes that PyTorch defines in C++ are."""


def _bind_property(world: World, found: property, obj: object, kind: type, name: str) -> object:
    if found.fget is None:
        raise UserException(AttributeError(f"property '{name}' of '{kind.__qualname__}' object has no getter"))
    if type(found.fget) is _BOUND_IN_C and not world.is_raw(obj):
        return native(found.fget, obj)
    return world.tracer.call(world.load(found.fget, world.constant(found.fget, name)), (obj,))


def _bind_cached(world: World, found: functools.cached_property, obj: object, kind: type, name: str) -> object:
    function = world.load(found.func, world.constant(found.func, name))
    namespace: Any = world.getattr(obj, "__dict__") if classes.is_hooked(kind) else instance_dict(world, obj)
    value = world.tracer.call(function, (obj,))
    if type(namespace) is OutsideDict:
        namespace.store(found.attrname, value)
    else:
        namespace[found.attrname] = value
    return value


def _bind_member(world: World, found: Any, obj: object, kind: type, name: str) -> object:
    record = world.outside(obj)
    if record is None:
        value = native(found.__get__, obj, kind)
        of_group = name == "exceptions" and issubclass(kind, BaseExceptionGroup)
        of_group = of_group and not any(value is one for one in args_of(obj))  # type: ignore[arg-type]
        if of_group or (kind is functools.partial and type(value) in (dict, tuple)):  # which are made with the object
            world.owners[id(value)] = obj, name
        return value
    stored = world.effects.read_slot(obj, name)
    if stored is not None:
        if stored.value is DELETED:
            raise UserException(
                AttributeError(f"'{classes.said_name(kind)}' object has no attribute '{name}'", name=name, obj=obj)
            )
        return stored.value
    where = classes.field_source(kind, record.source, found, name)
    try:
        value = found.__get__(record.real, kind)
    except AttributeError as missing:
        world.guard("BOUND", where, False)
        raise UserException(missing) from None
    return world.load(value, where)


def _bind_getset(world: World, found: Any, obj: object, kind: type, name: str) -> object:
    if name == "__dict__":
        namespace = handed_out(instance_dict(world, obj))
        world.owners[id(namespace)] = obj, name
        return namespace
    if name == "__class__":  # a compiled function says that it is a function
        return kind if found.__objclass__ is object else native(found.__get__, obj)
    of_context = name in ("saved_tensors", "saved_variables") and found.__objclass__ is torch._C._FunctionBase
    if of_context and world.outside(obj) is not None:
        # Hooks unpack them: a checkpoint's compute them again, at one read only. The program's read is that one.
        raise GraphBreak("autograd-call", f"{name} of a context from outside")
    return _bind_member(world, found, obj, kind, name)


def _bind_native(world: World, found: Any, obj: object, kind: type, name: str) -> object:
    return native(found.__get__, obj, kind)


_BINDERS = {
    types.FunctionType: _bind_function,
    functools._lru_cache_wrapper: _bind_function,
    staticmethod: _bind_static,
    classmethod: _bind_classmethod,
    property: _bind_property,
    functools.cached_property: _bind_cached,
    types.MemberDescriptorType: _bind_member,
    types.GetSetDescriptorType: _bind_getset,
    types.MethodDescriptorType: _bind_native,
    # elements are loaded already
    type(collections.namedtuple("_Pair", "first").first): _bind_native,  # type: ignore[attr-defined]
    types.WrapperDescriptorType: _bind_native,
    types.ClassMethodDescriptorType: _bind_native,
    _GROUP_METHOD: _bind_native,
    types.BuiltinFunctionType: lambda world, found, obj, kind, name: found,
}


def _is_outside(world: World, obj: object) -> bool:
    """Whether a store to the object must wait: it was there before. Members of enumerations have no record. A tuple or
    a partial whose parts were loaded is another one than that outside, and has no shadow."""
    kind = type(obj)
    if issubclass(kind, (tuple, functools.partial)):
        return world.outside(obj) is not None
    return world.is_raw(obj) or (issubclass(kind, enum.Enum) and not world.is_inside_class(kind))


def setattr_object(world: World, obj: object, name: str, value: object) -> None:
    """`obj.name = value`."""
    custom = classes.python_method(world, type(obj), "__setattr__")
    if custom is not None:
        world.tracer.call(custom, (obj, name, value))
    else:
        generic_setattr(world, obj, name, value)


def generic_setattr(world: World, obj: object, name: str, value: object) -> None:
    """`object.__setattr__(obj, name, value)`."""
    obj = _plain(world, obj)
    kind = type(obj)
    if name == "__traceback__" and issubclass(kind, BaseException):
        if type(value) is not AbsentTraceback or value.error is not obj:
            raise GraphBreak("frame-access", "an exception is given another traceback")
        world.tracer.set_traceback(obj, value)
        return
    if name == "__context__":
        world.tracer.open_contexts.pop(id(obj), None)
    if kind in CARRIED_TYPES:  # what leaves the call is this very object: it holds numbers, which are guarded
        value = concrete(value)
    found = classes.guarded_lookup(world, kind, name)
    raw = _is_outside(world, obj)
    if found is not MISSING and is_data_descriptor(world, found):
        if isinstance(found, property):
            if found.fset is None:
                raise UserException(AttributeError(f"property '{name}' of '{kind.__qualname__}' object has no setter"))
            world.tracer.call(world.load(found.fset, world.constant(found.fset, name)), (obj, value))
            return
        setter = classes.guarded_lookup(world, type(found), "__set__")
        if isinstance(setter, types.FunctionType):
            world.tracer.call(setter, (world.load(found, world.constant(found, name)), obj, value))
            return
        if not raw:
            native(object.__setattr__, obj, name, value)
            return
        if isinstance(found, types.MemberDescriptorType):
            world.effects.store_slot(obj, name, value)
            return
        raise GraphBreak("opaque-object", f"a store to {kind.__qualname__}.{name}, which is written in C")
    if not raw and _as_its_class_is(kind, name, found):
        native(object.__setattr__, obj, name, value)
        return
    namespace = handed_out(instance_dict(world, obj))
    if namespace is None:
        raise refusal(world, lambda probe: setattr(probe, name, None), _bare(name, found), obj)
    if type(namespace) is OutsideDict:
        namespace.store(name, value)
    else:  # its shadow has taken over
        namespace[name] = value


def refusal(world: World, change: Callable[[object], None], probe: object, obj: object) -> UserException:
    """What CPython of this version says where `obj` refuses a change, as the probe does."""
    try:
        change(probe)
    except AttributeError as error:
        of_probe, said = f"'{classes.said_name(type(probe))}'", f"'{classes.said_name(world.type_of(obj))}'"
        about = None if error.obj is None else obj
        return UserException(AttributeError(str(error).replace(of_probe, said, 1), name=error.name, obj=about))
    raise AssertionError("the probe has taken the change")


def _plain(world: World, obj: object) -> object:
    """A number or a text for what stands for one: it refuses every attribute, and the stand-in might not."""
    obj = _PLAIN[type(obj)]() if type(obj) in _PLAIN else concrete(obj)
    kind = world.type_of(obj)
    if kind is not type(obj) and type(obj) is not OutsideDict:
        raise GraphBreak("opaque-object", f"a store to an attribute of a {kind.__qualname__}")
    return obj


_PLAIN: dict[type, type] = {TensorText: str, Address: int}


class _Inline:
    """An object with a dictionary."""


_INLINE_VALUES = 1 << 2  # CPython's Py_TPFLAGS_INLINE_VALUES, from 3.13 on: instances keep the values themselves


def probe(world: World, obj: object, name: str) -> object:
    """An object with a dictionary that CPython keeps, and so asks, as it does that of `obj`: the real one, if that
    lacks `name` too."""
    record = world.outside(obj)
    if record is not None and name not in object.__getattribute__(record.real, "__dict__"):
        return record.real
    return _Inline() if world.type_of(obj).__flags__ & _INLINE_VALUES else types.SimpleNamespace()


def _as_its_class_is(kind: type, name: str, found: object) -> bool:
    """Whether an object made inside may be asked to change, though this frame's stores to its class are held back."""
    return classes.has_dict(kind) or found is classes.lookup(kind, name)


def _bare(name: str, found: object) -> object:
    """An object without a dictionary, whose class has the attribute too where `found` is not MISSING."""
    if found is MISSING or name in vars(object):
        return object()
    return type("_Probe", (), {name: lambda self: None, "__slots__": ()})()


def delattr_object(world: World, obj: object, name: str) -> None:
    """`del obj.name`."""
    custom = classes.python_method(world, type(obj), "__delattr__")
    if custom is not None:
        world.tracer.call(custom, (obj, name))
    else:
        generic_delattr(world, obj, name)


def generic_delattr(world: World, obj: object, name: str) -> None:
    """`object.__delattr__(obj, name)`."""
    obj = _plain(world, obj)
    kind = type(obj)
    found = classes.guarded_lookup(world, kind, name)
    if found is not MISSING and is_data_descriptor(world, found):
        if isinstance(found, property) and found.fdel is not None:
            world.tracer.call(world.load(found.fdel, world.constant(found.fdel, name)), (obj,))
            return
        deleter = classes.guarded_lookup(world, type(found), "__delete__")
        if isinstance(deleter, types.FunctionType):
            world.tracer.call(deleter, (world.load(found, world.constant(found, name)), obj))
            return
        if _is_outside(world, obj):
            if not isinstance(found, types.MemberDescriptorType):
                raise GraphBreak("opaque-object", f"del {kind.__qualname__}.{name}, which is written in C")
            try:
                bind(world, found, obj, kind, name)
            except UserException:  # it is unbound
                slotted = type("_Probe", (), {"__slots__": (name,)})()
                raise refusal(world, lambda probe: delattr(probe, name), slotted, obj) from None
            world.effects.store_slot(obj, name, DELETED)
            return
    if not _is_outside(world, obj) and _as_its_class_is(kind, name, found):
        native(object.__delattr__, obj, name)
        return
    namespace = instance_dict(world, obj)
    if namespace is None or read_namespace(namespace, name) is MISSING:
        asked = _bare(name, found) if namespace is None else probe(world, obj, name)
        raise refusal(world, lambda probe: object.__delattr__(probe, name), asked, obj)
    if type(namespace) is OutsideDict:
        namespace.remove(name)
    else:
        del namespace[name]
