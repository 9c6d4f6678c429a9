"""The table of opcode handlers, and the few helpers that several families share.

A handler is `handler(frame, operand) -> exit`: it works on `frame.stack` and `frame.locals`; a jump sets `frame.pc`; a
true result leaves the frame with `frame.value`. Always holds: handlers touch values only through `frame.world` and
`frame.tracer.call`, except where no user code can run and nothing outside can be read (an exact list, a string that the
frame built). No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusewright._native import isinstance
from fusewright.base.signals import SkipFrame, UserException
from fusewright.capture.border.interfaces import Frame
from fusewright.capture.border.values.cls import said_name

Handler = Callable[[Frame, Any], object]
HANDLERS: dict[str, Handler] = {}

EXACT_SEQUENCES = (list, tuple)
# Types whose hash and equality are native and depend on nothing but the value.
PLAIN_KEYS = frozenset({str, int, float, bool, bytes, complex, type(None), type(Ellipsis)})


def opcode(*names: str) -> Callable[[Handler], Handler]:
    """Enters a handler into the table under each of `names`."""

    def enter(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return enter


def row(name: str, handler: Handler) -> None:
    """Enters one row of a family that is made by a factory."""
    HANDLERS[name] = handler


def user_error(kind: type[BaseException], message: str, **attributes: object) -> UserException:
    """An exception that CPython's evaluator itself would raise here."""
    error = kind(message)
    for name, value in attributes.items():
        setattr(error, name, value)
    return UserException(error)


def pop_many(stack: list[Any], count: int) -> list[Any]:
    """The last `count` values, in order, taken off the stack."""
    if not count:
        return []
    values = stack[-count:]
    del stack[-count:]
    return values


def elements(frame: Frame, iterable: object, listed: bool = False) -> list[Any]:
    """All elements of an iterable, through the border. listed: CPython makes a list of them at once."""
    if type(iterable) in EXACT_SEQUENCES:
        return list(iterable)  # type: ignore[call-overload]
    world = frame.world
    iterator = world.iterate(iterable)
    if listed:
        world.ask_length(iterable)
    values: list[Any] = []
    while True:
        try:
            values.append(world.next(iterator))
        except UserException as signal:
            if isinstance(signal.exception, StopIteration):
                return values
            raise


def said_kind(frame: Frame, value: object) -> str:
    """The name of a value's class in CPython's messages."""
    return said_name(frame.world.type_of(value))


def unsupported(name: str) -> Handler:
    """The handler of an instruction that is never captured."""

    def refuse(frame: Frame, operand: object) -> object:
        raise SkipFrame("unsupported-instruction", name)

    return refuse
