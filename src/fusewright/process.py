"""What the compilers of this process share.

Takes nothing; gives `PROCESS`: the lock that one compile at a time holds, what is compiled, what is remembered about
each compiled function, and the stance. Always holds: whoever changes what is compiled holds the lock.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from fusewright import _native
from fusewright.base.errors import RuntimeFallback
from fusewright.base.records import dataclass, field
from fusewright.base.signals import Heard, raised_by_handler


@dataclass(slots=True)
class FunctionState:
    """What the driver remembers about one compiled function besides its entries."""

    skipped: bool = False
    called: bool = False  # under a stance that runs the first call eagerly
    works: bool = False  # a version has a tensor operation, or a break
    warned: bool = False
    compiles: int = 0
    numbers: dict[int, int] = field(default_factory=dict)  # of the versions that there are, by identity: 1 is the first
    numbered: int = 0
    stage: str = "driver"  # what a compile is busy with: what fails, fails in it
    pending: list[Any] = field(default_factory=list)  # guard programs of versions that are compiled in the background
    error: Exception | None = None  # what a background compile has to tell the caller

    def versions(self, entries: Sequence[Any]) -> tuple[int, ...]:
        """The entries' numbers. (The list of entries is not in the order in which they were made.)"""
        for entry in reversed(entries):  # a new one is in front
            if id(entry) not in self.numbers:
                self.numbered += 1
                self.numbers[id(entry)] = self.numbered
        self.numbers = {id(entry): self.numbers[id(entry)] for entry in entries}
        return tuple(self.numbers.values())


@dataclass(slots=True)
class GroupState:
    """What is known of a process group's other processes: the lists of collectives that were compared with theirs, by
    function, each with whether the graphs were compared, too, and were alike; and whether one of the processes does not
    answer."""

    asked: dict[str, list[tuple[list[Any], bool, bool]]] = field(default_factory=dict)
    silent: bool = False


@dataclass(slots=True)
class Process:
    """compiled: every compiled function and frame cache; compilers: who made them; states: by compiled function;
    before_compile: called when a call has met no version that fits; groups: by process group; resets: their number."""

    lock: Any = field(default_factory=threading.RLock)
    compiled: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    compilers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    states: weakref.WeakKeyDictionary[Any, FunctionState] = field(default_factory=weakref.WeakKeyDictionary)
    stance: str = "default"
    before_compile: Callable[[], None] = lambda: None
    groups: weakref.WeakKeyDictionary[Any, GroupState] = field(default_factory=weakref.WeakKeyDictionary)
    resets: int = 0

    def reset(self) -> None:
        """Forgets everything compiled in this process."""
        with self.lock:
            for compiled in list(self.compiled):
                compiled.clear()
            for compiler in list(self.compilers):
                compiler.frames.clear()
                compiler.costs.clear()
            _native.hook_reset()
            self.states.clear()
            self.groups.clear()
            self.resets += 1

    def set_stance(self, value: str) -> None:
        """Sets the process-wide stance (checked by api.set_stance)."""
        self.stance = value
        _native.set_stance(1 if value == "force_eager" else 0)


class HandlersHeard:
    """What handlers of signals raise between `listen` and the call of `restore`: the program is to have it, whoever
    has caught it.

    raised: in the order in which it came; away: how to put back the handlers, for `_native.set_signal_handlers`, which
    does so however many signals come meanwhile."""

    __slots__ = ("away", "raised")

    def __init__(self) -> None:
        self.raised: list[BaseException] = []
        self.away: list[tuple[int, Any, Any]] = []

    def listen(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return  # signals are handled on another thread
        there = _native.signal_handlers(signal.default_int_handler)
        heard = [(number, one, Heard(one, self.raised)) for number, one in there if not isinstance(one, Heard)]
        self.away = [(number, new, old) for number, old, new in heard]
        _native.set_signal_handlers(heard)


_native.set_fallback_error(RuntimeFallback)
_native.set_raised_by_handler(raised_by_handler)
PROCESS = Process()


def function_name(function: Callable[..., Any]) -> str:
    """`Model.forward (model.py:12)`: how messages and events name a frame."""
    code = function.__code__
    return f"{function.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def call_with_locals(function: types.FunctionType, values: tuple[Any, ...]) -> Any:
    """Calls `function` with the argument slots of its frame (positional, keyword-only, *args, **kwargs as its code
    orders them)."""
    code = function.__code__
    keyword_only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    positional = list(values[: code.co_argcount])
    keywords = dict(zip(keyword_only, values[code.co_argcount :]))
    rest = list(values[code.co_argcount + code.co_kwonlyargcount :])
    if code.co_flags & inspect.CO_VARARGS:
        positional.extend(rest.pop(0))
    if code.co_flags & inspect.CO_VARKEYWORDS:
        keywords.update(rest.pop(0))
    return function(*positional, **keywords)
