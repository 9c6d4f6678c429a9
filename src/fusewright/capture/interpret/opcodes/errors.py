"""Exceptions and `with`: raising, matching, the exception being handled, context managers."""

from __future__ import annotations

import types
from typing import Any

from fusewright._native import isinstance
from fusewright.base.exception_fields import cause_of, context_of, set_cause
from fusewright.base.signals import SkipFrame, UserException
from fusewright.capture.border.interfaces import Frame
from fusewright.capture.border.values.cls import lookup, own_attributes
from fusewright.capture.bytecode.instructions import NULL, no_special_method
from fusewright.capture.guards import MISSING
from fusewright.capture.interpret.opcodes.table import opcode, user_error
from fusewright.capture.interpret.tracebacks import Saved


@opcode("PUSH_EXC_INFO")
def push_exc_info(frame: Frame, operand: object) -> None:
    state = frame.tracer.handling
    stack = frame.stack
    stack.insert(-1, Saved(state.error))
    state.error = stack[-1]


@opcode("POP_EXCEPT")
def pop_except(frame: Frame, operand: object) -> None:
    frame.tracer.handling.error = frame.stack.pop().error


@opcode("RERAISE")
def reraise(frame: Frame, operand: object) -> None:
    raise UserException(frame.stack.pop())


def _instance(frame: Frame, value: object, message: str) -> BaseException:
    """The exception that `raise value` means: an exception, or a class to be called."""
    if isinstance(value, type) and issubclass(value, BaseException):
        error = frame.tracer.call(value)
        if not isinstance(error, BaseException):
            text = f"calling {value!r} should have returned an instance of BaseException, not {type(error)!r}"
            raise user_error(TypeError, text)
        return error
    if isinstance(value, BaseException):
        return value
    raise user_error(TypeError, message)


@opcode("RAISE_VARARGS")
def raise_varargs(frame: Frame, count: int) -> None:
    stack = frame.stack
    if count == 0:
        error = frame.tracer.handled_exception()
        raise user_error(RuntimeError, "No active exception to reraise") if error is None else UserException(error)
    cause = stack.pop() if count == 2 else None
    error = _instance(frame, stack.pop(), "exceptions must derive from BaseException")
    if frame.world.source_of(error) is not None:
        raise SkipFrame("outside-exception", "raises an exception object that existed before (raising changes it)")
    if count == 2:
        said = "exception causes must derive from BaseException"
        set_cause(error, None if cause is None else _instance(frame, cause, said))
    frame.tracer.set_context(error)
    raise UserException(error)


@opcode("CHECK_EXC_MATCH")
def check_exc_match(frame: Frame, operand: object) -> None:
    stack = frame.stack
    wanted = stack.pop()
    stack.append(exception_matches(type(stack[-1]), wanted))


try:
    raise KeyError
except* KeyError as _wrapped:  # an exception that is no group is put into one
    _WRAPPED_HAS_A_TRACEBACK = _wrapped.__traceback__ is not None


@opcode("CHECK_EG_MATCH")
def check_group_match(frame: Frame, operand: object) -> None:
    """`except* wanted:`: what matches, and what is left of the exception, with the subgroups that CPython makes."""
    stack = frame.stack
    wanted = stack.pop()
    error = stack.pop()
    for cls in wanted if isinstance(wanted, tuple) else (wanted,):
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            raise user_error(TypeError, "catching classes that do not inherit from BaseException is not allowed")
        if issubclass(cls, BaseExceptionGroup):
            raise user_error(TypeError, "catching ExceptionGroup with except* is not allowed. Use except instead.")
    if error is None:
        rest, match = None, None
    elif exception_matches(type(error), wanted):
        whole = isinstance(error, BaseExceptionGroup)
        group = ExceptionGroup if isinstance(error, Exception) else BaseExceptionGroup
        rest, match = None, error if whole else frame.tracer.call(group, ("", (error,)))
    elif isinstance(error, BaseExceptionGroup):
        match, rest = frame.tracer.call(frame.world.getattr(error, "split"), (wanted,))
    else:
        rest, match = error, None
    stack.append(rest)
    stack.append(match)
    if match is not None and rest is None and _WRAPPED_HAS_A_TRACEBACK and not isinstance(error, BaseExceptionGroup):
        frame.tracer.copy_traceback(error, match)
    if match is not None:
        frame.tracer.handling.error = match


def prepare_reraise(frame: Frame, original: BaseException, raised: list[Any]) -> object:
    """What is raised at the end of `except*` clauses: the parts that nobody caught or that were raised again, as one
    group."""
    errors = [error for error in raised if error is not None]
    if not errors:
        return None
    if not isinstance(original, BaseExceptionGroup):
        return errors[0]
    if len(errors) > 1 or not _is_part(errors[0], original):
        raise SkipFrame("unsupported-instruction", "exceptions that are raised in except* clauses, which are grouped")
    return errors[0]


def _is_part(error: BaseException, original: BaseExceptionGroup) -> bool:
    """Whether `split` has made it from the group that was caught (which keeps cause and context)."""
    return (
        isinstance(error, BaseExceptionGroup)
        and context_of(error) is context_of(original)
        and cause_of(error) is cause_of(original)
    )


@opcode("PREP_RERAISE_STAR")
def prep_reraise_star(frame: Frame, operand: object) -> None:
    stack = frame.stack
    raised = stack.pop()
    stack.append(prepare_reraise(frame, stack.pop(), raised))


def exception_matches(raised: type, wanted: object) -> bool:
    """Whether `except wanted:` catches an exception of class `raised` (by inheritance alone, as CPython does)."""
    classes = wanted if isinstance(wanted, tuple) else (wanted,)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            raise user_error(TypeError, "catching classes that do not inherit from BaseException is not allowed")
    return any(cls in raised.__mro__ for cls in classes)


def _special(frame: Frame, manager: object, name: str) -> object:
    """The bound special method `name`, looked up on the type of `manager` as the interpreter does."""
    cls = frame.world.type_of(manager)
    found = lookup(cls, name)
    if found is MISSING:
        raise user_error(TypeError, no_special_method(cls, name))
    hooked = type(lookup(cls, "__getattribute__")) is types.FunctionType
    if type(found) is types.FunctionType and (hooked or name in own_attributes(manager)):
        # neither that nor an instance attribute of this name has a say in it
        return types.MethodType(frame.world.getattr(cls, name), manager)
    return frame.world.getattr(manager, name)


@opcode("BEFORE_WITH")
def before_with(frame: Frame, operand: object) -> None:
    stack = frame.stack
    manager = stack.pop()
    enter = _special(frame, manager, "__enter__")
    stack.append(_special(frame, manager, "__exit__"))
    stack.append(frame.tracer.call(enter))


@opcode("LOAD_SPECIAL")
def load_special(frame: Frame, name: str) -> None:
    stack = frame.stack
    stack[-1] = _special(frame, stack[-1], name)
    stack.append(NULL)


@opcode("WITH_EXCEPT_START")
def with_except_start(frame: Frame, depth: int) -> None:
    stack = frame.stack
    error = stack[-1]
    stack.append(frame.tracer.call(stack[-depth], (type(error), error, frame.tracer.traceback_of(error))))
