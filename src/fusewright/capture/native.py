"""The one door to foreign native code.

Takes a callable and arguments that are ready for native code (stand-ins materialised); gives its result.
Always holds: what the callable raises becomes a `UserException`; a `Signal` passes through untouched; callbacks that native
code makes into interpreted code go through a `Trampoline`, which turns a `UserException` back into the plain exception that
native code expects to see (StopIteration, KeyError…).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fusewright.capture.signals import UserException

if TYPE_CHECKING:
    from fusewright.capture.world import World


def native(fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
    """Runs `fn`; raises UserException for what it raises."""
    try:
        return fn(*args, **kwargs)
    except Exception as exception:
        raise UserException(exception) from None


class Trampoline:
    """A callable for native code that enters the interpreter."""

    __slots__ = ("function", "tracer")

    def __init__(self, tracer: Any, function: object) -> None:
        self.tracer = tracer
        self.function = function

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return self.tracer.call(self.function, args, kwargs)
        except UserException as signal:
            error = signal.exception
        raise error  # plainly: `from None` would change the exception's cause


class TrampolineIterator:
    """An iterator for native code over an object whose `__next__` is interpreted."""

    __slots__ = ("iterator", "world")

    def __init__(self, world: World, iterator: object) -> None:
        self.world = world
        self.iterator = iterator

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        try:
            return self.world.next(self.iterator)
        except UserException as signal:
            error = signal.exception
        raise error  # plainly: `from None` would change the exception's cause
