"""The one door to foreign native code.

Takes a callable and arguments that are ready for native code (stand-ins materialised); gives its result.
Always holds: what the callable raises becomes a `UserException`; a `Signal` passes through untouched; what refuses a
symbolic number (a hash, a bit operation, a format) is asked again with its guarded value; callbacks that native
code makes into interpreted code go through a `Trampoline`, which turns a `UserException` back into the plain exception
that native code expects to see (StopIteration, KeyError…); so do Python functions that native code finds by itself (the
`__eq__` of a list's element), which the `Interceptor` of the attempt receives from the frame evaluator.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from fusewright import _native
from fusewright._native import isinstance
from fusewright.base.exception_fields import context_chain, context_of, set_context, traceback_of, with_traceback
from fusewright.base.signals import (
    Defect,
    GraphBreak,
    Heard,
    Signal,
    SkipFrame,
    UserException,
    memory_was_short,
    raised_by_handler,
)
from fusewright.capture.border.absent import look_alike
from fusewright.capture.border.values.text import refuse_if_shown

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


def native(fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
    """Runs `fn`; raises UserException for what it raises. Python functions of the user that it runs are interpreted."""
    try:
        return _native.call_watched(fn, *args, **kwargs)
    except (Signal, KeyboardInterrupt):  # the latter is most likely the user's, at the keyboard
        raise
    except BaseException as exception:
        _refuse_what_passes(exception)
        if isinstance(exception, TypeError):
            refuse_if_shown((*args, *kwargs.values()), str(exception))
        error = settled(exception)
    # From here on nothing of this is being handled: an error of the second call has no context either.
    _leave_out(error, sys.exception())
    if isinstance(error, (TypeError, AttributeError)) and _may_ask_again((*args, *kwargs.values())):
        return native(fn, *map(_specialised, args), **{name: _specialised(value) for name, value in kwargs.items()})
    unhashed = type(error) is TypeError and error.args[:1] == ("unhashable type: non-nested int",)
    if unhashed and any(type(value) is list for value in args):
        # What hashes the elements of a list only reads it.
        return native(fn, *([_specialised(e) for e in v] if type(v) is list else v for v in args), **kwargs)
    try:
        raise UserException(_in_public_words(error, fn, args, kwargs)) from None
    finally:
        del error  # its traceback holds this frame, and with it those of all callers


def _leave_out(error: BaseException, handled: BaseException | None) -> None:
    """`handled` is an exception of ours that is being handled here: the program's has no such context."""
    for link in context_chain(error):
        if handled is not None and context_of(link) is handled:
            set_context(link, None)
            return


def settled(exception: BaseException) -> BaseException:
    """The exception, without what its traceback says of frames of ours: they hold it, and so all would wait for the
    collector of cycles. What it had passed in the program before stays."""
    rest = here = traceback_of(exception)
    while here is not None:
        if _is_ours(here.tb_frame):
            rest = here.tb_next
        here = here.tb_next
    return with_traceback(exception, rest)


# What stands for an object of the program, and the name by which messages shall call it.
_PUBLIC = {"OutsideDict": "dict", "TracedTensor": "Tensor", "SymInt": "int", "SymFloat": "float", "SymBool": "bool",
           "InterpretedGenerator": "generator", "SequenceIterator": "iterator", "ReversedSequence": "reversed",
           "Trampoline": "function"}  # fmt: skip
_PRIVATE = re.compile(rf"\b(?:{'|'.join(_PUBLIC)})\b")
_WRONG_NUMBER = re.compile(rf"{_PRIVATE.pattern}\.")


def _in_public_words(
    exception: BaseException, fn: Any, args: tuple[object, ...], kwargs: dict[str, object]
) -> BaseException:
    """The exception, with the classes in its message that the program has."""
    text = exception.args[0] if type(exception) in (TypeError, AttributeError) and exception.args else None
    if type(text) is not str or not _PRIVATE.search(text):
        return exception
    alike = look_alike(fn)
    if alike is None and args and (owner := look_alike(args[0])) is not None:
        alike, args = getattr(owner, fn.__name__, None), args[1:]
    if alike is not None and _WRONG_NUMBER.match(text):  # CPython says it otherwise
        try:
            alike(*args, **kwargs)
        except TypeError as own:
            return own.with_traceback(None)
    exception.args = (_PRIVATE.sub(lambda found: _PUBLIC[found[0]], text), *exception.args[1:])
    return exception


