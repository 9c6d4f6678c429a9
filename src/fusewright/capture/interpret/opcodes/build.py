"""Containers, unpacking, slices and formatted strings."""

from __future__ import annotations

from typing import Any

from fusewright._native import isinstance
from fusewright.base.signals import UserException
from fusewright.capture.border.interfaces import Frame
from fusewright.capture.border.values.dict import is_copied_whole
from fusewright.capture.border.values.text import joined
from fusewright.capture.bytecode.instructions import CALLABLE_DEPTH, too_many_values
from fusewright.capture.interpret.opcodes.table import (
    EXACT_SEQUENCES,
    PLAIN_KEYS,
    elements,
    opcode,
    pop_many,
    said_kind,
    user_error,
)


@opcode("BUILD_TUPLE")
def build_tuple(frame: Frame, count: int) -> None:
    values = tuple(pop_many(frame.stack, count))
    frame.stack.append(values)


@opcode("BUILD_LIST")
def build_list(frame: Frame, count: int) -> None:
    values = pop_many(frame.stack, count)
    frame.stack.append(values)


def add_to_set(frame: Frame, target: set[object], value: object) -> None:
    """`target.add(value)`, interpreted where hashing could run user code."""
    if type(value) in PLAIN_KEYS:
        target.add(value)
    else:
        frame.tracer.call(set.add, (target, value))


def put_in_dict(frame: Frame, target: dict[object, object], key: object, value: object) -> None:
    """`target[key] = value`, interpreted where hashing could run user code."""
    if type(key) in PLAIN_KEYS:
        target[key] = value
    else:
        frame.world.setitem(target, key, value)


@opcode("BUILD_SET")
def build_set(frame: Frame, count: int) -> None:
    values = pop_many(frame.stack, count)
    result: set[object] = set()
    for value in values:
        add_to_set(frame, result, value)
    frame.stack.append(result)


@opcode("BUILD_MAP")
def build_map(frame: Frame, count: int) -> None:
    values = pop_many(frame.stack, 2 * count)
    result: dict[object, object] = {}
    for position in range(0, 2 * count, 2):
        put_in_dict(frame, result, values[position], values[position + 1])
    frame.stack.append(result)


@opcode("BUILD_CONST_KEY_MAP")
def build_const_key_map(frame: Frame, count: int) -> None:
    keys = frame.stack.pop()
    values = pop_many(frame.stack, count)
    frame.stack.append(dict(zip(keys, values)))


@opcode("BUILD_STRING")
def build_string(frame: Frame, count: int) -> None:
    parts = pop_many(frame.stack, count)
    frame.stack.append(joined(parts))


@opcode("BUILD_SLICE")
def build_slice(frame: Frame, count: int) -> None:
    parts = pop_many(frame.stack, count)
    frame.stack.append(slice(*parts))


@opcode("LIST_APPEND")
def list_append(frame: Frame, depth: int) -> None:
    value = frame.stack.pop()
    frame.stack[-depth].append(value)


@opcode("SET_ADD")
def set_add(frame: Frame, depth: int) -> None:
    value = frame.stack.pop()
    add_to_set(frame, frame.stack[-depth], value)


@opcode("MAP_ADD")
def map_add(frame: Frame, depth: int) -> None:
    value = frame.stack.pop()
    key = frame.stack.pop()
    put_in_dict(frame, frame.stack[-depth], key, value)


@opcode("LIST_EXTEND")
def list_extend(frame: Frame, depth: int) -> None:
    iterable = frame.stack.pop()
    try:
        values = elements(frame, iterable, listed=True)
    except UserException as signal:
        if (
            not isinstance(signal.exception, TypeError)
            or hasattr(type(iterable), "__iter__")
            or hasattr(type(iterable), "__getitem__")
        ):
            raise
        raise user_error(TypeError, f"Value after * must be an iterable, not {said_kind(frame, iterable)}") from None
    frame.stack[-depth].extend(values)


@opcode("SET_UPDATE")
def set_update(frame: Frame, depth: int) -> None:
    iterable = frame.stack.pop()
    target = frame.stack[-depth]
    # CPython copies tables, which gives another order than element by element, and asks no subclass.
    if isinstance(iterable, (set, frozenset)) or type(iterable) is dict:
        frame.tracer.call(set.update, (target, iterable))
        return
    for value in elements(frame, iterable):
        add_to_set(frame, target, value)


@opcode("LIST_TO_TUPLE")
def list_to_tuple(frame: Frame, operand: object) -> None:
    frame.stack[-1] = tuple(frame.stack[-1])


def mapping_items(frame: Frame, mapping: object) -> list[tuple[Any, Any]]:
    """Keys and values as `dict.update` takes them: through `keys()` and `[]`, or as a dict holds them."""
    if type(mapping) is dict or is_copied_whole(frame.world, mapping):
        return list(dict.items(mapping))  # type: ignore[arg-type]
    keys = elements(frame, frame.tracer.call(frame.world.getattr(mapping, "keys")))
    return [(key, frame.world.getitem(mapping, key)) for key in keys]


