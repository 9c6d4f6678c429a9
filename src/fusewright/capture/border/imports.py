"""Import statements inside a frame.

Takes names; gives modules and their attributes as loaded from `sys.modules`. Always holds: no module's code runs during
capture, so a module that is not loaded yet breaks the graph. (Where a called function imports it, the first call runs
eagerly as a whole instead: see capture/attempt.py.)
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any, cast

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.native import native
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.guards.sources import Item

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


def import_name(world: World, namespace: Any, name: str, fromlist: Any, level: int) -> Any:
    """`import name`; a module that is not loaded yet is imported eagerly, in a graph break."""
    if level:
        real = namespace.real if type(namespace) is OutsideDict else namespace
        package = real.get("__package__") or real.get("__name__", "").rpartition(".")[0]
        full = native(importlib.util.resolve_name, "." * level + name, package)
    else:
        full = name
    if full not in sys.modules:
        raise GraphBreak("import", f"module {full} is not loaded yet")
    table = world.known_stand_in(sys.modules)
    if table is not None and (type(table) is not OutsideDict or table.stores):
        raise GraphBreak("import", f"{full}, where the call has changed sys.modules")
    chosen = full if fromlist or level else full.partition(".")[0]
    if fromlist:
        package = hasattr(sys.modules[full], "__path__")  # of anything else, what is missing stays missing
        for attribute in fromlist:
            if package and f"{full}.{attribute}" not in sys.modules and not _has(sys.modules[full], attribute):
                raise GraphBreak("import", f"from {full} import {attribute}")
    loaded = sys.modules[chosen]
    return world.load(loaded, Item(world.constant(sys.modules, "sys_modules"), chosen))


def _has(module: types.ModuleType, attribute: str) -> bool:
    return attribute in module.__dict__ or "__getattr__" in module.__dict__ or type(module) is not types.ModuleType


def import_from(world: World, origin: types.ModuleType, name: str) -> Any:
    """`from origin import name`: the attribute, or a submodule that is loaded."""
    try:
        return world.getattr(origin, name)
    except UserException as signal:
        if not isinstance(signal.exception, AttributeError):
            raise
    full = f"{origin.__name__}.{name}"
    if full in sys.modules:
        return world.load(sys.modules[full], Item(world.constant(sys.modules, "sys_modules"), full))
    raise UserException(_refusal(origin, name))


def _refusal(origin: types.ModuleType, name: str) -> ImportError:
    """What CPython of this version says where `origin` has no `name`: an empty module of its description is asked."""
    empty = types.ModuleType(origin.__name__)
    vars(empty).update({key: vars(origin)[key] for key in ("__spec__", "__file__") if key in vars(origin)})
    try:
        code = _import_wanted.__code__
        code = code.replace(co_names=tuple(name if one == "wanted" else one for one in code.co_names))
        types.FunctionType(code, {"__builtins__": {"__import__": lambda *_: empty}})()
    except ImportError as error:
        kind, args, fields = cast(Any, error.__reduce__())
        return kind(*args, **fields)
    raise AssertionError("the empty module has the name")


def _import_wanted() -> None:
    from module import wanted  # type: ignore[import-not-found] # noqa: F401