def give_back(held: list[BaseException]) -> NoReturn:
    """Raises an exception of the program's in native code that called back: plainly, since `from None` would change its
    cause, and out of a list, since the traceback of what it raises would hold a variable."""
    raise held.pop()


def _refuse_defect(error: Exception) -> NoReturn:
    """Ends the capture, but for what is of the moment: this was no exception of the program's."""
    if raised_by_handler(error) or memory_was_short(error) or isinstance(error, RecursionError):
        raise error
    raise Defect(error) from error


def _given_back(exception: BaseException) -> bool:
    """Whether it is of interpreted code that native code has called."""
    last = None
    for frame, _ in traceback.walk_tb(traceback_of(exception)):
        last = frame.f_code if _is_ours(frame) else last
    return last is give_back.__code__


def _is_ours(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("fusewright.")


def unwatched(fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
    """As `native`, but Python code that `fn` runs is simply run: PyTorch's own under the recorder, or what is to happen
    as in eager."""
    try:
        return fn(*args, **kwargs)
    except Exception as exception:
        _refuse_what_passes(exception)
        if isinstance(exception, TypeError):
            refuse_if_shown((*args, *kwargs.values()), str(exception))
        raise UserException(exception) from None


def without_warnings(fn: Callable[..., Any], /, *args: object) -> Any:
    """As `fn`; a graph break where it warns, since the program records warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = fn(*args)
    if seen:
        raise GraphBreak("untraceable-call", f"a warning of PyTorch's that the function records: {seen[0].message}")
    return result


def _refuse_what_passes(exception: BaseException) -> None:
    """Ends the capture where the exception says nothing of the calls that a compile is for."""
    if raised_by_handler(exception):
        raise exception
    if memory_was_short(exception) and not _given_back(exception):
        raise SkipFrame("memory-short", str(exception)) from None
    if isinstance(exception, RuntimeError) and _UNKNOWN_SIZES in str(exception):  # eager knows them, and may say more
        raise GraphBreak("operator-failed", str(exception).partition("\n")[0]) from None


_UNKNOWN_SIZES = "on tensor with symbolic sizes/strides"
"""What PyTorch's C++ says where it asks a traced tensor for a number that has a symbol."""


def _folder(path: str | None) -> str:
    return os.path.dirname(os.path.abspath(path or os.__file__)) + os.sep


_OURS = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep
_STANDARD = _folder(os.__file__)
_LIBRARIES = (_folder(torch.__file__), _folder(np.__file__), "<frozen ")
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"
# Files of the standard library whose Python code works on its arguments' elements, as user code does.
_TRANSPARENT = frozenset(
    _STANDARD + name.replace("/", os.sep)
    for name in (
        "collections/__init__.py",
        "functools.py",
        "_collections_abc.py",
        "fractions.py",
        "numbers.py",
        "operator.py",
        "dataclasses.py",
    )
)


def _runs_natively(file: str) -> bool | None:
    """What is to become of a code object's frames: False, run them and what they call unwatched; None, run them; True,
    interpret."""
    if file.startswith(_OURS):
        return False
    if file.startswith(_LIBRARIES):
        return None
    if file.startswith(_STANDARD) and _SITE_PACKAGES not in file:
        return True if file in _TRANSPARENT else None
    return True


def is_library(function: types.FunctionType) -> bool:
    """Whether a function belongs to an installed library rather than to the user."""
    file = function.__code__.co_filename
    return _SITE_PACKAGES in file or file.startswith((_OURS, _STANDARD, *_LIBRARIES))


# What sys.unraisablehook is called with. It has no name in `sys`.
_Unraisable = next(kind for kind in tuple.__subclasses__() if kind.__name__ == "UnraisableHookArgs")
_PLAIN = frozenset({bool, int, float, complex, str, type(None)})


def _names(function: types.FunctionType, owner: object) -> set[str]:
    """Under which a class may have this method: a lambda does not know."""
    if function.__name__.startswith("__"):
        return {function.__name__}
    return {name for base in type(owner).__mro__ for name, found in base.__dict__.items() if found is function}


# Special methods of whose result native code asks that it is of the very type.
_CONVERSIONS = frozenset({
    "__hash__", "__index__", "__int__", "__float__", "__complex__", "__bool__", "__len__", "__length_hint__",
    "__str__", "__repr__",
    "__format__",
})  # fmt: skip


class Interceptor:
    """Receives the Python functions that native code runs by itself during one attempt; see csrc/hook.c. Given no
    function: some may have run that were not offered."""

    __slots__ = ("tracer",)

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer

    def __call__(self, function: types.FunctionType | None, values: tuple[object, ...]) -> tuple[object] | bool | None:
        if function is None:
            raise SkipFrame(
                "evaluator-replaced", "another thread turned on a debugger or another compiler during the capture"
            )
        how = _runs_natively(function.__code__.co_filename)
        if not how:
            return how
        if _handles_signal(function, values) or _Unraisable in map(type, values):
            return False
        try:
            value = self.tracer.called_natively(function, values)
            if type(value) in _PLAIN or not (values and _CONVERSIONS & _names(function, values[0])):
                return (value,)
            value = _specialised(value)
            kind = self.tracer.world.type_of(value)
            if kind is not type(value):  # what native code says of it shall name the program's class
                raise GraphBreak("untraceable-call", f"{function.__name__} gives a {kind.__qualname__}")
            return (value,)
        except UserException as signal:
            held = [signal.exception]
        give_back(held)


def _handles_signal(function: types.FunctionType, values: tuple[object, ...]) -> bool:
    """Whether CPython itself calls a signal handler, in the middle of whatever runs: that is no part of the program."""
    if len(values) < 2 or type(values[-1]) is not types.FrameType or not isinstance(values[-2], int):
        return False
    try:
        handler = signal.getsignal(values[-2])
    except ValueError:  # no signal
        return False
    if isinstance(handler, Heard):
        handler = handler.handler
    return getattr(handler, "__func__", handler) is function


def _may_ask_again(values: tuple[object, ...]) -> bool:
    """Whether a symbolic number is among the arguments, and nothing that would run the program's code twice."""
    return any(map(_is_symbolic, values)) and not any(
        isinstance(value, (Trampoline, TrampolineIterator)) for value in values
    )


def _is_symbolic(value: object) -> bool:
    if type(value) is tuple:
        return any(map(_is_symbolic, value))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _specialised(value: Any) -> Any:
    """`value` with symbolic numbers (in tuples too) replaced by their values, which are then guarded."""
    if type(value) is tuple:
        return tuple(map(_specialised, value))
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymFloat):
        return float(value.node.guard_float("", 0))
    return bool(value) if isinstance(value, torch.SymBool) else value


class Trampoline:
    """A callable for native code that enters the interpreter."""

    __slots__ = ("function", "tracer")

    def __init__(self, tracer: Any, function: object) -> None:
        self.tracer = tracer
        self.function = function

    def __repr__(self) -> str:
        """PyTorch's own code asks for it to name a function in an error. A program's is `text_ready`'s to refuse."""
        return repr(self.function) if self.is_plain else object.__repr__(self)

    @property
    def is_plain(self) -> bool:
        return type(self.function) in (types.FunctionType, types.BuiltinFunctionType, type)

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return self.tracer.call(self.function, args, kwargs)
        except UserException as signal:
            held = [signal.exception]
        except Exception as error:
            _refuse_defect(error)
        give_back(held)


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
            held = [signal.exception]
        except Exception as error:
            _refuse_defect(error)
        give_back(held)
