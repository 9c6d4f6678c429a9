"""Generators of the capture: a real Python iterator whose body is interpreted.

Takes the frame that a generator function's call has prepared; gives an object that native consumers (list, sum, zip,
dict, join…) and interpreted code can iterate, send to, throw into and close. Always holds: what its body raises leaves
as the plain exception (native code expects StopIteration and friends); a capture signal passes through untouched; no
frame that an exception passes keeps a name for it (its traceback holds the frame, and so the variables of all callers).
"""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any, NoReturn

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak, Signal, UserException
from fusewright.capture.border.absent import LOOK_LIKE, STAND_FOR, look_alike
from fusewright.capture.border.attributes import GETATTRS
from fusewright.capture.border.interfaces import World
from fusewright.capture.border.native import give_back, settled
from fusewright.capture.border.values import cls as classes, object as objects
from fusewright.capture.bytecode.instructions import NULL, THROW_OF_PARTS, VERSION


class InterpretedGenerator:
    """See the module's docstring; behaves as CPython's generator object.

    uses            how often it was resumed, or asked where it stands
    uses_of_inner   the `uses` of the generator that it delegates to, when it was last suspended
    """

    __slots__ = ("frame", "handling", "running", "started", "tracer", "uses", "uses_of_inner")

    def __init__(self, tracer: Any, frame: Any) -> None:
        self.tracer = tracer
        self.frame = frame
        self.handling = tracer.new_handling()
        self.started = False
        self.running = False
        self.uses = self.uses_of_inner = 0

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For `isinstance(generator, types.GeneratorType)`."""
        return types.GeneratorType

    def __repr__(self) -> NoReturn:
        raise GraphBreak("cannot-rebuild", "the text of a generator, which says where it lies in memory")

    def said(self, name: str) -> object:
        """An attribute that says where the generator stands; a graph break for one that shows its frame."""
        if name.startswith("gi_"):
            self.uses += 1
        if name == "gi_frame" and self.frame.finished:
            return None
        if name == "gi_running":
            return self.running
        if name == "gi_suspended":
            return self.started and not self.running and not self.frame.finished
        if name == "gi_yieldfrom":
            inner = self._delegate()
            if isinstance(inner, InterpretedGenerator):  # from here on others may hold it
                self.tracer.note_suspension(self, True)
            return inner
        if name in ("__name__", "__qualname__"):
            return getattr(self.frame.function, name)
        raise GraphBreak("frame-access", f"{name} of a generator")

    def __iter__(self) -> InterpretedGenerator:
        return self

    def __next__(self) -> object:
        return self._resume(None, None)

    def send(self, value: object, /) -> object:
        if not self.started and value is not None and not self.frame.finished:
            raise TypeError("can't send non-None value to a just-started generator")
        return self._resume(value, None)

    def throw(self, kind: Any, value: Any = NULL, traceback: Any = None, /) -> object:
        if value is not NULL and VERSION >= (3, 12):
            self.tracer.call(warnings.warn, (THROW_OF_PARTS, DeprecationWarning))
        error = _normalised(kind, None if value is NULL else value)
        inner = self._delegate()
        return self._resume(None, error) if inner is None else self._throw_into(inner, error)

    def close(self) -> object:
        if self.frame.finished:
            return None
        if not self.started:
            self.frame.finished = True
            return None
        inner = self._delegate()
        error: BaseException = GeneratorExit()
        self.tracer.set_context(error)
        if inner is not None:
            try:
                self._close_inner(inner)
            except Signal:
                raise
            except BaseException as raised:
                error = settled(raised)
        try:
            self._resume(None, error)
        except GeneratorExit as ended:
            settled(ended)
            return None
        except StopIteration as ended:
            settled(ended)
            return ended.value if VERSION >= (3, 13) else None  # what the body returned
        raise RuntimeError("generator ignored GeneratorExit")

    # -----------------------------------------------------------------------------------------------------------------

    def _resume(self, value: object, error: BaseException | None, jump: int | None = None) -> object:
        """Runs the body up to its next yield; raises StopIteration at its end. `jump` is where to go on after a
        delegation that ended."""
        if self.running:
            raise ValueError("generator already executing")
        self.uses += 1
        frame = self.frame
        raised = error
        if frame.finished and error is not None:
            self.tracer.note_thrown(error)
        if not frame.finished:
            if jump is not None:
                frame.stack[-1] = value  # in place of the inner iterator
                frame.pc = jump
            else:
                frame.stack.append(value)
            self.started = self.running = True
            value, raised = self._run(error)
            if raised is None and not frame.finished:
                return value
        else:
            value = None
        try:
            if raised is not None:
                give_back([raised])
            raise StopIteration if value is None else StopIteration(value)
        finally:
            del raised, error

    def _run(self, error: BaseException | None) -> tuple[object, BaseException | None]:
        """One stretch of the body: what it gives, and what it raised, if it did. (Raised by the caller, outside of any
        `except` of ours.)"""
        tracer, frame, handling = self.tracer, self.frame, self.handling
        handling.previous, tracer.handling = tracer.handling, handling
        tracer.note_suspension(self, False)
        given: object = None
        finished_by: BaseException | None = None
        try:
            if error is not None:
                tracer.note_thrown(error)
                if handling.error is not None:
                    tracer.set_context(error)
            given = tracer.execute(frame, error)
        except UserException as signal:
            frame.finished = True
            finished_by = signal.exception
        finally:
            self.running = False
            tracer.handling, handling.previous = handling.previous, None
        self._note_inner()
        handler = None if frame.finished else frame.info.handlers[frame.pc - 1]
        tracer.note_suspension(self, frame.info.is_programs(handler))
        if isinstance(finished_by, StopIteration) and VERSION < (3, 12):  # later the body has a handler for it
            replaced = RuntimeError("generator raised StopIteration")
            replaced.__cause__ = replaced.__context__ = finished_by
            return None, replaced
        return given, finished_by

    def _delegate(self) -> Any:
        """The iterator that a suspended `yield from` delegates to."""
        frame = self.frame
        if frame.finished or not self.started or self.running:
            return None
        following = frame.info.instructions[frame.pc]
        delegating = following.name == "RESUME" and following.arg & 3 >= 2
        return frame.stack[-1] if delegating else None

    def _note_inner(self) -> None:
        inner = self._delegate()
        self.uses_of_inner = inner.uses if type(inner) is InterpretedGenerator else 0

    def closes_another(self, noted: set[InterpretedGenerator]) -> bool:
        """Whether closing it here, or at any point since it was suspended, would close an iterator that others than the
        capture's notes hold too, or have used since, or one that has something to say to that."""
        inner = self._delegate()
        if isinstance(inner, InterpretedGenerator):
            if inner.uses != self.uses_of_inner:
                return True
            frame = self.frame
            own = sum(held is inner for held in (*frame.stack, *frame.locals)) + (inner in noted)
            return sys.getrefcount(inner) - 2 > own  # two: the name here, and the argument
        return inner is not None and _may_be_closed(inner)

    def _close_inner(self, inner: Any) -> None:
        self.running = True
        try:
            close = inner.close if isinstance(inner, InterpretedGenerator) else self._method(inner, "close")
            if close is not None:
                self._plain(close, ())
        finally:
            self.running = False

    def _throw_into(self, inner: Any, error: BaseException) -> object:
        if isinstance(error, GeneratorExit):
            try:
                self._close_inner(inner)
            except Signal:
                raise
            except BaseException as raised:
                error = settled(raised)
            return self._resume(None, error)
        throw = inner.throw if type(inner) is InterpretedGenerator else self._method(inner, "throw")
        if throw is None:
            return self._resume(None, error)
        self.running = True
        ended: BaseException | None = None
        try:
            given = self._plain(throw, (error,))
        except Signal:
            raise
        except BaseException as raised:
            ended = settled(raised)
        finally:
            self.running = False
        if ended is None:
            self._note_inner()
            return given
        send = self.frame.info.instructions[self.frame.pc - 2]
        if isinstance(ended, StopIteration) and send.action == "SEND_POP":
            return self._resume(ended.value, None, send.target)
        return self._resume(None, ended)

    def _method(self, inner: Any, name: str) -> Any:
        try:
            return self.tracer.world.getattr(inner, name)
        except UserException as signal:
            if isinstance(signal.exception, AttributeError):
                return None
            raise

    def _plain(self, function: Any, args: tuple[object, ...]) -> object:
        """Calls through the border; a user's exception leaves as itself."""
        try:
            return self.tracer.call(function, args)
        except UserException as signal:
            held = [signal.exception]
        give_back(held)


