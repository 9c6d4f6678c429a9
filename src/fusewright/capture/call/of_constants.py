"""Functions of plain data, of Python's and of NumPy's, that are simply called where all their arguments are constants.

Takes real values; gives the function's own result. Always holds: an array is made anew at each call of the compiled
code, since the program may write to it; what is not constant throughout is a graph break.
"""

from __future__ import annotations

import _pickle
import importlib.metadata
import importlib.util
import io
import json
import logging
import re
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.native import native, unwatched
from fusewright.capture.border.values import array
from fusewright.capture.border.values.array import of_data
from fusewright.capture.border.values.symbolic import concrete
from fusewright.capture.call.builtins import Row, plain_data
from fusewright.capture.guards import MISSING
from fusewright.operators import numpy_calls

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _of_numpy(fn: Callable[..., Any]) -> Row:
    """Of traced arrays it has been handled before (values/array.py)."""

    def call(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        if fn is np.asarray and args and tracer.world.recorder_owns(args[0]):  # (np.array of a tensor warns)
            return tracer.call(fn, (array.of_tensor(tracer.world, args[0]), *args[1:]), kwargs)
        ready = [_known(tracer, value) for value in args]
        keywords = {name: _known(tracer, value) for name, value in kwargs.items()}
        if any(value is MISSING for value in (*ready, *keywords.values())):
            raise GraphBreak("numpy-call", f"numpy.{fn.__name__} of something that is no constant")
        return of_data(tracer.world, unwatched(fn, *ready, **keywords))

    return call


def _known(tracer: Tracer, value: Any) -> Any:
    if isinstance(value, (np.generic, type)):
        return value
    if isinstance(value, types.FunctionType):  # none of NumPy's here calls one
        return MISSING
    value = tracer.world.materialise(value)
    if type(value) not in (list, tuple):
        return plain_data(tracer, value)
    parts = [_known(tracer, part) for part in value]
    return MISSING if any(part is MISSING for part in parts) else type(value)(parts)


def _constants_only(fn: Callable[..., Any]) -> Row:
    """A function that is a pure one of plain data, and refused with anything else; Python callbacks are interpreted."""

    def ask(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        ready = [plain_data(tracer, value) for value in args]
        keywords = {name: plain_data(tracer, value) for name, value in kwargs.items()}
        if any(value is MISSING for value in (*ready, *keywords.values())):
            raise GraphBreak("untraceable-call", f"{fn.__module__}.{fn.__qualname__} of something that is no constant")
        return native(fn, *ready, **keywords)

    return ask


def _pickled(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """pickle.dumps of plain data. What is in it twice may be one object now and two at another call, which gives other
    bytes; a set has no order of its own."""
    seen: set[object] = set()
    parts = [args[0]]
    while parts:
        value = concrete(tracer.world.materialise(parts.pop()))
        kind = type(value)
        if kind in (list, tuple):
            parts += value
        elif kind is dict:
            parts += (*value, *value.values())
        elif kind not in (bool, int, float) and value is not None:
            if kind not in (str, bytes) or value in seen:
                raise GraphBreak("untraceable-call", "pickle.dumps of more than numbers and different strings")
            seen.add(value)
    return _constants_only(_pickle.dumps)(tracer, args, kwargs)


class _PlainData(_pickle.Unpickler):
    """Reads what needs no class and no function of the program's."""

    def find_class(self, module: str, name: str) -> Any:
        raise GraphBreak("untraceable-call", f"pickle.loads of a {module}.{name}")


def _unpickled(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """pickle.loads of bytes that are known."""
    if len(args) != 1 or kwargs or type(args[0]) is not bytes:
        raise GraphBreak("untraceable-call", "pickle.loads of something that is no constant")
    return native(_PlainData(io.BytesIO(args[0])).load)


def _of_environment(fn: Callable[..., Any]) -> Row:
    """What is installed: asked once. It is asked again where the modules that are loaded, or the path, change."""

    def ask(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        if kwargs or not args or not all(type(value) is str for value in args):
            raise GraphBreak("untraceable-call", f"{fn.__module__}.{fn.__qualname__} of something that is no constant")
        world = tracer.world
        value = unwatched(fn, *args)
        world.guard_answer(_search_path, (), _search_path())
        loaded = sys.modules.get(args[0])
        world.guard_answer(sys.modules.get, (args[0],), loaded, identical=True)
        return value if value is None else world.load(value, world.constant(value, fn.__name__))

    return ask


def _logger(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """logging.getLogger(name): there is one of a name. Making it is no effect that a program can tell: eager does it as
    well, once."""
    name = (*args, *kwargs.values(), None)[0]
    if name is not None and type(name) is not str:
        raise GraphBreak("untraceable-call", "logging.getLogger of something that is no constant")
    found = unwatched(logging.getLogger, name)
    tracer.world.guard_answer(logging.getLogger, (name,), found, identical=True)
    return tracer.world.load(found, tracer.world.constant(found, "logger"))


def _search_path() -> tuple[Any, ...]:
    return *sys.path, *map(id, sys.meta_path)


def _error_state(name: str) -> Row:
    """`with np.errstate(...)`: entered while the call is captured, for the functions of NumPy's it records."""

    def call(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        states, state = tracer.world.error_states, args[0]
        if not isinstance(state, np.errstate):
            return native(getattr(np.errstate, name), *args)  # its complaint
        unknown = name == "__exit__" and (not states or states[-1] is not state)
        if unknown or tracer.world.outside(state) is not None:
            raise GraphBreak("open-context", "a np.errstate that was made before the call")
        if name == "__enter__":
            tracer.world.guard_answer(np.geterr, (), np.geterr())
            states.append(state)
        else:
            states.pop()
        return native(getattr(np.errstate, name), state, *((None, None, None) if name == "__exit__" else ()))

    return call


_NUMPY: tuple[Any, ...] = (
    np.array, np.asarray, np.arange, np.zeros, np.ones, np.full, np.eye, np.identity, np.linspace, np.logspace, np.tri,
    np.meshgrid, np.unique, np.nonzero, np.bincount, np.broadcast_to, np.expand_dims, np.squeeze,
)  # fmt: skip
ROWS: list[tuple[Any, Row]] = [
    *((fn, _of_numpy(fn)) for fn in (*_NUMPY, *numpy_calls.of_numpy())),
    *((fn, _constants_only(fn)) for fn in (re.compile, re.match, re.search, re.fullmatch, re.sub, re.findall,
                                           re.finditer, re.split, re.escape, json.dumps, json.loads)),
    *((fn, _of_environment(fn)) for fn in (importlib.util.find_spec, importlib.metadata.version,
                                           importlib.metadata.distribution)),
    (logging.getLogger, _logger), (_pickle.dumps, _pickled), (_pickle.loads, _unpickled),
    *((getattr(np.errstate, name), _error_state(name)) for name in ("__enter__", "__exit__")),
]  # fmt: skip
