"""Calls, functions and the intrinsics; and the builtins that need the calling frame (`super()`, `locals()`,
`__build_class__`…)."""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak, SkipFrame, UserException
from fusewright.capture.border.interfaces import Frame
from fusewright.capture.border.native import native
from fusewright.capture.bytecode.instructions import NULL, TUPLES_ASK_LENGTH, VERSION, intrinsic_body
from fusewright.capture.interpret.class_body import build_class
from fusewright.capture.interpret.opcodes.build import callable_text, merge_keywords
from fusewright.capture.interpret.opcodes.errors import prepare_reraise
from fusewright.capture.interpret.opcodes.table import elements, opcode, pop_many, said_kind, user_error


def _perform(frame: Frame, function: object, args: Any, kwargs: dict[str, object]) -> None:
    special = FRAME_CALLS.get(id(function))
    if special is None:
        frame.stack.append(frame.tracer.call(function, args, kwargs))
    else:
        frame.stack.append(special(frame, args, kwargs))


def _split(values: list[Any], names: tuple[str, ...]) -> tuple[list[Any], dict[str, object]]:
    if not names:
        return values, {}
    first = len(values) - len(names)
    return values[:first], dict(zip(names, values[first:]))


@opcode("CALL")
def call(frame: Frame, operand: tuple[int, tuple[str, ...]]) -> None:
    count, names = operand
    stack = frame.stack
    args = pop_many(stack, count)
    function = stack.pop()
    below = stack.pop()
    if below is not NULL:
        args.insert(0, function)
        function = below
    if names:
        args, kwargs = _split(args, names)
        _perform(frame, function, tuple(args), kwargs)
    else:
        _perform(frame, function, tuple(args), {})


def _call_null_last(frame: Frame, count: int, names: tuple[str, ...]) -> None:
    stack = frame.stack
    args = pop_many(stack, count)
    receiver = stack.pop()
    function = stack.pop()
    if receiver is not NULL:
        args.insert(0, receiver)
    args, kwargs = _split(args, names)
    _perform(frame, function, tuple(args), kwargs)


@opcode("CALL_NULL_LAST")
def call_null_last(frame: Frame, operand: tuple[int, tuple[str, ...]]) -> None:
    _call_null_last(frame, operand[0], ())


@opcode("CALL_KW")
def call_kw(frame: Frame, count: int) -> None:
    names = frame.stack.pop()
    _call_null_last(frame, count, names)


def _call_ex(frame: Frame, has_keywords: bool, null_last: bool) -> None:
    stack = frame.stack
    keywords = stack.pop() if has_keywords else NULL
    args = stack.pop()
    above = stack.pop()
    below = stack.pop()
    function = below if null_last or below is not NULL else above
    if type(args) is not tuple:
        try:
            args = elements(frame, args, listed=TUPLES_ASK_LENGTH)
        except UserException as signal:
            if not isinstance(signal.exception, TypeError) or hasattr(type(args), "__iter__"):
                raise
            message = f"{callable_text(function)} argument after * must be an iterable, not {said_kind(frame, args)}"
            raise user_error(TypeError, message) from None
    kwargs: dict[Any, object] = {}
    if keywords is not NULL:
        merge_keywords(frame, kwargs, keywords, function)
    if not all(isinstance(name, str) for name in kwargs):
        raise user_error(TypeError, "keywords must be strings")
    _perform(frame, function, tuple(args), kwargs)


@opcode("CALL_FUNCTION_EX")
def call_function_ex(frame: Frame, has_keywords: bool) -> None:
    _call_ex(frame, has_keywords, False)


@opcode("CALL_FUNCTION_EX_NULL_LAST")
def call_function_ex_null_last(frame: Frame, has_keywords: bool) -> None:
    _call_ex(frame, has_keywords, True)


# ---------------------------------------------------------------------------------------------------------------------
# Functions

DEFAULTS, KEYWORD_DEFAULTS, ANNOTATIONS, CLOSURE, ANNOTATE = 1, 2, 4, 8, 16


def _set_annotations(function: types.FunctionType, value: Any) -> None:
    function.__annotations__ = dict(zip(value[::2], value[1::2])) if isinstance(value, tuple) else value