def _may_be_closed(inner: object) -> bool:
    """Whether an iterator has a `close`, or is asked for one in Python."""
    of_class = any(name in vars(base) for base in type(inner).__mro__ for name in ("close", "__getattr__"))
    return of_class or "close" in classes.own_attributes(inner)


def _normalised(kind: Any, value: Any) -> BaseException:
    """The exception that the arguments of `throw` mean."""
    if isinstance(kind, BaseException):
        if value is not None:
            raise TypeError("instance exception may not have a separate value")
        return kind
    if isinstance(kind, type) and issubclass(kind, BaseException):
        if isinstance(value, kind):
            return value
        args = () if value is None else value if isinstance(value, tuple) else (value,)
        return kind(*args)
    raise TypeError(f"exceptions must be classes or instances deriving from BaseException, not {type(kind).__name__}")


def _getattr_generator(world: World, generator: InterpretedGenerator, name: str) -> object:
    """What CPython's generators have, and nothing else."""
    if not hasattr(look_alike(generator), name):
        raise UserException(AttributeError(f"'generator' object has no attribute '{name}'", name=name, obj=generator))
    if name == "__doc__":
        return None
    if name.startswith("gi_") or name in ("__name__", "__qualname__"):
        return generator.said(name)
    return objects.getattr_object(world, generator, name)


GETATTRS[InterpretedGenerator] = _getattr_generator
STAND_FOR[InterpretedGenerator] = types.GeneratorType
LOOK_LIKE[InterpretedGenerator] = lambda generator: (one for one in range(0))
