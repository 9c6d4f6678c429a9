"""`class` statements: `builtins.__build_class__` with an interpreted body.

Takes the arguments of `__build_class__`; gives the new class. Always holds: only plain classes are made during capture
(metaclass `type`, no Python code of a base or of a descriptor that type creation would run natively); every other one
is a graph break.
"""

from __future__ import annotations

import types
from typing import Any

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.capture.bytecode.instructions import NULL


def build_class(frame: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Executes the body in a namespace of its own and calls `type(name, bases, namespace)`."""
    body, name, *bases = args
    if not isinstance(body, types.FunctionType):
        raise GraphBreak("class-creation", f"class {name}: its body is no function")
    reason = _obstacle(bases, kwargs)
    if reason:
        raise GraphBreak("class-creation", f"class {name}: {reason}")
    namespace: dict[str, object] = {}
    cell = frame.tracer.run_class_body(body, namespace)
    for key, value in namespace.items():
        if isinstance(getattr(type(value), "__set_name__", None), types.FunctionType):
            raise GraphBreak(
                "class-creation", f"class {name}: the attribute {key} has a __set_name__ written in Python"
            )
    cls = frame.tracer.call(type, (name, tuple(bases), namespace))
    if isinstance(cell, types.CellType) and frame.tracer.read_cell(cell) is NULL:
        frame.tracer.write_cell(cell, cls)
    return cls


def _obstacle(bases: list[Any], kwargs: dict[str, Any]) -> str:
    """Why creating the class natively would run Python code that nobody interprets; empty if it would not."""
    if kwargs:
        return "it has a metaclass or keyword arguments"
    for base in bases:
        if type(base) is not type:
            return f"its base {base!r} has a metaclass, or is no class"
        if any(isinstance(vars(cls).get("__init_subclass__"), classmethod) for cls in base.__mro__):
            return f"its base {base.__name__} has an __init_subclass__ written in Python"
    return ""