_ATTRIBUTES: dict[int, Callable[[Any, Any], None]] = {
    DEFAULTS: lambda function, value: setattr(function, "__defaults__", value),
    KEYWORD_DEFAULTS: lambda function, value: setattr(function, "__kwdefaults__", value),
    ANNOTATIONS: _set_annotations,
    ANNOTATE: lambda function, value: setattr(function, "__annotate__", value),
}


@opcode("MAKE_FUNCTION")
def make_function(frame: Frame, flags: int) -> None:
    """A real function; its cells are real cells of the capture, and calling it interprets it."""
    stack = frame.stack
    code = stack.pop()
    closure = stack.pop() if flags & CLOSURE else None
    # CPython 3.13 gives a function its closure afterwards, so the cells that it will get are not known yet.
    pending = closure is None and bool(code.co_freevars)
    cells = tuple(types.CellType() for _ in code.co_freevars) if pending else closure
    function = types.FunctionType(code, frame.function.__globals__, None, None, cells)
    for flag in (ANNOTATIONS, KEYWORD_DEFAULTS, DEFAULTS):
        if flags & flag:
            _ATTRIBUTES[flag](function, stack.pop())
    frame.world.note_inside_function(function)
    stack.append(function)


@opcode("SET_FUNCTION_ATTRIBUTE")
def set_function_attribute(frame: Frame, flag: int) -> None:
    stack = frame.stack
    function = stack.pop()
    value = stack.pop()
    if flag == CLOSURE:
        complete = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, value
        )
        complete.__kwdefaults__ = function.__kwdefaults__
        complete.__annotations__ = function.__annotations__  # from 3.14 on it comes after the closure
        frame.world.note_inside_function(complete)
        function = complete
    else:
        _ATTRIBUTES[flag](function, value)
    stack.append(function)


# ---------------------------------------------------------------------------------------------------------------------
# Intrinsics (3.12 and later)


def _stop_iteration_error(frame: Frame, error: BaseException) -> BaseException:
    """PEP 479: a StopIteration that leaves a generator's body becomes a RuntimeError."""
    if not isinstance(error, StopIteration):
        return error
    replaced = RuntimeError("generator raised StopIteration")
    replaced.__cause__ = error
    replaced.__context__ = error
    return replaced


def _made_by(name: str, frame: Frame, *args: Any) -> object:
    """A type parameter or an alias (PEP 695). What evaluates it when it is asked can be given to the instruction only,
    which takes the module from the function that it is in."""
    maker = types.FunctionType(_intrinsic_body(name, len(args)), frame.function.__globals__)
    made = native(maker, *args)
    frame.world.made[id(made)] = made, maker, args, None
    return made


_intrinsic_body = functools.cache(intrinsic_body)


def _generic_base(frame: Frame, parameters: Any) -> NoReturn:
    kind = SkipFrame if frame.back is None else GraphBreak
    raise kind("class-creation", "a class with type parameters")


def _with_default(frame: Frame, parameter: Any, evaluate: Any) -> object:
    made, maker, args, _ = frame.world.made[id(parameter)]
    setter = types.FunctionType(_intrinsic_body("INTRINSIC_SET_TYPEPARAM_DEFAULT", 2), frame.function.__globals__)
    frame.world.made[id(parameter)] = made, maker, args, (setter, evaluate)
    return native(setter, parameter, evaluate)


def _with_type_parameters(frame: Frame, function: Any, parameters: Any) -> object:
    function.__type_params__ = parameters
    return function


_INTRINSICS_1: dict[str, Callable[..., object]] = {
    "INTRINSIC_STOPITERATION_ERROR": _stop_iteration_error,
    "INTRINSIC_UNARY_POSITIVE": lambda frame, value: frame.world.unary("+", value),
    "INTRINSIC_LIST_TO_TUPLE": lambda frame, value: tuple(value),
    "INTRINSIC_SUBSCRIPT_GENERIC": _generic_base,
}
_INTRINSICS_2: dict[str, Callable[..., object]] = {
    "INTRINSIC_PREP_RERAISE_STAR": prepare_reraise,
    "INTRINSIC_SET_FUNCTION_TYPE_PARAMS": _with_type_parameters,
    "INTRINSIC_SET_TYPEPARAM_DEFAULT": _with_default,
}


