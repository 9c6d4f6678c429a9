"""nn.Module: attribute reads and calls without interpreting `Module.__getattr__` and `Module.__call__`.

Takes modules from outside or made inside; gives the entry that eager would find, guarded by which dictionary held it
and by its absence in those that come before. Always holds: a module with hooks, or a process with global module hooks,
takes the slow way, which interprets PyTorch's own `_call_impl`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.modules import module as torch_module

from fusewright._native import ModuleCall, isinstance
from fusewright.base import own_methods
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.values import cls as classes, object as objects
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import InstanceDict, Item

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

Module = torch.nn.Module

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def getattr_module(world: World, module: torch.nn.Module, name: str) -> object:
    """`module.name`; the fast way when the class keeps nn.Module's own `__getattr__`."""
    kind = type(module)
    if classes.guarded_lookup(world, kind, "__getattr__") is not own_methods.GETATTR:
        return objects.getattr_object(world, module, name)
    if classes.python_method(world, kind, "__getattribute__") is not None:
        return objects.getattr_object(world, module, name)
    found = classes.guarded_lookup(world, kind, name)
    if found is not MISSING and objects.is_data_descriptor(world, found, reads=True):
        return objects.getattr_object(world, module, name)
    namespace = objects.instance_dict(world, module)
    value = objects.read_namespace(namespace, name)
    if value is not MISSING:
        return value
    if found is not MISSING:
        return objects.getattr_object(world, module, name)
    for table_name in _TABLES:
        table = objects.read_namespace(namespace, table_name)
        if table is not MISSING:
            value = objects.read_namespace(table, name)
            if value is not MISSING:
                return value
    raise UserException(AttributeError(f"'{kind.__name__}' object has no attribute '{name}'", name=name, obj=module))


def setattr_module(world: World, module: torch.nn.Module, name: str, value: object) -> None:
    """`module.name = value`: a plain value that replaces no parameter, buffer or submodule is a store to the instance
    dictionary."""
    kind = type(module)
    plain = (
        not isinstance(value, (torch.Tensor, Module))
        and classes.guarded_lookup(world, kind, "__setattr__") is own_methods.SETATTR
        and classes.python_method(world, kind, "__getattribute__") is None
    )
    if plain:
        namespace = objects.instance_dict(world, module)
        tables = [objects.read_namespace(namespace, table) for table in _TABLES]
        if all(table is not MISSING and objects.read_namespace(table, name) is MISSING for table in tables):
            objects.generic_setattr(world, module, name, value)
            return
    objects.setattr_object(world, module, name, value)


def _is_empty(world: World, namespace: object, name: str) -> bool:
    """Whether a hook table is there and empty, guarded by its length."""
    if (
        type(namespace) is not OutsideDict
        or name in namespace.stores
        or name in namespace.loaded
        or namespace.shadow is not None
    ):
        table = objects.read_namespace(namespace, name)
        return table is not MISSING and len(table) == 0  # type: ignore[arg-type]
    real = namespace.real.get(name)
    if not isinstance(real, dict) or dict.__len__(real):
        return False
    world.guard("LENGTH", Item(namespace.source, name), 0)
    return True


def _no_global_hooks(world: World) -> bool:
    if world.global_hooks_checked:
        return True
    where = InstanceDict(world.constant(torch_module, "torch_nn_module"))
    for name in _GLOBAL_HOOKS:
        if len(torch_module.__dict__[name]):
            return False
        world.guard("LENGTH", Item(where, name), 0)
    world.global_hooks_checked = True
    return True


def call_module(world: World, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """`module(*args, **kwargs)`."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise GraphBreak("torchscript", f"a call of the ScriptModule {kind.__qualname__}")
    entry = classes.guarded_lookup(world, kind, "__call__")
    if type(entry) is ModuleCall:
        entry = entry.__wrapped__
    # whose __call__ adds error reports
    watched = classes.is_hooked(kind)  # it is asked for all that PyTorch's own call reads
    if watched or (entry is not own_methods.CALL and not isinstance(module, torch.fx.GraphModule)):
        return world.tracer.call(objects.bind(world, entry, module, kind, "__call__"), args, kwargs)
    namespace = objects.instance_dict(world, module)
    plain = (
        classes.guarded_lookup(world, kind, "_call_impl") is own_methods.CALL_IMPL
        and objects.read_namespace(namespace, "_compiled_call_impl") in (None, MISSING)
        and objects.read_namespace(namespace, "_call_impl") is MISSING
        and _no_global_hooks(world)
        and all(_is_empty(world, namespace, name) for name in _HOOKS)
    )
    if plain:
        return world.repeated_call(module, getattr_module(world, module, "forward"), args, kwargs)
    # A compiled submodule (`module.compile()`) is captured from its original code, so `_compiled_call_impl` is passed
    # over.
    return world.tracer.call(world.getattr(module, "_call_impl"), args, kwargs)
