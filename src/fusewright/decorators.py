"""Decorators that tell capture how to treat a function: run it eagerly, run it natively, take its answer as fixed,
capture another one.

Takes the user's functions; gives functions that do the same outside of compiled code. Always holds: nothing here
imports the compiler.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from torch.utils import _pytree

from fusewright import _native
from fusewright._native import isinstance
from fusewright.base import marks
from fusewright.base.errors import OptionError
from fusewright.base.pytorch import methods, torch

Callee = TypeVar("Callee", bound=Callable[..., Any])


def disable(fn: Any = None, recursive: bool = True, reason: str | None = None) -> Any:
    """Runs `fn` eagerly inside compiled code: a function, a method, an nn.Module, a class, or nothing (decorator with
    arguments).

    recursive: the functions that it calls run eagerly too; False compiles those. `reason` appears in reports of graph
    breaks. A module comes back as a module that shares its state and whose calls are eager; the original is left as it
    was. A class is changed in place: the construction and the calls of its instances are eager. Raises OptionError for
    anything else.
    """
    if fn is None:
        return functools.partial(disable, recursive=recursive, reason=reason)
    if isinstance(fn, (classmethod, staticmethod)):
        return type(fn)(disable(fn.__func__, recursive, reason))
    if isinstance(fn, torch.nn.Module):
        module = importlib.import_module("fusewright.module")
        return module.disabled_module(getattr(fn, "_fusewright_original", fn), reason)
    if isinstance(fn, type):
        for name in ("__init__", "__call__", *(["_call_impl"] if issubclass(fn, torch.nn.Module) else [])):
            method = inspect.getattr_static(fn, name, None)
            if isinstance(method, types.FunctionType):
                setattr(fn, name, disable(method, recursive, reason))
        return fn
    if not callable(fn):
        raise OptionError(f"disable takes a function, a method, a class or an nn.Module, got {fn!r}")
    fn = _original(fn)
    if recursive:

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            return _native.call_paused(fn, *args, **kwargs)

    else:
        function = getattr(fn, "__func__", fn)
        if isinstance(function, types.FunctionType):
            setattr(function, marks.EAGER_FRAME, True)

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

    setattr(run, marks.DISABLED, reason or True)
    return run


def _original(fn: Any) -> Any:
    """The function behind a compiled one."""
    return fn.__wrapped__ if isinstance(fn, _native.CompiledFunction) else fn


def allow_in_graph(fn: Any) -> Any:
    """Runs `fn` natively on traced tensors instead of interpreting its Python code: its tensor operators are captured,
    its other effects happen once, while capturing. At torch level the call is one node of the graph.

    Takes a callable, or a list or tuple of them, and gives it back. Tensors that it reads from globals or closures
        count as constants.
    Raises OptionError for what is not callable.
    """
    if isinstance(fn, (list, tuple)):
        return [allow_in_graph(each) for each in fn]
    if not callable(fn):
        raise OptionError(f"allow_in_graph takes a callable, or a list of callables, got {fn!r}")
    marked = fn.__func__ if isinstance(fn, types.MethodType) else fn
    marks.ALLOWED[id(marked)] = marked
    return fn


def assume_constant_result(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Says that `fn` always gives the same result: capture calls it once, really, and keeps what it gave as a constant.

    Its arguments must be values from outside of the compiled function or constants. Raises OptionError for what is not
    a function.
    """
    function = getattr(fn, "__func__", fn)
    if not callable(fn) or not hasattr(function, "__dict__"):
        raise OptionError(f"assume_constant_result takes a function, got {fn!r}")
    setattr(function, marks.CONSTANT, True)
    return fn


def substitute_in_graph(
    original_fn: Callable[..., Any], *, can_constant_fold_through: bool = False, skip_signature_check: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: capture follows the decorated Python function wherever `original_fn` (a C function, say) is called.

    The two must give the same results and have the same parameters (`skip_signature_check` leaves that to you).
    `can_constant_fold_through` is taken for compatibility and not needed: constants are always folded. The decorated
    function, called outside of compiled code, calls `original_fn`. Raises OptionError when `original_fn` is not
    callable or substituted already, TypeError when the parameters differ.
    """
    if not callable(original_fn) or isinstance(original_fn, (type, torch.nn.Module)):
        raise OptionError(f"substitute_in_graph takes a function, got {original_fn!r}")
    if id(original_fn) in marks.SUBSTITUTES:
        raise OptionError(f"{original_fn!r} is substituted already, by {marks.SUBSTITUTES[id(original_fn)][1]!r}")

    def decorate(traceable: Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(traceable, types.FunctionType):
            raise OptionError(f"substitute_in_graph decorates a Python function, got {traceable!r}")
        if not skip_signature_check:
            _check_parameters(original_fn, traceable)

        @functools.wraps(traceable)
        def call_original(*args: Any, **kwargs: Any) -> Any:
            return original_fn(*args, **kwargs)

        marks.SUBSTITUTES[id(original_fn)] = (original_fn, traceable)
        marks.SUBSTITUTES[id(call_original)] = (call_original, traceable)
        return call_original

    return decorate


def _check_parameters(original: Callable[..., Any], traceable: Callable[..., Any]) -> None:
    try:
        theirs, ours = inspect.signature(original), inspect.signature(traceable)
    except (TypeError, ValueError):  # many C functions do not tell
        return
    shapes = [
        [
            (p.kind, p.name if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) else "")
            for p in signature.parameters.values()
        ]
        for signature in (theirs, ours)
    ]
    open_kinds = [{inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}] * 2
    anything = [{kind for kind, _ in shape} == kinds for shape, kinds in zip(shapes, open_kinds)]
    if shapes[0] != shapes[1] and not any(anything):
        raise TypeError(f"{traceable.__qualname__}{ours} must take the parameters of {original!r}, which are {theirs}")


def graph_break(reason: str = "") -> None:
    """Cuts the graph here when capturing; does nothing otherwise. `reason` appears in reports."""


def is_compiling() -> bool:
    """True while fusewright captures the code that asks, False when it runs eagerly."""
    return False  # capture answers True without calling this


def is_exporting() -> bool:
    """True while fusewright.export captures the code that asks, False otherwise."""
    return False  # capture answers without calling this


def nested_compile_region(fn: Callee | None = None, **arguments: Any) -> Any:
    """Gives `fn` as it is, or such a decorator: parts of a graph that repeat are found without being told."""
    return fn if fn is not None else lambda function: function


def cudagraph_mark_step_begin() -> None:
    """Does nothing: the results of a CUDA graph are copied out of its memory, so that no later step overwrites them."""


def wrap_numpy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, a function of NumPy arrays, as a function of tensors: tensors among the arguments become arrays that share
    their memory, arrays among the results tensors.

    To be compiled, or called as it is. Tensors that require a gradient, or lie on a GPU, raise what Tensor.numpy()
    raises.
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _pytree.tree_map_only(torch.Tensor, methods.numpy, (args, kwargs))
        return _pytree.tree_map_only((np.ndarray, np.generic), torch.as_tensor, fn(*args, **kwargs))

    return run
