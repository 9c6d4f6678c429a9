"""Which function reads, writes or deletes an attribute of a value, by the value's type.

Takes the world, a value and a name; gives what eager would. Always holds: by exact type first, then by the first base
that fits; `object` fits everything.
"""

from __future__ import annotations

import collections
import gc
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border import protocols
from fusewright.capture.border.absent import AbsentTraceback, look_alike
from fusewright.capture.border.effects import registration
from fusewright.capture.border.interfaces import World as Border
from fusewright.capture.border.native import Trampoline, native, unwatched
from fusewright.capture.border.sequence_iterator import ReversedSequence, SequenceIterator
from fusewright.capture.border.values import (
    array,
    array_calls,
    cls as classes,
    constant,
    dict as dicts,
    function,
    module,
    object as objects,
    tensor,
)
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.border.values.gradient_node import GradientNode
from fusewright.capture.border.values.memory import Address, Storage
from fusewright.capture.border.values.symbolic import concrete
from fusewright.capture.border.values.text import Carried, TensorText
from fusewright.capture.bytecode.instructions import decoded
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import InstanceDict

if TYPE_CHECKING:
    pass


class ByType(dict[type, Any]):
    """A table by type: the exact one's row, else that of the first base that fits, which it then keeps."""

    def __init__(self, exact: Mapping[type, Any], bases: Sequence[tuple[Any, Any]]) -> None:
        super().__init__(exact)
        self.bases = bases

    def __missing__(self, kind: type) -> Any:
        found = self[kind] = next(row for base, row in self.bases if issubclass(kind, base))
        return found


# Types whose instances made inside answer attribute reads natively, with nothing to guard.
NATIVE_TYPES: frozenset[type] = constant.FROZEN_TYPES | {
    int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice, type(None),
    type(Ellipsis),
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat,
    torch.SymBool,
    collections.OrderedDict, collections.defaultdict, collections.deque, types.BuiltinFunctionType,
    types.MethodWrapperType,
    type({}.keys()), type({}.values()), type({}.items()), types.MappingProxyType, type(iter([])), enumerate, zip, map,
    filter, reversed,
}  # fmt: skip


def _getattr_dict(world: Border, stand_in: OutsideDict, name: str) -> Any:
    if stand_in.shadow is None and name in dicts.LAZY_METHODS and hasattr(type(stand_in.real), name):
        return types.MethodType(getattr(OutsideDict, name), stand_in)
    if name == "__class__":
        return type(stand_in.real)
    return native(getattr, stand_in.as_native(), name)


def _getattr_native(world: Border, obj: Any, name: str) -> Any:
    return native(getattr, obj, name)


def _getattr_value(world: Border, obj: Any, name: str) -> Any:
    return native(getattr, concrete(obj), name)


def _getattr_type_parameter(world: Border, obj: Any, name: str) -> Any:
    """What it stands for is evaluated by the program when it is first asked for. Where that calls nothing, and
    succeeds, it makes no difference when that was."""
    if name not in _EVALUATED:
        return native(getattr, obj, name)
    evaluators = [one.__code__ for one in gc.get_referents(obj) if type(one) is types.FunctionType]
    calls = any("CALL" in one.name for code in evaluators for one in decoded(code).instructions)
    try:
        if not calls and id(obj) not in world.made:
            found = unwatched(getattr, obj, name)
            return world.load(found, world.constant(found, name))
    except UserException:
        pass
    raise GraphBreak("opaque-object", f"{name} of a {type(obj).__name__}, which is evaluated when it is asked for")


_EVALUATED = ("__bound__", "__constraints__", "__default__", "__value__")


def _getattr_method(world: Border, method: types.MethodType, name: str) -> Any:
    alike = look_alike(method)
    if name == "__self__":
        return method.__self__
    if alike is not None:
        return native(getattr, alike, name)
    own = name != "__doc__" and classes.lookup(types.MethodType, name) is not MISSING
    return native(getattr, method, name) if own else world.getattr(method.__func__, name)


def _getattr_builtin(world: Border, function: types.BuiltinFunctionType, name: str) -> Any:
    if name == "__qualname__" and isinstance(function.__self__, torch.Tensor):
        return f"{classes.said_name(world.type_of(function.__self__))}.{function.__name__}"
    return native(getattr, function, name)


def _getattr_default(world: Border, obj: collections.defaultdict[Any, Any], name: str) -> Any:
    value = native(getattr, obj, name)
    return value.function if type(value) is Trampoline else value


def _getattr_alike(world: Border, stand_in: Any, name: str) -> Any:
    """What it has of its own of what it looks like; the rest of that is a graph break."""
    alike = look_alike(stand_in)
    if name in _OF_CLASS or not hasattr(alike, name):
        return native(getattr, alike, name)
    if not any(name in vars(base) for base in type(stand_in).__mro__[:-1]):
        raise GraphBreak("opaque-object", f"{name} of a {type(alike).__name__}")
    return objects.getattr_object(world, stand_in, name)


_OF_CLASS = ("__class__", "__doc__", "__module__")


def _getattr_array_method(world: Border, method: array_calls.ArrayMethod, name: str) -> Any:
    return method.array if name == "__self__" else native(getattr, look_alike(method), name)


def _getattr_traceback(world: Border, traceback: AbsentTraceback, name: str) -> Any:
    return types.TracebackType if name == "__class__" else traceback.__getattr__(name)


def _getattr_cell(world: Border, cell: types.CellType, name: str) -> Any:
    if name == "cell_contents" and world.outside(cell) is not None:
        return world.load_cell(cell)
    return native(getattr, cell, name)


