"""The match statement, by the rules of PEP 634 (and CPython's `match_keys`, `match_class`)."""

from __future__ import annotations

import builtins
from typing import Any

from fusewright._native import isinstance
from fusewright.base.signals import UserException
from fusewright.capture.border.interfaces import Frame
from fusewright.capture.interpret.opcodes.table import opcode, user_error

_MAPPING_FLAG = 1 << 6  # Py_TPFLAGS_MAPPING
_SEQUENCE_FLAG = 1 << 5  # Py_TPFLAGS_SEQUENCE
_MATCH_SELF_FLAG = 1 << 22  # _Py_TPFLAGS_MATCH_SELF: int, str, list… match themselves by one positional pattern
_ABSENT = object()


@opcode("GET_LEN")
def get_len(frame: Frame, operand: object) -> None:
    frame.stack.append(frame.tracer.call(len, (frame.stack[-1],)))


@opcode("MATCH_MAPPING")
def match_mapping(frame: Frame, operand: object) -> None:
    frame.stack.append(bool(frame.world.type_of(frame.stack[-1]).__flags__ & _MAPPING_FLAG))


@opcode("MATCH_SEQUENCE")
def match_sequence(frame: Frame, operand: object) -> None:
    frame.stack.append(bool(frame.world.type_of(frame.stack[-1]).__flags__ & _SEQUENCE_FLAG))


@opcode("MATCH_KEYS")
def match_keys(frame: Frame, operand: object) -> None:
    subject, keys = frame.stack[-2:]
    frame.stack.append(_match_keys(frame, subject, keys))


def _match_keys(frame: Frame, subject: object, keys: tuple[Any, ...]) -> tuple[object, ...] | None:
    seen: set[object] = set()
    values = []
    get = frame.world.getattr(subject, "get")
    for key in keys:
        if key in seen:  # keys are constants or dotted names; constants hash natively
            raise user_error(ValueError, f"mapping pattern checks duplicate key ({key!r})")
        seen.add(key)
        value = frame.tracer.call(get, (key, _ABSENT))
        if value is _ABSENT:
            return None
        values.append(value)
    return tuple(values)


@opcode("MATCH_CLASS")
def match_class(frame: Frame, positional: int) -> None:
    stack = frame.stack
    names = stack.pop()
    cls = stack.pop()
    subject = stack.pop()
    stack.append(_match_class(frame, subject, cls, positional, names))


def _match_class(
    frame: Frame, subject: object, cls: Any, positional: int, names: tuple[str, ...]
) -> tuple[object, ...] | None:
    if not isinstance(cls, type):
        raise user_error(TypeError, "called match pattern must be a class")
    if not frame.tracer.call(builtins.isinstance, (subject, cls)):
        return None
    seen: set[str] = set()
    values: list[object] = []
    if positional:
        match_self = False
        try:
            arguments = frame.world.getattr(cls, "__match_args__")
        except UserException as signal:
            if not isinstance(signal.exception, AttributeError):
                raise
            arguments = ()
            match_self = bool(cls.__flags__ & _MATCH_SELF_FLAG)
        if type(arguments) is not tuple:
            raise user_error(
                TypeError, f"{cls.__name__}.__match_args__ must be a tuple (got {type(arguments).__name__})"
            )
        allowed = 1 if match_self else len(arguments)
        if allowed < positional:
            plural = "" if allowed == 1 else "s"
            raise user_error(
                TypeError, f"{cls.__name__}() accepts {allowed} positional sub-pattern{plural} ({positional} given)"
            )
        if match_self:
            values.append(subject)
        else:
            for name in arguments[:positional]:
                if not isinstance(name, str):
                    raise user_error(TypeError, f"__match_args__ elements must be strings (got {type(name).__name__})")
                if not _take_attribute(frame, subject, cls, name, seen, values):
                    return None
    for name in names:
        if not _take_attribute(frame, subject, cls, name, seen, values):
            return None
    return tuple(values)


def _take_attribute(frame: Frame, subject: object, cls: type, name: str, seen: set[str], values: list[object]) -> bool:
    if name in seen:
        raise user_error(TypeError, f"{cls.__name__}() got multiple sub-patterns for attribute '{name}'")
    seen.add(name)
    try:
        values.append(frame.world.getattr(subject, name))
    except UserException as signal:
        if isinstance(signal.exception, AttributeError):
            return False
        raise
    return True
