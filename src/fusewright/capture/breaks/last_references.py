"""Objects whose death the program is told of, by a finalizer, a weak reference with a callback or a generator's
`finally`.

Takes what places of outside objects held that hold something else after the frame; refuses the frame where an object
among it, or one that such an object holds, tells: stores are replayed behind the graph, too late for that. At a break
it takes what variables hold that nothing reads any more: they are left behind there, in eager at the frame's end.
Always holds: no code of the program is run, and nothing is kept alive.
"""

from __future__ import annotations

import gc
import itertools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import FrameCache, isinstance
from fusewright.base.signals import SkipFrame
from fusewright.capture.border.effects import let_go
from fusewright.capture.border.values import cls as classes
from fusewright.capture.bytecode.instructions import decoded
from fusewright.capture.bytecode.resume import CannotCut
from fusewright.capture.interpret.generators import InterpretedGenerator

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

MOST = 1000
"""Objects that are looked at; what holds more is hardly let go of by one store."""

_SUSPENDED = {types.GeneratorType: "gi_suspended", types.CoroutineType: "cr_suspended"}
_ATOMS = frozenset({type(None), bool, int, float, str, tuple, list, dict})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_LASTING = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType)  # what a store hardly ends


def refuse_finalizers(world: World) -> None:
    """See the module's docstring."""
    gone = map(world.real_of, let_go(world.effects, world.written_dicts()))
    for value in itertools.islice(_held(gone), MOST):
        why = _tells(value)
        if why:
            what = f"a {type(value).__qualname__} that {why}"
            raise SkipFrame("finalizer", f"the last reference to {what} may be overwritten")


def refuse_to_lose(values: Iterable[object]) -> None:
    """Raises CannotCut where one of these is a generator, alive or about to begin, whose code has a `finally` or the
    like. (An instance with a finalizer that the call makes is refused where it is made.)"""
    for value in values:
        info = None
        if type(value) is InterpretedGenerator and not value.frame.finished:
            info = value.frame.info
        elif type(value) is types.GeneratorType and value.gi_frame is not None:
            info = decoded(value.gi_code)
        if info is not None and any(map(info.is_programs, info.handlers)):
            raise CannotCut("a generator whose code has a handler ends with the frame")


def _tells(value: object) -> str:
    """How the program is told of its death; empty if it is not."""
    kind = type(value)
    if kind in _ATOMS or (kind in _TENSORS and not weakref.getweakrefcount(value)):
        return ""
    if isinstance(classes.lookup(kind, "__del__"), types.FunctionType):
        return "has a finalizer"
    if any(map(_calls_back, weakref.getweakrefs(value))):
        return "is watched by a weak reference"
    return "is suspended" if kind in _SUSPENDED and getattr(value, _SUSPENDED[kind]) else ""


def _calls_back(reference: Any) -> bool:
    """Whether a weak reference has a callback that the program may notice: PyTorch's own bookkeeping (once its compiler
    was used, each module is in it) is none. A proxy does not say what it has."""
    if type(reference) in weakref.ProxyTypes:
        return True
    callback: Any = weakref.ref.__callback__.__get__(reference)  # type: ignore[misc]
    made_in = callback.__globals__.get("__name__", "") if type(callback) is types.FunctionType else ""
    return callback is not None and made_in.partition(".")[0] not in ("torch", "fusewright")


def _held(values: Iterable[object]) -> Iterator[Any]:
    """The values, and what they hold, each once."""
    seen: set[int] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if id(value) not in seen and not isinstance(value, (*_LASTING, FrameCache)):  # the last is our own
            seen.add(id(value))
            yield value
            if not isinstance(value, (types.FunctionType, torch.Tensor)):
                pending += gc.get_referents(value)