def _getattr_python_module(world: Border, obj: types.ModuleType, name: str) -> Any:
    if type(obj) is not types.ModuleType:
        return objects.getattr_object(world, obj, name)
    said = obj.__dict__.get("__name__")  # a program may have deleted it
    known_as = said if type(said) is str else "module"
    namespace = world.dict_stand_in(obj.__dict__, InstanceDict(world.constant(obj, known_as)))
    if name == "__dict__":
        return namespace
    value = objects.read_namespace(namespace, name)
    if value is not MISSING:
        return value
    if classes.lookup(types.ModuleType, name) is not MISSING:
        return native(getattr, obj, name)
    return objects.not_in_module(world, obj, name, namespace)


def _setattr_python_module(world: Border, obj: types.ModuleType, name: str, value: object) -> None:
    if type(obj) is not types.ModuleType:
        objects.setattr_object(world, obj, name, value)
        return
    if obj is sys or name == "__dict__":  # output that is held back would go elsewhere; a module keeps its dict
        raise GraphBreak("opaque-object", f"a store to a module's {name}")
    protocols.setitem(world, world.getattr(obj, "__dict__"), name, value)


def _setattr_native(world: Border, obj: Any, name: str, value: object) -> None:
    if name == "cell_contents" and world.outside(obj) is not None:
        world.store_cell(obj, value)
    else:
        native(setattr, obj, name, value)


def _setattr_method(world: Border, obj: types.MethodType, name: str, value: object) -> None:
    native(setattr, look_alike(obj) or obj, name, value)


def _setattr_function(world: Border, obj: types.FunctionType, name: str, value: object) -> None:
    record = world.outside(obj)
    if record is None:
        native(setattr, obj, name, world.materialise(value))
    elif classes.lookup(types.FunctionType, name) is not MISSING:
        raise GraphBreak("function-mutation", f"a store to {obj.__qualname__}.{name}")
    else:
        protocols.setitem(world, world.getattr(obj, "__dict__"), name, value)


Getter = Callable[[Border, Any, str], Any]


def _getattr_handle(world: Border, obj: RemovableHandle, name: str) -> Any:
    """The number of one that the frame made is known to its `remove` alone: each registration takes another."""
    method = isinstance(vars(RemovableHandle).get(name), types.FunctionType)
    if registration(obj) is not None and not method:
        raise GraphBreak("autograd-call", f"{name} of the handle of a hook that is registered at the end")
    frame = world.tracer.frame
    if name == "id" and world.outside(obj) is None and (frame is None or frame.function is not RemovableHandle.remove):
        raise GraphBreak("autograd-call", "id of the handle of a hook that is registered inside")
    return objects.getattr_object(world, obj, name)


def _refuse_carried(world: Border, obj: Carried, *args: object) -> Any:
    return world.type_of(obj) if args[0] == "__class__" else obj.refuse()


def _getattr_stand_in(world: Border, obj: TensorText | Address, name: str) -> Any:
    """Of what stands for a text or a number: what such a value has is refused, CPython complains of anything else."""
    kind = world.type_of(obj)
    if name == "__class__":
        return kind
    return obj.refuse() if hasattr(kind, name) else native(getattr, kind(), name)


def _getattr_storage(world: Border, obj: Storage, name: str) -> Any:
    if name in _OF_CLASS:
        return torch.UntypedStorage if name == "__class__" else getattr(torch.UntypedStorage, name)
    if not (name in vars(Storage) and hasattr(torch.UntypedStorage, name)):
        raise GraphBreak("tensor-address", f"{name} of a storage")
    return objects.getattr_object(world, obj, name)


GETATTRS: dict[type, Getter] = {
    **dict.fromkeys(NATIVE_TYPES, _getattr_value),
    **dict.fromkeys(constant.TYPE_PARAMETERS, _getattr_type_parameter),
    RemovableHandle: _getattr_handle,
    Carried: _refuse_carried,
    TensorText: _getattr_stand_in,
    Address: _getattr_stand_in,
    Storage: _getattr_storage,
    OutsideDict: _getattr_dict,
    types.FunctionType: function.getattr_function,
    types.MethodType: _getattr_method,
    types.BuiltinFunctionType: _getattr_builtin,
    collections.defaultdict: _getattr_default,
    **dict.fromkeys((SequenceIterator, ReversedSequence, GradientNode), _getattr_alike),
    array_calls.ArrayMethod: _getattr_array_method,
    AbsentTraceback: _getattr_traceback,
    types.CellType: _getattr_cell,
    types.ModuleType: _getattr_python_module,
    super: classes.getattr_super,
    array.TracedArray: array_calls.getattr_array,
    type: classes.getattr_class,
}


BASE_GETATTRS: tuple[tuple[Any, Getter], ...] = (
    (constant.PLACEMENTS, _getattr_value),
    (torch.Tensor, tensor.getattr_tensor),
    (torch.nn.Module, module.getattr_module),
    (type, classes.getattr_class),
    (types.ModuleType, _getattr_python_module),
    ((torch._ops.OpOverload, torch._ops.OpOverloadPacket), _getattr_native),
    (object, objects.getattr_object),
)


BASE_SETATTRS: tuple[tuple[type, Callable[[Border, Any, str, object], None]], ...] = (
    (Carried, _refuse_carried),
    (torch.Tensor, tensor.setattr_tensor),
    (torch.nn.Module, module.setattr_module),
    (type, classes.setattr_class),
    (types.ModuleType, _setattr_python_module),
    (types.FunctionType, _setattr_function),
    (types.MethodType, _setattr_method),
    (types.CellType, _setattr_native),
    (object, objects.setattr_object),
)


BASE_DELATTRS: tuple[tuple[type, Callable[[Border, Any, str], None]], ...] = (
    (Carried, _refuse_carried),
    (torch.Tensor, tensor.delattr_tensor),
    (type, classes.delattr_class),
    (object, objects.delattr_object),
)