for _name in ("TYPEVAR", "PARAMSPEC", "TYPEVARTUPLE", "TYPEALIAS"):
    _INTRINSICS_1[f"INTRINSIC_{_name}"] = functools.partial(_made_by, f"INTRINSIC_{_name}")
for _name in ("TYPEVAR_WITH_BOUND", "TYPEVAR_WITH_CONSTRAINTS"):
    _INTRINSICS_2[f"INTRINSIC_{_name}"] = functools.partial(_made_by, f"INTRINSIC_{_name}")


@opcode("CALL_INTRINSIC_1")
def call_intrinsic_1(frame: Frame, name: str) -> None:
    frame.stack[-1] = _intrinsic(_INTRINSICS_1, name)(frame, frame.stack[-1])


@opcode("CALL_INTRINSIC_2")
def call_intrinsic_2(frame: Frame, name: str) -> None:
    second = frame.stack.pop()
    frame.stack[-1] = _intrinsic(_INTRINSICS_2, name)(frame, frame.stack[-1], second)


def _intrinsic(table: dict[str, Callable[..., object]], name: str) -> Callable[..., object]:
    if name not in table:
        raise SkipFrame("unsupported-instruction", name)
    return table[name]


# ---------------------------------------------------------------------------------------------------------------------
# Builtins that read the frame that calls them


def _super(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """`super()`: the class from the cell `__class__`, the receiver from the first argument."""
    if args or kwargs:
        return frame.tracer.call(super, args, kwargs)
    info = frame.info
    if not info.code.co_argcount:
        raise user_error(RuntimeError, "super(): no arguments")
    if "__class__" not in info.slots[info.first_free :]:
        raise user_error(RuntimeError, "super(): __class__ cell not found")
    receiver = frame.local(0)
    if 0 in info.cells:
        receiver = frame.tracer.read_cell(receiver)
    if receiver is NULL:
        raise user_error(RuntimeError, "super(): arg[0] deleted")
    cls = frame.tracer.read_cell(frame.local(info.slots.index("__class__", info.first_free)))
    if cls is NULL:
        raise user_error(RuntimeError, "super(): empty __class__ cell")
    return frame.tracer.call(super, (cls, receiver))


def frame_variables(frame: Frame) -> dict[str, object]:
    """What `locals()` gives in this frame. Before CPython 3.13 it is one dict, brought up to date at each question."""
    if frame.namespace is not None:
        return frame.namespace
    result = {} if frame.variables is None else frame.variables
    if VERSION < (3, 13):
        frame.variables = result
    for slot, name in enumerate(frame.info.slots):
        value = frame.local(slot)
        if slot in frame.info.cells and isinstance(value, types.CellType):
            value = frame.tracer.read_cell(value)
        if value is not NULL:
            result[name] = value
        else:
            result.pop(name, None)
    return result


def _locals(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return frame.tracer.call(locals, args, kwargs) if args or kwargs else frame_variables(frame)


def _vars(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return frame.tracer.call(vars, args, kwargs) if args or kwargs else frame_variables(frame)


def _dir(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return frame.tracer.call(dir, args, kwargs) if args or kwargs else sorted(frame_variables(frame))


def _exc_info(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    error = frame.tracer.handled_exception()
    return (None, None, None) if error is None else (type(error), error, frame.tracer.traceback_of(error))


def _exception(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return frame.tracer.handled_exception()


def _refuse(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    # A break runs the call inside `finish`, whose frame is not the user's in the place of the root.
    kind = SkipFrame if frame.back is None else GraphBreak
    raise kind("frame-access", "a call that reads or changes the calling frame (eval, exec, sys._getframe…)")


def _skip(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    raise SkipFrame("frame-access", "a call that looks at the frames of all callers")


FRAME_CALLS: dict[int, Callable[[Any, tuple[Any, ...], dict[str, Any]], object]] = {
    id(super): _super,
    id(locals): _locals,
    id(vars): _vars,
    id(dir): _dir,
    id(sys.exc_info): _exc_info,
    id(sys.exception): _exception,
    id(builtins.__build_class__): build_class,
    id(globals): lambda frame, args, kwargs: frame.world.globals_dict(frame.function),
    id(eval): _refuse,
    id(exec): _refuse,
    id(sys._getframe): _refuse,
    id(inspect.currentframe): _refuse,
    id(inspect.stack): _skip,
}
