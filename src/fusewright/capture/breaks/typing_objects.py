"""Rebuilding: type parameters and aliases that the call has made (PEP 695), and what holds them (`list[T]`).

Takes such an object; gives an expression, as `rebuild.py` does. Always holds: what a parameter or an alias stands for
is evaluated when it is asked for, as in eager.
"""

from __future__ import annotations

import copyreg
import gc
import operator
import types
from typing import Any

from fusewright._native import isinstance
from fusewright.capture.border.interfaces import World
from fusewright.capture.border.values.constant import TYPE_ALIASES, TYPE_PARAMETERS
from fusewright.capture.border.values.text import refuse_if_shown
from fusewright.capture.breaks.contents import Code, fill_cells, start_cells

KINDS = (*TYPE_PARAMETERS, *TYPE_ALIASES)


def build(code: Code, value: Any) -> str:
    kind = type(value)
    if id(value) in code.world.made:
        return _build_made(code, *code.world.made[id(value)])
    if not _holds_made(code.world, value):
        refuse_if_shown(gc.get_referents(value))
        return code.bind(getattr(value, "__name__", kind.__name__), value)
    reduce: Any = copyreg.dispatch_table.get(kind, operator.methodcaller("__reduce__"))
    maker, args = reduce(value)
    return f"{code.expression(maker)}({', '.join(map(code.expression, args))})"


def _build_made(code: Code, value: Any, maker: Any, args: Any, default: Any) -> str:
    """The instruction is run again, over functions that evaluate the rest: their cells may hold what it makes."""
    given = [*args, *(default or ()), *(args[0] if isinstance(args[0], tuple) else ())]
    functions = [one for one in given if isinstance(one, types.FunctionType)]
    empty = start_cells(code, [cell for one in functions for cell in one.__closure__ or ()])
    name = code.start(value, f"{code.bind('made', maker)}({', '.join(map(code.expression, args))})")
    if default is not None:
        setter, evaluate = default
        code.lines.append(f"{code.bind('set_default', setter)}({name}, {code.expression(evaluate)})")
    fill_cells(code, empty)
    return name


def _holds_made(world: World, value: Any) -> bool:
    pending = [value]
    while pending:
        part = pending.pop()
        if id(part) in world.made:
            return True
        if isinstance(part, (*TYPE_ALIASES, tuple, list, dict)):
            pending += gc.get_referents(part)
    return False
