"""Control flow: jumps, loops, returns, and the suspension of generators."""

from __future__ import annotations

from fusewright._native import isinstance
from fusewright.base.signals import UserException
from fusewright.capture.border.interfaces import Frame
from fusewright.capture.interpret.assertions import truth
from fusewright.capture.interpret.generators import InterpretedGenerator
from fusewright.capture.interpret.opcodes.table import opcode

# Iterators of builtin containers: their `next` is native, and can only end.
_PLAIN_ITERATORS = frozenset({type(iter([])), type(iter(())), type(iter(range(0)))})
_END = object()

LEAVE = True


@opcode("RETURN_VALUE")
def return_value(frame: Frame, operand: object) -> bool:
    frame.value = frame.stack.pop()
    frame.finished = True
    return LEAVE


@opcode("RETURN_CONST")
def return_const(frame: Frame, value: object) -> bool:
    frame.value = value
    frame.finished = True
    return LEAVE


@opcode("JUMP_FORWARD")
def jump_forward(frame: Frame, target: int) -> None:
    frame.pc = target


@opcode("JUMP_BACKWARD")
def jump_backward(frame: Frame, target: int) -> None:
    # Work is charged where it can repeat: here, and at each call.
    frame.tracer.spend(frame.pc - target)
    frame.pc = target


def _spend_if_backward(frame: Frame, target: int) -> None:
    if target < frame.pc:
        frame.tracer.spend(frame.pc - target)
    frame.pc = target


@opcode("POP_JUMP_IF_TRUE")
def pop_jump_if_true(frame: Frame, target: int) -> None:
    value = frame.stack.pop()
    if value is True or (value is not False and truth(frame, value, frame.pc - 1)):
        _spend_if_backward(frame, target)


@opcode("POP_JUMP_IF_FALSE")
def pop_jump_if_false(frame: Frame, target: int) -> None:
    value = frame.stack.pop()
    if value is False or (value is not True and not truth(frame, value, frame.pc - 1)):
        _spend_if_backward(frame, target)


@opcode("POP_JUMP_IF_NONE")
def pop_jump_if_none(frame: Frame, target: int) -> None:
    if frame.stack.pop() is None:
        _spend_if_backward(frame, target)


@opcode("POP_JUMP_IF_NOT_NONE")
def pop_jump_if_not_none(frame: Frame, target: int) -> None:
    if frame.stack.pop() is not None:
        _spend_if_backward(frame, target)


@opcode("JUMP_IF_TRUE_OR_POP")
def jump_if_true_or_pop(frame: Frame, target: int) -> None:
    if frame.world.truth(frame.stack[-1]):
        frame.pc = target
    else:
        frame.stack.pop()


@opcode("JUMP_IF_FALSE_OR_POP")
def jump_if_false_or_pop(frame: Frame, target: int) -> None:
    if frame.world.truth(frame.stack[-1]):
        frame.stack.pop()
    else:
        frame.pc = target


# ---------------------------------------------------------------------------------------------------------------------
# Iteration


@opcode("GET_ITER")
def get_iter(frame: Frame, operand: object) -> None:
    frame.stack[-1] = frame.world.iterate(frame.stack[-1])


@opcode("FOR_ITER")
def for_iter(frame: Frame, end: int) -> None:
    stack = frame.stack
    iterator = stack[-1]
    if type(iterator) in _PLAIN_ITERATORS and frame.world.source_of(iterator) is None:
        value = next(iterator, _END)
        if value is not _END:
            stack.append(value)
            return
    else:
        try:
            stack.append(frame.world.next(iterator))
            return
        except UserException as signal:
            if not isinstance(signal.exception, StopIteration):
                raise
    stack.pop()
    frame.pc = end


# ---------------------------------------------------------------------------------------------------------------------
# Generators


@opcode("RETURN_GENERATOR")
def return_generator(frame: Frame, operand: object) -> bool:
    """Reached once, when the function is called: what follows runs when the generator is first resumed."""
    frame.value = InterpretedGenerator(frame.tracer, frame)
    return LEAVE


@opcode("YIELD_VALUE")
def yield_value(frame: Frame, operand: object) -> bool:
    frame.value = frame.stack.pop()
    return LEAVE


@opcode("GET_YIELD_FROM_ITER")
def get_yield_from_iter(frame: Frame, operand: object) -> None:
    if type(frame.stack[-1]) is not InterpretedGenerator:
        frame.stack[-1] = frame.world.iterate(frame.stack[-1])


def _send(frame: Frame, value: object) -> tuple[bool, object]:
    """Sends `value` to the iterator on top of the stack: whether it has ended, and what it gave."""
    receiver = frame.stack[-1]
    try:
        if value is None:
            return False, frame.world.next(receiver)
        return False, frame.tracer.call(frame.world.getattr(receiver, "send"), (value,))
    except UserException as signal:
        if not isinstance(signal.exception, StopIteration):
            raise
        return True, signal.exception.value


@opcode("SEND_POP")
def send_pop(frame: Frame, end: int) -> None:
    ended, value = _send(frame, frame.stack.pop())
    if ended:
        frame.stack[-1] = value
        frame.pc = end
    else:
        frame.stack.append(value)


@opcode("SEND")
def send(frame: Frame, end: int) -> None:
    ended, value = _send(frame, frame.stack.pop())
    frame.stack.append(value)
    if ended:
        frame.pc = end


@opcode("END_SEND")
def end_send(frame: Frame, operand: object) -> None:
    del frame.stack[-2]


@opcode("CLEANUP_THROW")
def cleanup_throw(frame: Frame, operand: object) -> None:
    """An exception thrown into a delegating generator came back out of the inner iterator: a StopIteration is its
    result."""
    stack = frame.stack
    error = stack[-1]
    if not isinstance(error, StopIteration):
        raise UserException(error)
    stack[-3:] = [None, error.value]
