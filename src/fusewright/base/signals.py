"""Control flow of capture itself: signals that travel through interpreted code without it being able to catch them.

Always holds: every signal is a BaseException that user code cannot name, and the interpreter never unwinds one through
the user's exception tables (not even through a bare `except:` or `finally:`).
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import NoReturn

import torch

from fusewright.base.exception_fields import traceback_of
from fusewright.base.location import Location


def memory_was_short(error: BaseException) -> bool:
    """Whether `error` is of this moment and says nothing of what was tried: no conclusion from it may be kept."""
    # PyTorch's allocator for a CPU has no class for it, nor has what its C functions say of a GPU's.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORT)
    )


_SHORT = "can't allocate memory", "out of memory"


def raised_by_handler(error: BaseException) -> bool:
    """Whether `error` comes out of a handler of the operating system's signals, which may run at any moment: it is the
    program's, wherever it was met."""
    # A handler that has raised is over; asked for its locals, a frame that still runs would hold on to them.
    left = {id(frame): frame for frame, _ in traceback.walk_tb(traceback_of(error))}
    caller: types.FrameType | None = sys._getframe()
    while left and caller is not None:  # as a rule the caller is the only one
        left.pop(id(caller), None)
        caller = caller.f_back
    return any(map(_is_handlers, left.values()))


def _is_handlers(frame: types.FrameType) -> bool:
    """Whether CPython has called this frame's function for a signal: with its number, and the frame that it stopped.
    (Which handler is set now says less: some set another one and then raise.)"""
    code = frame.f_code
    first = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        first += frame.f_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return any(
        issubclass(type(number), int)  # `isinstance` would ask an object of the program's for its __class__
        and type(stopped) is types.FrameType
        and _calls(stopped, frame)
        for number, stopped in itertools.pairwise(first)
    )


def _calls(stopped: types.FrameType, frame: types.FrameType) -> bool:
    """Whether `stopped` is what `frame` returns to, or to what a handler around this one does (a method that calls the
    one that was there before)."""
    back = frame.f_back
    return back is stopped or (back is not None and _is_handlers(back))


class Heard:
    """A handler of the program's, in its place while a compile runs: what it raises is noted in `raised` as well, since
    the code that it stops may take any exception for an answer."""

    __slots__ = ("handler", "raised")

    def __init__(self, handler: Callable[[int, types.FrameType | None], object], raised: list[BaseException]) -> None:
        self.handler = handler
        self.raised = raised

    def __call__(self, number: int, frame: types.FrameType | None) -> object:
        try:
            return self.handler(number, frame)
        except BaseException as error:
            self.raised.append(error)
            raise


class Signal(BaseException):
    """Base of the signals. takes_larger: what it ended had taken sizes of 1 to be larger ones."""

    takes_larger = False


READS_OF_DATA = frozenset({"data-dependent-branch", "data-dependent-scalar", "data-dependent-shape"})
"""Codes of the breaks at which the program asks what a tensor holds."""


class GraphBreak(Signal):
    """Capture cannot go past this point. `code` names a row of the catalogue in `fusewright.base.errors` (cause, what
    to do).

    `stack` is the user's stack (outermost first) at the moment of the break, `operators` how many the frame and what it
    called had recorded until then; `passed`, where data are read: of the inlined frames that it has left, innermost
    first, the code, the instruction after the one that it came from, and how many operators were recorded when the
    frame began; the interpreter fills them in.
    """

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.stack: tuple[Location, ...] = ()
        self.operators = 0
        self.passed: list[tuple[types.CodeType, int, int]] = []


def untraced(what: object, error: Exception) -> NoReturn:
    """Ends the tracing of an operator that raised `error`."""
    if raised_by_handler(error):
        raise error
    if memory_was_short(error):
        raise MemoryError(str(error)) from error
    if isinstance(error, RuntimeError) and "data-dependent shape" in str(error):
        # A fake kernel of the program's, or of a library's, has asked for a size where there is none to be had.
        raise GraphBreak("data-dependent-shape", f"{what} gives a shape that depends on data") from error
    said = f"{what}: {type(error).__name__}: {error}"
    if isinstance(error, RuntimeError) and any(part in said for part in _OF_VIEWS):
        raise SkipFrame("operator-failed", said) from error  # behind a graph it is no view, and nothing fails
    raise GraphBreak("operator-failed", said) from error


_OF_VIEWS = ("is a view and is being modified inplace", "modified inplace with grad mode", "a view of a leaf Variable")
"""What autograd says of a write to a view that it does not allow."""


class SkipFrame(Signal):
    """The whole root frame must run eagerly (the functions that it calls are still compiled)."""

    def __init__(self, code: str, detail: str = "", stack: tuple[Location, ...] = ()) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.stack = stack


class Deadline:
    """When a compile must be done. Whatever works on it for long asks now and then."""

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        """seconds: that a compile may take; 0: as many as it needs."""
        self.seconds = seconds
        self.at = math.inf

    def start(self) -> None:
        self.at = time.perf_counter() + self.seconds if self.seconds else math.inf

    def stop(self) -> None:
        self.at = math.inf

    def check(self) -> None:
        """Raises SkipFrame when the time is over."""
        if self.at != math.inf and time.perf_counter() > self.at:
            raise SkipFrame("compile-time", f"compile_seconds={self.seconds:g} were over")


class Retry(Signal):
    """Something that the attempt took for granted does not hold: the frame is captured again under other assumptions
    (`changes`: fields of capture/assumptions.py, none where what is known of its sizes has grown)."""

    def __init__(self, **changes: object) -> None:
        super().__init__(changes)
        self.changes = changes


class Defect(Signal):
    """Carries an exception of our own code out of native code that called it back, and that the program may guard: it
    is no exception of the program's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class UserException(Signal):
    """Carries an exception that the user's own code (or a native operation that it asked for) has raised, until the
    interpreter unwinds it through the frame's exception table."""

    def __init__(self, exception: BaseException) -> None:
        super().__init__(exception)
        self.exception = exception
