"""Loads and stores: constants, variables, cells, globals, names of class bodies, attributes, items, imports, and
operators."""

from __future__ import annotations

import builtins

from fusewright.base.signals import UserException
from fusewright.capture.border.interfaces import Frame
from fusewright.capture.border.values import list as lists
from fusewright.capture.bytecode.instructions import NULL
from fusewright.capture.interpret.assertions import truth
from fusewright.capture.interpret.opcodes.table import Handler, opcode, row, user_error

_MISSING = object()


@opcode("NOP", "CACHE", "EXTENDED_ARG")
def nop(frame: Frame, operand: object) -> None:
    pass


@opcode("LOAD_CONST")
def load_const(frame: Frame, value: object) -> None:
    frame.stack.append(value)


@opcode("POP_TOP", "END_FOR")
def pop_top(frame: Frame, operand: object) -> None:
    frame.stack.pop()


@opcode("PUSH_NULL")
def push_null(frame: Frame, operand: object) -> None:
    frame.stack.append(NULL)


@opcode("COPY")
def copy(frame: Frame, depth: int) -> None:
    stack = frame.stack
    stack.append(stack[-depth])


@opcode("SWAP")
def swap(frame: Frame, depth: int) -> None:
    stack = frame.stack
    stack[-1], stack[-depth] = stack[-depth], stack[-1]


def unbound_local(frame: Frame, slot: int) -> UserException:
    """CPython's exception for a variable (or cell) that has no value."""
    name = frame.info.slots[slot]
    if slot >= frame.info.first_free:
        message = f"cannot access free variable '{name}' where it is not associated with a value in enclosing scope"
        return user_error(NameError, message, name=name)
    return user_error(
        UnboundLocalError, f"cannot access local variable '{name}' where it is not associated with a value"
    )


@opcode("LOAD_FAST")
def load_fast(frame: Frame, slot: int) -> None:
    value = frame.local(slot)
    if value is NULL:
        raise unbound_local(frame, slot)
    frame.stack.append(value)


@opcode("LOAD_CLOSURE")
def load_closure(frame: Frame, slot: int) -> None:
    frame.stack.append(frame.local(slot))


@opcode("LOAD_FAST_AND_CLEAR")
def load_fast_and_clear(frame: Frame, slot: int) -> None:
    frame.stack.append(frame.local(slot))
    frame.locals[slot] = NULL


@opcode("STORE_FAST", "STORE_FAST_MAYBE_NULL")
def store_fast(frame: Frame, slot: int) -> None:
    frame.locals[slot] = frame.stack.pop()


@opcode("DELETE_FAST")
def delete_fast(frame: Frame, slot: int) -> None:
    if frame.locals[slot] is NULL:
        raise unbound_local(frame, slot)
    frame.locals[slot] = NULL


@opcode("LOAD_FAST_LOAD_FAST")
def load_fast_load_fast(frame: Frame, slots: tuple[int, int]) -> None:
    load_fast(frame, slots[0])
    load_fast(frame, slots[1])


@opcode("STORE_FAST_LOAD_FAST")
def store_fast_load_fast(frame: Frame, slots: tuple[int, int]) -> None:
    store_fast(frame, slots[0])
    load_fast(frame, slots[1])


@opcode("STORE_FAST_STORE_FAST")
def store_fast_store_fast(frame: Frame, slots: tuple[int, int]) -> None:
    store_fast(frame, slots[0])
    store_fast(frame, slots[1])


# ---------------------------------------------------------------------------------------------------------------------
# Cells


@opcode("MAKE_CELL")
def make_cell(frame: Frame, slot: int) -> None:
    frame.locals[slot] = frame.tracer.new_cell(frame.local(slot))


@opcode("COPY_FREE_VARS")
def copy_free_vars(frame: Frame, count: int) -> None:
    first = frame.info.first_free
    frame.locals[first : first + count] = frame.function.__closure__ or ()


@opcode("LOAD_DEREF")
def load_deref(frame: Frame, slot: int) -> None:
    value = frame.tracer.read_cell(frame.local(slot))
    if value is NULL:
        raise unbound_local(frame, slot)
    frame.stack.append(value)


@opcode("STORE_DEREF")
def store_deref(frame: Frame, slot: int) -> None:
    frame.tracer.write_cell(frame.local(slot), frame.stack.pop())


@opcode("DELETE_DEREF")
def delete_deref(frame: Frame, slot: int) -> None:
    cell = frame.local(slot)
    if frame.tracer.read_cell(cell) is NULL:
        raise unbound_local(frame, slot)
    frame.tracer.clear_cell(cell)


