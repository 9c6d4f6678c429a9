"""Which functions that an eager region calls are compiled too.

Takes a code object that the frame hook meets inside a call of a compiler; gives a cache for its frames, or None: it
runs eagerly. Always holds: PyTorch, fusewright, the standard library and NumPy are left alone; what goes wrong here
reaches nobody but the event stream.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import traceback
import types
import weakref
from typing import Any

import numpy as np
from torch.utils import checkpoint

from fusewright import _native
from fusewright.base import marks
from fusewright.base.events import STREAM, InternalError
from fusewright.base.pytorch import torch
from fusewright.base.signals import Signal, raised_by_handler
from fusewright.capture.guards import build_program
from fusewright.operators import higher_order
from fusewright.process import PROCESS, call_with_locals, function_name


class FrameTable(dict[int, Any]):
    """What one compiler has decided about the functions that its eager runs call: each compiles them by its own
    settings."""

    __slots__ = ("compiler",)
    compiler: weakref.ref[Any]


NEVER_COMPILED = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, __file__, os.__file__, np.__file__)
    if path is not None
)
"""Code under these folders (PyTorch, fusewright, the standard library, NumPy) runs eagerly when it is reached through a
graph break."""
DISTRIBUTED_DATA_PARALLEL = "torch.nn.parallel.distributed"
"""Its forward, which talks to the reducer, runs eagerly; the module inside is compiled as a frame that it reaches."""
OF_SEVERAL = tuple(os.path.join("torch", "nn", "modules", name) for name in ("container.py", "transformer.py"))
"""Modules of PyTorch that consist of several: their `forward` is compiled as the user's would be."""
OPTIMIZER_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""What wraps the `step` of every optimizer: compiled also where PyTorch's own code calls it (GradScaler.step)."""
PEER = tuple(
    os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), name) + os.sep for name in ("_dynamo", "_inductor")
)
"""PyTorch's own compiler: what it calls while it works is no part of the program."""
SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"
TRITON = f"{SITE_PACKAGES}triton{os.sep}"
"""A kernel that is launched eagerly runs its Python under Triton's interpreter, or is read by its compiler."""


# torch.utils.checkpoint runs the user's functions again in the backward, where no frame is compiled, and they must save
# the same tensors both times; so nothing is compiled below it the first time either.
CHECKPOINT_FILE = checkpoint.__file__


def policy(code: types.CodeType, function: types.FunctionType, table: FrameTable | None = None) -> Any:
    """The frame hook asks once for each code object that runs eagerly inside a call of a compiler: compile its frames,
    or never."""
    try:
        return _decided(code, function, table)
    except (Exception, Signal) as error:  # the frame belongs to the user, who has not asked for anything here
        if raised_by_handler(error):
            raise
        STREAM.emit(InternalError(function_name(function), "frame policy", traceback.format_exc()))
        return None


def _decided(code: types.CodeType, function: types.FunctionType, table: FrameTable | None) -> Any:
    attributes = function.__dict__
    if (function.__globals__.get("__name__"), function.__qualname__) in higher_order.PLAIN:
        return _native.FrameCache(_run_plainly)
    if code is _FIND_AND_LOAD or attributes.get("_torchdynamo_disable_recursive") or _is_collector_callback(code):
        return _native.FrameCache(_run_paused)
    file = code.co_filename
    compiler = None if table is None else table.compiler()
    if compiler is not None and TRITON in file:
        return _native.FrameCache(_run_paused)
    peer = file.startswith(PEER) and attributes.get("_torchdynamo_disable_recursive") is not False
    if compiler is not None and (peer or file == CHECKPOINT_FILE):
        return _native.FrameCache(_run_paused)
    if compiler is None or file.startswith("<") or marks.DISABLED in attributes or marks.EAGER_FRAME in attributes:
        return None
    theirs = any(
        file.startswith(folder) and (SITE_PACKAGES in folder or SITE_PACKAGES not in file) for folder in NEVER_COMPILED
    )
    if theirs and code is not OPTIMIZER_STEP and not (code.co_name == "forward" and file.endswith(OF_SEVERAL)):
        return None
    if code.co_varnames[:1] == (".0",):  # a comprehension over an iterator of an eager frame: what it calls is compiled
        return None
    cache = _native.FrameCache(compiler.miss)
    cache.frames = compiler.frames
    PROCESS.compiled.add(cache)
    return cache


def _is_collector_callback(code: types.CodeType) -> bool:
    """Whether the garbage collector calls it, whenever it runs: no part of the program."""
    return any(getattr(getattr(callback, "__func__", callback), "__code__", None) is code for callback in gc.callbacks)


_FIND_AND_LOAD = sys.modules["importlib._bootstrap"]._find_and_load.__code__


def _run_paused(compiled: Any, function: types.FunctionType, values: tuple[Any, ...]) -> Any:
    """Every call of this code object runs without compiling what it calls: an import, which runs modules once, and the
    wrappers of torch.compiler.disable, which share one code object."""
    return _native.Entry(build_program((), ()), None, _paused_finish)


def _paused_finish(outputs: object, function: types.FunctionType, *values: Any) -> Any:
    return _native.call_paused(call_with_locals, function, values)


def _run_plainly(compiled: Any, function: types.FunctionType, values: tuple[Any, ...]) -> Any:
    """PyTorch's higher-order functions, whose own implementation starts torch.compile, run by their plain meaning."""
    return _native.Entry(build_program((), ()), None, _plain_finish)


def _plain_finish(outputs: object, function: types.FunctionType, *values: Any) -> Any:
    plain: Any = higher_order.PLAIN[function.__globals__["__name__"], function.__qualname__]
    keyword_only = function.__code__.co_varnames[function.__code__.co_argcount :][: function.__code__.co_kwonlyargcount]
    count = function.__code__.co_argcount
    keywords = dict(zip(keyword_only, values[count:]))
    rest = values[count + len(keyword_only)] if function.__code__.co_flags & inspect.CO_VARARGS else ()
    return plain(*values[:count], *rest, **keywords)
