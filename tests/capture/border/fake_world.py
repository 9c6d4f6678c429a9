"""A World for tests of the interpreter alone: every operation is done natively, nothing is guarded, functions are interpreted.

Works without torch's help (and, under CPython 3.12 and 3.13, without torch: see `without_torch`).
"""

from __future__ import annotations

import builtins
import operator
import types
from typing import Any

from fusewright.base.signals import UserException
from fusewright.capture.assumptions import Assumptions
from fusewright.capture.border.absent import AbsentTraceback
from fusewright.capture.border.effects import DELETED
from fusewright.capture.border.native import native
from fusewright.capture.interpret.interpreter import NULL, Frame, Tracer
from fusewright.capture.settings import CaptureOptions

BINARY = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod,
    "**": operator.pow, "@": operator.matmul, "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_,
    "^": operator.xor,
}  # fmt: skip
INPLACE = {
    "+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv, "//": operator.ifloordiv, "%": operator.imod,
    "**": operator.ipow, "@": operator.imatmul, "<<": operator.ilshift, ">>": operator.irshift, "&": operator.iand, "|": operator.ior,
    "^": operator.ixor,
}  # fmt: skip
COMPARE = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge,
    "is": operator.is_, "is not": operator.is_not,
}  # fmt: skip
UNARY = {"+": operator.pos, "-": operator.neg, "~": operator.invert}


class FakeWorld:
    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.unread: dict[int, Any] = {}
        self.intent = ""

    def use(self, value: Any) -> Any:
        return value

    def guard_answer(self, *question: object) -> None:
        pass

    def load_default(self, function: Any, key: Any) -> object:
        if key is None:  # guards that there is none
            return None
        return function.__defaults__[key] if isinstance(key, int) else function.__kwdefaults__[key]

    def load_global(self, function: Any, name: str) -> object:
        for namespace in (function.__globals__, vars(builtins)):
            if name in namespace:
                return namespace[name]
        raise UserException(NameError(f"name '{name}' is not defined", name=name))

    def store_global(self, function: Any, name: str, value: object) -> None:
        function.__globals__[name] = value

    def delete_global(self, function: Any, name: str) -> None:
        if name not in function.__globals__:
            raise UserException(NameError(f"name '{name}' is not defined", name=name))
        del function.__globals__[name]

    def load_cell(self, cell: Any) -> object:
        try:
            return cell.cell_contents
        except ValueError:
            return NULL

    def store_cell(self, cell: Any, value: object) -> None:
        if value is DELETED:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    def getattr(self, obj: Any, name: str) -> object:
        return native(getattr, obj, name)

    def setattr(self, obj: Any, name: str, value: object) -> None:
        if type(value) is not AbsentTraceback:
            native(setattr, obj, name, value)

    def delattr(self, obj: Any, name: str) -> None:
        native(delattr, obj, name)

    def unary(self, op: str, value: Any) -> object:
        return native(UNARY[op], value)

    def binary(self, op: str, left: Any, right: Any, inplace: bool = False) -> object:
        return native((INPLACE if inplace else BINARY)[op], left, right)

    def compare(self, op: str, left: Any, right: Any) -> object:
        return native(COMPARE[op], left, right)

    def contains(self, container: Any, item: Any) -> bool:
        return native(operator.contains, container, item)

    def getitem(self, obj: Any, key: Any) -> object:
        return native(operator.getitem, obj, key)

    def setitem(self, obj: Any, key: Any, value: object) -> None:
        native(operator.setitem, obj, key, value)

    def delitem(self, obj: Any, key: Any) -> None:
        native(operator.delitem, obj, key)

    def truth(self, obj: Any) -> bool:
        return native(bool, obj)

    def ask_length(self, obj):
        pass

    def iterate(self, obj: Any) -> Any:
        return native(iter, obj)

    def next(self, iterator: Any) -> object:
        return native(next, iterator)

    def format(self, value: Any, conversion: int, spec: str) -> str:
        return native(format, (lambda v: v, str, repr, ascii)[conversion](value), spec)

    def import_name(self, namespace: Any, name: str, names: Any, level: int) -> Any:
        return native(__import__, name, namespace, None, names or (), level)

    def import_from(self, module: Any, name: str) -> object:
        return native(getattr, module, name)

    def source_of(self, obj: object) -> None:
        return None

    def type_of(self, obj: object) -> type:
        return type(obj)

    def note_inside_function(self, function: Any) -> None:
        pass

    def load_function(self, function: Any) -> bool:
        return False

    def note_inside_class(self, cls: type) -> None:
        pass


def call(tracer: Tracer, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Python functions and methods are interpreted, everything else is native."""
    if isinstance(function, types.MethodType):
        return tracer.call(function.__func__, (function.__self__, *args), kwargs)
    if isinstance(function, types.FunctionType):
        return tracer.inline(function, args, kwargs)
    return native(function, *(None if type(value) is AbsentTraceback else value for value in args), **kwargs)


def tracer_for(
    function: Any, arguments: tuple[Any, ...], stop_at: int = -1, options: CaptureOptions | None = None
) -> Tracer:
    tracer = Tracer(function, arguments, options or CaptureOptions(), call, Assumptions(stop_at=stop_at))
    tracer.world = FakeWorld(tracer)
    tracer.recorder = types.SimpleNamespace(op_count=0)  # nothing is recorded
    return tracer


def no_cut(frame: Frame) -> Any:
    raise AssertionError("not asked to stop")


def interpret(function: Any, *arguments: Any) -> object:
    """Interprets a call whose arguments are already those of the frame; gives what the function returns."""
    (value,) = tracer_for(function, arguments).run(lambda real, slot, name: real, no_cut).values
    return value