@opcode("LOAD_FROM_CLASS_OR_DEREF")
def load_from_class_or_deref(frame: Frame, slot: int) -> None:
    value = frame.namespace.get(frame.info.slots[slot], _MISSING)
    if value is _MISSING:
        load_deref(frame, slot)
    else:
        frame.stack.append(value)


@opcode("LOAD_FROM_DICT_OR_DEREF")
def load_from_dict_or_deref(frame: Frame, slot: int) -> None:
    value = frame.stack.pop().get(frame.info.slots[slot], _MISSING)
    if value is _MISSING:
        load_deref(frame, slot)
    else:
        frame.stack.append(value)


# ---------------------------------------------------------------------------------------------------------------------
# Globals, and the names of class bodies


@opcode("LOAD_GLOBAL")
def load_global(frame: Frame, name: str) -> None:
    frame.stack.append(frame.world.load_global(frame.function, name))


@opcode("NULL_LOAD_GLOBAL")
def null_load_global(frame: Frame, name: str) -> None:
    frame.stack.append(NULL)
    frame.stack.append(frame.world.load_global(frame.function, name))


@opcode("LOAD_GLOBAL_NULL")
def load_global_null(frame: Frame, name: str) -> None:
    frame.stack.append(frame.world.load_global(frame.function, name))
    frame.stack.append(NULL)


@opcode("STORE_GLOBAL")
def store_global(frame: Frame, name: str) -> None:
    frame.world.store_global(frame.function, name, frame.stack.pop())


@opcode("DELETE_GLOBAL")
def delete_global(frame: Frame, name: str) -> None:
    frame.world.delete_global(frame.function, name)


@opcode("LOAD_NAME")
def load_name(frame: Frame, name: str) -> None:
    value = frame.namespace.get(name, _MISSING)
    frame.stack.append(frame.world.load_global(frame.function, name) if value is _MISSING else value)


@opcode("LOAD_FROM_DICT_OR_GLOBALS")
def load_from_dict_or_globals(frame: Frame, name: str) -> None:
    value = frame.stack.pop().get(name, _MISSING)
    frame.stack.append(frame.world.load_global(frame.function, name) if value is _MISSING else value)


@opcode("STORE_NAME")
def store_name(frame: Frame, name: str) -> None:
    frame.namespace[name] = frame.stack.pop()


@opcode("DELETE_NAME")
def delete_name(frame: Frame, name: str) -> None:
    if name not in frame.namespace:
        raise user_error(NameError, f"name '{name}' is not defined", name=name)
    del frame.namespace[name]


@opcode("LOAD_LOCALS")
def load_locals(frame: Frame, operand: object) -> None:
    frame.stack.append(frame.namespace)


@opcode("SETUP_ANNOTATIONS")
def setup_annotations(frame: Frame, operand: object) -> None:
    frame.namespace.setdefault("__annotations__", {})


@opcode("LOAD_BUILD_CLASS")
def load_build_class(frame: Frame, operand: object) -> None:
    frame.stack.append(builtins.__build_class__)


@opcode("LOAD_ASSERTION_ERROR")
def load_assertion_error(frame: Frame, operand: object) -> None:
    frame.stack.append(AssertionError)


# ---------------------------------------------------------------------------------------------------------------------
# Attributes, items, imports


@opcode("LOAD_ATTR")
def load_attr(frame: Frame, name: str) -> None:
    stack = frame.stack
    stack[-1] = frame.world.getattr(stack[-1], name)


@opcode("NULL_LOAD_ATTR")
def null_load_attr(frame: Frame, name: str) -> None:
    stack = frame.stack
    stack.append(frame.world.getattr(stack[-1], name))
    stack[-2] = NULL


@opcode("LOAD_ATTR_NULL")
def load_attr_null(frame: Frame, name: str) -> None:
    stack = frame.stack
    stack[-1] = frame.world.getattr(stack[-1], name)
    stack.append(NULL)


@opcode("LOAD_SUPER_ATTR")
def load_super_attr(frame: Frame, name: str) -> None:
    stack = frame.stack
    receiver = stack.pop()
    cls = stack.pop()
    stack[-1] = frame.world.getattr(frame.tracer.call(stack[-1], (cls, receiver)), name)


@opcode("NULL_LOAD_SUPER_ATTR")
def null_load_super_attr(frame: Frame, name: str) -> None:
    load_super_attr(frame, name)
    frame.stack.insert(-1, NULL)