@opcode("DICT_UPDATE")
def dict_update(frame: Frame, depth: int) -> None:
    mapping = frame.stack.pop()
    target = frame.stack[-depth]
    try:
        items = mapping_items(frame, mapping)
    except UserException as signal:
        if not isinstance(signal.exception, AttributeError):
            raise
        raise user_error(TypeError, f"'{said_kind(frame, mapping)}' object is not a mapping") from None
    for key, value in items:
        put_in_dict(frame, target, key, value)


def callable_text(function: object) -> str:
    """How CPython names a callable in messages about its arguments: `module.qualname()`."""
    name = getattr(function, "__qualname__", None)
    if not isinstance(name, str):
        return str(function)
    module = getattr(function, "__module__", None)
    return f"{name}()" if module in (None, "builtins") else f"{module}.{name}()"


def merge_keywords(frame: Frame, target: dict[object, object], mapping: object, function: object) -> None:
    """`target.update(mapping)` for `**mapping` in a call of `function`: a key may come once."""
    try:
        items = mapping_items(frame, mapping)
    except UserException as signal:
        if not isinstance(signal.exception, AttributeError):
            raise
        message = f"{callable_text(function)} argument after ** must be a mapping, not {said_kind(frame, mapping)}"
        raise user_error(TypeError, message) from None
    for key, value in items:
        if type(key) in PLAIN_KEYS and key in target:
            raise user_error(TypeError, f"{callable_text(function)} got multiple values for keyword argument '{key}'")
        put_in_dict(frame, target, key, value)


@opcode("DICT_MERGE")
def dict_merge(frame: Frame, depth: int) -> None:
    mapping = frame.stack.pop()
    # Below the dict lie the positional arguments and the callable's two slots, in the order of this version of CPython.
    stack = frame.stack
    function = stack[-depth - CALLABLE_DEPTH]
    merge_keywords(frame, stack[-depth], mapping, function)


# ---------------------------------------------------------------------------------------------------------------------
# Unpacking


def _cannot_unpack(cls: type, error: UserException) -> UserException:
    if isinstance(error.exception, TypeError) and not hasattr(cls, "__iter__") and not hasattr(cls, "__getitem__"):
        return user_error(TypeError, f"cannot unpack non-iterable {cls.__name__} object")
    return error


@opcode("UNPACK_SEQUENCE")
def unpack_sequence(frame: Frame, count: int) -> None:
    value = frame.stack.pop()
    if type(value) in EXACT_SEQUENCES:
        if len(value) > count:
            raise user_error(ValueError, too_many_values(count, type(value), lambda: len(value)))
        values = value
    else:
        values, _ = _take(frame, value, count + 1)  # one more than wanted is all that CPython asks for
        if len(values) > count:
            raise user_error(ValueError, too_many_values(count, frame.world.type_of(value), lambda: len(value)))
    if len(values) < count:
        raise user_error(ValueError, f"not enough values to unpack (expected {count}, got {len(values)})")
    frame.stack.extend(reversed(values))


def _take(frame: Frame, iterable: object, count: int) -> tuple[list[Any], object]:
    """Up to `count` elements, and the iterator that has given them."""
    world = frame.world
    try:
        iterator = world.iterate(iterable)
    except UserException as signal:
        raise _cannot_unpack(world.type_of(iterable), signal) from None
    values: list[Any] = []
    while len(values) < count:
        try:
            values.append(world.next(iterator))
        except UserException as signal:
            if isinstance(signal.exception, StopIteration):
                break
            raise
    return values, iterator


@opcode("UNPACK_EX")
def unpack_ex(frame: Frame, counts: int) -> None:
    before, after = counts & 255, counts >> 8
    value = frame.stack.pop()
    if type(value) in EXACT_SEQUENCES:
        values = list(value)
    else:
        values, iterator = _take(frame, value, before)
        if len(values) == before:
            values += elements(frame, iterator, listed=True)  # which asks the iterator for one
    if len(values) < before + after:
        raise user_error(
            ValueError, f"not enough values to unpack (expected at least {before + after}, got {len(values)})"
        )
    end = len(values) - after
    frame.stack.extend(reversed([*values[:before], values[before:end], *values[end:]]))


# ---------------------------------------------------------------------------------------------------------------------
# Formatted strings


@opcode("FORMAT_VALUE")
def format_value(frame: Frame, operand: tuple[int, bool]) -> None:
    conversion, has_spec = operand
    stack = frame.stack
    spec = stack.pop() if has_spec else ""
    stack[-1] = frame.world.format(stack[-1], conversion, spec)


@opcode("CONVERT_VALUE")
def convert_value(frame: Frame, conversion: int) -> None:
    frame.stack[-1] = frame.tracer.call((None, str, repr, ascii)[conversion], (frame.stack[-1],))


@opcode("FORMAT_SIMPLE")
def format_simple(frame: Frame, operand: object) -> None:
    frame.stack[-1] = frame.world.format(frame.stack[-1], 0, "")


@opcode("FORMAT_WITH_SPEC")
def format_with_spec(frame: Frame, operand: object) -> None:
    spec = frame.stack.pop()
    frame.stack[-1] = frame.world.format(frame.stack[-1], 0, spec)
