"""Tracebacks of exceptions that interpreted code raises: which lines they would have, and how those are made at run
time.

Takes the instructions at which an exception was raised or passed; gives `Place`s, which add one line each to an
exception's traceback, as CPython does when an exception leaves an instruction. Always holds: a line has the user's
file, function, line and columns; its frame holds no variables. No torch.
"""

from __future__ import annotations

import types
from typing import Any

from fusewright import _native
from fusewright.base.exception_fields import traceback_of, with_traceback
from fusewright.capture.bytecode.instructions import CodeInfo, offset_of
from fusewright.capture.bytecode.resume import raising_code


class Saved:
    """On the stack: the exception that was being handled before the handler began, to be restored by POP_EXCEPT."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Place:
    """Adds the line of one instruction to a traceback: `place(error)` gives the error. `namespace` are the function's
    globals."""

    __slots__ = ("frame", "lasti", "line")

    def __init__(self, info: CodeInfo, index: int, namespace: dict[str, Any]) -> None:
        code = raising_code(info, index)
        self.frame = _native.traceback_frame(code, namespace)
        self.lasti = offset_of(code, "RERAISE")
        self.line = info.line(index)

    def __call__(self, error: BaseException) -> BaseException:
        return with_traceback(error, self.above(traceback_of(error)))

    def above(self, inner: types.TracebackType | None) -> types.TracebackType:
        """A traceback of this line and, within it, `inner`."""
        return types.TracebackType(inner, self.frame, self.lasti, self.line)

    def catches(self, error: BaseException) -> BaseException:
        """For the generated function that has caught what the instruction raised: its own line makes room for this
        one."""
        caught = traceback_of(error)
        assert caught is not None
        return with_traceback(error, self.above(caught.tb_next))


def chain(inner: types.TracebackType | None, *places: Place) -> types.TracebackType | None:
    """A traceback that grew by `places`, innermost first."""
    for place in places:
        inner = place.above(inner)
    return inner


class Raised:
    """What is known of an exception that interpreted code has seen raised: the instructions that it left, innermost
    first, as arguments of `Place`. Of an exception from outside: since the capture began. chained: it has the context
    that it keeps until it is raised again."""

    __slots__ = ("chained", "error", "left", "traceback")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.chained = False
        self.left: tuple[tuple[CodeInfo, int, dict[str, Any]], ...] = ()
        self.traceback: object = None  # the stand-in for the traceback of just these instructions