@opcode("LOAD_SUPER_ATTR_NULL")
def load_super_attr_null(frame: Frame, name: str) -> None:
    load_super_attr(frame, name)
    frame.stack.append(NULL)


@opcode("STORE_ATTR")
def store_attr(frame: Frame, name: str) -> None:
    target = frame.stack.pop()
    frame.world.setattr(target, name, frame.stack.pop())


@opcode("DELETE_ATTR")
def delete_attr(frame: Frame, name: str) -> None:
    frame.world.delattr(frame.stack.pop(), name)


@opcode("BINARY_SUBSCR")
def binary_subscr(frame: Frame, operand: object) -> None:
    stack = frame.stack
    key = stack.pop()
    world = frame.world
    stack[-1] = lists.element(world, stack[-1], key) if world.unread else world.getitem(stack[-1], key)


@opcode("STORE_SUBSCR")
def store_subscr(frame: Frame, operand: object) -> None:
    stack = frame.stack
    key = stack.pop()
    target = stack.pop()
    frame.world.setitem(target, key, stack.pop())


@opcode("DELETE_SUBSCR")
def delete_subscr(frame: Frame, operand: object) -> None:
    key = frame.stack.pop()
    frame.world.delitem(frame.stack.pop(), key)


@opcode("BINARY_SLICE")
def binary_slice(frame: Frame, operand: object) -> None:
    stack = frame.stack
    stop = stack.pop()
    start = stack.pop()
    stack[-1] = frame.world.getitem(stack[-1], slice(start, stop))


@opcode("STORE_SLICE")
def store_slice(frame: Frame, operand: object) -> None:
    stack = frame.stack
    stop = stack.pop()
    start = stack.pop()
    target = stack.pop()
    frame.world.setitem(target, slice(start, stop), stack.pop())


@opcode("IMPORT_NAME")
def import_name(frame: Frame, name: str) -> None:
    stack = frame.stack
    names = stack.pop()
    stack[-1] = frame.world.import_name(frame.function.__globals__, name, names, stack[-1])


@opcode("IMPORT_FROM")
def import_from(frame: Frame, name: str) -> None:
    stack = frame.stack
    stack.append(frame.world.import_from(stack[-1], name))


# ---------------------------------------------------------------------------------------------------------------------
# Operators


def _unary(symbol: str) -> Handler:
    def handler(frame: Frame, operand: object) -> None:
        stack = frame.stack
        stack[-1] = frame.world.unary(symbol, stack[-1])

    return handler


row("UNARY_NEGATIVE", _unary("-"))
row("UNARY_POSITIVE", _unary("+"))
row("UNARY_INVERT", _unary("~"))


@opcode("UNARY_NOT")
def unary_not(frame: Frame, operand: object) -> None:
    stack = frame.stack
    stack[-1] = not frame.world.truth(stack[-1])


@opcode("TO_BOOL")
def to_bool(frame: Frame, operand: object) -> None:
    stack = frame.stack
    stack[-1] = truth(frame, stack[-1], frame.pc)


@opcode("BINARY_OP")
def binary_op(frame: Frame, symbol: str) -> None:
    stack = frame.stack
    right = stack.pop()
    stack[-1] = frame.world.binary(symbol, stack[-1], right)


@opcode("INPLACE_OP")
def inplace_op(frame: Frame, symbol: str) -> None:
    stack = frame.stack
    right = stack.pop()
    stack[-1] = frame.world.binary(symbol, stack[-1], right, True)


@opcode("COMPARE_OP")
def compare_op(frame: Frame, symbol: str) -> None:
    stack = frame.stack
    right = stack.pop()
    stack[-1] = frame.world.compare(symbol, stack[-1], right)


@opcode("COMPARE_OP_BOOL")
def compare_op_bool(frame: Frame, symbol: str) -> None:
    compare_op(frame, symbol)
    frame.stack[-1] = truth(frame, frame.stack[-1], frame.pc)


@opcode("IS_OP")
def is_op(frame: Frame, inverted: int) -> None:
    stack = frame.stack
    right = stack.pop()
    stack[-1] = frame.world.compare("is not" if inverted else "is", stack[-1], right)


@opcode("CONTAINS_OP")
def contains_op(frame: Frame, inverted: int) -> None:
    stack = frame.stack
    container = stack.pop()
    stack[-1] = frame.world.contains(container, stack[-1]) != inverted
